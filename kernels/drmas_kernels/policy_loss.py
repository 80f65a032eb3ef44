"""The clipped policy loss: the scalar map from a token's log-prob to loss and slope, its weighted sum, metrics per agent.

Contract
  For a token with log-prob l, behaviour log-prob o, advantage A, entropy H and weight w (all fp32):
      d     = clamp(l - o, -20, 20),  rho = e^d                       (o absent: d = 0 and rho = 1, on-policy)
      pg    = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high));  A < 0 and dual_clip c: pg = min(pg, -A c)
      loss  = sum_t w_t (pg_t - entropy_bonus H_t)                     summed in float64, returned in fp32
      slope = d pg / d l = -A rho where no clip is active and |l - o| < 20, else 0
  The sum has no other normaliser: weights carry it, so the loss of a batch is the sum of the losses of its pieces. On-policy
  the slope is -A, hence A = 1 is supervised learning (the value of the loss is then the constant -sum w A).
  Tokens of weight 0 are dropped first: whatever their log-prob, advantage or row is (NaN included), loss, gradients and
  metrics don't see them. No tokens left: loss 0.

  logprob, old_logprob, token_weight, entropy [T] fp32; row [T] int64 in 0..R-1; advantage [R] fp32; agent [R] int64 in
  0..num_agents-1. O(T); deterministic (no atomics). `linear_logprob.linear_policy_loss` applies the same map to the head.

The loss is PPO's (Schulman et al. 2017) with the dual clip of Ye et al. 2020; the KL estimators are Schulman's k1 and k3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""e^20 is 5e8: far beyond any clip, far below overflow."""


