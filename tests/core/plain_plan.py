"""The plan of microbatches in plain Python, row by row: what `drmas.core.batching` and `drmas.core.prefixes` must plan exactly.

It reads whole rows and keeps every number in lists, and is some times slower at many rows. Used by `test_batching` and
`test_prefixes` alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from heapq import heappush, heapreplace
from itertools import accumulate, pairwise
from operator import add, sub
from typing import NamedTuple

from drmas.core.batching import TokenCost
from drmas.core.prefixes import LEAST_SHARED
from drmas.types import Row

Stretch = tuple[int, int]


class Order(NamedTuple):
    """As `drmas.core.prefixes.PrefixOrder`, in lists."""

    rows: list[int]
    lengths: list[int]
    common: list[int]
    shared: list[int]

    @classmethod
    def of(cls, ids: Iterable[Sequence[int]]) -> Order:
        keys = [array("I", each).tobytes() for each in ids]
        rows = sorted(range(len(keys)), key=keys.__getitem__)
        common = [_common(keys[rows[i - 1]], keys[rows[i]]) if i else 0 for i in range(len(rows))]
        return cls.made(rows, [len(keys[row]) // 4 for row in rows], common)

    @classmethod
    def made(cls, rows: list[int], lengths: list[int], common: list[int]) -> Order:
        equal = [i > 0 and lengths[i] == lengths[i - 1] == common[i] for i in range(len(rows))]
        split = iter(_split_depths([depth for depth, same in zip(common, equal, strict=True) if not same]))
        return cls(rows, lengths, common, [depth if same else next(split) for depth, same in zip(common, equal, strict=True)])

    def take(self, places: Sequence[int]) -> Order:
        common = [min(self.common[i + 1 : j + 1]) for i, j in pairwise(places)]
        return self.made([self.rows[i] for i in places], [self.lengths[i] for i in places], [0, *common][: len(places)])

    @property
    def computed(self) -> int:
        return sum(self.lengths) - sum(self.shared)


def _common(one: bytes, other: bytes) -> int:
    low = 0
    while low < min(len(one), len(other)) and one[low : low + 4] == other[low : low + 4]:
        low += 4
    return low // 4


def _split_depths(depths: list[int]) -> list[int]:
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


def plain_plan(
    rows: Sequence[Row], *, budget: int, num_ranks: int, cost: TokenCost, share_prefixes: bool
) -> list[list[list[int]]]:
    """As `drmas.core.batching.plan_microbatches` of at least one row."""
    inputs = [row.prompt_ids + row.response_ids[:-1] for row in rows]
    lengths = list(map(len, inputs))
    order = Order.of(inputs) if share_prefixes else Order.made(list(range(len(rows))), lengths, [0] * len(rows))
    responses = [len(row.response_ids) for row in rows]
    sizes = Sizes.costs(order, responses, cost)
    fitting = _cut(_unrelated(order), order, Sizes.tokens(order), budget)
    total = sum(map(sizes.of, fitting))
    best, fastest, tried = [], None, None
    for parts in (1, 2, 4, 8, 16, 32, 64) if num_ranks > 1 else (1,):
        units = _cut(fitting, order, sizes, total // (parts * num_ranks))
        if units == tried:
            continue
        tried = units
        shares = [order.take(_places(stretches)) for stretches in _spread(units, sizes, num_ranks)]
        ranks = [_within(budget, microbatches) for microbatches in _fill(shares, budget)]
        slowest = max(sum(_cost(microbatch, responses, cost) for microbatch in rank) for rank in ranks)
        if fastest is None or slowest < fastest:
            best, fastest = ranks, slowest
        if slowest * num_ranks * 100 <= total * 101:
            break
    most = max(map(len, best))
    return [[sorted(microbatch.rows) for microbatch in rank] + [[] for _ in range(most - len(rank))] for rank in best]


def _cost(order: Order, responses: Sequence[int], cost: TokenCost) -> int:
    pairs = sum(n * (n + 1) // 2 - m * (m + 1) // 2 for n, m in zip(order.lengths, order.shared, strict=True))
    return order.computed * cost.token + pairs * cost.pair + sum(responses[row] for row in order.rows) * cost.response


class Sizes:
    def __init__(self, whole: list[int], rest: list[int]) -> None:
        self._whole = whole
        self._until = list(accumulate(rest, initial=0))

    @classmethod
    def tokens(cls, order: Order) -> Sizes:
        return cls(order.lengths, list(map(sub, order.lengths, order.shared)))

    @classmethod
    def costs(cls, order: Order, responses: Sequence[int], cost: TokenCost) -> Sizes:
        def costs_of(tokens: Sequence[int]) -> list[int]:
            return [n * cost.token + n * (n + 1) // 2 * cost.pair for n in tokens]

        whole = list(map(add, costs_of(order.lengths), (responses[row] * cost.response for row in order.rows)))
        return cls(whole, list(map(sub, whole, costs_of(order.shared))))

    def of(self, stretch: Stretch) -> int:
        start, end = stretch
        return self._whole[start] + self._until[end] - self._until[start + 1]


def _cut(stretches: Iterable[Stretch], order: Order, sizes: Sizes, limit: int) -> list[Stretch]:
    left = list(stretches)[::-1]
    units = []
    while left:
        start, end = left.pop()
        if end - start == 1 or sizes.of((start, end)) <= limit:
            units.append((start, end))
            continue
        least = min(order.shared[start + 1 : end])
        pieces = []
        for place, following in pairwise([*(i for i in range(start + 1, end) if order.shared[i] == least), end]):
            if sizes.of((start, following)) > limit:
                pieces.append((start, place))
                start = place
        left += [(start, end), *reversed(pieces)]
    return units


def _unrelated(order: Order) -> list[Stretch]:
    return list(pairwise([*(i for i, depth in enumerate(order.shared) if depth == 0), len(order.rows)]))


def _spread(units: Sequence[Stretch], sizes: Sizes, bins: int, room: int | None = None) -> list[list[Stretch]]:
    filled: list[list[Stretch]] = [[] for _ in range(bins)]
    loads = [(0, number) for number in range(bins)]
    for size, unit in sorted(((sizes.of(unit), unit) for unit in units), key=lambda item: -item[0]):
        load, number = loads[0]
        if room is not None and load and load + size > room:
            heappush(loads, (size, len(filled)))
            filled.append([unit])
        else:
            heapreplace(loads, (load + size, number))
            filled[number].append(unit)
    return filled


def _fill(shares: Sequence[Order], budget: int) -> list[list[Order]]:
    sizes = list(map(Sizes.tokens, shares))
    best, lowest, tried = [], None, None
    for parts in (1, 2, 4, 8):
        units = [_cut(_unrelated(share), share, size, budget // parts) for share, size in zip(shares, sizes, strict=True)]
        if units == tried:
            continue
        tried = units
        tokens = [list(map(size.of, stretches)) for stretches, size in zip(units, sizes, strict=True)]
        busiest = max(map(sum, tokens))
        most, needed = 0, max(-(-sum(min(each, budget) for each in rank) // budget) for rank in tokens)
        while needed > most:
            most = needed
            filled = [_spread(stretches, size, most, budget) for stretches, size in zip(units, sizes, strict=True)]
            needed = max(map(len, filled))
        price = 8 * busiest + most * budget
        if lowest is None or price < lowest:
            best, lowest = filled, price
    return [[share.take(_places(unit)) for unit in rank] for share, rank in zip(shares, best, strict=True)]


def _places(stretches: Iterable[Stretch]) -> list[int]:
    return [place for start, end in sorted(stretches) for place in range(start, end)]


def _within(budget: int, microbatches: Iterable[Order]) -> list[Order]:
    fitting, late = [], []
    for microbatch in microbatches:
        fits = len(microbatch.rows)
        while fits > 1 and microbatch.take(range(fits)).computed > budget:
            fits -= 1
        fitting.append(microbatch.take(range(fits)))
        late += [microbatch.take([place]) for place in range(fits, len(microbatch.rows))]
    return fitting + late
