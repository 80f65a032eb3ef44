"""Shared starts of rows: the tree of their common prefixes, so that a start which several rows have is computed once.

`PrefixOrder` puts rows that start alike next to each other and knows how much each has in common with the one before: all that
a plan needs. `PrefixOrder.tree` makes the segments of a compressed prefix tree of it: what a microbatch is packed as. Called by
`drmas.core.batching` and `drmas.policy.packing`, which must agree on what is shared.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 16
"""A shared start is split off only where it is that many tokens longer than the last split; less isn't worth a segment."""

_ID_BYTES = array("I").itemsize
_CHUNK = 128
"""So many ids of every row are read at first."""


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
    def of(cls, ids: Sequence[list[int]]) -> PrefixOrder:
        """Sort rows of token ids (0 to 2^32 - 1) by the bytes of their ids; equal rows keep their order."""
        return cls.of_turns(ids, [[0]] * len(ids))

    @classmethod
    def of_turns(cls, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> PrefixOrder:
        """As `of`, for rows of a prompt and of a response without its last id, which nobody reads. No response is empty."""
        rows, common = (np.array(values, dtype=np.int64) for values in _sorted(prompts, responses))
        lengths = np.fromiter(map(len, prompts), np.int64) + np.fromiter(map(len, responses), np.int64) - 1
        return cls(rows, lengths[rows], common)

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> PrefixOrder:
        """Rows that share nothing, in the order given."""
        return cls(np.arange(len(lengths)), np.array(lengths, dtype=np.int64), np.zeros(len(lengths), dtype=np.int64))

    def take(self, places: Sequence[int], blocks: Sequence[int] = (0,)) -> PrefixOrder:
        """The rows at these places of the order, in blocks that start at these of the places and have nothing in common.

        Places ascend within a block. Without places there is no row; else no block is empty.
        """
        if not len(places):
            return PrefixOrder(self.rows[:0], self.lengths[:0], self.common[:0])
        chosen = np.asarray(places)
        after = np.roll(chosen, 1) + 1
        after[np.asarray(blocks)] = chosen[np.asarray(blocks)]
        # What two rows have in common is the least of `common` from behind the one to the other: of two powers of two of rows.
        level = np.frexp(chosen + 1 - after)[1] - 1
        common = np.minimum(self._least[level, after], self._least[level, chosen + 1 - 2**level])
        common[np.asarray(blocks)] = 0
        return PrefixOrder(self.rows[chosen], self.lengths[chosen], common)

    @cached_property
    def _least(self) -> np.ndarray:
        """[levels, N]: the least of `common` over 2^level rows from each one on, where there are so many."""
        levels = [self.common]
        while 2 ** len(levels) <= len(self.common):
            step, least = 2 ** (len(levels) - 1), levels[-1].copy()
            least[:-step] = np.minimum(least[:-step], least[step:])
            levels.append(least)
        return np.stack(levels)

    @cached_property
    def shared(self) -> np.ndarray:
        """[N] int64: how many tokens each row takes from the row before it: at most `common`, by the rule of LEAST_SHARED.

        Equal rows share everything. Which other starts are split off depends on all rows here: rows a few tokens apart share
        what the first branch that is long enough leaves them.
        """
        shared = self.common.copy()
        equal = np.zeros(len(shared), dtype=bool)
        equal[1:] = (self.lengths[1:] == self.lengths[:-1]) & (self.common[1:] == self.lengths[1:])
        shared[~equal] = _split_depths(shared[~equal])
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


def _sorted(prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """The rows in order, and how many ids each has in common with the one before it.

    Rows are read in growing chunks, and only as far as there are others that are alike: most part where their prompt ends.
    """
    order, common = [0] * len(prompts), [0] * len(prompts)
    alike = [(range(len(prompts)), 0, 0, _CHUNK)]  # rows, their place in the order, and the chunk that may tell them apart
    while alike:
        rows, place, start, stop = alike.pop()
        chunks = defaultdict(list)
        for row in rows:
            chunks[_chunk(prompts[row], responses[row], start, stop)].append(row)
        before, shared = None, 0
        for chunk in sorted(chunks):
            found = chunks[chunk]
            order[place : place + len(found)] = found
            if before is not None:
                shared = _common(before, chunk, shared)
                common[place] = start + shared
            if len(found) > 1:
                if len(chunk) == (stop - start) * _ID_BYTES:
                    alike.append((found, place, stop, 2 * stop))
                else:  # they end here: equal rows
                    common[place + 1 : place + len(found)] = [start + len(chunk) // _ID_BYTES] * (len(found) - 1)
            before = chunk
            place += len(found)
    return order, common


def _chunk(prompt: list[int], response: list[int], start: int, stop: int) -> bytes:
    """Ids [start, stop) of a row, as far as it has them."""
    inside = len(prompt)
    if stop <= inside:
        return array("I", prompt[start:stop]).tobytes()
    rest = response[max(start - inside, 0) : min(stop - inside, len(response) - 1)]
    return array("I", prompt[start:] + rest if start < inside else rest).tobytes()


def _common(one: bytes, other: bytes, guess: int) -> int:
    """How many ids two different chunks start with alike; `guess` is tried first: siblings part where the last two did."""
    low = guess * _ID_BYTES
    if one[:low] == other[:low] and one[low : low + _ID_BYTES] != other[low : low + _ID_BYTES]:
        return guess
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


def _split_depths(depths: np.ndarray) -> np.ndarray:
    """For branches at these depths [N], in order of the rows: the depth at which each is split off. The first is a root, 0.

    A branch lies inside the deeper of the two nearest shallower branches on either side; from the root down, one that is less
    than LEAST_SHARED below the last split joins that one.
    """
    padded = np.append(depths, 0)
    before = _nearest_shallower(padded)
    after = len(depths) - _nearest_shallower(padded[::-1])[::-1]
    above = np.where(padded[before] >= padded[after], before, after)
    split = np.zeros_like(padded)
    while True:  # as often as branches lie inside each other
        least = split[above]
        deeper = np.where(padded - least >= LEAST_SHARED, padded, least)
        if np.array_equal(deeper, split):
            return split[:-1]
        split = deeper


def _nearest_shallower(depths: np.ndarray) -> np.ndarray:
    """For each of the depths [N], the place of the last one before it that is less; for those of depth 0, their own.

    By pointers that are followed and shortened for all places at once. The first depth is 0.
    """
    nearest = np.maximum(np.arange(len(depths)) - 1, 0)
    nearest[depths == 0] = np.flatnonzero(depths == 0)
    left = np.flatnonzero(depths)
    while len(left := left[depths[nearest[left]] >= depths[left]]):
        nearest[left] = nearest[nearest[left]]
    return nearest


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
