"""Shared starts of rows: the tree of their common prefixes, so that a start which several rows have is computed once.

`PrefixOrder` puts rows that start alike next to each other and knows how much each has in common with the one before: all that
a plan needs. `PrefixOrder.tree` makes the segments of a compressed prefix tree of it: what a microbatch is packed as. Called by
`drmas.core.batching` and `drmas.policy.packing`, which must agree on what is shared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 16
"""A shared start is split off only where it is that many tokens longer than the last split; less isn't worth a segment."""

_ID_BYTES = array("I").itemsize


class Segment(NamedTuple):
    """Tokens [position, position + length) of `row`, which it shares with all rows below this segment.

    `parent` is the segment, by its place in the list, that holds the tokens just before; -1 where there are none.
    """

    row: int
    position: int
    length: int
    parent: int


class PrefixTree(NamedTuple):
    """Segments in preorder, children after their parent and their elder siblings' subtrees; `leaves[row]` holds the row's end.

    A row's tokens are those of its leaf and of the leaf's ancestors. A leaf may have children: rows that go on after its end.
    """

    segments: list[Segment]
    leaves: list[int]


@dataclass(frozen=True)
class PrefixOrder:
    """N rows in an order in which rows that start alike stand together. All arrays are [N] int64.

    `rows` are the rows' numbers, `lengths` their tokens; `common` is how many tokens each has in common with the row before it
    (0 for the first). What rows further apart have in common is the least of the `common` between them.
    """

    rows: np.ndarray
    lengths: np.ndarray
    common: np.ndarray

    @classmethod
    def of(cls, ids: Iterable[Sequence[int]]) -> PrefixOrder:
        """Sort rows of token ids (0 to 2^32 - 1) by the bytes of their ids; equal rows keep their order."""
        keys = [array("I", each).tobytes() for each in ids]
        rows = sorted(range(len(keys)), key=keys.__getitem__)
        common = [_common(keys[rows[i - 1]], keys[rows[i]]) if i else 0 for i in range(len(rows))]
        lengths = [len(keys[row]) // _ID_BYTES for row in rows]
        return cls(*(np.array(values, dtype=np.int64) for values in (rows, lengths, common)))

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> PrefixOrder:
        """Rows that share nothing, in the order given."""
        return cls(np.arange(len(lengths)), np.array(lengths, dtype=np.int64), np.zeros(len(lengths), dtype=np.int64))

    def take(self, places: Sequence[int]) -> PrefixOrder:
        """The rows at these places of the order (ascending)."""
        if not len(places):
            return PrefixOrder(self.rows[:0], self.lengths[:0], self.common[:0])
        chosen = np.asarray(places)
        common = np.minimum.reduceat(self.common[: chosen[-1] + 1], np.concatenate(([0], chosen[:-1] + 1)))
        return PrefixOrder(self.rows[chosen], self.lengths[chosen], common)

    @cached_property
    def shared(self) -> np.ndarray:
        """[N] int64: how many tokens each row takes from the row before it: at most `common`, by the rule of LEAST_SHARED.

        Equal rows share everything. Which other starts are split off depends on all rows here: rows a few tokens apart share
        what the first branch that is long enough leaves them.
        """
        shared = self.common.copy()
        equal = np.zeros(len(shared), dtype=bool)
        equal[1:] = (self.lengths[1:] == self.lengths[:-1]) & (self.common[1:] == self.lengths[1:])
        shared[~equal] = _split_depths(shared[~equal].tolist())
        return shared

    @property
    def computed(self) -> int:
        """Tokens that are left to compute: what a pack of these rows holds."""
        return int(self.lengths.sum() - self.shared.sum())

    def tree(self) -> PrefixTree:
        """The segments that the rows share, or don't."""
        rows, lengths, shared = self.rows.tolist(), self.lengths.tolist(), self.shared.tolist()
        segments: list[Segment] = []
        leaves = [-1] * len(rows)
        path: list[tuple[int, int]] = []  # (segment, its end) from the root to the row before
        for row, start, ends in zip(rows, shared, _ends(lengths, shared), strict=True):
            while path and path[-1][1] > start:
                path.pop()
            for end in ends:
                segments.append(Segment(row, start, end - start, path[-1][0] if path else -1))
                path.append((len(segments) - 1, end))
                start = end
            leaves[row] = path[-1][0]
        return PrefixTree(segments, leaves)


def _common(one: bytes, other: bytes) -> int:
    """How many ids two rows start with alike."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high // _ID_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low // _ID_BYTES


def _split_depths(depths: list[int]) -> list[int]:
    """For branches at these depths, in order of the rows (the first is the root, 0): the depth at which each is split off.

    A branch lies inside the deeper of the two nearest shallower branches on either side; from the root down, one that is less
    than LEAST_SHARED below the last split joins that one.
    """
    above = [0] * len(depths)
    open_branches: list[int] = []
    for i, depth in enumerate([*depths, -1]):
        while open_branches and depths[open_branches[-1]] > depth:
            branch = open_branches.pop()
            above[branch] = open_branches[-1] if open_branches and depths[open_branches[-1]] >= depth else i
        open_branches.append(i)
    split = [0] * len(depths)
    for i in sorted(range(1, len(depths)), key=depths.__getitem__):
        least = split[above[i]]
        split[i] = depths[i] if depths[i] - least >= LEAST_SHARED else least
    return split


def _ends(lengths: list[int], shared: list[int]) -> list[list[int]]:
    """Where the segments that a row adds to the rows before it end: wherever a later row branches off, and at its own end."""
    ends: list[list[int]] = [[] for _ in lengths]
    later: list[int] = []  # depths, ascending, at which the rows after this one branch off of it
    for i in reversed(range(len(lengths))):
        if lengths[i] > max(shared[i], later[-1] if later else 0):
            ends[i].append(lengths[i])
        while later and later[-1] > shared[i]:
            ends[i].append(later.pop())
        ends[i].reverse()
        if not later or later[-1] < shared[i]:
            later.append(shared[i])
    return ends
