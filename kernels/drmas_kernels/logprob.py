"""Log-prob of the target and entropy per token from logits that exist already, and the gradient, in place where asked for.

Contract
  logits [..., v] fp32 or bf16, any strides; target [...] int64; temperature a number or [...]. With z = logit / temperature
  over the true vocabulary, m = max z, u = z - m, s = sum e^u and q = sum e^u u:
      logprob = (z_y - m) - ln s          entropy = ln s - q / s          both [...] fp32
  and for upstream gradients g and h per token, with p = e^u / s and H the entropy,
      d / d logit_v = (p_v (-h (ln p_v + H) - g) + g [v = y]) / temperature
  in the dtype of the logits, rounded once. The target's g (1 - p_y) is formed from fp32 statistics without cancellation.

  A column -inf has p = 0 and gradient 0. A logit that is NaN or +inf shows: results of its row are not finite. A row whose
  upstream gradients are 0 has gradient exactly 0 even then. There is no ignored target: what a token counts is the caller's
  weight on the results. A target outside 0..vocab_size-1 is refused, with `check_values=False` its log-prob is -inf (and nobody
  waits for the GPU). Columns at or past `vocab_size` (padding) never enter, even NaN, and have gradient 0.

  Vocabulary-parallel: logits are the shard that starts at `vocab_start`, `group` a process group whose ranks hold the same
  tokens, shards of equal width in rank order. ONE collective in the forward pass, an all-gather of [T, 4], merged in rank
  order: the same bits on all ranks. None in the backward pass: each rank forms its shard's gradient, for upstream gradients
  that must be the same on all ranks.

  `inplace_backward` writes the gradient over the logits: they are gone after backward, no second buffer of their size is made.
  Refused for a leaf or a view of one (its .grad would be itself) and for rows that overlap. Whoever else saved the logits for a
  backward pass, a second one of this operation included, gets autograd's error about modification in place.
  Second derivatives are refused.

  Memory: beside logits and gradient, blocks of rows in fp32 (torch: 2 MiB each on a CPU, 64 MiB elsewhere) or nothing of that
  size (Triton); logits without adjacent columns are copied. Bytes: logits are read once for each pass, the gradient written
  once. Deterministic: no atomics, fixed order. A row's result depends on that row alone, and on alignment.

The shifted moment and the packed all-gather are this project's; the formulas are in `vocab_statistics`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drmas_kernels import vocab_statistics
from drmas_kernels._checks import check_device, check_range, inverse_temperature
from drmas_kernels.backend import choose


def logprob_reference(
    logits: Tensor, target: Tensor, *, temperature: float | Tensor = 1.0, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy by log_softmax, in the dtype of the logits, differentiable: the specification."""
    scale = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    logprobs = torch.log_softmax(logits[..., :vocab_size] / scale, -1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)
    return logprobs.gather(-1, target[..., None]).squeeze(-1), entropy


@torch.library.custom_op("drmas::logprob", mutates_args=())
def _statistics(logits: Tensor, size: int, column: Tensor, inverse_temperature: Tensor | None) -> Tensor:
    """(m, s, q, z_y) of every row of [T, v] over its first `size` columns, [T, 4] fp32."""
    return _kernels(logits).statistics(logits[:, :size], column, inverse_temperature)


@_statistics.register_fake
def _(logits, size, column, inverse_temperature) -> Tensor:
    return logits.new_empty(logits.shape[0], 4, dtype=torch.float32)


