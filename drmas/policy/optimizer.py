"""A policy's optimiser: gradient buffers, AdamW with its schedule, and the one place where a step is refused.

Megatron's contiguous buffers and its partition of the optimiser state (ZeRO-1) are used at every size, one rank included: a
checkpoint then has one format, and any layout opens it. The step itself is that of `drmas_kernels` on flat buffers: norms per
slot, one all-reduce, a clip coefficient and AdamW, of which the host reads nothing. Called by the trainer and the critic inside
`PolicyGroups.active`, on all of the policy's ranks together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection

from drmas.config.schema import PolicyConfig
from drmas.core.schedule import learning_rate
from drmas.errors import ConfigError
from drmas.policy import host_platform
from drmas.policy.groups import PolicyGroups
from drmas.policy.megatron_config import ddp_config
from drmas.policy.model import PolicyModel
from drmas.policy.shards import ShardedAdam, Shards
from drmas_kernels.grad_norm import clip_coefficient


class StepFlags(NamedTuple):
    """Scalars on the device, the same on every rank; reading one waits for the step."""

    norm: torch.Tensor
    """float64: of the whole gradient, before clipping."""
    applied: torch.Tensor
    """bool: False where the norm wasn't finite; parameters, moments and counts are as before."""


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
        if self.dp_cp_group.size() > 1:
            super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        if self.dp_cp_group.size() > 1:
            super().start_param_sync(*unused, force_sync=force_sync, force_dispatch=force_dispatch)


