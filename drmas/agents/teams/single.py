"""A team of one: single-agent reinforcement learning, the baseline that a team is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
from drmas.agents.parsers import spoken
from drmas.agents.team import TeamConfig, register_team
from drmas.types import Task


@register_team("single")
class Single(TeamConfig):
    """One agent answers the question in one call."""

    values: ClassVar[Mapping[str, frozenset[str]]] = {"solver": frozenset({"question"})}

    solver: AgentConfig = AgentConfig(
        prompt="{question}\n\nThink step by step. Put only the final answer in \\boxed{}.",
        parser="boxed",
    )

    async def run(self, task: Task, agents: Agents) -> str | None:
        turn = await agents.solver(question=task.question)
        return spoken(turn.text)
