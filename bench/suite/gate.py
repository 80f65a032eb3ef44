"""Is a run worse than an older one? Ratios are compared, never seconds, which are the machine's. Called by the runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.suite.record import Result


class Verdict(NamedTuple):
    text: str
    worse: bool


def compare(before: Mapping[str, Result], now: Mapping[str, Result], asked: Sequence[str]) -> list[Verdict]:
    """Every ratio of the `asked` benchmarks beside the older one, with the tolerance that this tree states for it.

    Worse is, too, what was measured before and isn't now, a ratio or a whole benchmark, and a benchmark that the baseline
    lacks: it would pass whatever it measures. A ratio that is new is named and passes.
    """
    verdicts: list[Verdict] = []
    for name in asked:
        if name not in before:
            verdicts.append(Verdict(f"{name}: not in the baseline; measure and commit it first: WORSE", True))
        elif name not in now:
            verdicts.append(Verdict(f"{name}: in the baseline and not measured now: WORSE", True))
        else:
            verdicts += _of_one(name, before[name], now[name])
    return verdicts


def _of_one(name: str, before: Result, now: Result) -> list[Verdict]:
    verdicts = []
    if before.about.machine != now.about.machine:
        verdicts.append(Verdict(f"{name}: the baseline is of {before.about.machine}, this run of {now.about.machine}", False))
    measured = {ratio.name: ratio for ratio in now.ratios}
    for old in before.ratios:
        new = measured.pop(old.name, None)
        if new is None:
            verdicts.append(Verdict(f"{name}: {old.name} {old.value:.3g} -> not measured now: WORSE", True))
            continue
        limit = old.model_copy(update={"tolerance": new.tolerance, "better": new.better}).limit()
        worse = new.value < limit if new.better == "higher" else new.value > limit
        sign = "at least" if new.better == "higher" else "at most"
        said = f"{name}: {old.name} {old.value:.3g} -> {new.value:.3g} ({sign} {limit:.3g}): {'WORSE' if worse else 'fine'}"
        verdicts.append(Verdict(said, worse))
    verdicts += [Verdict(f"{name}: {new} is not in the baseline", False) for new in measured]
    return verdicts
