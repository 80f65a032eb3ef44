"""The operations as one writes them in plain torch: the eager sides of the benchmark, and what its torch.compile sides compile.

Not the references of the kernels (those are in drmas_kernels and check their inputs), and no more than the formulas.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def head_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return logprob(F.linear(hidden, weight), target)


def logprob(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(log-prob of the target, entropy) per token."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(1, target[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def chosen_logprob(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1).gather(1, target[:, None]).squeeze(1)


def clipped_terms(logprob: Tensor, old: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """(PPO's loss with clips 0.2 and the dual clip 3, ratio) per token."""
    ratio = (logprob - old).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return torch.where(advantage < 0, torch.minimum(loss, -3.0 * advantage), loss), ratio


def clipped_loss(logprob: Tensor, old: Tensor, row: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    return (weight * clipped_terms(logprob, old, advantage[row])[0]).sum()


def head_loss(hidden, weight, target, old, row, advantage, token_weight) -> Tensor:
    return clipped_loss(chosen_logprob(F.linear(hidden, weight), target), old, row, advantage, token_weight)


def head_loss_entropy(hidden, weight, target, old, row, advantage, token_weight) -> Tensor:
    chosen, entropy = head_logprob(hidden, weight, target)
    return clipped_loss(chosen, old, row, advantage, token_weight) - 0.01 * (token_weight * entropy).sum()


def loss_and_metrics(logprob, old, row, advantage, token_weight, agent, num_agents: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss with eleven sums and three extremes per agent."""
    terms, ratio = clipped_terms(logprob, old, advantage[row])
    loss = (token_weight * terms).sum()
    with torch.no_grad():
        gap, of = logprob - old, agent[row]
        low, high, dual = ratio < 0.8, ratio > 1.2, ratio > 3.0
        one = torch.ones_like(ratio)
        columns = (one, token_weight * terms, terms, low, high, dual, -gap, ratio - 1 - gap, gap.abs(), token_weight, ratio)
        rows = torch.stack([column.double() for column in columns], dim=1)
        sums = rows.new_zeros(num_agents, len(columns)).index_add_(0, of, rows)
        extremes = torch.stack([-ratio, ratio, gap.abs()], dim=1)
        start = torch.full((num_agents, 3), -torch.inf, device=ratio.device)
        largest = start.scatter_reduce_(0, of[:, None].expand(-1, 3), extremes, "amax")
    return loss, sums, largest


def segment_advantage(reward: Tensor, penalty: Tensor, segment: Tensor, included: Tensor, segments: int) -> Tensor:
    """(score - mean) / (std + eps) - penalty in two passes of float64 scatter-adds; lone rows give 0."""
    score = torch.where(included, reward, 0.0).double()
    count = score.new_zeros(segments).index_add_(0, segment, included.double())
    mean = score.new_zeros(segments).index_add_(0, segment, score) / count.clamp(min=1.0)
    centred = torch.where(included, score - mean[segment], 0.0)
    squares = score.new_zeros(segments).index_add_(0, segment, centred.square())
    std = (squares / (count - 1.0).clamp(min=1.0)).sqrt()
    advantage = torch.where(count[segment] > 1, centred / (std[segment] + 1e-6), 0.0)
    return torch.where(included, advantage - penalty.double(), 0.0).to(reward.dtype)


def squared_norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient).square()


def adamw(param: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: Tensor, coefficient: Tensor, lr: float) -> None:
    """One step in place with betas 0.9 and 0.999, eps 1e-8 and decay 0.01."""
    grad = grad * coefficient
    step.add_(1)
    first.mul_(0.9).add_(0.1 * grad)
    second.mul_(0.999).add_(0.001 * grad * grad)
    count = step.double()
    size = lr / (1 - 0.9**count)
    root = second.sqrt() / (1 - 0.999**count).sqrt()
    param.mul_(1 - lr * 0.01).sub_(size * first / (root + 1e-8))
