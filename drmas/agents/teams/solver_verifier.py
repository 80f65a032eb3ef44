"""Solver and verifier: one proposes, the other approves or sends it back.

    solver -> verifier -> (approved: done) -> solver with the critique -> verifier -> ...      at most `rounds` solver calls

The answer is the last solver text. An episode has between one and 2 * rounds turns, so the agents' segments are ragged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import PositiveInt

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
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
    on_invalid: Literal["fail_closed", "fail_open"] = "fail_closed"
    """A verifier response without a verdict rejects (fail_closed) or approves (fail_open) the solution."""
    verify_last: bool = False
    """Ask the verifier about the last possible solution too. Its verdict can't change the answer any more; it only trains."""
    solver: AgentConfig = AgentConfig(
        prompt="{question}\n\nThink step by step. Put only the final answer in \\boxed{}.",
        parser="boxed",
    )
    revise: str | None = (
        "{question}\n\nAn earlier solution was rejected:\n{solution}\n\nThe review said:\n{critique}\n\n"
        "Solve it again. Put only the final answer in \\boxed{}."
    )
    """The solver's prompt after a rejection; its first prompt again if unset or empty."""
    verifier: AgentConfig = AgentConfig(
        prompt=(
            "Question: {question}\n\nProposed solution:\n{solution}\n\nCheck it. "
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
                solution=solution.text if solution else "",
                answer=_answer(solution),
                critique=critique.text if critique else "",
            )
            if round_ == self.rounds and not self.verify_last:
                break
            critique = await agents.verifier(question=task.question, solution=solution.text, answer=_answer(solution))
            approved = critique.parsed if critique.valid else self.on_invalid == "fail_open"
            if approved:
                break
        return solution.text


def _answer(solution: Turn | None) -> str:
    """What the solver marked as its answer; empty before its first call and where it marked none."""
    return "" if solution is None or solution.parsed is None else str(solution.parsed)
