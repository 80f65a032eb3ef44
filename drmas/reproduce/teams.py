"""Teams for regimes in which the theory says that one pooled baseline inflates gradients: rewards on different scales, and an
agent that is called in failing episodes. Tasks must have one exact answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveFloat

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
from drmas.agents.parsers import spoken
from drmas.agents.team import TeamConfig, register_team
from drmas.agents.teams.solver_verifier import SolverVerifier
from drmas.types import Outcome, Task

_JUDGED = frozenset({"question", "answer"})


@register_team("unequal")
class Unequal(SolverVerifier):
    """Solver and verifier as ever, but the verifier's reward is `verdict_reward` times its share of right verdicts."""

    verdict_reward: PositiveFloat = 5.0

    async def run(self, task: Task, agents: Agents) -> Outcome:
        right: list[bool] = []
        for round_ in range(1, self.rounds + 1):
            solution = await agents.solver(question=task.question)
            if round_ == self.rounds:
                break
            verdict = await agents.verifier(question=task.question, answer=spoken(solution.text))
            right.append(bool(verdict.parsed) == (spoken(solution.text).strip() == task.truth))
            if verdict.parsed:
                break
        rewards = {"verifier": self.verdict_reward * sum(right) / len(right)} if right else {}
        return Outcome(spoken(solution.text), rewards)


@register_team("rescue")
class Rescue(TeamConfig):
    """A fixer is called where the verifier rejects the solver's answer: seldom, and mostly where it goes wrong."""

    values: ClassVar[Mapping[str, frozenset[str]]] = {
        "solver": frozenset({"question"}),
        "verifier": _JUDGED,
        "fixer": _JUDGED,
    }

    solver: AgentConfig = AgentConfig(prompt="{question}=")
    verifier: AgentConfig = AgentConfig(prompt="{question}={answer}?", parser="verdict:yes,no")
    fixer: AgentConfig = AgentConfig(prompt="{question}={answer}!")

    async def run(self, task: Task, agents: Agents) -> str:
        answer = spoken((await agents.solver(question=task.question)).text)
        verdict = await agents.verifier(question=task.question, answer=answer)
        if verdict.parsed:
            return answer
        return spoken((await agents.fixer(question=task.question, answer=answer)).text)
