"""From a team's answer to its reward. `make_reward` picks the reward that the `reward` section names.

A reward is awaited by the collector, once per episode. No answer is a legitimate 0; an answer that couldn't be graded raises
(I3). To add one: a class with `__call__` and `close`, a value of `RewardType`, a line in `_of_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from drmas.config.tasks import RewardConfig, RewardType
from drmas.envs.generated import gym_truth
from drmas.envs.grading import GraderPool
from drmas.envs.math import MathGrader
from drmas.errors import ConfigError, GraderError
from drmas.types import Task


class Reward(Protocol):
    async def __call__(self, task: Task, answer: str | None) -> float:
        """The reward of `answer`; GraderError if it can't be graded."""

    def close(self) -> None:
        """Stop what grades; idempotent."""


class TextReward:
    """`score(answer, accepted answers)` of texts, from 0 to 1."""

    def __init__(self, score: Callable[[str, Sequence[str]], float]) -> None:
        self._score = score

    async def __call__(self, task: Task, answer: str | None) -> float:
        return 0.0 if answer is None else self._score(answer, accepted_answers(task))

    def close(self) -> None:
        pass


class MathReward:
    """1.0 where the answer equals an accepted one as mathematics (`drmas.envs.math.grade`)."""

    def __init__(self, config: RewardConfig) -> None:
        self._grader = MathGrader(workers=config.workers, timeout_seconds=config.timeout_seconds)

    async def __call__(self, task: Task, answer: str | None) -> float:
        if answer is None:
            return 0.0
        trouble = None
        for truth in accepted_answers(task):
            try:
                if await self._grader(answer, truth) == 1.0:
                    return 1.0
            except GraderError as error:
                trouble = error
        if trouble is not None:  # the answer may have equalled the truth that it wasn't compared with
            raise trouble
        return 0.0

    def close(self) -> None:
        self._grader.close()


class GymReward:
    """What the reasoning-gym generator that made the task gives the answer (`drmas.envs.generated.gym_verdict`)."""

    def __init__(self, config: RewardConfig) -> None:
        self._pool = GraderPool(config.workers, rule="gym")
        self._timeout_seconds = config.timeout_seconds

    async def __call__(self, task: Task, answer: str | None) -> float:
        if answer is None:
            return 0.0
        if "gym" not in task.extra:
            raise GraderError(f"reward gym: the task {task.id} wasn't made by a reasoning-gym generator")
        return await self._pool.grade_async(answer, gym_truth(task), self._timeout_seconds)

    def close(self) -> None:
        self._pool.close()


class BySource:
    """The reward of the task's source; `default` for sources that have none of their own."""

    def __init__(self, rewards: Mapping[str, Reward], default: Reward) -> None:
        self._rewards, self._default = dict(rewards), default

    async def __call__(self, task: Task, answer: str | None) -> float:
        return await self._rewards.get(task.source, self._default)(task, answer)

    def close(self) -> None:
        for reward in (*self._rewards.values(), self._default):
            reward.close()


def make_reward(config: RewardConfig) -> Reward:
    """The reward that `config.type` names, or those that `config.by_source` does."""
    made = {name: _of_type(name, config) for name in dict.fromkeys((config.type, *config.by_source.values()))}
    if not config.by_source:
        return made[config.type]
    return BySource({source: made[name] for source, name in config.by_source.items()}, made[config.type])


def check_reward(config: RewardConfig, examples: Iterable[Task]) -> None:
    """ConfigError where a task, one of each source, can't be graded by the reward that it would get. Called at start."""
    for task in examples:
        name = config.by_source.get(task.source, config.type)
        key = f"reward.by_source.{task.source}" if task.source in config.by_source else "reward.type"
        if name == "gym" and "gym" not in task.extra:
            raise ConfigError(
                f"{key} is gym, and the task {task.id} isn't made by a reasoning-gym generator; choose another type"
            )
        if name != "gym" and not task.truth:
            raise ConfigError(
                f"{key} is {name}, and the task {task.id} has no one right answer: its generator scores answers by a rule of "
                f"its own; set {key} to gym"
            )


def accepted_answers(task: Task) -> list[str]:
    """The truth and the other accepted answers, each once. GraderError where there are none."""
    accepted = [text for text in dict.fromkeys([task.truth, *task.extra.get("answers", [])]) if text]
    if not accepted:
        raise GraderError(f"the task {task.id} has no truth to compare with; its generator's own rule is reward.type gym")
    return accepted


def _exact(answer: str, accepted: Sequence[str]) -> float:
    return float(any(answer.strip() == truth.strip() for truth in accepted))


def _of_type(name: RewardType, config: RewardConfig) -> Reward:
    if name in ("em", "f1"):
        from drmas.envs.search import scoring

        return TextReward(scoring.exact_match if name == "em" else scoring.f1)
    if name == "exact":
        return TextReward(_exact)
    return GymReward(config) if name == "gym" else MathReward(config)
