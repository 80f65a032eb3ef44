"""Other libraries as sides of the benchmark: Liger, cut-cross-entropy, Megatron-core and torch's own fused head.

None is needed: one that isn't installed shows up with that reason. Each side says what it computes less than the operation.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from bench.kernel_bench import plain
from bench.kernel_bench.sides import Side, Step, clear

NLL = "the mean NLL and its gradients: no old log-prob, clip, advantage or metrics"
NO_METRICS = "no entropy, no metrics"


def _needs(package: str, device: str, gpu: bool) -> Any:
    def missing() -> str | None:
        if find_spec(package) is None:
            return "not installed"
        return "needs a GPU" if gpu and device != "cuda" else None

    return missing


_WORLD = contextlib.ExitStack()


@functools.cache
def megatron_group() -> Any:
    """Megatron's groups over a world of this process alone, active until `leave_megatron`."""
    import drmas.policy  # noqa: F401  (lets Megatron run where there is no GPU; before any import of megatron)
    from drmas.policy import groups

    groups.init_distributed()
    _WORLD.callback(groups.destroy)
    layout = groups.Groups().layout()
    _WORLD.enter_context(layout.active())
    return layout.collection


@atexit.register
def leave_megatron() -> None:
    _WORLD.close()
    megatron_group.cache_clear()


def megatron_cross_entropy(fused: bool) -> Any:
    """(logits [T, V], target [T]) -> NLL per token, by Megatron's own function. It overwrites fp32 logits."""
    group = megatron_group().tp
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    if fused:
        return lambda logits, target: fused_vocab_parallel_cross_entropy(logits, target, group)
    return vocab_parallel_cross_entropy


def _gradients(inputs: SimpleNamespace, loss: Any, comparable: bool = True) -> Step:
    def step() -> torch.Tensor | None:
        clear(inputs)
        value = loss()
        value.backward()
        return value.detach() if comparable else None

    return step


def _liger_grpo(i: SimpleNamespace) -> Step:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    # `delta` bounds the ratio, which for a negative advantage is the dual clip; "dapo" divides by the number of tokens.
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", delta=3.0)
    rows = i.advantage.shape[0]
    split = (rows, -1)
    mask = torch.ones_like(i.old).view(split)

    def run() -> torch.Tensor:
        hidden = i.hidden.view(rows, -1, i.hidden.shape[1])
        return loss(hidden, i.weight, i.target.view(split), mask, i.advantage, old_per_token_logps=i.old.view(split))[0]

    return _gradients(i, run)


def _liger_linear_ce(i: SimpleNamespace) -> Step:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return _gradients(i, lambda: liger_fused_linear_cross_entropy(i.hidden, i.weight, i.target), comparable=False)


def _cce(implementation: str, reduction: str) -> Any:
    def make(i: SimpleNamespace) -> Step:
        from cut_cross_entropy import linear_cross_entropy

        def run() -> torch.Tensor:
            return linear_cross_entropy(i.hidden, i.weight, i.target, impl=implementation, reduction=reduction)

        return _without_gradients(run) if reduction == "none" else _gradients(i, run, comparable=False)

    return make


def _without_gradients(nll: Any) -> Step:
    @torch.no_grad()
    def step() -> torch.Tensor:
        return -nll().mean()

    return step


def _torch_fused(reduction: str) -> Any:
    def make(i: SimpleNamespace) -> Step:
        options = torch.nn.LinearCrossEntropyOptions()

        def run() -> torch.Tensor:
            return F.linear_cross_entropy(i.hidden, i.weight, i.target, reduction=reduction, options=options)

        return _without_gradients(run) if reduction == "none" else _gradients(i, run, comparable=False)

    return make


def _megatron_head(fused: bool) -> Any:
    def make(i: SimpleNamespace) -> Step:
        cross_entropy = megatron_cross_entropy(fused)

        def run() -> torch.Tensor:
            logprob = -cross_entropy(F.linear(i.hidden, i.weight), i.target)
            return plain.clipped_loss(logprob, i.old, i.row, i.advantage, i.token_weight)

        return _gradients(i, run)

    return make


