"""This rank's part of a policy's parameters, gradients and AdamW state: flat buffers for the kernels, bookkeeping for Megatron.

Data-parallel ranks own equal stretches of every bucket of Megatron's buffers. Of its stretch a rank keeps fp32 parameters and
two moments, laid out as the gradients are, so that norms and AdamW run over whole stretches. Megatron's distributed optimiser
sees the same memory parameter by parameter, as views: its state dictionaries and what reads them work on what the kernels
update. Used by drmas.policy.optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from drmas.policy import host_platform
from drmas.policy.groups import PolicyGroups
from drmas_kernels.adamw import AdamBuffers, StepState, adamw_slots
from drmas_kernels.backend import use
from drmas_kernels.grad_norm import slot_norms
from drmas_kernels.tile_table import Span, TileTable

DECAY, NO_DECAY = 0, 1
"""The slots: parameters with weight decay, and without."""


class ShardedAdam(DistributedOptimizer):
    """Megatron's view of the state, for checkpoints. It never steps: `Shards` does.

    Megatron's own class counts AdamW's steps in the optimiser that it wraps; here they are counted once, in `steps_taken`.
    """

    def __init__(self, ddp: DistributedDataParallel, groups: PolicyGroups, decayed: set[torch.nn.Parameter]) -> None:
        """Of the trainable parameters in `ddp`: of `decayed` and of the others, a group each, on every rank."""
        trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        common = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}  # what Megatron knows groups by
        container = torch.optim.AdamW(
            [
                {"params": [parameter for parameter in trained if parameter in decayed], "wd_mult": 1.0, **common},
                {"params": [parameter for parameter in trained if parameter not in decayed], "wd_mult": 0.0, **common},
            ]
        )
        dtype = next((parameter.dtype for parameter in trained), torch.float32)
        super().__init__(
            container,
            OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, bf16=dtype == torch.bfloat16, params_dtype=dtype),
            grad_scaler=None,
            init_state_fn=None,
            model_chunks=[ddp],
            per_model_buffers={0: ddp.buffers},
            data_parallel_group=groups.dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=groups.collection.mp.rank(),
            distributed_optimizer_instance_id=0,
        )
        self.grad_stats_parallel_group, self.tp_group = groups.whole, groups.tp
        self.steps_taken = torch.zeros(2, dtype=torch.int64)
        """[slots] int64; `Shards` puts its own count here."""

    def state_dict(self) -> dict[str, Any]:
        """The groups with their number of steps; tensors are `drmas.policy.optimizer_state`'s business."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
        for group, steps in zip(groups, self.steps_taken.tolist(), strict=True):
            group["step"] = steps
        return {"optimizer": {"param_groups": groups}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the number of steps, in place."""
        steps = [group["step"] for group in state_dict["optimizer"]["param_groups"]]
        self.steps_taken.copy_(torch.tensor(steps))


class _Place(NamedTuple):
    """Where this rank's part of a parameter lies in the flat buffers."""

    bucket: int
    place: slice
    slot: int
    parameter: torch.nn.Parameter
    main: Tensor
    """Its fp32 values, as Megatron has them: a part of the model's parameter, or a copy of one."""


class Shards:
    """The flat buffers, one of each kind per bucket.

    `grad` is fp32. `main` are the fp32 parameters: the model's own where they are fp32, else copies that are rounded into it.
    """

    def __init__(self, sharded: ShardedAdam, groups: PolicyGroups, *, offload: bool) -> None:
        """Rebase the state of `sharded` onto flat buffers; with `offload`, in (on CUDA pinned) host memory."""
        self._offload = offload
        self.grad: list[Tensor] = []
        self._param: list[Tensor] = []
        rank, ranks = groups.dp_cp.rank(), groups.dp_cp.size()
        for buffer in sharded.buffers:
            for bucket in buffer.buckets:
                self.grad.append(bucket.grad_data.chunk(ranks)[rank])
                self._param.append(bucket.param_data.chunk(ranks)[rank])
        self._is_fp32 = all(param.dtype == torch.float32 for param in self._param)
        places = list(_places(sharded))
        self._main = self._param if self._is_fp32 else self._rebased(places)
        self._exp_avg, self._exp_avg_sq = self._zeros(), self._zeros()
        for index, place, _, _, main in places:
            moments = {"exp_avg": self._exp_avg[index][place], "exp_avg_sq": self._exp_avg_sq[index][place]}
            sharded.optimizer.state[main] = moments
        spans = [
            Span(index, place.start, place.stop - place.start, slot, replicated=not _counts(parameter, groups))
            for index, place, slot, parameter, _ in places
        ]
        lengths = [grad.numel() for grad in self.grad]
        # A span marked as replicated counts on rank 0; which ones count on this rank was decided with the pipeline in view.
        self._table = TileTable.build(spans, lengths, 2, tp_rank=1, device=host_platform.device())
        if offload:
            self._tables = [
                TileTable.build([span._replace(buffer=0) for span in spans if span.buffer == index], [length], 2)
                for index, length in enumerate(lengths)
            ]
            self._staged = _host_zeros(max(lengths, default=0))
        self.state = StepState.zeros(2, "cpu" if offload else host_platform.device())
        sharded.steps_taken = self.state.step

    def _zeros(self) -> list[Tensor]:
        if self._offload:
            return [_host_zeros(grad.numel()) for grad in self.grad]
        return [torch.zeros_like(grad) for grad in self.grad]

    @torch.no_grad()
    def _rebased(self, places: list[_Place]) -> list[Tensor]:
        """Flat fp32 parameters, which take the place of Megatron's, one after the other."""
        flat = self._zeros()
        for index, place, _, _, main in places:
            flat[index][place] = main
            main.data = flat[index][place]
        return flat

    def squared_norms(self) -> Tensor:
        """[slots] float64: of this rank's part of the gradient, each element of the whole gradient on one rank only."""
        return slot_norms(self.grad, self._table).squared

    def step(self, coefficient: Tensor, *, lr: float, weight_decay: float, **settings: float) -> None:
        """AdamW with the gradient times `coefficient`, a scalar on the device; nothing where it is `grad_norm.SKIP`.

        The host waits for nothing, unless the state is offloaded: it is the host that steps then.
        """
        settings = settings | {"lr": lr}
        if self._offload:
            self._step_on_host(coefficient, weight_decay, settings)
            return
        adamw_slots(
            AdamBuffers(self._main, self.grad, self._exp_avg, self._exp_avg_sq, () if self._is_fp32 else self._param),
            self.state,
            self._table,
            coefficient=coefficient.repeat(2),
            weight_decay=_per_slot(weight_decay, coefficient.device),
            **settings,
        )

    def _step_on_host(self, coefficient: Tensor, weight_decay: float, settings: dict[str, float]) -> None:
        """Bucket by bucket: the gradient comes over, the parameters go back."""
        coefficient = coefficient.cpu().repeat(2)
        decay = _per_slot(weight_decay, coefficient.device)
        for index, table in enumerate(self._tables):
            param, main = self._param[index], self._main[index].cpu()
            grad = self._staged[: param.numel()].copy_(self.grad[index])
            count = StepState(self.state.step.clone(), self.state.skipped.clone())
            buffers = AdamBuffers([main], [grad], [self._exp_avg[index]], [self._exp_avg_sq[index]])
            with use("torch"):
                adamw_slots(buffers, count, table, coefficient=coefficient, weight_decay=decay, **settings)
            param.copy_(main)
        self.state.advance(coefficient)


def _places(sharded: ShardedAdam) -> Iterator[_Place]:
    """Of every parameter that this rank has a part of, by Megatron's own tables."""
    ranges = [bucket for dtypes in sharded.gbuf_ranges for buckets in dtypes.values() for bucket in buckets]
    for index, bucket in enumerate(ranges):
        for parameter, where in bucket["param_map"].items():
            slot, order = sharded.model_param_group_index_map[parameter]
            main = sharded.optimizer.param_groups[slot]["params"][order]
            yield _Place(index, slice(where["gbuf_local"].start, where["gbuf_local"].end), slot, parameter, main)


def _host_zeros(length: int) -> Tensor:
    return torch.zeros(length, pin_memory=not host_platform.is_host())


def _per_slot(weight_decay: float, device: torch.device) -> Tensor:
    decays = torch.zeros(2, dtype=torch.float64, device=device)
    decays[DECAY].fill_(weight_decay)
    return decays


def _counts(parameter: torch.nn.Parameter, groups: PolicyGroups) -> bool:
    """Whether its gradient enters the norm here: of what several tensor-parallel ranks or stages hold alike, one's does."""
    if getattr(parameter, "shared", False):  # the last stage's copy of a tied embedding
        return False
    return getattr(parameter, "tensor_model_parallel", False) or groups.tp.rank() == 0
