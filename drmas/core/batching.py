"""How rows become updates, microbatches and token weights: pure functions that every rank evaluates alike.

Called by the controller (updates, weights) and by the trainer (microbatches). Integers decide the plan, so that no rounding can
make two ranks disagree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from heapq import heappush, heapreplace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from drmas.core.prefixes import PrefixOrder
from drmas.types import Row

_Stretches = np.ndarray
"""[n, 2] int64: [start, end) of rows in order, ascending."""

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
    prompts, replies = [row.prompt_ids for row in rows], [row.response_ids for row in rows]
    if share_prefixes:
        order = PrefixOrder.of_turns(prompts, replies)
    else:
        order = PrefixOrder.apart([len(prompt) + len(reply) - 1 for prompt, reply in zip(prompts, replies, strict=True)])
    responses = np.fromiter(map(len, replies), np.int64)
    sizes = _Sizes.costs(order, responses, cost)
    fitting = _cut(_unrelated(order), order, _Sizes.tokens(order), budget)
    total = sum(sizes.of(fitting))
    best, fastest, tried = [], None, None
    for parts in _PARTS_OF_A_RANK if num_ranks > 1 else _PARTS_OF_A_RANK[:1]:
        units = _cut(fitting, order, sizes, total // (parts * num_ranks))
        if np.array_equal(units, tried):
            continue
        tried = units
        shares = [order.take(_places(units[chosen])) for chosen in _spread(sizes.of(units), num_ranks)]
        ranks = [_within(budget, share, places) for share, places in zip(shares, _fill(shares, budget), strict=True)]
        slowest = max(_cost(order, responses, cost) for order, _ in ranks)
        if fastest is None or slowest < fastest:
            best, fastest = ranks, slowest
        if slowest * num_ranks * 100 <= total * 101:  # within 1 %: finer units can't gain more
            break
    plan = [[sorted(rows.tolist()) for rows in np.split(order.rows, np.cumsum(counts[:-1]))] for order, counts in best]
    most = max(map(len, plan))
    return [rank + [[] for _ in range(most - len(rank))] for rank in plan]


def _cost(order: PrefixOrder, responses: np.ndarray, cost: TokenCost) -> int:
    """FLOPs of the microbatches that are the blocks of `order`. A Python integer: a large batch's passes 2^63."""
    pairs = (order.lengths * (order.lengths + 1) - order.shared * (order.shared + 1)) // 2
    return order.computed * cost.token + int(pairs.sum()) * cost.pair + int(responses[order.rows].sum()) * cost.response