def _megatron_head_logprob(fused: bool) -> Any:
    def make(i: SimpleNamespace) -> Step:
        cross_entropy = megatron_cross_entropy(fused)
        return _without_gradients(lambda: cross_entropy(F.linear(i.hidden, i.weight), i.target))

    return make


def head_loss_sides(device: str) -> tuple[Side, ...]:
    """For `linear_policy_loss` without an entropy bonus."""
    return (
        Side("Liger GRPO", _liger_grpo, "no entropy, no metrics per agent", _needs("liger_kernel", device, False)),
        Side("Liger linear CE", _liger_linear_ce, NLL, _needs("liger_kernel", device, True)),
        Side("CCE", _cce("cce", "mean"), NLL + "; skips small gradients", _needs("cut_cross_entropy", device, True)),
        Side("CCE torch_compile", _cce("torch_compile", "mean"), NLL, _needs("cut_cross_entropy", device, False)),
        Side("torch linear CE", _torch_fused("mean"), NLL),
        Side("Megatron CE", _megatron_head(False), NO_METRICS, _needs("megatron", device, False)),
        Side("Megatron fused CE", _megatron_head(True), NO_METRICS + "; bf16 gradients", _needs("megatron", device, False)),
    )


def head_logprob_sides(device: str) -> tuple[Side, ...]:
    """For `linear_logprob`."""
    less = "no entropy"
    return (
        Side("CCE", _cce("cce", "none"), less, _needs("cut_cross_entropy", device, True)),
        Side("CCE torch_compile", _cce("torch_compile", "none"), less, _needs("cut_cross_entropy", device, False)),
        Side("torch linear CE", _torch_fused("none"), less),
        Side("Megatron CE", _megatron_head_logprob(False), less, _needs("megatron", device, False)),
        Side("Megatron fused CE", _megatron_head_logprob(True), less, _needs("megatron", device, False)),
    )


def _own_logits(i: SimpleNamespace) -> torch.Tensor:
    """A copy for a side that overwrites its logits: the other sides keep theirs."""
    return i.logits.detach().clone().requires_grad_(i.logits.requires_grad)


def _on_logits(make_nll: Any, backward: bool) -> Any:
    def make(i: SimpleNamespace) -> Step:
        nll, logits = make_nll(), _own_logits(i)
        i.leaves.append(logits)

        def run() -> None:
            clear(i)
            value = nll(logits, i.target).mean()
            if backward:
                value.backward()

        return run if backward else torch.no_grad()(run)

    return make


def _liger_ce() -> Any:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


def logits_sides(device: str, backward: bool) -> tuple[Side, ...]:
    """For `logprob`, forward alone or with the gradient of the mean log-prob."""
    less = "no entropy; overwrites the logits"
    sides = [
        Side(name, _on_logits(make, backward), less, _needs("megatron", device, False))
        for name, make in (
            ("Megatron CE", lambda: megatron_cross_entropy(False)),
            ("Megatron fused CE", lambda: megatron_cross_entropy(True)),
        )
    ]
    if backward:
        sides.append(Side("Liger CE", _on_logits(_liger_ce, backward), less, _needs("liger_kernel", device, True)))
    return tuple(sides)


def _megatron_norm(i: SimpleNamespace) -> Step:
    group = megatron_group().mp
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    return lambda: torch.tensor(get_grad_norm_fp32(i.gradients, grad_stats_parallel_group=group)).square()


def _megatron_step(i: SimpleNamespace) -> Step:
    megatron_group()
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    config = OptimizerConfig(optimizer="adam", lr=i.lr, clip_grad=1.0, use_distributed_optimizer=False)
    optimizer = FP32Optimizer(i.adamw_of_views(), config, None)

    def step() -> None:
        optimizer.step()
        i.copy.copy_(i.param)

    return step


def norm_sides(device: str) -> tuple[Side, ...]:
    return (
        Side(
            "torch foreach",
            lambda i: lambda: torch.nn.utils.get_total_norm(i.gradients, foreach=True).square(),
            "a norm per view",
        ),
        Side("Megatron", _megatron_norm, "waits for the device", _needs("megatron", device, False)),
    )


def clipped_step_sides(device: str) -> tuple[Side, ...]:
    inner = "torch's fused AdamW inside, its own norm and clip passes"
    return (Side("Megatron", _megatron_step, inner, _needs("megatron", device, False)),)
