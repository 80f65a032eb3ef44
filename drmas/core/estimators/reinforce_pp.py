"""REINFORCE++: every token's reward to come, whitened over the step (arXiv 2501.03262). No groups are needed.

    G_t = r_t + gamma G_{t+1} within a turn, r = R at its last token and 0 before      A = (G - mean) / (std + eps)

mean and std are over the tokens of all rows. Each turn has the episode's whole reward at its own last token; with gamma 1 all
of its tokens get R. `reinforce++-baseline` first takes off the task's mean over its distinct episodes, then whitens what is
left: A = whiten(R - mean of the task); `mean=agent` takes it off per agent.

Penalties are taken off after the whitening; with "inside" a turn's penalty comes with its last token, as the reward does.

Fails, without the baseline, when tasks differ in difficulty: all turns of an easy task are pushed up, all of a hard one down,
which is noise as large as the signal; and, as all pooled statistics, when agents differ in how often they speak and succeed.
gamma < 1 shortens sight to the last 1 / (1 - gamma) tokens of a turn, and never discounts across turns. What
`drmas.core.estimators.whiten` fails at, both fail at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from drmas.core.advantages import AdvantageRow, AdvantageRule, Advantages, TokenAdvantages, check_rows
from drmas.core.estimators.base import NOTHING, Evidence, Penalty, Segmented, Stateless
from drmas.core.estimators.whiten import Pool, Whitened, as_lists, whitened


@dataclass(frozen=True, slots=True)
class ReinforcePP(Stateless):
    gamma: float = 1.0
    whiten: Pool = "pooled"
    eps: float = 1e-6
    penalty: Penalty = "outside"
    equal_groups_teach: ClassVar[bool] = True

    def __call__(self, rows: Sequence[AdvantageRow], evidence: Evidence = NOTHING) -> Advantages:
        check_rows(rows)
        inside = self.penalty == "inside"
        raw = [
            self._to_come(row.reward - row.penalty * inside, len(row.response_ids)) if row.status == "ok" else None
            for row in rows
        ]
        white = whitened(rows, raw, self.whiten, eps=self.eps)
        tokens = TokenAdvantages(as_lists(white, less=None if inside else [row.penalty for row in rows]))
        return Advantages(tokens.row_means(), [], tokens)

    def _to_come(self, reward: float, tokens: int) -> torch.Tensor:
        left = torch.arange(tokens - 1, -1, -1, dtype=torch.float64)
        return reward * torch.pow(torch.tensor(self.gamma, dtype=torch.float64), left)

    def __str__(self) -> str:
        over = "all tokens" if self.whiten == "pooled" else "each agent's tokens"
        return f"reward to come of each token, gamma {self.gamma:g}, whitened over {over}"


def reinforce_pp_baseline(
    *,
    mean: Literal["agent", "task", "none"] = "task",
    weighting: Literal["turn", "episode"] = "episode",
    singleton: Literal["zero", "raw"] = "zero",
    min_std: float = 0.0,
    penalty: Penalty = "outside",
    whiten: Pool = "pooled",
    eps: float = 1e-6,
) -> Whitened:
    rule = AdvantageRule(mean=mean, std="none", weighting=weighting, singleton=singleton, min_std=min_std, penalty=penalty)
    return Whitened(Segmented(rule), whiten, eps, penalty)
