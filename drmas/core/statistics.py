"""The numbers of an evaluation: pass@k without bias, avg@k, and means over tasks with bootstrap intervals.

A task was tried n times and solved c times; `pass_at_k` and `avg_at_k` make one number of it, `mean_interval` one of many
tasks. With the tasks' sources that is the macro mean, the mean over sources of the mean over their tasks; without, the micro
mean. The interval of a difference between two evaluations of the same tasks is that of the tasks' differences (paired).

    values = [pass_at_k(n, c, 4) for n, c in tries]
    mean_interval(values, resamples=1000, seed=0)             # Interval(value=0.41, low=0.36, high=0.47)

Called by `drmas.runtime.scores`. Everything is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from drmas.errors import DataError

LEVEL = 0.95
"""The share of resamples whose mean is inside an interval."""
_BLOCK = 2**20
"""Draws that are held at once."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its bootstrap interval; `low` and `high` are None where there are too few tasks to tell."""

    value: float
    low: float | None
    high: float | None


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k tries is a success, estimated from n tries with c successes, without bias.

    1 - C(n - c, k) / C(n, k): the share of the k-subsets of the tries that hold a success (Chen et al. 2021, arXiv 2107.03374,
    equation 1). Computed in integers and rounded once. DataError: fewer than k tries, or counts that can't be.

    Example: pass_at_k(10, 3, 5) == 11 / 12
    """
    _check(n, c)
    if not 1 <= k <= n:
        raise DataError(f"pass@{k} of {n} tries; k must be 1 to {n}: ask for a smaller k, or sample more episodes per task")
    return float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))


def avg_at_k(n: int, c: int) -> float:
    """The share of successes that k of the tries are expected to hold: c / n for every k. DataError as in `pass_at_k`."""
    _check(n, c)
    return c / n


def _check(n: int, c: int) -> None:
    if n < 1 or not 0 <= c <= n:
        raise DataError(f"{c} successes in {n} tries; expected at least one try, and 0 to as many successes")


def mean_interval(
    values: Sequence[float], sources: Sequence[str] | None = None, *, resamples: int, seed: int, level: float = LEVEL
) -> Interval:
    """The mean of `values`, one per task, and its percentile bootstrap interval over tasks (Efron 1979).

    With `sources`, one per task, the mean over sources of the mean over the source's tasks; tasks are resampled within their
    source then. No interval where a mean comes from a single task, which says nothing about the spread. The same values give
    the same interval for the same `seed`. DataError: no values.
    """
    table = np.asarray(values, dtype=np.float64)
    if table.size == 0:
        raise DataError("the mean over tasks of no tasks; expected at least one with a value")
    labels = np.zeros(table.size, dtype=np.int64) if sources is None else np.unique(np.asarray(sources), return_inverse=True)[1]
    parts = [table[labels == label] for label in range(labels.max() + 1)]
    value = math.fsum(math.fsum(part) / part.size for part in parts) / len(parts)
    if min(part.size for part in parts) < 2:
        return Interval(value, None, None)
    draw = np.random.default_rng(seed)
    means = np.mean([_resampled(part, resamples, draw) for part in parts], axis=0)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def _resampled(values: np.ndarray, resamples: int, draw: np.random.Generator) -> np.ndarray:
    """The means of `resamples` samples of `values` with replacement, each as large as `values`: [resamples]."""
    rows = max(1, _BLOCK // values.size)
    blocks = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    return np.concatenate([values[draw.integers(values.size, size=(block, values.size))].mean(axis=1) for block in blocks])
