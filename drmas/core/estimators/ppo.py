"""PPO: a token against what a critic expected, by generalised advantage estimation (arXiv 1707.06347, 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}        return_t = A_t + V_t

t runs over the response tokens of the agent's turns, one turn after the other: what other agents and tools say between them is
part of the agent's environment and takes no step. V_t is the critic's value of the state that token t is sampled from; after
the last token of the last turn there is none. The episode's reward comes with that last token.

The advantages are then whitened over each agent's tokens of the step, because agents whose advantages spread differently would
otherwise share one scale; `mean` and `std` of "none" leave either out, `whiten=pooled` makes it one pool of all agents. A
turn's penalty is taken off the advantages of its own tokens after that (I7), and the critic doesn't learn it.

Fails while the critic knows nothing: with lambda 1 that is REINFORCE with a bad baseline, with lambda < 1 its errors are bias.
A critic needs a model's memory again, and many steps before it tells one token from the next; rewards at the end of a long
episode of several agents are where it has least to go by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from drmas.core.advantages import Advantages, TokenAdvantages, check_rows
from drmas.core.estimators.base import NOTHING, Evidence, Stateless
from drmas.core.estimators.whiten import Pool, as_lists, whitened
from drmas.errors import ConfigError
from drmas.types import Row


@dataclass(frozen=True, slots=True)
class Ppo(Stateless):
    """Example: Ppo(gamma=1.0, gae_lambda=0.95)"""

    gamma: float = 1.0
    gae_lambda: float = 1.0
    mean: Literal["agent", "none"] = "agent"
    std: Literal["agent", "none"] = "agent"
    eps: float = 1e-6
    whiten: Pool = "agent"
    needs_critic: ClassVar[bool] = True
    equal_groups_teach: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            if getattr(self, name) not in ("agent", "none"):
                raise ConfigError(f"advantage.{name} is {getattr(self, name)!r}; with preset 'ppo' expected agent or none")

    def __call__(self, rows: Sequence[Row], evidence: Evidence = NOTHING) -> Advantages:
        """Rows of a policy that has no critic get no advantage, and take no part.

        ValueError: a row with another number of values than response tokens.
        """
        check_rows(rows)
        values = _of_rows(rows, evidence.values)
        known = [row if row.policy in evidence.values else replace(row, status="no critic") for row in rows]
        raw, returns = gae(known, values, self.gamma, self.gae_lambda)
        center, scale = self.mean != "none", self.std != "none"
        white = whitened(rows, raw, self.whiten, center=center, scale=scale, eps=self.eps)
        tokens = TokenAdvantages(as_lists(white, less=[row.penalty for row in rows]), returns, values)
        return Advantages(tokens.row_means(), [], tokens)

    def __str__(self) -> str:
        over = {"none": "none", "agent": "agent" if self.whiten == "agent" else "all agents"}
        text = f"from a critic, gamma {self.gamma:g}, lambda {self.gae_lambda:g}"
        return f"{text}, mean over {over[self.mean]}, std over {over[self.std]}"


def _of_rows(rows: Sequence[Row], values: Mapping[str, Sequence[Sequence[float]]]) -> list[list[float]]:
    queues = {policy: iter(own) for policy, own in values.items()}
    found = [list(next(queues.get(row.policy, iter(())), ())) for row in rows]
    for i, (row, own) in enumerate(zip(rows, found, strict=True)):
        if row.policy in values and len(own) != len(row.response_ids):
            raise ValueError(f"row {i} has {len(own)} values for {len(row.response_ids)} response tokens")
    return found


def gae(
    rows: Sequence[Row], values: Sequence[Sequence[float]], gamma: float, gae_lambda: float
) -> tuple[list[torch.Tensor | None], list[list[float] | None]]:
    """Every row's advantages before any normalisation, float64 and one per response token, and its returns; None: excluded."""
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
        advantage = _along(value, reward, gamma, gae_lambda)
        sizes = [len(rows[i].response_ids) for i in indices]
        for i, part, own in zip(indices, advantage.split(sizes), value.split(sizes), strict=True):
            raw[i], returns[i] = part, (part + own).tolist()
    return raw, returns


def _along(value: torch.Tensor, reward: torch.Tensor, gamma: float, gae_lambda: float) -> torch.Tensor:
    following = torch.cat([value[1:], value.new_zeros(1)])
    delta = (reward + gamma * following - value).tolist()
    carried, advantage = 0.0, []
    for each in reversed(delta):
        carried = each + gamma * gae_lambda * carried
        advantage.append(carried)
    return torch.tensor(advantage[::-1], dtype=torch.float64)
