"""How rows become updates, microbatches and token weights: pure functions that every rank evaluates alike.

Called by the controller (updates, weights) and by the trainer (microbatches). Integers decide the plan, so that no rounding can
make two ranks disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from drmas.types import Row

_ATTENTION_TOKENS = 8192
"""Sequence length at which attention costs about as much as the rest of a layer (some six times the hidden size)."""


def plan_microbatches(lengths: Sequence[int], *, budget: int, num_ranks: int) -> list[list[list[int]]]:
    """[rank][microbatch][row]: every row once, at most `budget` tokens per microbatch, a longer row alone.

    Rows go to ranks by longest processing time first (cost: tokens plus attention's quadratic term), then first-fit into
    microbatches; ties go to the lower index. All ranks get the same number of microbatches, so that they meet in the same
    collectives; some may be empty. Without rows there are none. ValueError: a length, the budget or the ranks aren't positive.
    """
    if budget < 1 or num_ranks < 1:
        raise ValueError(f"budget is {budget} and num_ranks is {num_ranks}; expected at least 1 of both")
    if any(length < 1 for length in lengths):
        raise ValueError(f"a row has {min(lengths)} tokens; expected at least 1")
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    used: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        length = lengths[row]
        rank = load.index(min(load))
        load[rank] += length * (_ATTENTION_TOKENS + length)
        place = next((i for i, tokens in enumerate(used[rank]) if tokens + length <= budget), None)
        if place is None:
            ranks[rank].append([row])
            used[rank].append(length)
        else:
            ranks[rank][place].append(row)
            used[rank][place] += length
    most = max(len(microbatches) for microbatches in ranks)
    return [[sorted(rows) for rows in microbatches] + [[] for _ in range(most - len(microbatches))] for microbatches in ranks]


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
