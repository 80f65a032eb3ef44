"""The output head without whole logits: log-prob and entropy from hidden states, and the policy loss with its gradients.

Contract
  Logits of token t are z_v = (h_t . w_v) / temperature_t over the true vocabulary v < vocab_size. With m = max z, u = z - m,
  s = sum e^u and q = sum e^u u (shifted, so a common offset of the logits costs no digits):
      logprob = (z_y - m) - log s          entropy = log s - q / s
  `linear_policy_loss` puts `policy_loss.token_terms` on top and forms the gradients in the forward pass: with g = w_t slope_t,
  b = w_t entropy_bonus, H the entropy and p = e^u / s,
      dz_v = p_v (b (log p_v + H) - g) + g [v = y],   dH = dz W / temperature,   dW = dz^T h / temperature
  That is three matrix products, 6 T H V FLOP, where recomputing the logits in the backward pass costs 8 T H V. It needs the
  loss's upstream gradient in advance: `grad_scale`. Backward compares it with what arrives and raises if they differ.

  hidden [T, H] and weight [v, H]: fp32 or bf16, the same dtype; target [T] int64. Logits, statistics and dW are fp32. bf16 is
  widened block by block for the products, which is exact; dH is summed in fp32 and rounded once to the dtype of hidden. Where
  `weight.main_grad` (fp32) exists, dW is added to it in the forward pass and the gradient returned for weight is the stand-in
  that Megatron's hooks expect; else dW is returned in the dtype of weight.

  Tokens of weight 0 are dropped before the first product: exactly 0 loss, log-prob, dH, dW and metrics, even if their hidden
  row or target is garbage. No token left: loss 0, gradients 0. Columns at or past `vocab_size` (padding) never enter, even if
  their weights are NaN. A logit that is not finite shows as a NaN loss.

  Vocabulary-parallel: `weight` is the shard that starts at `vocab_start`, `group` a process group whose ranks hold the same
  hidden and token arguments, shards of equal size in rank order. One collective per chunk, an all-gather of (m, s, q, z_y) per
  token, merged in rank order, so log-probs, entropies and losses have the same bits on all ranks. dH is this shard's PARTIAL
  sum: the caller adds the ranks up.

  Memory: one [chunk, v] fp32 buffer of at most 128 MiB by default, beside inputs and gradients. Deterministic: no atomics,
  fixed order. The chunk size changes results only by the rounding of the products (numerics.LOGPROB).

Gradients in forward follow Liger's fused head, the shifted moment and the packed all-gather are this project's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from drmas_kernels.policy_loss import (
    AgentMetrics,
    PolicyLossOptions,
    TokenInputs,
    check_range,
    select_tokens,
    token_terms,
    weighted_terms,
)

_CHUNK_BYTES = 128 * 2**20
_WIDEN_BYTES = 16 * 2**20
_CACHE_BYTES = 2 * 2**20
_LOWEST = -1e30
"""Stands for the maximum of a shard without columns: finite, so that differences of maxima times 0 stay 0."""


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


class _Shard:
    """The local columns of the vocabulary: which they are, their products with hidden rows, and how ranks merge."""

    def __init__(self, weight: Tensor, vocab_start: int, vocab_size: int | None, group: Any) -> None:
        self.group, self.start = group, vocab_start
        self.world = 1 if group is None else dist.get_world_size(group)
        self.vocab_size = weight.shape[0] * self.world if vocab_size is None else vocab_size
        self.size = min(max(self.vocab_size - vocab_start, 0), weight.shape[0])
        self.weight = weight.detach()[: self.size]

    def blocks(self) -> list[slice]:
        """Pieces of the shard that are widened to fp32 at a time; fp32 needs no widening and is one piece."""
        rows = self.size
        if self.weight.dtype != torch.float32:
            rows = max(1, _WIDEN_BYTES // (4 * self.weight.shape[1]))
        return [slice(first, min(first + rows, self.size)) for first in range(0, self.size, max(rows, 1))]

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """out [Tc, size] = hidden W^T, for fp32 hidden."""
        for part in self.blocks():
            torch.mm(hidden, self.weight[part].float().t(), out=out[:, part])

    def hidden_grad(self, dlogits: Tensor, out: Tensor) -> None:
        """out [Tc, H] = dlogits W."""
        out.zero_()
        for part in self.blocks():
            out.addmm_(dlogits[:, part], self.weight[part].float())

    def add_weight_grad(self, dlogits: Tensor, hidden: Tensor, out: Tensor) -> None:
        """out [v, H] += dlogits^T hidden; rows of padding columns stay as they are."""
        out[: self.size].addmm_(dlogits.t(), hidden)

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Rows whose target is on this shard, and its column there."""
        column = target - self.start
        rows = ((column >= 0) & (column < self.size)).nonzero().squeeze(1)
        return rows, column[rows]

    def merge(self, statistics: Tensor) -> Tensor:
        """[Tc, 4] of (m, s, q, z_y) over all shards; the identity for one."""
        if self.world == 1:
            return statistics
        parts = [torch.empty_like(statistics) for _ in range(self.world)]
        dist.all_gather(parts, statistics, group=self.group)
        largest = parts[0][:, 0]
        for part in parts[1:]:
            largest = torch.maximum(largest, part[:, 0])
        total = torch.zeros_like(statistics)
        for part in parts:
            shift = part[:, 0] - largest
            factor = shift.exp()
            total[:, 1] += factor * part[:, 1]
            total[:, 2] += factor * (part[:, 2] + shift * part[:, 1])
            total[:, 3] += part[:, 3]
        total[:, 0] = largest
        return total


