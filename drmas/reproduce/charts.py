"""The charts of the report. Throughout, orange is grpo and blue the method that a chart's title or legend names: two colours
that everyone can tell apart. A band is the range of seeds.

Called by `drmas.reproduce.page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drmas.reproduce.analysis import BASE, SMOOTHED
from drmas.telemetry.plot import Points, Series, Span, interval_chart, line_chart, scatter_chart

OWN, OTHER = 0, 1
"""Colours of the method in question and of grpo; of second moments, of the pooled baseline and of per-agent statistics."""
MOMENT_RANGE = (0.05, 10.0)
"""Second moments that are drawn."""
AGENT_CURVES = (
    ("grad_norm", "Gradient norm", "norm", None),
    ("inflation", "Inflation factor", "factor", 1.0),
    ("imbalance", "Row sum", "|sum of advantages| / rows", None),
)


def of_scenario(scenario: Mapping[str, Any]) -> list[str]:
    """Differences to grpo, reward curves of each method beside grpo's, and each agent under dr-mas beside grpo."""
    return [*differences(scenario), *_rewards(scenario["methods"]), *_agents(scenario["methods"]), *_moments(scenario)]


def differences(scenario: Mapping[str, Any]) -> list[str]:
    to_base = [one for one in scenario["differences"] if one["right"] == BASE]
    titles = {
        "final": ("Final reward less grpo's", "difference by seed, 95 %; small dots: seeds"),
        "avg": ("avg@16 less grpo's", "difference by seed, 95 %; small dots: seeds"),
    }
    drawn = []
    for key, (title, x_label) in titles.items():
        spans = [
            Span(one["left"], *(one[key][part] for part in ("value", "low", "high")), each=one["seeds"][key]) for one in to_base
        ]
        if any(span.value is not None for span in spans):
            drawn.append(interval_chart(spans, title=title, x_label=x_label, reference=0.0))
    return drawn


def _rewards(methods: Mapping[str, Any]) -> list[str]:
    curves = {name: own["curves"]["reward"] for name, own in methods.items() if own["curves"]["reward"]["mean"]}
    cover = [value for curve in curves.values() for part in ("low", "high") for value in curve[part] if value is not None]
    others = [name for name in curves if name != BASE] or list(curves)
    y_label = f"mean of {SMOOTHED} steps"
    return [line_chart(_beside(curves, other), title=f"Reward: {other}", y_label=y_label, cover=cover) for other in others]


def _agents(methods: Mapping[str, Any]) -> list[str]:
    drawn = []
    for key, title, y_label, reference in AGENT_CURVES:
        for agent in sorted({agent for name in (BASE, "dr-mas") for agent in methods.get(name, {}).get("agents", {})}):
            curves = {name: own["curves"][key][agent] for name, own in methods.items() if agent in own["curves"][key]}
            series = _beside(curves, "dr-mas")
            if any(value is not None for one in series for value in one.y):
                drawn.append(line_chart(series, title=f"{title}: {agent}", y_label=y_label, reference=reference))
    return drawn


def _beside(curves: Mapping[str, Any], other: str) -> list[Series]:
    """The curves of grpo and of the other method, where they are there."""
    colours = {other: OWN} if other != BASE else {}
    return [
        Series(name, range(1, len(curve["mean"]) + 1), curve["mean"], curve["low"], curve["high"], colour)
        for name, colour in ({BASE: OTHER} | colours).items()
        if (curve := curves.get(name))
    ]


def _moments(scenario: Mapping[str, Any]) -> list[str]:
    points, bins = scenario["points"], scenario["moments"].get("bins", [])
    return [_scatter([*_clouds(points), *_means(bins)], "Second moment, measured")] if points else []


def all_moments(analysis: Mapping[str, Any], exact: Sequence[Points]) -> str:
    """Every measured second moment over its factor, faint, the means of bins with their intervals, and the clouds `exact`."""
    points = [point for scenario in analysis["scenarios"].values() for point in scenario["points"]]
    clouds = [*_clouds(points), *_means(analysis["moments"].get("bins", [])), *exact]
    return _scatter(clouds, "Second moment and factor")


def identity(analysis: Mapping[str, Any]) -> str:
    """Every measured second moment over the factor and Delta; '' where no trial left a Delta."""
    points = [point for scenario in analysis["scenarios"].values() for point in scenario["points"] if point[3] is not None]
    if not points:
        return ""
    cloud = Points("pooled", [x + delta for x, _, _, delta in points], [y for _, y, _, _ in points], OWN)
    title, x_label = "Arithmetic: with Δ", "predicted factor + Δ"
    return scatter_chart([cloud], title=title, x_label=x_label, y_label="measured", reference=1.0, y_range=MOMENT_RANGE)


def _clouds(points: Sequence[Sequence[float | None]]) -> list[Points]:
    """Dots under the pooled baseline, crosses under per-agent statistics."""
    x = [point[0] for point in points]
    return [
        Points("", x, [point[1] for point in points], OWN, faint=True),
        Points("", x, [point[2] for point in points], OTHER, cross=True, faint=True),
    ]


def _means(bins: Sequence[Mapping[str, Any]]) -> list[Points]:
    """The two sorts side by side, 3 % apart, so that their intervals can be told apart."""
    clouds = []
    for name, what, colour, aside in (("pooled", "pooled", OWN, 0.985), ("per agent", "per_agent", OTHER, 1.015)):
        found = [(one["predicted"] * aside, one["over_seeds"][what]) for one in bins]
        x, values = [place for place, _ in found], [own for _, own in found]
        y, low, high = ([own[part] for own in values] for part in ("value", "low", "high"))
        clouds.append(Points(name, x, y, colour, large=True, low=low, high=high))
    return clouds


def _scatter(clouds: Sequence[Points], title: str) -> str:
    x_label = "predicted inflation factor"
    return scatter_chart(clouds, title=title, x_label=x_label, y_label="measured", reference=1.0, y_range=MOMENT_RANGE)
