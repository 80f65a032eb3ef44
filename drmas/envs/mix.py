"""Which of several sources the next draw is from, in stated shares. Called by `source`."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


class Rota:
    """Draws in the proportion of `weights`, without chance: after n draws each part had n times its share, give or take less
    than one.

    Of the parts that may have the next draw without getting ahead of their share, it goes to the one whose draw is due first
    (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980: no part is ever off by more than
    1 - 1 / (2k - 2) of k parts). Always giving the draw to the part that is furthest behind doesn't hold that bound.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self._slack = Fraction(1, 2 * max(len(weights), 2) - 2)
        self.counts = [0] * len(weights)
        """Draws that each part had: all that there is to remember."""

    def next(self) -> int:
        """The part that has the next draw."""
        draw = sum(self.counts) + 1
        behind = [draw * share - count for share, count in zip(self._shares, self.counts, strict=True)]
        may = [part for part, lack in enumerate(behind) if lack >= self._slack]
        part = min(may, key=lambda part: (1 - self._slack - behind[part]) / self._shares[part])
        self.counts[part] += 1
        return part
