"""How well the inflation factor of Lemma 4.2 predicts the second moment that was measured (Dr. MAS, arXiv 2602.08847).

A point is one agent at one measured step of one trial: x, the factor over the measured rows, and y, the mean of A^2 |z|^2 over
the mean of |z|^2 under the pooled baseline. The lemma says y = x + Delta, Delta the covariance of |z|^2 and A^2. There is no
free parameter in it, so what is tested is y = x:

    slope      of y on x through the origin, sum(x y) / sum(x^2)
    r2_log     1 - sum((log y - log x)^2) / sum((log y - mean log y)^2); below 0 where x says less of y than its mean does
    ratio      sum(y) / sum(x), of each seed and then over seeds; also of the points with x up to `SPLIT`, and above it
    identity   the same with x + Delta for x, of the points that have a Delta: 1 but for chance, whatever the team does; Delta
               and y are of the measured rows, x is the mean of A^2 over all of the task's rows

What a pooled baseline does that per-agent statistics don't is `excess`, the mean of y less that of the same rows under the
agent's own statistics, of each seed: Delta is in both. The single agent has nobody to be pooled with, and is left out.

Pure; called by `drmas.reproduce.analysis`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from drmas.reproduce.intervals import deviation, estimate, finite, mean
from drmas.reproduce.plan import SINGLE
from drmas.reproduce.results import Moment, Trial

BINS_PER_OCTAVE = 2
"""Bins of the predicted factor have edges at powers of the square root of 2."""
SPLIT = 1.2
"""Predictions up to it are small: there is next to nothing that could be inflated."""


def moment_points(trials: Sequence[Trial]) -> list[list[float | None]]:
    """[predicted, pooled, per_agent, covariance] of every point, in the order of trials and steps."""
    return [[one.predicted, one.pooled, one.per_agent, one.covariance] for _, one in _points(trials)]


def of_moments(trials: Sequence[Trial], of: int | None) -> dict[str, Any]:
    """The fit over all points, means in bins of the prediction, and what has intervals over seeds. {} without a point."""
    points = _points(trials)
    if not points:
        return {}
    predictions = [one.predicted for _, one in points]
    known = [pair for pair in points if finite(pair[1].covariance)]
    both = [pair for pair in points if finite(pair[1].per_agent)]
    agents = sorted({one.agent for _, one in points})
    methods = sorted({trial.method for trial, _ in points})
    return {
        "count": len(points),
        "rows": sum(one.rows for _, one in points),
        **fit(predictions, [one.pooled for _, one in points]),
        "spread": deviation(predictions, mean(predictions), freedom=len(predictions)),
        "ratio": _over_seeds(points, of, _ratio),
        "ratio_low": _over_seeds([pair for pair in points if pair[1].predicted <= SPLIT], of, _ratio),
        "ratio_high": _over_seeds([pair for pair in points if pair[1].predicted > SPLIT], of, _ratio),
        "identity": _over_seeds(known, of, _with_delta),
        "covariance": _over_seeds(known, of, _mean_of("covariance")),
        "excess": _over_seeds(both, of, lambda own: mean([one.pooled - one.per_agent for one in own])),
        **{what: _over_seeds(points, of, _mean_of(what)) for what in ("predicted", "pooled", "per_agent")},
        "agents": {
            agent: {
                what: _over_seeds([pair for pair in points if pair[1].agent == agent], of, _mean_of(what))
                for what in ("predicted", "pooled", "per_agent")
            }
            for agent in agents
        },
        "own": {
            method: _over_seeds([pair for pair in points if pair[0].method == method], of, _mean_of("own"))
            for method in methods
        },
        "bins": _bins(points, of),
    }


def fit(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, float | int | None]:
    """slope, r2_log, median_ratio of measured on predicted; zeros, the points without a logarithm, count in the others only."""
    pairs = list(zip(predicted, measured, strict=True))
    squares = math.fsum(x * x for x, _ in pairs) if pairs else 0.0
    logs = [(math.log(x), math.log(y)) for x, y in pairs if x > 0 and y > 0]
    centre = mean([y for _, y in logs])
    spread = math.fsum((y - centre) ** 2 for _, y in logs)
    ratios = [y / x for x, y in pairs if x > 0]
    return {
        "slope": math.fsum(x * y for x, y in pairs) / squares if squares else None,
        "r2_log": 1 - math.fsum((y - x) ** 2 for x, y in logs) / spread if spread > 0 else None,
        "median_ratio": median(ratios) if ratios else None,
        "zeros": len(pairs) - len(logs),
    }


def _points(trials: Sequence[Trial]) -> list[tuple[Trial, Moment]]:
    """Of the teams' trials; a crashed one has none."""
    teams = [trial for trial in sorted(trials, key=lambda trial: trial.key) if trial.method != SINGLE]
    found = [(trial, one) for trial in teams for one in trial.moments]
    return [(trial, one) for trial, one in found if finite(one.predicted) and finite(one.pooled)]


def _over_seeds(points: Sequence[tuple[Trial, Moment]], of: int | None, number: Any) -> dict[str, Any]:
    """An estimate of `number`, which makes one of the points of a seed."""
    by_seed: dict[int, list[Moment]] = {}
    for trial, one in points:
        by_seed.setdefault(trial.seed, []).append(one)
    return asdict(estimate([number(own) for own in by_seed.values()], of))


def _ratio(points: Sequence[Moment]) -> float | None:
    predicted = math.fsum(one.predicted for one in points)
    return math.fsum(one.pooled for one in points) / predicted if predicted else None


def _with_delta(points: Sequence[Moment]) -> float | None:
    whole = math.fsum(one.predicted + one.covariance for one in points)
    return math.fsum(one.pooled for one in points) / whole if whole else None


def _mean_of(what: str):
    return lambda points: mean([getattr(one, what) for one in points])


def _bins(points: Sequence[tuple[Trial, Moment]], of: int | None) -> list[dict[str, Any]]:
    """Means of the points whose prediction lies in low..high, for the bins that have any; `over_seeds`: "
    "those with intervals."""
    bins: dict[int, list[tuple[Trial, Moment]]] = {}
    for pair in points:
        if pair[1].predicted > 0:
            bins.setdefault(math.floor(math.log2(pair[1].predicted) * BINS_PER_OCTAVE + 1e-9), []).append(pair)
    return [
        {
            "low": 2 ** (index / BINS_PER_OCTAVE),
            "high": 2 ** ((index + 1) / BINS_PER_OCTAVE),
            "count": len(own),
            **{what: mean([getattr(one, what) for _, one in own]) for what in ("predicted", "pooled", "per_agent")},
            "over_seeds": {what: _over_seeds(own, of, _mean_of(what)) for what in ("pooled", "per_agent")},
        }
        for index, own in sorted(bins.items())
    ]
