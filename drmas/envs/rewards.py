"""From a team's answer to its reward. `make_reward` picks the reward that the `reward` section names.

A reward is awaited by the collector, once per episode. No answer is a legitimate 0; an answer that couldn't be graded raises
(I3). To add one: a class with `__call__` and `close`, a value of `RewardConfig.type`, a line in `make_reward`.
"""

from __future__ import annotations

from typing import Protocol

from drmas.config.tasks import RewardConfig
from drmas.envs.math import MathGrader
from drmas.types import Task


class Reward(Protocol):
    async def __call__(self, task: Task, answer: str | None) -> float:
        """The reward of `answer`; GraderError if it can't be graded."""

    def close(self) -> None:
        """Stop what grades; idempotent."""


class ExactReward:
    """1.0 where the stripped answer is the stripped truth, letter for letter."""

    async def __call__(self, task: Task, answer: str | None) -> float:
        return float(answer is not None and answer.strip() == task.truth.strip())

    def close(self) -> None:
        pass


class MathReward:
    """1.0 where the answer equals the truth as mathematics (`drmas.envs.math.grade`)."""

    def __init__(self, config: RewardConfig) -> None:
        self._grader = MathGrader(workers=config.workers, timeout_seconds=config.timeout_seconds)

    async def __call__(self, task: Task, answer: str | None) -> float:
        return 0.0 if answer is None else await self._grader(answer, task.truth)

    def close(self) -> None:
        self._grader.close()


def make_reward(config: RewardConfig) -> Reward:
    """The reward that `config.type` names."""
    return ExactReward() if config.type == "exact" else MathReward(config)
