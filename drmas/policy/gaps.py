"""How far the trainer's log-probs are from the engine's, row by row, from the passes that an update makes anyway.

The trainer fills `RowGaps` microbatch by microbatch; `PolicyReport` (drmas.runtime.record) keeps a `Gap` per agent. Only fresh
rows tell about engine and trainer (I11): a row is fresh if all its tokens were sampled by the weights that are in force. On
other rows the distance is that of two versions, too.

Example: gap = Gap(); gap.add("sums/17#0/1", tokens=4, total=0.02, largest=0.01); gap.mean == 0.005
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from drmas.policy.host_platform import upload
from drmas.policy.packing import Packed
from drmas.types import Row
from drmas_kernels.loss_options import LOG_RATIO_LIMIT

WORST = 10
"""Rows that a gap names."""


@dataclass(slots=True)
class Gap:
    """|trainer's - engine's log-prob| on the sampled tokens of one agent's fresh rows, in nats."""

    tokens: float = 0.0
    total: float = 0.0
    largest: float = 0.0
    worst: dict[str, float] = field(default_factory=dict)
    """Row -> mean over its tokens: the `WORST` rows of the largest, first the largest."""

    @property
    def mean(self) -> float | None:
        return self.total / self.tokens if self.tokens else None

    def add(self, row: str, *, tokens: int, total: float, largest: float) -> None:
        """One more row. What isn't a number stays one, and is the largest."""
        self.tokens, self.total = self.tokens + tokens, self.total + total
        self.largest = largest if math.isnan(largest) else max(self.largest, largest)
        ranked = sorted([*self.worst.items(), (row, total / tokens)], key=lambda item: (not math.isnan(item[1]), -item[1]))
        self.worst = dict(ranked[:WORST])


def is_fresh(row: Row, version: int) -> bool:
    """Whether the weights of `version` sampled all of the row."""
    return all(each == version for each in row.versions)


class RowGaps:
    """Sums over the response tokens of each of the rows `chosen`; of d, the trainer's minus the engine's log-prob.

    Ranks fill their shares; after `reduce` every rank has all rows.
    """

    def __init__(self, rows: Sequence[Row], chosen: Sequence[int], device: torch.device) -> None:
        self._rows, self._chosen = rows, chosen
        self._sums = torch.zeros(3, len(rows), dtype=torch.float64, device=device)
        self._largest = torch.zeros(len(rows), dtype=torch.float64, device=device)

    def add(self, logprob: torch.Tensor, sampled: torch.Tensor, packed: Packed, share: Sequence[int]) -> None:
        """One microbatch: `logprob` and `sampled`, the engine's, [R]; its rows are number `share` of all. Doesn't wait."""
        if not share:
            return
        distance = (logprob - sampled).double()
        bounded = distance.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        size = distance.abs()
        # Response tokens lie row by row; a context-parallel rank may have none of a row.
        ends = torch.searchsorted(packed.row, torch.arange(len(share) + 1, device=packed.row.device))
        where = upload(torch.tensor(share, dtype=torch.int64), packed.row.device)
        for values, into in zip((size, -distance, torch.expm1(bounded) - bounded), self._sums, strict=True):
            into.index_copy_(0, where, torch.segment_reduce(values, "sum", offsets=ends, unsafe=True))
        self._largest.index_copy_(0, where, torch.segment_reduce(size, "max", offsets=ends, initial=0.0, unsafe=True))

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Collective: what all ranks of the group have."""
        dist.all_reduce(self._sums, group=group)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=group)

    def fresh(self, version: int) -> dict[str, Gap]:
        """Of the agents that have rows which the weights of `version` sampled. Waits for the device."""
        gaps: dict[str, Gap] = {}
        total, largest = self._sums[0].tolist(), self._largest.tolist()
        for i in self._chosen:
            row = self._rows[i]
            if is_fresh(row, version):
                gap = gaps.setdefault(row.agent, Gap())
                gap.add(f"{row.episode}/{row.turn}", tokens=len(row.response_ids), total=total[i], largest=largest[i])
        return gaps

    def divergence(self) -> dict[str, dict[str, float]]:
        """Per agent, over all its rows: `kl_k1` and `kl_k3`, means per token, of the policy that sampled from this one."""
        sums: dict[str, list[float]] = {}
        k1, k3 = self._sums[1].tolist(), self._sums[2].tolist()
        for i in self._chosen:
            row = self._rows[i]
            tokens, first, third = sums.get(row.agent, (0, 0.0, 0.0))
            sums[row.agent] = [tokens + len(row.response_ids), first + k1[i], third + k3[i]]
        return {agent: {"kl_k1": first / tokens, "kl_k3": third / tokens} for agent, (tokens, first, third) in sums.items()}
