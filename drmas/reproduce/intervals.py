"""A mean over seeds and its 95 % t-interval; plain and paired.

With n seeds of a trial the interval of the mean is mean +- t s / sqrt(n): s is the sample's standard deviation (n - 1), t the
0.975 quantile of Student's distribution with n - 1 degrees of freedom. A paired interval is that of the seeds' differences. It
takes the seeds' values for normal, which a handful of shares between 0 and 1 need not be.

Called by `drmas.reproduce.analysis`. Everything is in float64, and independent of the order of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` of `of` seeds; `value` is None where n is 0, `low` and `high` are None below two seeds."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    of: int


def estimate(values: Sequence[float | None], of: int | None = None) -> Estimate:
    """The mean of the values that are there and finite, with its t-interval; `of`: seeds that were planned, if not these.

    Example: estimate([1.0, 2.0, 3.0]) == Estimate(2.0, -0.484, 4.484, n=3, of=3), to three digits
    """
    there = [value for value in values if finite(value)]
    n, planned = len(there), len(values) if of is None else of
    middle = mean(there)
    if n < 2:
        return Estimate(middle, None, None, n, planned)
    spread = deviation(there, middle, freedom=n - 1)
    half = t_quantile(n - 1) * spread / math.sqrt(n)
    return Estimate(middle, middle - half, middle + half, n, planned)


def paired(left: Mapping[int, float | None], right: Mapping[int, float | None], of: int | None = None) -> Estimate:
    """The mean of left - right over the seeds that both have, with its t-interval; keys are seeds."""
    return estimate(differences(left, right), of)


def differences(left: Mapping[int, float | None], right: Mapping[int, float | None]) -> list[float | None]:
    """left - right of each seed that both have, in the order of seeds; None where one has no number."""
    pairs = [(left[seed], right[seed]) for seed in sorted(left.keys() & right.keys())]
    return [None if None in pair else pair[0] - pair[1] for pair in pairs]


def deviation(values: Sequence[float], middle: float, *, freedom: int) -> float:
    """sqrt(sum((value - middle)^2) / freedom), without a square that overflows; 0 exactly where all values are one number."""
    return math.hypot(*(value - middle for value in values)) / math.sqrt(freedom) if len(set(values)) > 1 else 0.0


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t with P(|T| <= t) = level, T of Student's distribution with `freedom` degrees of freedom, an integer from 1.

    Example: t_quantile(4) == 2.776, to three digits
    """
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _within(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(angle)): Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4."""
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def mean(values: Sequence[float | None]) -> float | None:
    """Of the values that are there and finite."""
    there = [value for value in values if finite(value)]
    return math.fsum(there) / len(there) if there else None