@dataclass(frozen=True, slots=True)
class PolicyLossOptions:
    """`dual_clip` None switches the dual clip off; it must exceed 1."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    entropy_bonus: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "entropy_bonus"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number of at least 0")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}; expected more than 1, or None for off")


class TokenTerms(NamedTuple):
    """What the scalar map gives per token, each [T]."""

    loss: Tensor
    slope: Tensor
    ratio: Tensor
    log_ratio: Tensor
    """Unclamped."""
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor


def token_terms(logprob: Tensor, old_logprob: Tensor | None, advantage: Tensor, options: PolicyLossOptions) -> TokenTerms:
    """The scalar map of the contract, for tokens [T]; the only place where the loss and its derivative are written."""
    log_ratio = torch.zeros_like(logprob) if old_logprob is None else logprob - old_logprob
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    loss = torch.maximum(plain, clipped)
    bounded = clipped > plain
    dual = torch.zeros_like(bounded)
    if options.dual_clip is not None:
        bound = -advantage * options.dual_clip
        dual = (advantage < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    # Written so that a NaN log-prob keeps a NaN slope: a broken model must show, not train on zeros.
    flat = bounded | dual | (log_ratio.abs() >= LOG_RATIO_LIMIT)
    slope = torch.where(flat, 0.0, plain)
    return TokenTerms(loss, slope, ratio, log_ratio, bounded & (ratio < 1.0), bounded & (ratio > 1.0), dual)


class TokenInputs(NamedTuple):
    """The inputs of the loss for the tokens of non-zero weight, looked up per token; `index` None means all tokens."""

    index: Tensor | None
    old_logprob: Tensor | None
    advantage: Tensor
    weight: Tensor
    agent: Tensor

    def slice(self, part: slice) -> TokenInputs:
        old = None if self.old_logprob is None else self.old_logprob[part]
        return TokenInputs(None, old, self.advantage[part], self.weight[part], self.agent[part])


def select_tokens(
    num_tokens: int,
    old_logprob: Tensor | None,
    row: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    agent: Tensor,
    num_agents: int,
) -> TokenInputs:
    """Check the shared arguments and drop the tokens of weight 0. ValueError names the argument that is wrong."""
    for name, tensor in (("old_logprob", old_logprob), ("row", row), ("token_weight", token_weight)):
        if tensor is not None and tensor.shape != (num_tokens,):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{num_tokens}], one entry per token")
    if advantage.ndim != 1 or agent.shape != advantage.shape:
        raise ValueError(f"advantage {list(advantage.shape)} and agent {list(agent.shape)} must be vectors over the same rows")
    if not bool(token_weight.isfinite().all()):
        raise ValueError("token_weight holds a value that is not finite; use 0 for tokens to ignore")
    valid = token_weight != 0
    index = None if bool(valid.all()) else valid.nonzero().squeeze(1)
    if index is not None:
        row, token_weight = row[index], token_weight[index]
        old_logprob = None if old_logprob is None else old_logprob[index]
    check_range("row", row, advantage.shape[0])
    agent_of_token = agent[row]
    check_range("agent", agent_of_token, num_agents)
    old_logprob = None if old_logprob is None else old_logprob.float()
    return TokenInputs(index, old_logprob, advantage[row].float(), token_weight.float(), agent_of_token)


def check_range(name: str, value: Tensor, size: int) -> None:
    """ValueError unless every entry is in 0..size-1."""
    if value.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(value))
    if low < 0 or high >= size:
        raise ValueError(f"{name} runs from {low} to {high}; expected 0 to {size - 1}")


@dataclass(slots=True)
class AgentMetrics:
    """Sums and extremes per agent, each [num_agents] float64; pieces of a batch and ranks merge without loss.

    Shares and means are quotients with `tokens`; `per_token` forms them. An agent without tokens has sums 0, ratio_min inf,
    ratio_max 0 and gap_max 0. Clip counts, ratios and gaps are against the behaviour log-prob; on-policy they are 0, 1 and 0.
    """

    tokens: Tensor
    """Tokens of non-zero weight."""
    loss: Tensor
    """The agent's part of the loss, weights included: the sum over agents is the loss."""
    pg: Tensor
    """Sum of the unweighted clipped terms."""
    clip_low: Tensor
    clip_high: Tensor
    dual_clip: Tensor
    entropy: Tensor
    kl_k1: Tensor
    """Sum of old - new log-prob."""
    kl_k3: Tensor
    """Sum of rho - 1 - log rho."""
    gap_sum: Tensor
    """Sum of |new - old| log-prob."""
    ratio_min: Tensor
    ratio_max: Tensor
    gap_max: Tensor

    @classmethod
    def zeros(cls, num_agents: int, device: torch.device | str = "cpu") -> AgentMetrics:
        """The neutral element of `merge`."""
        zero = {f.name: torch.zeros(num_agents, dtype=torch.float64, device=device) for f in fields(cls)}
        zero["ratio_min"] = zero["ratio_min"] + torch.inf
        return cls(**zero)

    @classmethod
    def of(cls, terms: TokenTerms, inputs: TokenInputs, entropy: Tensor, num_agents: int, entropy_bonus: float) -> AgentMetrics:
        """Metrics of the tokens [T] that `terms` and `entropy` describe."""
        member = inputs.agent == torch.arange(num_agents, device=inputs.agent.device)[:, None]
        bounded = terms.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        gap = terms.log_ratio.abs().double()
        columns = {
            "tokens": torch.ones_like(terms.loss),
            "loss": weighted_terms(terms, inputs, entropy, entropy_bonus),
            "pg": terms.loss,
            "clip_low": terms.clipped_low,
            "clip_high": terms.clipped_high,
            "dual_clip": terms.dual_clipped,
            "entropy": entropy,
            "kl_k1": -terms.log_ratio,
            "kl_k3": torch.expm1(bounded) - bounded,
            "gap_sum": gap,
        }
        sums = {name: torch.where(member, column.double(), 0.0).sum(1) for name, column in columns.items()}
        metrics = cls.zeros(num_agents, terms.loss.device)
        if terms.loss.numel():
            ratio = terms.ratio.double()
            sums["ratio_min"] = torch.where(member, ratio, torch.inf).amin(1)
            sums["ratio_max"] = torch.where(member, ratio, 0.0).amax(1)
            sums["gap_max"] = torch.where(member, gap, 0.0).amax(1)
        for name, value in sums.items():
            setattr(metrics, name, value)
        return metrics

    def merge(self, other: AgentMetrics) -> AgentMetrics:
        """The metrics of both sets of tokens together."""
        combine = dict.fromkeys(_SUMS, torch.add) | {"ratio_min": torch.minimum}
        combine |= {"ratio_max": torch.maximum, "gap_max": torch.maximum}
        return AgentMetrics(**{name: how(getattr(self, name), getattr(other, name)) for name, how in combine.items()})

    def all_reduce(self, group: Any) -> AgentMetrics:
        """The metrics of all ranks of the process group together: one SUM and one MAX (the minimum travels negated)."""
        sums = torch.stack([getattr(self, name) for name in _SUMS])
        extremes = torch.stack([-self.ratio_min, self.ratio_max, self.gap_max])
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        merged = dict(zip(_SUMS, sums, strict=True))
        return AgentMetrics(**merged, ratio_min=-extremes[0], ratio_max=extremes[1], gap_max=extremes[2])

    def per_token(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Readable values for the agents that had tokens: shares and means per token, the loss as it is."""
        result = {}
        for index, name in enumerate(names):
            tokens = float(self.tokens[index])
            if tokens == 0:
                continue
            value = {f.name: float(getattr(self, f.name)[index]) for f in fields(self)}
            result[name] = {
                "loss": value["loss"],
                "tokens": tokens,
                "clip_low_share": value["clip_low"] / tokens,
                "clip_high_share": value["clip_high"] / tokens,
                "dual_clip_share": value["dual_clip"] / tokens,
                "entropy": value["entropy"] / tokens,
                "kl_k1": value["kl_k1"] / tokens,
                "kl_k3": value["kl_k3"] / tokens,
                "ratio_min": value["ratio_min"],
                "ratio_max": value["ratio_max"],
                "logprob_gap_mean": value["gap_sum"] / tokens,
                "logprob_gap_max": value["gap_max"],
            }
        return result


_SUMS = ("tokens", "loss", "pg", "clip_low", "clip_high", "dual_clip", "entropy", "kl_k1", "kl_k3", "gap_sum")


def weighted_terms(terms: TokenTerms, inputs: TokenInputs, entropy: Tensor, entropy_bonus: float) -> Tensor:
    """w (pg - bonus H) per token, float64; its sum is the loss."""
    return inputs.weight.double() * (terms.loss.double() - entropy_bonus * entropy.double())


class _PolicyLoss(torch.autograd.Function):
    """Hands out the slopes formed in the forward pass, times the upstream scalar."""

    @staticmethod
    def forward(
        ctx: Any, logprob: Tensor, entropy: Tensor | None, loss: Tensor, slope: Tensor, entropy_slope: Tensor
    ) -> Tensor:
        ctx.save_for_backward(slope, entropy_slope)
        ctx.has_entropy = entropy is not None
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        slope, entropy_slope = ctx.saved_tensors
        return upstream * slope, upstream * entropy_slope if ctx.has_entropy else None, None, None, None


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor | None,
    row: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    agent: Tensor,
    *,
    num_agents: int,
    options: PolicyLossOptions,
    entropy: Tensor | None = None,
) -> tuple[Tensor, AgentMetrics]:
    """The loss (a scalar with gradient to `logprob` and `entropy`) and the metrics; the contract is on top of this file."""
    if logprob.ndim != 1 or not logprob.is_floating_point():
        raise ValueError(f"logprob is {logprob.dtype} {list(logprob.shape)}; expected a floating vector over tokens")
    if entropy is None and options.entropy_bonus:
        raise ValueError(f"entropy_bonus is {options.entropy_bonus} but entropy is missing; pass the entropy of every token")
    if entropy is not None and entropy.shape != logprob.shape:
        raise ValueError(f"entropy has shape {list(entropy.shape)}; expected that of logprob, {list(logprob.shape)}")
    inputs = select_tokens(logprob.shape[0], old_logprob, row, advantage, token_weight, agent, num_agents)
    with torch.no_grad():
        index = slice(None) if inputs.index is None else inputs.index
        chosen = logprob[index].float()
        chosen_entropy = torch.zeros_like(chosen) if entropy is None else entropy[index].float()
        terms = token_terms(chosen, inputs.old_logprob, inputs.advantage, options)
        loss = weighted_terms(terms, inputs, chosen_entropy, options.entropy_bonus).sum().float()
        metrics = AgentMetrics.of(terms, inputs, chosen_entropy, num_agents, options.entropy_bonus)
        slope, entropy_slope = torch.zeros_like(logprob), torch.zeros_like(logprob)
        slope[index] = (inputs.weight * terms.slope).to(slope.dtype)
        entropy_slope[index] = (-options.entropy_bonus * inputs.weight).to(slope.dtype)
    return _PolicyLoss.apply(logprob, entropy, loss, slope, entropy_slope), metrics
