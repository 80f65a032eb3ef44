"""Role-conditioned advantages: an agent against its own past (SPIRAL, arXiv 2506.24119).

    b_k <- decay b_k + (1 - decay) m_k, m_k the mean reward of agent k's rows of the step       A = R - b_k

The baseline moves first, as in the paper. An agent's first step has nothing of before: b_k starts as m_k, not as 0, so that
the first advantages sum to zero. A step without rows of an agent leaves its baseline as it is. Groups aren't needed: this is
for self-play, where the reward of one agent is the loss of another and each role has another expected reward.

Fails when tasks differ in difficulty: all turns of an easy one are pushed up and all of a hard one down. Equal rewards aren't
0, since they are compared with the past. When the policy improves within 1 / (1 - decay) steps the baseline lags, and nearly
all advantages have one sign. One baseline per agent, whatever the source of the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from drmas.core.advantages import AdvantageRow, Advantages, check_rows
from drmas.core.estimators.base import NOTHING, Evidence, Stateless, above
from drmas.core.means import mean_of
from drmas.errors import CheckpointError


@dataclass(slots=True)
class Ema(Stateless):
    ema_decay: float = 0.95
    equal_groups_teach: ClassVar[bool] = True
    baselines: dict[str, float] = field(default_factory=dict, init=False)
    """Agent -> b_k, as of the last step in which it had rows."""

    def __call__(self, rows: Sequence[AdvantageRow], evidence: Evidence = NOTHING) -> Advantages:
        check_rows(rows)
        rewards: dict[str, list[float]] = {}
        for row in rows:
            if row.status == "ok":
                rewards.setdefault(row.agent, []).append(row.reward)
        for agent, own in rewards.items():
            mean = mean_of(own)
            before = self.baselines.get(agent, mean)
            self.baselines[agent] = mean if before == mean else self.ema_decay * before + (1.0 - self.ema_decay) * mean
        return above(rows, [self.baselines.get(row.agent) for row in rows])

    def state(self) -> dict[str, Any]:
        return {"baselines": dict(self.baselines)}

    def restore(self, state: dict[str, Any]) -> None:
        if not state.keys() <= {"baselines"}:
            raise CheckpointError(f"advantage.preset 'ema' keeps baselines; the checkpoint has {', '.join(map(repr, state))}")
        self.baselines = dict(state.get("baselines", {}))

    def __str__(self) -> str:
        return f"reward above each agent's moving mean, decay {self.ema_decay:g}"
