"""Advantages from a critic: generalised advantage estimation along all that one agent said in one episode.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}        return_t = A_t + V_t

(arXiv 1506.02438). t runs over the response tokens of the agent's turns, one turn after the other: what other agents and tools
say between them is part of the agent's environment and takes no step. V_t is the critic's value of the state that token t is
sampled from; after the last token of the last turn there is none. The episode's reward comes with that last token.

The advantages are then brought to mean 0 and deviation 1 over each agent's tokens of the step, because agents whose advantages
spread differently would otherwise share one scale; `mean` and `std` of "none" leave either out. A turn's penalty is taken off
the advantages of its own tokens after that (I7), and the critic doesn't learn it. Called by the controller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from drmas.errors import ConfigError
from drmas.types import Row

Whitening = Literal["agent", "none"]

_ROUNDING = 1e-9
"""A spread below this share of the largest is that of sums in float64, not of rewards."""


@dataclass(frozen=True, slots=True)
class GaeRule:
    """Example: GaeRule(gamma=1.0, lam=0.95)"""

    gamma: float = 1.0
    lam: float = 1.0
    mean: Whitening = "agent"
    std: Whitening = "agent"
    eps: float = 1e-6

    def __str__(self) -> str:
        return f"from a critic, gamma {self.gamma:g}, lambda {self.lam:g}, mean over {self.mean}, std over {self.std}"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            if getattr(self, name) not in ("agent", "none"):
                raise ConfigError(f"advantage.{name} is {getattr(self, name)!r}; with preset 'ppo' expected agent or none")


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """One number per response token of each row, in order; None for an excluded row (I3).

    The critic learns `returns`; `before` is what it said.
    """

    values: list[list[float] | None]
    returns: list[list[float] | None]
    before: list[list[float]]

    def row_means(self) -> list[float | None]:
        """The mean advantage of each row's tokens."""
        return [None if each is None else sum(each) / len(each) for each in self.values]


def gae(rows: Sequence[Row], values: Sequence[Sequence[float]], rule: GaeRule) -> TokenAdvantages:
    """Advantages of every row from the critic's `values`, one per response token. Rows whose status isn't "ok" are excluded.

    ValueError: a row with another number of values than response tokens.
    """
    for i, (row, own) in enumerate(zip(rows, values, strict=True)):
        if len(own) != len(row.response_ids):
            raise ValueError(f"row {i} has {len(own)} values for {len(row.response_ids)} response tokens")
    speeches: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.status == "ok":
            speeches[(row.task, row.episode, row.agent)].append(i)
    raw: list[torch.Tensor | None] = [None] * len(rows)
    returns: list[list[float] | None] = [None] * len(rows)
    for indices in speeches.values():
        indices.sort(key=lambda i: rows[i].turn)
        value = torch.tensor([v for i in indices for v in values[i]], dtype=torch.float64)
        reward = torch.zeros_like(value)
        reward[-1] = rows[indices[-1]].reward
        advantage = _along(value, reward, rule)
        sizes = [len(rows[i].response_ids) for i in indices]
        for i, part, own in zip(indices, advantage.split(sizes), value.split(sizes), strict=True):
            raw[i], returns[i] = part, (part + own).tolist()
    return TokenAdvantages(_whitened(rows, raw, rule), returns, [list(own) for own in values])


def _along(value: torch.Tensor, reward: torch.Tensor, rule: GaeRule) -> torch.Tensor:
    following = torch.cat([value[1:], value.new_zeros(1)])
    delta = (reward + rule.gamma * following - value).tolist()
    carried, advantage = 0.0, []
    for each in reversed(delta):
        carried = each + rule.gamma * rule.lam * carried
        advantage.append(carried)
    return torch.tensor(advantage[::-1], dtype=torch.float64)


def _whitened(rows: Sequence[Row], raw: Sequence[torch.Tensor | None], rule: GaeRule) -> list[list[float] | None]:
    """Over each agent's tokens, then penalties off. Tokens all alike, or one alone, get 0 where the mean is taken (I6)."""
    result: list[list[float] | None] = [None] * len(rows)
    for agent in dict.fromkeys(row.agent for row in rows):
        mine = [i for i, row in enumerate(rows) if row.agent == agent and raw[i] is not None]
        if not mine:
            continue
        flat = torch.cat([raw[i] for i in mine])
        alike = float(flat.max() - flat.min()) <= _ROUNDING * float(flat.abs().max())
        if rule.mean == "agent":
            flat = torch.zeros_like(flat) if alike else flat - flat.mean()
        if rule.std == "agent" and not alike:
            flat = flat / (flat.std(correction=1) + rule.eps)
        for i, part in zip(mine, flat.split([raw[i].numel() for i in mine]), strict=True):
            result[i] = (part - rows[i].penalty).tolist()
    return result