class PolicyOptimizer:
    """Gradients of `model` and the steps that they lead to.

    `ddp` is the model to run forward and backward; `steps` counts the updates that were applied. One update is `zero_grad`,
    passes with `set_aside` after some of them, `step`, `record`.
    """

    def __init__(
        self,
        name: str,
        model: PolicyModel,
        config: PolicyConfig,
        groups: PolicyGroups,
        *,
        total_steps: int,
        overlap: bool = False,
        bucket_size: int | None = None,
    ) -> None:
        """For the parameters of `model` that require a gradient. They must be of one dtype, and move into buffers here.

        With `overlap`, gradients are reduced during the backward pass and parameters gathered during the next forward pass:
        before anything else reads weights, call `settle`. `bucket_size`, in elements, is what overlap works by; Megatron's if
        unset. ConfigError: settings that don't fit each other.
        """
        if config.lr_min > config.lr:
            raise ConfigError(f"policies.{name}.lr_min is {config.lr_min}; it must not exceed lr, {config.lr}")
        dtypes = {str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(f"trainable parameters of {name!r} are {', '.join(sorted(dtypes))}; expected one dtype")
        self._config, self._groups, self._total_steps = config, groups, total_steps
        self._overlap = overlap and groups.dp_cp.size() > 1
        self.steps = 0
        buffers = ddp_config(groups, overlap=self._overlap)
        buffers.bucket_size = bucket_size
        self.ddp = Replicas(model.config, buffers, model, pg_collection=groups.collection)
        model.config.finalize_model_grads_func = _sum_gradients
        if self._overlap:
            model.config.no_sync_func = self.ddp.no_sync
            # No module waits for what is read by hand, as the head's weight is.
            model.register_forward_hook(lambda *_: self.settle())
        self.megatron = ShardedAdam(self.ddp, groups, _decayed(model, config))
        """What checkpoints read and write."""
        self._shards = Shards(self.megatron, groups, offload=_offloads(config))
        self._aside: list[torch.Tensor] | None = None
        self._has_aside = self._is_set_aside = False
        self.ddp.register_forward_pre_hook(lambda *_: self._make_room())

    @property
    def lr(self) -> float:
        """The rate of the last step; before the first, the rate that it will have."""
        return self._rate(max(self.steps, 1))

    def _rate(self, step: int) -> float:
        config = self._config
        return learning_rate(
            step,
            style=config.lr_schedule,
            lr=config.lr,
            lr_min=config.lr_min,
            warmup_steps=config.lr_warmup_steps,
            total_steps=self._total_steps,
            decay_share=config.lr_decay_share,
        )

    def zero_grad(self) -> None:
        """Start an update."""
        self._has_aside = self._is_set_aside = False
        self.ddp.zero_grad_buffer()

    @torch.no_grad()
    def set_aside(self) -> torch.Tensor:
        """The squared norm of the gradient since the last `zero_grad` or `set_aside`, which is kept apart. Collective.

        float64 scalar on the device, the same on every rank. Call it when a backward pass is over. The gradients are moved out
        of the buffers only if another pass follows, into one more buffer of their size. `step` takes the sum of all.
        """
        squared = self._squared_norms().sum()
        self._is_set_aside = True
        for group in self.ddp.bucket_groups:
            group.reset()
        self._gathered(True)  # by the pass; Megatron expects a step after it
        return squared

    @torch.no_grad()
    def _make_room(self) -> None:
        """Before a pass: what was set aside leaves the buffers that the pass accumulates in."""
        if not self._is_set_aside:
            return
        grads = self._shards.grad
        if self._aside is None:
            self._aside = [torch.empty_like(grad) for grad in grads]
        for aside, grad in zip(self._aside, grads, strict=True):
            aside.add_(grad) if self._has_aside else aside.copy_(grad)
        for buffer in self.ddp.buffers:
            buffer.reset()
        self._has_aside, self._is_set_aside = True, False

    @torch.no_grad()
    def step(self) -> StepFlags:
        """Clip the gradient to `clip_grad_norm` and apply AdamW, unless the gradient isn't finite. Collective.

        The host waits for nothing here (but for `offload_optimizer`, where it does the work); `record` wants what it returns.
        """
        config = self._config
        if self._has_aside:
            for grad, aside in zip(self._shards.grad, self._aside, strict=True):
                grad.add_(aside)
            self._has_aside = False
        squared = self._squared_norms()
        norm = squared.sum().sqrt()
        coefficient = clip_coefficient(norm, config.clip_grad_norm)
        self._shards.step(
            coefficient,
            lr=self._rate(self.steps + 1),
            weight_decay=config.weight_decay,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
        )
        if self._overlap:
            self._gathered(False)
        else:
            self.ddp.start_param_sync()
        return StepFlags(norm, coefficient >= 0)

    def record(self, norm: float, applied: bool) -> StepOutcome:
        """Move the schedule on if the last step was applied. `norm` and `applied` are what it returned, read by the caller."""
        self.steps += int(applied)
        return StepOutcome(norm, self.lr, applied)

    def _squared_norms(self) -> torch.Tensor:
        """[slots] float64, of the whole gradient, the same on every rank."""
        squared = self._shards.squared_norms()
        if self._groups.whole.size() > 1:
            dist.all_reduce(squared, group=self._groups.whole)
        return squared

    def settle(self) -> None:
        """Wait until the model holds the weights of the last step; before they are saved, exported or sent. Collective."""
        if not self._overlap:
            return
        for group in reversed(self.ddp.bucket_groups):
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _gathered(self, value: bool) -> None:
        """Whether the model holds what the ranks' shards do; if not, the next forward pass gathers."""
        for group in self.ddp.bucket_groups:
            group.param_gather_dispatched = value

    def load_state(self, state: dict[str, Any], *, steps: int) -> None:
        """Take a checkpoint's `state`, as `megatron` gave it; the schedule and Adam's settings stay the run's own."""
        self.megatron.load_state_dict(state)
        self.steps = steps


def _decayed(model: PolicyModel, config: PolicyConfig) -> set[torch.nn.Parameter]:
    """The parameters with weight decay."""
    return {parameter for name, parameter in model.named_parameters() if _kind(name, parameter) not in config.no_decay}


def _kind(name: str, parameter: torch.nn.Parameter) -> str:
    """norm, bias, embedding or weight, by Megatron's names: TransformerEngine's norms are parts of its linear layers."""
    if getattr(parameter, "shared_embedding", False) or ".word_embeddings." in f".{name}":
        return "embedding"
    owner, _, own = f".{name}".rpartition(".")
    if own == "bias":
        return "bias"
    return "norm" if "norm" in own or "norm" in owner.rpartition(".")[2] else "weight"


def _offloads(config: PolicyConfig) -> bool:
    return config.offload_optimizer and not host_platform.is_host()


def _sum_gradients(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    *,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Sum gradients over the ranks and leave them so: the loss's own weights are its only normaliser (I5)."""
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