@torch.library.custom_op("drmas::logprob_backward", mutates_args=())
def _gradient(
    logits: Tensor,
    size: int,
    merged: Tensor,
    column: Tensor,
    slope: Tensor,
    bonus: Tensor | None,
    inverse_temperature: Tensor | None,
) -> Tensor:
    """The derivative by the logits [T, v], contiguous and in their dtype; `bonus` is minus the derivative by the entropy."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(logits, size, merged, column, slope, bonus, inverse_temperature, out)
    return out


@_gradient.register_fake
def _(logits, size, merged, column, slope, bonus, inverse_temperature) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("drmas::logprob_backward_", mutates_args=("logits",))
def _gradient_in_place(
    logits: Tensor,
    size: int,
    merged: Tensor,
    column: Tensor,
    slope: Tensor,
    bonus: Tensor | None,
    inverse_temperature: Tensor | None,
) -> None:
    """The same, written over the logits."""
    _write_gradient(logits, size, merged, column, slope, bonus, inverse_temperature, logits)


def _write_gradient(logits: Tensor, size: int, merged: Tensor, *rest: Any) -> None:
    *arguments, out = rest
    true, goal = logits[:, :size], out[:, :size]
    _kernels(logits).to_dlogits(true, merged, *arguments, goal)
    out[:, size:] = 0.0


def _kernels(logits: Tensor) -> ModuleType:
    """What computes statistics and gradients: two modules with the same functions."""
    if choose("logprob", logits.device).name == "torch":
        return vocab_statistics
    from drmas_kernels import _logits_triton

    return _logits_triton


class _Logprob(torch.autograd.Function):
    """Keeps logits and four numbers per token between the passes."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, column: Tensor, inverse: Tensor | None, size: int, group: Any, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        merged = vocab_statistics.merge(_statistics(logits, size, column, inverse), group)
        ctx.save_for_backward(logits, merged, column, inverse)
        ctx.size, ctx.in_place = size, in_place
        ctx.set_materialize_grads(False)
        return vocab_statistics.logprob_and_entropy(merged)

    @staticmethod
    def backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("logprob has no second derivative; expected a backward pass without create_graph=True")
        if dlogprob is None and dentropy is None:
            return (None,) * 6
        logits, merged, column, inverse = ctx.saved_tensors
        slope = torch.zeros_like(dentropy) if dlogprob is None else dlogprob
        bonus = None if dentropy is None else -dentropy
        logits = logits.detach()
        if ctx.in_place:
            _gradient_in_place(logits, ctx.size, merged, column, slope, bonus, inverse)
            return logits, None, None, None, None, None
        return _gradient(logits, ctx.size, merged, column, slope, bonus, inverse), None, None, None, None, None


def logprob(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: Any = None,
    inplace_backward: bool = False,
    check_values: bool = True,
) -> tuple[Tensor, Tensor]:
    """(log-prob of `target`, entropy) per token, differentiable by the logits; the contract is on top of this file.

    `vocab_size` is the true size of the whole vocabulary (default: all columns of all shards). `check_values=False` leaves out
    the checks that look at the values of `target` and `temperature`. ValueError names the argument that is wrong.
    """
    world = 1 if group is None else dist.get_world_size(group)
    _check_arguments(logits, target)
    width = logits.shape[-1]
    vocab_size = width * world if vocab_size is None else vocab_size
    _check_shard(width, vocab_start, vocab_size, world, 0 if group is None else dist.get_rank(group))
    if check_values:
        check_range("target", target, vocab_size)
    inverse = inverse_temperature(temperature, target, check_values)
    rows = logits.reshape(-1, width)
    if width > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    if inplace_backward and logits.requires_grad and torch.is_grad_enabled():
        _check_writable(logits, rows)
    size = min(max(vocab_size - vocab_start, 0), width)
    column = target.reshape(-1) - vocab_start
    scored, entropy = _Logprob.apply(rows, column, inverse, size, group, inplace_backward)
    return scored.view(target.shape), entropy.view(target.shape)


def _check_arguments(logits: Tensor, target: Tensor) -> None:
    if logits.ndim < 1 or logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"logits is {logits.dtype} {list(logits.shape)}; expected float32 or bfloat16 [..., v]")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits is {list(logits.shape)}; expected at least one column")
    if target.shape != logits.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(f"target is {target.dtype} {list(target.shape)}; expected int64 {list(logits.shape[:-1])}")
    check_device("target", target, logits, "logits")


def _check_shard(width: int, vocab_start: int, vocab_size: int, world: int, rank: int) -> None:
    if vocab_start != rank * width:
        raise ValueError(
            f"vocab_start is {vocab_start} on rank {rank} of {world}; expected rank times the shard's {width} columns, "
            "since shards are merged in rank order"
        )
    if not 1 <= vocab_size <= width * world:
        raise ValueError(f"vocab_size is {vocab_size}; expected 1 to {width * world}, the columns of all shards")


def _check_writable(logits: Tensor, rows: Tensor) -> None:
    owner = logits if logits._base is None else logits._base
    if owner.is_leaf:
        raise ValueError(
            "inplace_backward=True for logits that are a leaf (or a view of one): the gradient would overwrite the values of a "
            "tensor that outlives the backward pass; expected the result of an operation"
        )
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(
            f"inplace_backward=True for logits {list(logits.shape)} with strides {logits.stride()}; "
            "expected rows that don't overlap in memory"
        )
