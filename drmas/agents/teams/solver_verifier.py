"""Solver and verifier: one proposes, the other approves or sends it back.

    solver -> verifier -> (approved: done) -> solver with the critique -> verifier -> ...      at most `rounds` solver calls

The answer is the last solver text; thoughts are neither handed on nor graded. A verifier response without a verdict rejects the
solution, or approves it where `verifier.on_invalid` is fail_open. An episode has between one and 2 * rounds turns, so that the
agents' segments are ragged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveInt

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
from drmas.agents.parsers import spoken
from drmas.agents.prompts import quote, tags
from drmas.agents.team import TeamConfig, register_team
from drmas.types import Task, Turn


@register_team("solver-verifier")
class SolverVerifier(TeamConfig):
    """A solver whose solution a verifier approves or rejects."""

    values: ClassVar[Mapping[str, frozenset[str]]] = {
        "solver": frozenset({"question", "solution", "answer", "critique"}),
        "revise": frozenset({"question", "solution", "answer", "critique"}),
        "verifier": frozenset({"question", "solution", "answer"}),
    }

    rounds: PositiveInt = 2
    """Most solver calls per episode."""
    verify_last: bool = False
    """Ask the verifier about the last possible solution too. Its verdict can't change the answer any more; it only trains."""
    solver: AgentConfig = AgentConfig(
        prompt="{question}\n\nThink step by step. Put only the final answer in \\boxed{}.",
        parser="boxed",
    )
    revise: str | None = (
        "{question}\n\nAn earlier solution was rejected:\n<solution>\n{solution}\n</solution>\n\n"
        "The review said:\n<review>\n{critique}\n</review>\n\nSolve it again. Put only the final answer in \\boxed{}."
    )
    """The solver's prompt after a rejection; its first prompt again if unset or empty."""
    verifier: AgentConfig = AgentConfig(
        prompt=(
            "Question: {question}\n\nProposed solution:\n<solution>\n{solution}\n</solution>\n\nCheck it. "
            "End with <verdict>approve</verdict> if the final answer is right, or <verdict>reject</verdict> if it is wrong."
        ),
        parser="verdict:approve,reject",
    )

    async def run(self, task: Task, agents: Agents) -> str | None:
        solution = critique = None
        for round_ in range(1, self.rounds + 1):
            solution = await agents.solver(
                self.revise or None if solution else None,
                question=task.question,
                critique=quote(spoken(critique.text), self._solver_tags) if critique else "",
                **_said(solution, self._solver_tags),
            )
            if round_ == self.rounds and not self.verify_last:
                break
            critique = await agents.verifier(question=task.question, **_said(solution, self.verifier.tags))
            if critique.parsed:
                break
        return spoken(solution.text)

    @property
    def _solver_tags(self) -> set[str]:
        return self.solver.tags | tags(self.revise or "")


def _said(solution: Turn | None, tags: set[str]) -> dict[str, str]:
    """What the solver said, without its thoughts, and what it marked as its answer; empty before its first call, the latter
    also where it marked none."""
    if solution is None:
        return {"solution": "", "answer": ""}
    answer = "" if solution.parsed is None else str(solution.parsed)
    return {"solution": quote(spoken(solution.text), tags), "answer": quote(answer, tags)}
