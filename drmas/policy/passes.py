"""Rows through one Megatron model, microbatch by microbatch: the plan, the packing, and the pipeline's schedule.

Every rank holds the same list of rows and works out the same plan, so ranks can't disagree about who computes what; each then
packs its own data-parallel share. What happens to the hidden states is the caller's: a loss, log-probs, values. Used by the
trainer, the reference and the critic, inside `PolicyGroups.active`, on all of the policy's ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from drmas.config.schema import PolicyConfig
from drmas.core.batching import TokenCost, plan_microbatches
from drmas.core.stack import Stack
from drmas.policy import host_platform
from drmas.policy.groups import PolicyGroups
from drmas.policy.model import PolicyModel
from drmas.policy.packing import Packed, pack
from drmas.telemetry.trace import span
from drmas.types import Row

EMPTY = Row(
    task="",
    episode="",
    agent="",
    policy="",
    turn=0,
    prompt_ids=[0],
    response_ids=[0],
    logprobs=[0.0],
    versions=[0],
    reward=None,
)
"""Stands in where a rank has no rows for a microbatch that other ranks have; its weight is 0 (I4)."""

After = Callable[[torch.Tensor, Packed, list[int]], Any]
"""(hidden states of the last stage, the microbatch, indices of its rows) -> what the pass is for."""


@dataclass(slots=True)
class Work:
    """What this rank computed of a pass. `saved` are tokens that sharing of prefixes left out; `pairs` query-key pairs."""

    tokens: int = 0
    saved: int = 0
    pairs: int = 0
    responses: int = 0

    def add(self, packed: Packed) -> None:
        self.tokens += packed.tokens
        self.saved += packed.saved
        self.responses += packed.source.numel()
        for (start, end), keys in packed.params.calls:
            queries, seen = end - start, sum(last - first for first, last in keys)
            self.pairs += queries * seen - queries * (queries - 1) // 2

    def total(self, groups: PolicyGroups) -> torch.Tensor:
        """[tokens, saved, pairs, responses] of all replicas, int64 on the device. Context-parallel ranks share one pack."""
        own = (self.tokens, self.saved) if groups.cp.rank() == 0 else (0, 0)
        counts = torch.tensor([*own, self.pairs, self.responses], dtype=torch.int64).to(host_platform.device())
        dist.all_reduce(counts, group=groups.dp_cp)
        return counts

    def __iadd__(self, other: Work) -> Work:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


class Passes:
    """Runs rows through `model`. One per model; `work` counts what the last call did."""

    def __init__(self, model: PolicyModel, groups: PolicyGroups, config: PolicyConfig, stack: Stack, cost: TokenCost) -> None:
        self.model, self.groups, self.stack = model, groups, stack
        self._budget, self._cost = config.tokens_per_microbatch, cost
        self._multiple = stack.token_multiple * (groups.tp.size() if model.config.sequence_parallel else 1)
        self._pipeline = {}
        if groups.pp.size() > 1:
            self._pipeline["p2p_communicator"] = P2PCommunicator(pp_group=groups.pp, config=model.config)
        self.work = Work()

    @torch.no_grad()
    def forward(self, rows: Sequence[Row], chosen: Sequence[int], after: After) -> list[Any]:
        """What `after` returned for each microbatch of this rank's share; empty but on the last stage."""
        return self._run(self.model, rows, chosen, after, None)

    def per_token(self, rows: Sequence[Row], score: After) -> list[list[float]]:
        """One number per response token of every row, in order, on every rank; `score` gives those of a microbatch, [R]."""
        if not rows:
            return []
        ends = list(accumulate((len(row.response_ids) for row in rows), initial=0))
        found = torch.zeros(ends[-1], dtype=torch.float32, device=host_platform.device())

        def collect(hidden: torch.Tensor, packed: Packed, share: list[int]) -> None:
            values = score(hidden, packed, share)
            if share:
                found[packed.of_tokens([range(ends[i], ends[i + 1]) for i in share], torch.int64)] = values

        self.forward(rows, range(len(rows)), collect)
        dist.all_reduce(found, group=self.groups.dp_cp)
        if self.groups.pp.size() > 1:  # zeros but on the last stage
            dist.all_reduce(found, group=self.groups.pp)
        numbers = found.tolist()
        return [numbers[start:end] for start, end in pairwise(ends)]

    def backward(
        self,
        model: torch.nn.Module,
        rows: Sequence[Row],
        chosen: Sequence[int],
        after: After,
        on_rows: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """`forward`, then gradients into the buffers of `model` (the DDP around it), summed over replicas.

        `after` returns (loss, result); the results are listed. The loss is this rank's part of one sum over all rows (I5): it
        is scaled by nothing, here or in Megatron. `on_rows` hears of this rank's rows as they go through.
        """
        device = host_platform.device()

        def loss_of(hidden: torch.Tensor, packed: Packed, share: list[int]) -> tuple[torch.Tensor, torch.Tensor, Any]:
            loss, result = after(hidden, packed, share)
            return loss, torch.zeros((), dtype=torch.int32, device=device), result  # a token count that divides nothing

        return self._run(model, rows, chosen, loss_of, on_rows)

    def _run(
        self,
        model: torch.nn.Module,
        rows: Sequence[Row],
        chosen: Sequence[int],
        after: After,
        on_rows: Callable[[int], None] | None,
    ) -> list[Any]:
        shares = self._shares(rows, chosen)
        self.work = Work()

        def step(iterator: Iterator[list[int]], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            share = next(iterator)
            with span("pack"):
                packed = self._pack([rows[i] for i in share] or [EMPTY])
            if share:
                self.work.add(packed)
            if on_rows is not None:
                on_rows(len(share))
            hidden = model(
                input_ids=packed.ids, position_ids=packed.positions, attention_mask=None, packed_seq_params=packed.params
            )
            return hidden, lambda hidden, non_loss_data=False: after(hidden, packed, share)

        forward_only = not torch.is_grad_enabled()
        return get_forward_backward_func(self.groups.pp.size(), None)(
            forward_step_func=step,
            data_iterator=iter(shares),
            model=[model],
            num_microbatches=len(shares),
            seq_length=self._budget,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=self.groups.collection,
            **self._pipeline,
        )

    def _shares(self, rows: Sequence[Row], chosen: Sequence[int]) -> list[list[int]]:
        """This rank's microbatches, as indices of rows."""
        plan = plan_microbatches(
            [rows[i] for i in chosen],
            budget=self._budget,
            num_ranks=self.groups.dp.size(),
            cost=self._cost,
            share_prefixes=self.stack.shares_prefixes,
        )
        return [[chosen[j] for j in microbatch] for microbatch in plan[self.groups.dp.rank()]]

    def _pack(self, rows: Sequence[Row]) -> Packed:
        return pack(
            rows,
            device=host_platform.device(),
            multiple=self._multiple,
            share_prefixes=self.stack.shares_prefixes,
            thd=self.stack.thd,
            cp_size=self.groups.cp.size(),
            cp_rank=self.groups.cp.rank(),
        )