class _Sizes:
    """Of rows in order: what a stretch of them costs if the first computes all of its tokens, the others what isn't shared."""

    def __init__(self, whole: np.ndarray, rest: np.ndarray) -> None:
        self.whole = whole
        self.until = np.concatenate(([0], np.cumsum(rest)))

    @classmethod
    def tokens(cls, order: PrefixOrder) -> _Sizes:
        return cls(order.lengths, order.lengths - order.shared)

    @classmethod
    def costs(cls, order: PrefixOrder, responses: np.ndarray, cost: TokenCost) -> _Sizes:
        """As `_cost`, in Python integers."""

        def costs_of(tokens: np.ndarray) -> np.ndarray:
            return tokens.astype(object) * cost.token + (tokens * (tokens + 1) // 2).astype(object) * cost.pair

        whole = costs_of(order.lengths) + responses[order.rows].astype(object) * cost.response
        return cls(whole, whole - costs_of(order.shared))

    def of(self, stretches: _Stretches) -> list[int]:
        starts, ends = stretches.T
        return (self.whole[starts] + self.until[ends] - self.until[starts + 1]).tolist()


def _cut(stretches: _Stretches, order: PrefixOrder, sizes: _Sizes, limit: int) -> _Stretches:
    """Cut every stretch that is larger than `limit` and has more than one row where its shared start is the shortest.

    Between those places, as many neighbours as fit stay together; what is too large by itself is cut again.
    """
    large = np.array([size > limit for size in sizes.of(stretches)], dtype=bool) & (np.diff(stretches)[:, 0] > 1)
    if not large.any():
        return stretches
    shared, whole, until = order.shared.tolist(), sizes.whole.tolist(), sizes.until.tolist()
    left, pieces = stretches[large].tolist(), stretches[~large].tolist()
    while left:
        start, end = left.pop()
        least = min(shared[start + 1 : end])
        cuts, places = [start], [place for place in range(start + 1, end) if shared[place] == least]
        for place, following in pairwise([*places, end]):
            if whole[cuts[-1]] + until[following] - until[cuts[-1] + 1] > limit:
                cuts.append(place)
        for first, last in pairwise([*cuts, end]):
            fits = last - first == 1 or whole[first] + until[last] - until[first + 1] <= limit
            (pieces if fits else left).append([first, last])
    return np.array(sorted(pieces), dtype=np.int64)


def _unrelated(order: PrefixOrder) -> _Stretches:
    """The stretches that share nothing with each other: cutting there costs nothing."""
    starts = np.flatnonzero(order.shared == 0)
    return np.stack((starts, np.append(starts[1:], len(order.rows))[: len(starts)]), axis=1)


def _spread(sizes: Sequence[int], bins: int, room: int | None = None) -> list[list[int]]:
    """Units of these sizes into bins, the largest first, each to the emptiest. If that hasn't `room` for it, none has: a bin is
    added."""
    filled: list[list[int]] = [[] for _ in range(bins)]
    loads = [(0, number) for number in range(bins)]
    for unit in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        load, number = loads[0]
        if room is not None and load and load + sizes[unit] > room:
            heappush(loads, (sizes[unit], len(filled)))
            filled.append([unit])
        else:
            heapreplace(loads, (load + sizes[unit], number))
            filled[number].append(unit)
    return filled


def _fill(shares: Sequence[PrefixOrder], budget: int) -> list[list[np.ndarray]]:
    """The microbatches of each rank as places in its share, as many on every rank.

    Smaller units fill microbatches better and share less; of several sizes the one is taken that computes the fewest tokens on
    its busiest rank, where a microbatch counts for an eighth of the budget even if it is empty.
    """
    sizes = list(map(_Sizes.tokens, shares))
    best, lowest, tried = [], math.inf, []
    for parts in _PARTS_OF_A_BUDGET:
        units = [_cut(_unrelated(share), share, size, budget // parts) for share, size in zip(shares, sizes, strict=True)]
        if tried and all(map(np.array_equal, units, tried)):
            continue
        tried = units
        tokens = [size.of(stretches) for stretches, size in zip(units, sizes, strict=True)]
        busiest = max(map(sum, tokens))
        needed = max(-(-sum(min(each, budget) for each in rank) // budget) for rank in tokens)
        while 8 * busiest + needed * budget < lowest:  # with fewer microbatches the rows don't fit
            filled = [_spread(rank, needed, budget) for rank in tokens]
            most = max(map(len, filled))
            if most == needed:
                best, lowest = list(zip(units, filled, strict=True)), 8 * busiest + needed * budget
            needed = most
    return [[_places(stretches[unit]) for unit in rank] for stretches, rank in best]


def _places(stretches: _Stretches) -> np.ndarray:
    """The rows of all of them, ascending."""
    lengths = np.diff(stretches)[:, 0]
    before = np.cumsum(lengths) - lengths
    return np.sort(np.repeat(stretches[:, 0] - before, lengths) + np.arange(lengths.sum()))


def _within(budget: int, share: PrefixOrder, microbatches: Sequence[np.ndarray]) -> tuple[PrefixOrder, list[int]]:
    """The rows of `microbatches` as blocks and how many each has, and further ones for rows that don't fit after all.

    Nearly always none: units were measured by what is split off among all rows, and a few rows alone may split a little less.
    """
    fitting, late = list(microbatches), []
    order, counts = _joined(share, fitting)
    computed = np.append(0, np.cumsum(order.lengths - order.shared))
    ends = np.cumsum(counts)
    for number in np.flatnonzero(computed[ends] - computed[ends - counts] > budget):
        places = microbatches[number]
        fits = len(places)
        while fits > 1 and share.take(places[:fits]).computed > budget:
            fits -= 1
        fitting[number] = places[:fits]
        late += [places[[place]] for place in range(fits, len(places))]
    return _joined(share, fitting + late) if late else (order, counts)


def _joined(share: PrefixOrder, microbatches: Sequence[np.ndarray]) -> tuple[PrefixOrder, list[int]]:
    counts = [len(places) for places in microbatches]
    starts = (np.cumsum(counts) - counts)[np.array(counts) > 0]
    return share.take(np.concatenate(microbatches), starts), counts


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
