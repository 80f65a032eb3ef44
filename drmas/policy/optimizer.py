"""A policy's optimiser: gradient buffers, AdamW with its schedule, and the one place where a step is refused.

Megatron's contiguous buffers and its distributed optimiser (ZeRO-1) are used at every size, one rank included: a checkpoint
then has one format, and any layout opens it. Called by the trainer inside `PolicyGroups.active`.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from drmas.config.schema import PolicyConfig
from drmas.errors import ConfigError
from drmas.policy import fused_adam, host_platform
from drmas.policy.groups import PolicyGroups
from drmas.policy.model import PolicyModel
from drmas_kernels.grad_norm import SKIP, clip_coefficient, squared_norms


class StepOutcome(NamedTuple):
    grad_norm: float
    """Of the whole gradient, before clipping."""
    lr: float
    applied: bool
    """False where the norm wasn't finite: weights, moments and schedule are as before."""


class Replicas(DistributedDataParallel):
    """Megatron's gradient and parameter buffers, without collectives where there is one replica only.

    Over one rank gloo still copies both buffers from end to end, a tenth of an update of SmolLM2 on a laptop.
    """

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if not self._alone:
            super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        if not self._alone:
            super().start_param_sync(*unused, force_sync=force_sync, force_dispatch=force_dispatch)

    @property
    def _alone(self) -> bool:
        return self.dp_cp_group.size() == 1 and not self.ddp_config.overlap_grad_reduce


class PolicyOptimizer:
    """Gradients of `model` and the steps that they lead to."""

    def __init__(self, name: str, model: PolicyModel, config: PolicyConfig, groups: PolicyGroups, *, total_steps: int) -> None:
        if config.lr_min > config.lr:
            raise ConfigError(f"policies.{name}.lr_min is {config.lr_min}; it must not exceed lr, {config.lr}")
        fused_adam.install()
        self._config = config
        self.ddp = Replicas(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model,
            pg_collection=groups.collection,
        )
        model.config.finalize_model_grads_func = _sum_gradients
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.lr_min,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                clip_grad=config.clip_grad_norm,
                bf16=config.dtype == "bfloat16",
                params_dtype=getattr(torch, config.dtype),
                use_distributed_optimizer=True,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
            pg_collection=groups.collection,
        )
        (self._sharded,) = self.megatron.chained_optimizers
        # Moments exist from the start, so that a policy can be saved before its first step.
        self._sharded.init_state_fn(self._sharded.optimizer, self._sharded.config)
        self.scheduler = self._make_scheduler(total_steps)

    def _make_scheduler(self, total_steps: int) -> OptimizerParamScheduler:
        """Also what keeps weight decay off norms and biases: Megatron applies that exception in the scheduler only."""
        config = self._config
        return OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.lr_min,
            lr_warmup_steps=config.lr_warmup_steps,
            lr_decay_steps=max(total_steps, config.lr_warmup_steps) + 1,  # lr_min is due one step after the last
            lr_decay_style=config.lr_schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @property
    def lr(self) -> float:
        """The rate of the last step; before the first, the rate that it will have."""
        schedule = copy.copy(self.scheduler)
        schedule.num_steps = max(schedule.num_steps, 1)
        return schedule.get_lr(self.megatron.param_groups[0])

    def zero_grad(self) -> None:
        self.ddp.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self) -> StepOutcome:
        """Clip the gradient to `clip_grad_norm` and apply AdamW, unless the gradient isn't finite. Collective."""
        self.megatron.prepare_grads()
        norm = self._grad_norm()
        coefficient = float(clip_coefficient(norm, self._config.clip_grad_norm))
        if coefficient == SKIP:
            return StepOutcome(float(norm), self.lr, applied=False)
        self.scheduler.step(1)
        if coefficient < 1.0:
            for parameter in self._sharded.get_parameters():
                parameter.grad.mul_(coefficient)
        self.megatron.step_with_ready_grads()
        return StepOutcome(float(norm), self.lr, applied=True)

    def _grad_norm(self) -> torch.Tensor:
        """The norm of the whole gradient, a float64 scalar, the same on every rank.

        Megatron says which parts of this rank's shard count: what tensor-parallel ranks hold alike counts once.
        """
        parts = [grad.view(-1) for grad in self._sharded.get_main_grads_for_grad_norm()]
        squared = squared_norms(parts, [0] * len(parts), 1, device=host_platform.device())
        dist.all_reduce(squared, group=self._sharded.get_grad_stats_parallel_group())
        return squared[0].sqrt()

    @torch.no_grad()
    def load_state(self, state: dict[str, Any], *, steps: int) -> None:
        """Take moments and main parameters from a checkpoint's `state`; the schedule and Adam's settings stay the run's own."""
        self.megatron.load_state_dict(state)
        config = self._config
        for group in self.megatron.param_groups:
            group |= {"max_lr": config.lr, "min_lr": config.lr_min, "eps": config.adam_eps}
            group["betas"] = (config.adam_beta1, config.adam_beta2)
        self.scheduler.num_steps = steps
        self.scheduler.step(0)


def _sum_gradients(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    *,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Sum gradients over the ranks and leave them so: the loss's own weights are its only normaliser (I5)."""
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
