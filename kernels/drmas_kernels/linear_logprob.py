"""The output head without whole logits: log-prob and entropy from hidden states, and the policy loss with its gradients.

Contract
  Logits of token t are z_v = (h_t . w_v) / temperature_t over the true vocabulary v < vocab_size. With m = max z, u = z - m,
  s = sum e^u and q = sum e^u u (shifted, so a common offset of the logits costs no digits):
      logprob = (z_y - m) - log s          entropy = log s - q / s
  `linear_policy_loss` puts `policy_loss.token_terms` on top and forms the gradients in the forward pass: with g = w_t slope_t,
  b = w_t entropy_bonus, H the entropy and p = e^u / s,
      dz_v = p_v (b (log p_v + H) - g) + g [v = y],   dH = dz W / temperature,   dW = dz^T h / temperature
  That is three matrix products, 6 T H V FLOP, where recomputing the logits in the backward pass costs 8 T H V. It needs the
  loss's upstream gradient in advance: `grad_scale`. Backward compares it with what arrives and raises if they differ (on a GPU
  with check_values=False by an assertion on the device: it waits for nothing, and if it fails the device is lost to the
  process). The objective "gspo" needs the log-probs of whole rows before the first slope: it goes by way of `linear_logprob`,
  at 8 T H V.
  `linear_logprob` has a gradient too, for callers with a loss of their own: backward takes any upstream gradient per token, in
  g = d loss / d logprob and b = -d loss / d entropy, and computes the logits again. There are no second derivatives.

  hidden [T, H] and weight [v, H]: fp32 or bf16, the same dtype; target [T] int64. Logits, statistics and dW are fp32. bf16
  products have fp32 results: on GPUs by tensor cores, elsewhere widened block by block, which is exact. fp32 products on GPUs
  follow torch.get_float32_matmul_precision; the bounds are for "highest". dH is summed in fp32 and rounded once to the dtype of
  hidden. Where `weight.main_grad` (fp32) exists, dW is added to it (by `linear_policy_loss` in the forward pass) and the
  gradient returned for weight is the stand-in that Megatron's hooks expect; else dW is returned in the dtype of weight. So a
  loss that nobody differentiates is formed under no_grad, the head stays out of activation checkpointing, which would run it
  twice (refused), and where backward refuses an upstream gradient, main_grad has to be zeroed.

  Tokens of weight 0 (in `linear_logprob`'s backward: of upstream gradient 0) are dropped before the first product: exactly 0
  loss, log-prob, dH, dW and metrics, even if their hidden row or target is garbage. No token left: loss 0, gradients 0. Columns
  at or past `vocab_size` (padding) never enter, even if their weights are NaN. A logit that is not finite shows as a NaN loss.

  Vocabulary-parallel: `weight` is the shard that starts at `vocab_start`, `group` a process group whose ranks hold the same
  hidden and token arguments, shards of equal size in rank order. One collective per chunk (per call where no gradient is formed
  by kernels), an all-gather of (m, s, q, z_y) per token, merged in rank order, so log-probs, entropies and losses have the same
  bits on all ranks. dH is this shard's PARTIAL sum: the caller adds the ranks up.

  Memory: one [chunk, v] fp32 buffer of at most 128 MiB (GPU: 2 GiB), with Triton and bf16 half as much again for its
  derivative; dH in fp32 before it is rounded; dW in fp32 where there is no main_grad. With Triton, bf16 and H a multiple of 8,
  log-probs without gradient need no buffer: `_head_triton` forms them tile by tile. Deterministic: no atomics, fixed order. The
  chunk size changes results only by the rounding of the products (numerics.LOGPROB).

  Values are checked: targets, rows, agents and temperatures out of range raise. That waits for a GPU, and so does looking for
  the tokens that have weight. `check_values=False` and `index` (their positions, which whoever packed the batch knows) avoid
  both; a target or row out of range then gives a NaN loss. The backward pass of `linear_logprob` waits either way, and so does
  "gspo".

Gradients in forward follow Liger's fused head, the shifted moment and the packed all-gather are this project's.
"""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from drmas_kernels import _head_chunks
from drmas_kernels._checks import check_device, check_range, inverse_temperature
from drmas_kernels._head_chunks import Shard, Sink, TorchSteps, TritonSteps
from drmas_kernels.backend import choose
from drmas_kernels.policy_loss import (
    AgentMetrics,
    PolicyLossOptions,
    TokenInputs,
    evaluate,
    policy_loss_of,
    select_tokens,
    weighted_slope,
)
from drmas_kernels.vocab_statistics import logprob_and_entropy


