"""How rows become updates, microbatches and token weights: pure functions that every rank evaluates alike.

Called by the controller (updates, weights) and by the trainer (microbatches). Integers decide the plan, so that no rounding can
make two ranks disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappush, heapreplace
from itertools import accumulate, pairwise
from operator import add, sub
from typing import Literal, NamedTuple

import numpy as np

from drmas.core.prefixes import PrefixOrder
from drmas.types import Row

_Stretch = tuple[int, int]
"""[start, end) of rows in order."""

_PARTS_OF_A_RANK = (1, 2, 4, 8, 16, 32, 64)
_PARTS_OF_A_BUDGET = (1, 2, 4, 8)
"""How small the units are that are tried: parts of a rank's mean cost, parts of a microbatch."""


class TokenCost(NamedTuple):
    """FLOPs, as integers: per token of the layers, per query-key pair of attention, per response token of the head."""

    token: int
    pair: int
    response: int


def plan_microbatches(
    rows: Sequence[Row], *, budget: int, num_ranks: int, cost: TokenCost, share_prefixes: bool
) -> list[list[list[int]]]:
    """[rank][microbatch][row]: every row once, at most `budget` computed tokens per microbatch, a longer row alone.

    A row computes its tokens without the last one; with `share_prefixes`, rows of one microbatch compute a shared start once,
    as `drmas.core.prefixes` says. Rows that start alike stand together and are cut into units: shared starts where they are
    shortest, and only as often as budget and balance ask for. Units go to ranks by longest processing time, then each rank's
    units, the largest first, to its emptiest microbatch. Of several sizes of units the one is taken whose slowest rank is done
    first. All ranks get the same number of microbatches, of about even size; where a rank has too few units some are empty.
    Without rows there are none. Given in another order, the rows are planned alike but for ties, which go to the lower index.
    ValueError: a row without prompt or response, or a budget or number of ranks that isn't positive.
    """
    if budget < 1 or num_ranks < 1:
        raise ValueError(f"budget is {budget} and num_ranks is {num_ranks}; expected at least 1 of both")
    for i, row in enumerate(rows):
        if not row.prompt_ids or not row.response_ids:
            sizes = f"{len(row.prompt_ids)} prompt and {len(row.response_ids)} response tokens"
            raise ValueError(f"row {i} has {sizes}; expected at least one of each")
    if not rows:
        return [[] for _ in range(num_ranks)]
    if share_prefixes:
        order = PrefixOrder.of(row.prompt_ids + row.response_ids[:-1] for row in rows)
    else:
        order = PrefixOrder.apart([row.num_tokens - 1 for row in rows])
    responses = np.array([len(row.response_ids) for row in rows], dtype=np.int64)
    sizes = _Sizes.costs(order, responses, cost)
    fitting = _cut(_unrelated(order), order, _Sizes.tokens(order), budget)
    total = sum(map(sizes.of, fitting))
    best, fastest, tried = [], None, None
    for parts in _PARTS_OF_A_RANK if num_ranks > 1 else _PARTS_OF_A_RANK[:1]:
        units = _cut(fitting, order, sizes, total // (parts * num_ranks))
        if units == tried:
            continue
        tried = units
        shares = [order.take(_places(stretches)) for stretches in _spread(units, sizes, num_ranks)]
        ranks = [_within(budget, microbatches) for microbatches in _fill(shares, budget)]
        slowest = max(sum(_cost(microbatch, responses, cost) for microbatch in rank) for rank in ranks)
        if fastest is None or slowest < fastest:
            best, fastest = ranks, slowest
        if slowest * num_ranks * 100 <= total * 101:  # within 1 %: finer units can't gain more
            break
    most = max(map(len, best))
    return [[sorted(microbatch.rows.tolist()) for microbatch in rank] + [[] for _ in range(most - len(rank))] for rank in best]


def _cost(order: PrefixOrder, responses: np.ndarray, cost: TokenCost) -> int:
    """FLOPs of a microbatch. A Python integer: a large batch's passes 2^63."""
    pairs = (order.lengths * (order.lengths + 1) - order.shared * (order.shared + 1)) // 2
    return order.computed * cost.token + int(pairs.sum()) * cost.pair + int(responses[order.rows].sum()) * cost.response


class _Sizes:
    """Of rows in order: what a stretch of them costs if the first computes all of its tokens, the others what isn't shared."""

    def __init__(self, whole: list[int], rest: list[int]) -> None:
        self._whole = whole
        self._until = list(accumulate(rest, initial=0))

    @classmethod
    def tokens(cls, order: PrefixOrder) -> _Sizes:
        return cls(order.lengths.tolist(), (order.lengths - order.shared).tolist())

    @classmethod
    def costs(cls, order: PrefixOrder, responses: np.ndarray, cost: TokenCost) -> _Sizes:
        """As `_cost`."""

        def costs_of(tokens: np.ndarray) -> Iterable[int]:
            pairs = tokens * (tokens + 1) // 2
            return (n * cost.token + m * cost.pair for n, m in zip(tokens.tolist(), pairs.tolist(), strict=True))

        heads = (n * cost.response for n in responses[order.rows].tolist())
        whole = list(map(add, costs_of(order.lengths), heads))
        return cls(whole, list(map(sub, whole, costs_of(order.shared))))

    def of(self, stretch: _Stretch) -> int:
        start, end = stretch
        return self._whole[start] + self._until[end] - self._until[start + 1]


def _cut(stretches: Iterable[_Stretch], order: PrefixOrder, sizes: _Sizes, limit: int) -> list[_Stretch]:
    """Cut every stretch that is larger than `limit` and has more than one row where its shared start is the shortest.

    Between those places, as many neighbours as fit stay together; what is too large by itself is cut again.
    """
    left = list(stretches)[::-1]
    units = []
    while left:
        start, end = left.pop()
        if end - start == 1 or sizes.of((start, end)) <= limit:
            units.append((start, end))
            continue
        inner = order.shared[start + 1 : end]
        pieces = []
        for place, following in pairwise([*(np.flatnonzero(inner == inner.min()) + start + 1).tolist(), end]):
            if sizes.of((start, following)) > limit:
                pieces.append((start, place))
                start = place
        left += [(start, end), *reversed(pieces)]
    return units


def _unrelated(order: PrefixOrder) -> list[_Stretch]:
    """The stretches that share nothing with each other: cutting there costs nothing."""
    starts = np.flatnonzero(order.shared == 0).tolist()
    return list(pairwise([*starts, len(order.rows)]))


def _spread(units: Sequence[_Stretch], sizes: _Sizes, bins: int, room: int | None = None) -> list[list[_Stretch]]:
    """Units into bins, the largest first, each to the emptiest bin. If that hasn't `room` for it, none has: a bin is added."""
    filled: list[list[_Stretch]] = [[] for _ in range(bins)]
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


def _fill(shares: Sequence[PrefixOrder], budget: int) -> list[list[PrefixOrder]]:
    """The microbatches of each rank, as many on every rank.

    Smaller units fill microbatches better and share less; of several sizes the one is taken that computes the fewest tokens on
    its busiest rank, where a microbatch counts for an eighth of the budget even if it is empty.
    """
    sizes = list(map(_Sizes.tokens, shares))
    best, lowest, tried = [], None, None
    for parts in _PARTS_OF_A_BUDGET:
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


def _places(stretches: Iterable[_Stretch]) -> list[int]:
    return [place for start, end in sorted(stretches) for place in range(start, end)]


def _within(budget: int, microbatches: Iterable[PrefixOrder]) -> list[PrefixOrder]:
    """`microbatches`, and further ones for rows that don't fit after all.

    Nearly always none: units were measured by what is split off among all rows, and a few rows alone may split a little less.
    """
    fitting, late = [], []
    for microbatch in microbatches:
        fits = len(microbatch.rows)
        while fits > 1 and microbatch.take(range(fits)).computed > budget:
            fits -= 1
        fitting.append(microbatch.take(range(fits)))
        late += [microbatch.take([place]) for place in range(fits, len(microbatch.rows))]
    return fitting + late


def token_weights(
    rows: Sequence[Row], aggregation: Literal["token", "turn", "episode"], advantages: Sequence[float | None] | None = None
) -> list[float]:
    """The weight of each response token of each row: over all tokens of included rows they sum to 1 (I5).

    "token": all tokens weigh the same. "turn": all rows do, each shared by its tokens. "episode": all episodes do, each shared
    by the tokens of its rows. Rows whose status isn't "ok", or whose advantage is None where `advantages` are given, weigh 0
    and don't count (I3). ValueError: an unknown aggregation.
    """
    if aggregation not in ("token", "turn", "episode"):
        raise ValueError(f"aggregation is {aggregation!r}; expected token, turn or episode")
    share: dict[object, int] = defaultdict(int)
    groups: list[object] = []
    for index, row in enumerate(rows):
        counts = row.status == "ok" and row.response_ids and (advantages is None or advantages[index] is not None)
        group = {"token": "all", "turn": index, "episode": (row.task, row.episode)}[aggregation] if counts else None
        groups.append(group)
        if counts:
            share[group] += len(row.response_ids)
    return [0.0 if group is None else 1.0 / (len(share) * share[group]) for group in groups]


def split_updates(tasks: Sequence[str], n: int) -> list[list[str]]:
    """The task ids in `n` runs of consecutive tasks whose sizes differ by at most one, longer ones first.

    Example: split_updates(["a", "b", "c"], 2) == [["a", "b"], ["c"]]
    """
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1 update")
    size, longer = divmod(len(tasks), n)
    ends = [size * i + min(i, longer) for i in range(n + 1)]
    return [list(tasks[start:end]) for start, end in pairwise(ends)]
