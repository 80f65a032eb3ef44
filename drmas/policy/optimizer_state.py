"""Moments and fp32 parameters of a distributed optimiser as tensors of a checkpoint, each in the shape of its parameter.

Data-parallel ranks own equal ranges of one flat buffer, whose ends cut through parameters. A parameter is saved by the first
rank that owns a part of it: nearly all lie whole in one rank's range and are saved from where they are, without a copy; the
pieces of the others, at most one parameter per border of two ranges, are sent to that rank. Megatron's own state of this shape
(`fully_reshardable`) gathers all of it on every rank first and saves wrong values behind a padded bucket. Where parameters are
fp32 they are their own fp32 copies and are saved with the model.

Called by `drmas.policy.checkpoint` inside the policy's groups, on all of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from drmas.policy import host_platform

Sharded = ShardedTensor | ShardedTensorFactory


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter that this rank owns a part of, and how many elements of it each rank from `first` on owns."""

    parameter: torch.nn.Parameter
    first: int
    sizes: list[int]


class OptimizerState:
    """The tensors of `optimizer` for the parameters in `model`, a sharded state dict that holds the parameters themselves."""

    def __init__(self, optimizer: DistributedOptimizer, model: dict[str, Sharded]) -> None:
        self._optimizer, self._group = optimizer, optimizer.data_parallel_group
        self._sharded = {sharded.data: (name, sharded) for name, sharded in model.items()}

    def to_save(self) -> dict[str, Sharded]:
        """This rank's share. Tensors share memory with the optimiser where they lie whole on this rank."""
        return self._described(self._joined)

    def to_load(self) -> dict[str, Sharded]:
        """What this rank has to read: whole tensors, of which `take` uses its part."""
        return self._described(lambda place, piece: piece if len(place.sizes) == 1 else piece.new_empty(sum(place.sizes)))

    @torch.no_grad()
    def take(self, loaded: dict[str, torch.Tensor]) -> None:
        """Fill the optimiser from what was read for `to_load`."""
        for place in self._places():
            index = self._group.rank() - place.first
            for name, piece in self._pieces(place.parameter).items():
                piece.copy_(loaded[self._key(place, name)].flatten().split(place.sizes)[index])

    def _places(self) -> Iterator[_Place]:
        """In an order that all ranks share."""
        ranks, me = self._group.size(), self._group.rank()
        for buffer in self._optimizer.buffers:
            for parameter, (start, end, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                share = bucket.grad_data.numel() // ranks
                start, end = start - bucket.offset, end - bucket.offset
                first, last = start // share, (end - 1) // share
                if first <= me <= last:
                    borders = [start, *(share * rank for rank in range(first + 1, last + 1)), end]
                    yield _Place(parameter, first, [b - a for a, b in pairwise(borders)])

    def _pieces(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """This rank's part of the parameter's flat tensors, by name."""
        tensors = self._optimizer._get_main_param_and_optimizer_states(parameter)
        names = ("exp_avg", "exp_avg_sq") if parameter.dtype == torch.float32 else ("param", "exp_avg", "exp_avg_sq")
        return {name: tensors[name].detach() for name in names}

    def _joined(self, place: _Place, piece: torch.Tensor) -> torch.Tensor | None:
        """The whole flat tensor on the first of the ranks that share it, None on the others."""
        if len(place.sizes) == 1:
            return piece
        if self._group.rank() != place.first:
            self._exchange(
                [dist.P2POp(dist.isend, piece.to(host_platform.device()), group=self._group, group_peer=place.first)]
            )
            return None
        parts = [piece.new_empty(size, device=host_platform.device()) for size in place.sizes[1:]]
        peers = range(place.first + 1, place.first + len(place.sizes))
        self._exchange(
            [dist.P2POp(dist.irecv, part, group=self._group, group_peer=peer) for part, peer in zip(parts, peers, strict=True)]
        )
        return torch.cat([piece.cpu(), *(part.cpu() for part in parts)])

    @staticmethod
    def _exchange(operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _key(self, place: _Place, name: str) -> str:
        return f"{name}.{self._sharded[place.parameter][0]}"

    def _described(self, whole_of: Callable[[_Place, torch.Tensor], torch.Tensor | None]) -> dict[str, Sharded]:
        """Cut over tensor- and pipeline-parallel ranks as the parameters are; of a group of replicas only one rank saves."""
        state = {}
        for place in self._places():
            _, model = self._sharded[place.parameter]
            for name, piece in self._pieces(place.parameter).items():
                whole = whole_of(place, piece)
                if whole is None:
                    continue
                changes: dict[str, Any] = {
                    "key": f"optimizer.state.{name}.{model.key}",
                    "data": whole.view(model.data.shape),
                    "replica_id": (*model.replica_id[:-1], self._group.rank() - place.first),
                }
                if isinstance(model, ShardedTensor):
                    changes["dtype"] = whole.dtype
                state[self._key(place, name)] = replace(model, **changes)
        return state