class PolicyLoss(NamedTuple):
    """`loss`: scalar fp32 with gradients to hidden and weight; `logprob` [T] fp32 detached, 0 at tokens of weight 0."""

    loss: Tensor
    logprob: Tensor
    metrics: AgentMetrics


def linear_logprob_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, *, vocab_size: int | None = None, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy from whole logits, in the inputs' dtype, differentiable: the yardstick of tests and benchmarks."""
    logits = hidden @ weight[:vocab_size].t()
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(1, target[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


class _Columns(NamedTuple):
    """Which columns of the vocabulary a weight holds, in words that a custom operator can take."""

    start: int
    vocab_size: int
    group: str
    """The process group's name, "" for none."""
    chunk: int
    """Tokens per chunk, 0 for what fits."""

    def shard(self, weight: Tensor) -> Shard:
        group = dist.distributed_c10d._resolve_process_group(self.group) if self.group else None
        return Shard(weight, self.start, self.vocab_size, group)


def _steps(op: str, weight: Tensor, keep_shifted: bool) -> TorchSteps | TritonSteps:
    if choose(op, weight.device).name == "triton":
        return TritonSteps(weight.dtype)
    return TorchSteps(keep_shifted)


def _scores(merged: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy; a target that no shard holds has log-prob NaN, so that it shows in every loss."""
    logprob, entropy = logprob_and_entropy(merged)
    return logprob.masked_fill(logprob == -torch.inf, torch.nan), entropy


@torch.library.custom_op("drmas::linear_logprob", mutates_args=())
def _statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    inverse_temperature: Tensor | None,
    start: int,
    vocab_size: int,
    group: str,
    chunk: int,
) -> Tensor:
    """(m, s, q, z_y) of every token over the whole vocabulary, [T, 4] fp32."""
    shard = _Columns(start, vocab_size, group, chunk).shard(weight)
    steps = _steps("linear_logprob", weight, keep_shifted=False)
    if isinstance(steps, TritonSteps):
        from drmas_kernels import _head_triton

        if _head_triton.unsupported(hidden, shard.weight) is None:
            column = shard.column(target)
            return shard.merge(_head_triton.head_statistics(hidden, shard.weight, column, inverse_temperature))
    merged = hidden.new_empty(hidden.shape[0], 4, dtype=torch.float32)
    for piece in _head_chunks.chunks(hidden, target, inverse_temperature, shard, chunk, steps):
        merged[piece.part] = piece.merged
    return merged


@_statistics.register_fake
def _(hidden: Tensor, weight: Tensor, target: Tensor, *unused: Any) -> Tensor:
    return hidden.new_empty(hidden.shape[0], 4, dtype=torch.float32)


@torch.library.custom_op("drmas::linear_logprob_backward", mutates_args=("dweight",))
def _gradients(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    inverse_temperature: Tensor | None,
    merged: Tensor,
    slope: Tensor,
    bonus: Tensor,
    dweight: Tensor | None,
    want_hidden: bool,
    start: int,
    vocab_size: int,
    group: str,
    chunk: int,
) -> Tensor:
    """dH [T, H] fp32 (no rows where it isn't wanted) from the derivatives per token; adds dW to `dweight`."""
    shard = _Columns(start, vocab_size, group, chunk).shard(weight)
    dhidden = hidden.new_empty(hidden.shape if want_hidden else (0, hidden.shape[1]), dtype=torch.float32)
    sink = Sink(dhidden if want_hidden else None, dweight)
    steps = _steps("linear_logprob", weight, keep_shifted=True)
    entropy = logprob_and_entropy(merged)[1]
    for piece in _head_chunks.chunks(hidden, target, inverse_temperature, shard, chunk, steps, merged):
        sink.add(piece, steps.way_back(piece, entropy[piece.part], slope[piece.part], bonus[piece.part]), shard)
    return dhidden


@_gradients.register_fake
def _(hidden: Tensor, *arguments: Any) -> Tensor:
    return hidden.new_empty(hidden.shape if arguments[7] else (0, hidden.shape[1]), dtype=torch.float32)


@torch.library.custom_op("drmas::linear_policy_loss", mutates_args=("dweight",))
def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    inverse_temperature: Tensor | None,
    row: Tensor,
    token_weight: Tensor,
    old_logprob: Tensor | None,
    ref_logprob: Tensor | None,
    rollout_logprob: Tensor | None,
    advantage: Tensor,
    agent: Tensor,
    dweight: Tensor | None,
    want_hidden: bool,
    grad_scale: float,
    num_agents: int,
    start: int,
    vocab_size: int,
    group: str,
    chunk: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    entropy_bonus: float,
    kl: str | None,
    kl_coefficient: float,
    mismatch: str,
    mismatch_low: float,
    mismatch_high: float,
    objective: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, log-prob [T], the metrics as a matrix, dH [T, H] fp32 (no rows where it isn't wanted); dW into `dweight`."""
    columns = _Columns(start, vocab_size, group, chunk)
    options = PolicyLossOptions(
        *(clip_low, clip_high, dual_clip, entropy_bonus, kl, kl_coefficient),
        *(mismatch, mismatch_low, mismatch_high, objective),
    )
    inputs = TokenInputs(None, row, token_weight, old_logprob, ref_logprob, rollout_logprob, advantage, agent)
    dhidden = hidden.new_empty(hidden.shape if want_hidden else (0, hidden.shape[1]), dtype=torch.float32)
    if dweight is None and not want_hidden:
        logprob, entropy = _scores(_statistics(hidden, weight, target, inverse_temperature, *columns))
    else:
        sink = Sink(dhidden if want_hidden else None, dweight)
        logprob, entropy = _consume(hidden, weight, target, inverse_temperature, columns, inputs, options, grad_scale, sink)
    loss, _, metrics = evaluate(logprob, entropy, inputs, options, num_agents)
    return loss, logprob, metrics.matrix(), dhidden


@_loss_and_gradients.register_fake
def _(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    want_hidden, num_agents = arguments[11], arguments[13]
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape[0], dtype=torch.float32),
        AgentMetrics.zeros(num_agents, hidden.device).matrix(),
        hidden.new_empty(hidden.shape if want_hidden else (0, hidden.shape[1]), dtype=torch.float32),
    )


def _consume(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    inverse_temperature: Tensor | None,
    columns: _Columns,
    inputs: TokenInputs,
    options: PolicyLossOptions,
    grad_scale: float,
    sink: Sink,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every token; adds the gradients of each chunk to `sink` while its logits are there."""
    shard = columns.shard(weight)
    steps = _steps("linear_policy_loss", weight, keep_shifted=options.entropy_bonus > 0)
    logprob = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    entropy = torch.empty_like(logprob)
    for piece in _head_chunks.chunks(hidden, target, inverse_temperature, shard, columns.chunk, steps):
        part, tokens = piece.part, inputs.slice(piece.part)
        logprob[part], entropy[part] = _scores(piece.merged)
        slope = grad_scale * weighted_slope(logprob[part], entropy[part], tokens, options)
        bonus = tokens.weight * (grad_scale * options.entropy_bonus) if options.entropy_bonus > 0 else None
        sink.add(piece, steps.way_back(piece, entropy[part], slope, bonus), shard)
    return logprob, entropy


class _AttachGradients(torch.autograd.Function):
    """Gives the loss the gradients that were formed with it; the upstream gradient must be the scale they were formed for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        loss: Tensor,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        scale: float,
        check_values: bool,
    ) -> Tensor:
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight, ctx.scale, ctx.check_values, ctx.handed_out = weight, scale, check_values, False
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _check_upstream(upstream, ctx.scale, ctx.check_values)
        dhidden, dweight = ctx.saved_tensors
        if ctx.needs_input_grad[1] and dweight is None:
            if ctx.handed_out:
                raise RuntimeError("a second backward of this loss; the weight's gradient went into main_grad once, in forward")
            dweight, ctx.handed_out = _stand_in(ctx.weight), True
        return dhidden, dweight, None, None, None, None, None


class _Scored(torch.autograd.Function):
    """Log-prob and entropy with a gradient: backward computes the logits again, for the tokens that need it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, inverse_temperature: Tensor | None, columns: _Columns
    ) -> tuple[Tensor, Tensor]:
        merged = _statistics(hidden, weight, target, inverse_temperature, *columns)
        ctx.save_for_backward(hidden, weight, target, inverse_temperature, merged)
        ctx.weight, ctx.columns = weight, columns
        return _scores(merged)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprob: Tensor, dentropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target, inverse_temperature, merged = ctx.saved_tensors
        wanted = (dlogprob != 0) | (dentropy != 0)
        index = None if bool(wanted.all()) else wanted.nonzero().squeeze(1)
        parts = (hidden, target, inverse_temperature, merged, dlogprob, dentropy)
        if index is not None:
            parts = tuple(None if part is None else part[index] for part in parts)
        hidden_rows, target, inverse_temperature, merged, dlogprob, dentropy = parts
        dweight = _weight_sink(ctx.weight) if ctx.needs_input_grad[1] else None
        want_hidden = ctx.needs_input_grad[0]
        dhidden = _gradients(
            hidden_rows,
            weight.detach(),
            target,
            inverse_temperature,
            merged,
            dlogprob.float().contiguous(),
            -dentropy.float().contiguous(),
            dweight,
            want_hidden,
            *ctx.columns,
        )
        dhidden = _scatter(dhidden.to(hidden.dtype), index, hidden.shape[0]) if want_hidden else None
        if dweight is not None:
            dweight = _stand_in(ctx.weight) if _main_grad(ctx.weight) is not None else dweight.to(weight.dtype)
        return dhidden, dweight, None, None, None


def _check_upstream(upstream: Tensor, scale: float, check_values: bool) -> None:
    agrees = (upstream - scale).abs() <= 1e-6 * abs(scale)
    if upstream.is_cuda and not check_values:
        torch._assert_async(agrees, f"the gradient arriving at the policy loss is not grad_scale={scale}")
    elif not bool(agrees):
        raise ValueError(
            f"the gradient arriving at the policy loss is {float(upstream)}; the gradients were formed for grad_scale={scale} "
            "(pass what the loss will be multiplied with as grad_scale)"
        )


def _main_grad(weight: Tensor) -> Tensor | None:
    main = getattr(weight, "main_grad", None)
    if main is not None and (main.dtype != torch.float32 or main.shape != weight.shape or main.device != weight.device):
        found, expected = (f"{list(tensor.shape)} on {tensor.device}" for tensor in (main, weight))
        raise ValueError(f"weight.main_grad is {main.dtype} {found}; expected float32 {expected} (gradients add up in fp32)")
    return main


def _weight_sink(weight: Tensor) -> Tensor:
    """Where dW is added up: main_grad, or fp32 zeros."""
    main = _main_grad(weight)
    return torch.zeros_like(weight, dtype=torch.float32) if main is None else main


def _stand_in(weight: Tensor) -> Tensor:
    """What a weight gradient that is in main_grad already owes Megatron's hooks.

    Tied embeddings set zero_out_wgrad, as theirs is added to it.
    """
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _scatter(values: Tensor, index: Tensor | None, tokens: int) -> Tensor:
    """Values of the selected tokens in their places among all tokens, 0 elsewhere."""
    if index is None:
        return values
    return values.new_zeros(tokens, *values.shape[1:]).index_copy_(0, index, values)


def _check_head(
    hidden: Tensor, weight: Tensor, target: Tensor, shard: Shard, chunk: int | None, grad_scale: float = 1.0
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or not hidden.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, H] and [v, H], H not 0")
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"hidden is {hidden.dtype}, weight is {weight.dtype}; expected both float32 or both bfloat16")
    if target.shape != hidden.shape[:1] or target.dtype != torch.int64:
        raise ValueError(f"target is {target.dtype} {list(target.shape)}; expected int64 [{hidden.shape[0]}]")
    for name, tensor in (("weight", weight), ("target", target)):
        check_device(name, tensor, hidden, "hidden")
    if not math.isfinite(grad_scale):
        raise ValueError(f"grad_scale is {grad_scale}; expected a finite number")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; expected at least 1 token")
    if shard.vocab_size < 1 or shard.vocab_size > weight.shape[0] * shard.world:
        raise ValueError(
            f"vocab_size is {shard.vocab_size}; expected 1 to {weight.shape[0] * shard.world}, the columns of all shards"
        )
    rank = dist.get_rank(shard.group) if shard.world > 1 else 0
    if shard.start != rank * weight.shape[0] and (shard.world > 1 or shard.start):
        raise ValueError(
            f"vocab_start is {shard.start} on rank {rank}; "
            f"expected rank times the shard's {weight.shape[0]} rows, since shards are merged in rank order"
        )


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: Any = None,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
    check_values: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of `target` and entropy per token, [T] fp32; the contract is on top of this file.

    `vocab_size` is the true size of the whole vocabulary (default: all columns of all shards), `chunk` the tokens per piece.
    Both have gradients to hidden and weight if grad mode is on and these require them. ValueError names the argument that is
    wrong.
    """
    shard = Shard(weight, vocab_start, vocab_size, group)
    _check_head(hidden, weight, target, shard, chunk)
    if check_values:
        check_range("target", target, shard.vocab_size)
    inverse = inverse_temperature(temperature, target, check_values)
    columns = _Columns(vocab_start, shard.vocab_size, "" if group is None else group.group_name, chunk or 0)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _Scored.apply(hidden, weight, target, inverse, columns)
    return _scores(_statistics(hidden, weight, target, inverse, *columns))


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprob: Tensor | None,
    row: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    agent: Tensor,
    *,
    num_agents: int,
    options: PolicyLossOptions,
    ref_logprob: Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: Any = None,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
    grad_scale: float = 1.0,
    index: Tensor | None = None,
    check_values: bool = True,
) -> PolicyLoss:
    """The clipped policy loss of an output head; the contract is on top of this file, that of the loss in `policy_loss`.

    `row` [T] says which row each token belongs to, `advantage` and `agent` are per row, `old_logprob` None is on-policy.
    `grad_scale` is the gradient that will arrive at the loss (the factor it is multiplied with before `backward`).
    Gradients are formed if grad mode is on and hidden or weight requires them. ValueError names the argument that is wrong.
    """
    shard = Shard(weight, vocab_start, vocab_size, group)
    _check_head(hidden, weight, target, shard, chunk, grad_scale)
    inputs = select_tokens(
        hidden.shape[0],
        old_logprob,
        row,
        advantage,
        token_weight,
        agent,
        num_agents,
        ref_logprob=ref_logprob,
        rollout_logprob=rollout_logprob,
        index=index,
        check_values=check_values,
    )
    check_device("token_weight", inputs.weight, hidden, "hidden")
    where = slice(None) if inputs.index is None else inputs.index
    if check_values:
        check_range("target", target[where], shard.vocab_size)
    inverse = inverse_temperature(temperature, target, check_values, inputs.index)
    columns = _Columns(vocab_start, shard.vocab_size, "" if group is None else group.group_name, chunk or 0)
    if options.objective == "gspo":
        return _over_whole_rows(hidden, weight, target, inverse, columns, inputs, options, num_agents)
    tracked = torch.is_grad_enabled()
    want_hidden, want_weight = tracked and hidden.requires_grad, tracked and weight.requires_grad
    keep = want_weight and _main_grad(weight) is None
    if want_weight and not keep and torch._C._current_graph_task_id() != -1:
        raise RuntimeError("the loss is formed again in a backward pass (checkpointing), which would add to main_grad twice")
    with torch.no_grad():
        dweight = _weight_sink(weight) if want_weight else None
        loss, logprob, metrics, dhidden = _loss_and_gradients(
            hidden.detach()[where],
            weight.detach(),
            target[where],
            inverse,
            *inputs[1:],
            dweight,
            want_hidden,
            grad_scale,
            num_agents,
            *columns,
            *astuple(options),
        )
        logprob = _scatter(logprob, inputs.index, hidden.shape[0])
    if want_hidden or want_weight:
        dhidden = _scatter(dhidden.to(hidden.dtype), inputs.index, hidden.shape[0]) if want_hidden else None
        handed = (dhidden, dweight.to(weight.dtype) if keep else None)
        loss = _AttachGradients.apply(hidden, weight, loss, *handed, grad_scale, check_values)
    given = {"reference": ref_logprob is not None, "rollout": rollout_logprob is not None}
    return PolicyLoss(loss, logprob, AgentMetrics.from_matrix(metrics, **given))


def _over_whole_rows(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    inverse_temperature: Tensor | None,
    columns: _Columns,
    inputs: TokenInputs,
    options: PolicyLossOptions,
    num_agents: int,
) -> PolicyLoss:
    """The loss whose slopes need all log-probs of a row first: the head's backward computes the logits again."""
    where = slice(None) if inputs.index is None else inputs.index
    logprob, entropy = _Scored.apply(hidden[where], weight, target[where], inverse_temperature, columns)
    loss, metrics = policy_loss_of(logprob, entropy, inputs, options, num_agents)
    return PolicyLoss(loss, _scatter(logprob.detach(), inputs.index, hidden.shape[0]), metrics)