def _row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Rows that fit the cache together: several operations then read and write memory once. A GPU takes all rows at once."""
    rows = matrix.shape[0]
    if not matrix.is_cuda:
        rows = max(1, _CACHE_BYTES // (4 * max(matrix.shape[1], 1)))
    for first in range(0, matrix.shape[0], max(rows, 1)):
        yield slice(first, min(first + rows, matrix.shape[0]))


def _shift_and_exponentiate(logits: Tensor, target_rows: Tensor, target_columns: Tensor, keep_shifted: bool) -> Tensor:
    """The shard's (m, s, q, z_y) per token [Tc, 4]. `logits` becomes e^u in place, or u with `keep_shifted`."""
    tokens, columns = logits.shape
    statistics = logits.new_zeros(tokens, 4)
    if columns == 0:
        statistics[:, 0] = _LOWEST
        return statistics
    statistics[target_rows, 3] = logits[target_rows, target_columns]
    for rows in _row_blocks(logits):
        block, row = logits[rows], statistics[rows]
        row[:, 0] = block.amax(1)
        shifted = block.sub_(row[:, :1]) if keep_shifted else block - row[:, :1]
        exponential = shifted.exp() if keep_shifted else torch.exp(shifted, out=block)
        row[:, 1] = exponential.sum(1)
        row[:, 2] = torch.linalg.vecdot(exponential, shifted)
    return statistics


def _logprob_and_entropy(merged: Tensor) -> tuple[Tensor, Tensor]:
    largest, total, moment, chosen = merged.unbind(1)
    log_total = total.log()
    return (chosen - largest) - log_total, log_total - moment / total


class _Chunk(NamedTuple):
    """Some tokens on their way through the head: what the statistics left behind for the gradients."""

    part: slice
    hidden: Tensor
    """[Tc, H] fp32, divided by the temperature."""
    inverse_temperature: Tensor | None
    logits: Tensor
    """[Tc, size]: e^u, or u where asked for, u relative to the shard's own maximum."""
    local: Tensor
    merged: Tensor
    target_rows: Tensor
    target_columns: Tensor


def _chunks(
    hidden: Tensor,
    target: Tensor,
    inverse_temperature: Tensor | None,
    shard: _Shard,
    chunk: int | None,
    keep_shifted: bool = False,
) -> Iterator[_Chunk]:
    """Statistics of all tokens, a chunk at a time, in one buffer: a chunk is gone when the next one is asked for."""
    tokens = hidden.shape[0]
    rows = _chunk_rows(tokens, shard, chunk)
    buffer = torch.empty(min(rows, tokens), shard.size, dtype=torch.float32, device=hidden.device)
    for first in range(0, tokens, rows):
        part = slice(first, min(first + rows, tokens))
        scaled, inverse = hidden[part].float(), None
        if inverse_temperature is not None:
            inverse = inverse_temperature[part]
            scaled = scaled * inverse
        logits = buffer[: scaled.shape[0]]
        shard.logits(scaled, logits)
        target_rows, target_columns = shard.locate(target[part])
        local = _shift_and_exponentiate(logits, target_rows, target_columns, keep_shifted)
        yield _Chunk(part, scaled, inverse, logits, local, shard.merge(local), target_rows, target_columns)


