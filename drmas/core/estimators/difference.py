"""Difference rewards: what an agent's presence was worth (Wolpert & Tumer 2002; COMA, arXiv 1705.08926, is their learnt kin).

    A of agent k = R - mean of R over the task's episodes in which k is silent

The counterfactual episodes run beside the group, `counterfactuals` of them for each task and agent: k's calls give an empty
text, which the team parses as such, and the others speak as always. They share nothing with the group's episodes but the task,
so the baseline doesn't depend on what k sampled, and the estimate has no bias.

Fails when an empty text breaks the team: a task can't be solved without its only solver, the baseline is 0 and A is the bare
reward; a team that raises on it fails the episode, and the agent's rows of the task teach nothing. Silence isn't doing nothing:
a verifier's may be read as a rejection. An agent that is never worth anything has advantages around 0, which is right; one that
is, pushes up all that it says, good turns and bad, until its reward exceeds the baseline no more. It costs
trained agents x counterfactuals episodes per task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from drmas.core.advantages import AdvantageRow, Advantages
from drmas.core.estimators.base import NOTHING, Evidence, Probe, Stateless, above


@dataclass(frozen=True, slots=True)
class Difference(Stateless):
    """`team`: the agents that have a counterfactual, which are those that are trained; rows of others have no advantage."""

    team: tuple[str, ...]
    counterfactuals: int = 1
    equal_groups_teach: ClassVar[bool] = True

    @property
    def probes(self) -> tuple[Probe, ...]:
        return tuple(Probe(_without(agent), episodes=self.counterfactuals, without=agent) for agent in self.team)

    def __call__(self, rows: Sequence[AdvantageRow], evidence: Evidence = NOTHING) -> Advantages:
        return above(rows, [evidence.baseline(row.task, _without(row.agent), row.agent) for row in rows])

    def __str__(self) -> str:
        whom = ", ".join(self.team) or "none"
        return f"reward above {self.counterfactuals} episode(s) of the task without the agent, for {whom}"


def _without(agent: str) -> str:
    return f"without {agent}"
