"""The one mean that advantages, diagnostics and metrics take."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_of(values: Sequence[float]) -> float | None:
    """None without values; in any order the same, and of equal values that value (three times 0.1 over 3 isn't 0.1 in floating
    point). What isn't finite stays so.
    """
    if not values:
        return None
    first = float(values[0])
    return first if all(value == first for value in values) else math.fsum(values) / len(values)
