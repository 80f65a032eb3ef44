"""Debate: several solvers at once, who see each other's solutions between rounds; a judge picks one.

    solver x solvers (in parallel) -> the same, each with the others' solutions -> ... `rounds` times -> judge -> done

The answer is the text of the solution that the judge picks by its number. Where the judge names none that there is, it is the
first of those with the most common answer (what the solver's parser found); `judge.on_invalid = "fail_open"` takes the first
solution instead. All solvers are one agent, called `solvers` times per round, so that its segments hold all of these calls.
Thoughts are neither handed on nor graded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
from drmas.agents.parsers import spoken
from drmas.agents.prompts import quote, tags
from drmas.agents.team import TeamConfig, register_team
from drmas.types import Task, Turn

_SLOTS = frozenset({"solution"})


@register_team("debate")
class Debate(TeamConfig):
    """Solvers who debate, and a judge who picks one of their solutions."""

    values: ClassVar[Mapping[str, frozenset[str]]] = {
        "solver": frozenset({"question"}),
        "revise": frozenset({"question", "own", "others"}),
        "judge": frozenset({"question", "solutions", "count"}),
    }

    solvers: Annotated[int, Field(ge=2, le=9)] = 3
    """Solver calls per round."""
    rounds: PositiveInt = 2
    solver: AgentConfig = AgentConfig(
        prompt="{question}\n\nThink step by step. Put only the final answer in \\boxed{}.",
        parser="boxed",
    )
    revise: Annotated[str, Field(min_length=1)] = (
        "{question}\n\nYour solution so far:\n<solution>\n{own}\n</solution>\n\nSolutions of others:\n{others}\n\n"
        "Compare them and say where one is wrong. Then solve it again. Put only the final answer in \\boxed{}."
    )
    """The solver's prompt from the second round on."""
    judge: AgentConfig = AgentConfig(
        prompt=(
            "Question: {question}\n\nSolutions 1 to {count}:\n{solutions}\n\nWhich solution is right? Think briefly. End with "
            "its number alone between <choice> and </choice>."
        ),
        parser="choice:1,2,3,4,5,6,7,8,9",
    )

    async def run(self, task: Task, agents: Agents) -> str | None:
        solutions = await asyncio.gather(*(agents.solver(question=task.question) for _ in range(self.solvers)))
        marks = tags(self.revise) | _SLOTS
        for _ in range(1, self.rounds):
            calls = [
                agents.solver(
                    self.revise,
                    question=task.question,
                    own=quote(spoken(own.text), marks),
                    others=_listed([other for other in solutions if other is not own], marks),
                )
                for own in solutions
            ]
            solutions = await asyncio.gather(*calls)
        listed = _listed(solutions, self.judge.tags | _SLOTS)
        verdict = await agents.judge(question=task.question, solutions=listed, count=self.solvers)
        return spoken(_picked(solutions, verdict.parsed).text)


def _picked(solutions: Sequence[Turn], number: str | None) -> Turn:
    """The solution of that number, from 1, or the first with the most common answer."""
    if number is not None and number.isdecimal() and 1 <= int(number) <= len(solutions):
        return solutions[int(number) - 1]
    votes = Counter(str(solution.parsed) for solution in solutions if solution.parsed is not None)
    if not votes:
        return solutions[0]
    winner, _ = votes.most_common(1)[0]  # of equals the one that was met first
    return next(solution for solution in solutions if str(solution.parsed) == winner)


def _listed(solutions: Sequence[Turn], marks: set[str] | frozenset[str]) -> str:
    return "\n".join(
        f"{number}:\n<solution>\n{quote(spoken(solution.text), marks)}\n</solution>"
        for number, solution in enumerate(solutions, start=1)
    )
