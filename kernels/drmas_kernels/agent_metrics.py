"""What a loss says about the tokens of each agent: sums and extremes that pieces of a batch and ranks merge without loss.

Filled by `policy_loss` (and through it by the output head), merged and read by the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROWS = (
    *("tokens", "loss", "pg", "clip_low", "clip_high", "dual_clip", "entropy", "kl_k1", "kl_k3", "gap_sum"),
    *("kl_ref", "mismatch", "mismatch_truncated", "ratio_min", "ratio_max", "gap_max"),
)
"""What the loss hands over as one [16, agents] matrix: 13 sums, a minimum, two maxima."""


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
    """Sum of the clipped terms, without token weights and the correction for the engine."""
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
    kl_ref: Tensor
    """Sum of the KL to the reference, by the estimator of the options (k3 where they name none)."""
    mismatch: Tensor
    """Sum of the ratios of the trainer's to the engine's probability, as they were before the rule for them."""
    mismatch_truncated: Tensor
    """Tokens whose ratio the rule changed: those truncated, or masked."""
    ref_tokens: Tensor
    """Tokens that came with a reference log-prob: what `kl_ref` is a sum over."""
    rollout_tokens: Tensor
    """Tokens that came with the engine's log-prob: what `mismatch` is a sum over."""
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
    def from_matrix(cls, matrix: Tensor, *, reference: bool, rollout: bool) -> AgentMetrics:
        """Metrics whose rows are `ROWS`; whether their tokens had a reference's and the engine's log-prob."""
        rows = dict(zip(ROWS, matrix.unbind(0), strict=True))
        tokens, none = rows["tokens"], torch.zeros_like(rows["tokens"])
        return cls(**rows, ref_tokens=tokens if reference else none, rollout_tokens=tokens if rollout else none)

    def matrix(self) -> Tensor:
        """[16, num_agents] float64 with the rows `ROWS`: how metrics pass through a custom operator."""
        return torch.stack([getattr(self, name) for name in ROWS])

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
        """Readable values for the agents that had tokens: shares and means per token, the loss as it is.

        `clip_low_share` and `clip_high_share` together are what others call clip_frac, `dual_clip_share` clip_frac_lower.
        `kl_ref` is there for agents with reference log-probs, `mismatch_mean` and `mismatch_truncated_share` for those with the
        engine's.
        """
        columns = {f.name: getattr(self, f.name).tolist() for f in fields(self)}
        result = {}
        for index, name in enumerate(names):
            value = {column: values[index] for column, values in columns.items()}
            tokens = value["tokens"]
            if tokens == 0:
                continue
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
            if value["ref_tokens"]:
                result[name]["kl_ref"] = value["kl_ref"] / value["ref_tokens"]
            if value["rollout_tokens"]:
                result[name]["mismatch_mean"] = value["mismatch"] / value["rollout_tokens"]
                result[name]["mismatch_truncated_share"] = value["mismatch_truncated"] / value["rollout_tokens"]
        return result


_SUMS = tuple(f.name for f in fields(AgentMetrics) if f.name not in ("ratio_min", "ratio_max", "gap_max"))