def _chunk_rows(tokens: int, shard: _Shard, chunk: int | None) -> int:
    """Rows per chunk: as asked, else what fills the buffer, spread evenly. The same on all ranks: they share collectives."""
    if chunk is not None:
        return chunk
    fit = max(16, _CHUNK_BYTES // (4 * -(-shard.vocab_size // shard.world)))
    return max(1, -(-tokens // max(1, -(-tokens // fit))))


def _to_dlogits(chunk: _Chunk, entropy: Tensor, slope: Tensor, bonus: Tensor | None) -> Tensor:
    """Turn the chunk's logits into the loss's derivative by them, up to the factor per token [Tc, 1] that is returned.

    Without an entropy bonus dz is e^u times a number per token, so the factor goes into the small operands of the two products
    and the buffer is touched at the targets only.
    """
    logits, slope = chunk.logits, slope[:, None]
    largest, total = chunk.merged[:, :1], chunk.merged[:, 1:2]
    behind = chunk.local[:, :1] - largest
    at_target = (chunk.target_rows, chunk.target_columns)
    if bonus is None:
        if chunk.local is not chunk.merged:  # other shards: e^u is still relative to this shard's own maximum
            logits.mul_(behind.exp())
        logits[at_target] -= total[chunk.target_rows, 0]
        return -slope / total
    bonus = bonus[:, None]
    offset = bonus * entropy[:, None] - slope
    logits.add_(behind - total.log())
    for rows in _row_blocks(logits):
        probability = logits[rows].exp()
        logits[rows].mul_(bonus[rows]).add_(offset[rows]).mul_(probability)
    logits[at_target] += slope[chunk.target_rows, 0]
    return torch.ones_like(slope)


class _Sink:
    """Where gradients gather: dH [tokens, H] fp32 and dW [v, H] fp32, each None where it isn't wanted."""

    def __init__(self, tokens: int, hidden: Tensor, weight: Tensor, scale: float) -> None:
        self.scale = scale
        self.hidden, self.weight = None, None
        if hidden.requires_grad:
            self.hidden = hidden.new_empty(tokens, hidden.shape[1], dtype=torch.float32)
        if weight.requires_grad:
            main = getattr(weight, "main_grad", None)
            if main is not None and main.dtype != torch.float32:
                raise ValueError(f"weight.main_grad is {main.dtype}; expected float32 (gradients are accumulated in fp32)")
            self.weight = torch.zeros_like(weight, dtype=torch.float32) if main is None else main

    def add(self, chunk: _Chunk, factor: Tensor, shard: _Shard) -> None:
        """Products of the chunk's dlogits (in `chunk.logits`, times `factor` per token) with the weight and the hidden rows."""
        factor = factor * self.scale
        if self.weight is not None:
            shard.add_weight_grad(chunk.logits, factor * chunk.hidden, self.weight)
        if self.hidden is not None:
            out = self.hidden[chunk.part]
            shard.hidden_grad(chunk.logits, out)
            out.mul_(factor if chunk.inverse_temperature is None else factor * chunk.inverse_temperature)


def _consume(
    pieces: Iterator[_Chunk], inputs: TokenInputs, options: PolicyLossOptions, shard: _Shard, sink: _Sink | None
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of the selected tokens; adds the gradients of every chunk to `sink` while its logits are there."""
    logprob = inputs.weight.new_empty(inputs.weight.shape)
    entropy = torch.empty_like(logprob)
    for piece in pieces:
        part = piece.part
        logprob[part], entropy[part] = _logprob_and_entropy(piece.merged)
        if sink is None:
            continue
        tokens = inputs.slice(part)
        slope = tokens.weight * token_terms(logprob[part], tokens.old_logprob, tokens.advantage, options).slope
        bonus = tokens.weight * options.entropy_bonus if options.entropy_bonus > 0 else None
        sink.add(piece, _to_dlogits(piece, entropy[part], slope, bonus), shard)
    return logprob, entropy


def _handed_out(sink: _Sink, hidden: Tensor, weight: Tensor, index: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients as autograd wants them; that of a weight with main_grad is already where it belongs."""
    dhidden = None if sink.hidden is None else _scatter(sink.hidden, index, hidden.shape[0]).to(hidden.dtype)
    keep = sink.weight is not None and getattr(weight, "main_grad", None) is None
    return dhidden, sink.weight.to(weight.dtype) if keep else None


def _scatter(values: Tensor, index: Tensor | None, tokens: int) -> Tensor:
    """Values of the selected tokens in their places among all tokens, 0 elsewhere."""
    if index is None:
        return values
    return values.new_zeros(tokens, *values.shape[1:]).index_copy_(0, index, values)


class _AttachGradients(torch.autograd.Function):
    """Gives the loss the gradients that were formed with it; the upstream gradient must be the scale they were formed for."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, dhidden: Tensor | None, dweight: Tensor | None, scale: float
    ) -> Tensor:
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight, ctx.scale = weight, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        arrived = float(upstream)
        if not abs(arrived - ctx.scale) <= 1e-6 * abs(ctx.scale):
            raise ValueError(
                f"the gradient arriving at the policy loss is {arrived}; the gradients were formed for grad_scale={ctx.scale} "
                "(pass what the loss will be multiplied with as grad_scale)"
            )
        dhidden, dweight = ctx.saved_tensors
        weight = ctx.weight
        if ctx.needs_input_grad[1] and dweight is None:
            weight.grad_added_to_main_grad = True
            # What a fused weight gradient owes Megatron's hooks; tied embeddings set zero_out_wgrad, as theirs is added to it.
            dweight = torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
        return dhidden, dweight, None, None, None, None


def _inverse_temperature(temperature: float | Tensor, hidden: Tensor, index: Tensor | None) -> Tensor | None:
    """1 / temperature per token [T, 1] for the tokens at `index`, None for the constant 1."""
    tokens = hidden.shape[0]
    if not isinstance(temperature, Tensor):
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature is {temperature}; expected a positive number")
        count = tokens if index is None else index.shape[0]
        return None if temperature == 1.0 else hidden.new_full((count, 1), 1.0 / temperature, dtype=torch.float32)
    if temperature.shape != (tokens,):
        raise ValueError(f"temperature has shape {list(temperature.shape)}; expected a number or [{tokens}]")
    chosen = temperature if index is None else temperature[index]
    if not bool(((chosen > 0) & chosen.isfinite()).all()):
        raise ValueError("temperature holds a value that is not positive and finite")
    return chosen.float().reciprocal()[:, None]


def _check_head(hidden: Tensor, weight: Tensor, target: Tensor, shard: _Shard, chunk: int | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, H] and [v, H]")
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"hidden is {hidden.dtype}, weight is {weight.dtype}; expected both float32 or both bfloat16")
    if target.shape != hidden.shape[:1] or target.dtype != torch.int64:
        raise ValueError(f"target is {target.dtype} {list(target.shape)}; expected int64 [{hidden.shape[0]}]")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; expected at least 1 token")
    if shard.world > 1 and shard.start != dist.get_rank(shard.group) * weight.shape[0]:
        raise ValueError(
            f"vocab_start is {shard.start} on rank {dist.get_rank(shard.group)}; "
            f"expected rank times the shard's {weight.shape[0]} rows, since shards are merged in rank order"
        )


@torch.no_grad()
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
) -> tuple[Tensor, Tensor]:
    """Log-prob of `target` and entropy per token, [T] fp32, without gradient; the contract is on top of this file.

    `vocab_size` is the true size of the whole vocabulary (default: all columns of all shards), `chunk` the tokens per piece.
    ValueError names the argument that is wrong.
    """
    shard = _Shard(weight, vocab_start, vocab_size, group)
    _check_head(hidden, weight, target, shard, chunk)
    check_range("target", target, shard.vocab_size)
    logprob = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    entropy = torch.empty_like(logprob)
    inverse = _inverse_temperature(temperature, hidden, None)
    for piece in _chunks(hidden, target, inverse, shard, chunk):
        logprob[piece.part], entropy[piece.part] = _logprob_and_entropy(piece.merged)
    return logprob, entropy


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
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: Any = None,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
    grad_scale: float = 1.0,
) -> PolicyLoss:
    """The clipped policy loss of an output head; the contract is on top of this file, that of the loss in `policy_loss`.

    `row` [T] says which row each token belongs to, `advantage` and `agent` are per row, `old_logprob` None is on-policy.
    `grad_scale` is the gradient that will arrive at the loss (the factor it is multiplied with before `backward`).
    Gradients are formed if grad mode is on and hidden or weight requires them. ValueError names the argument that is wrong.
    """
    shard = _Shard(weight, vocab_start, vocab_size, group)
    _check_head(hidden, weight, target, shard, chunk)
    tokens = hidden.shape[0]
    inputs = select_tokens(tokens, old_logprob, row, advantage, token_weight, agent, num_agents)
    inverse = _inverse_temperature(temperature, hidden, inputs.index)
    chosen = slice(None) if inputs.index is None else inputs.index
    check_range("target", target[chosen], shard.vocab_size)
    tracked = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.no_grad():
        sink = _Sink(inputs.agent.shape[0], hidden, weight, grad_scale) if tracked else None
        pieces = _chunks(hidden[chosen], target[chosen], inverse, shard, chunk, tracked and options.entropy_bonus > 0)
        logprob, entropy = _consume(pieces, inputs, options, shard, sink)
        terms = token_terms(logprob, inputs.old_logprob, inputs.advantage, options)
        loss = weighted_terms(terms, inputs, entropy, options.entropy_bonus).sum().float()
        metrics = AgentMetrics.of(terms, inputs, entropy, num_agents, options.entropy_bonus)
        dhidden, dweight = _handed_out(sink, hidden, weight, inputs.index) if sink else (None, None)
    if tracked:
        loss = _AttachGradients.apply(hidden, weight, loss, dhidden, dweight, grad_scale)
    return PolicyLoss(loss, _scatter(logprob, inputs.index, tokens), metrics)
