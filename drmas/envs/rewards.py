"""From a team's answer to its reward. `make_reward` picks the reward that the `reward` section names.

A reward is awaited by the collector, once per episode. No answer is a legitimate 0; an answer that couldn't be graded raises
(I3). To add one: a class with `__call__` and `close`, a value of `RewardType`, a line in `_of_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from drmas.config.tasks import RewardConfig, RewardType
from drmas.core.names import expected_names
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
    """The reward of the task's source (`source_key`); `default` for sources that have none of their own."""

    def __init__(self, rewards: Mapping[str, Reward], default: Reward) -> None:
        self._rewards, self._default = dict(rewards), default

    async def __call__(self, task: Task, answer: str | None) -> float:
        key = source_key(task.source, self._rewards)
        return await (self._default if key is None else self._rewards[key])(task, answer)

    def close(self) -> None:
        for reward in (*self._rewards.values(), self._default):
            reward.close()


def make_reward(config: RewardConfig) -> Reward:
    """The reward that `config.type` names, or those that `config.by_source` does."""
    made = {name: _of_type(name, config) for name in dict.fromkeys((config.type, *config.by_source.values()))}
    if not config.by_source:
        return made[config.type]
    return BySource({source: made[name] for source, name in config.by_source.items()}, made[config.type])


def source_key(source: str, keys: Collection[str]) -> str | None:
    """Which key of `reward.by_source` a task's source has: its own, else what stands before its first "/", else None.

    Example: source_key("facts/1", {"facts": "em"}) == "facts"
    """
    return next((key for key in (source, source.partition("/")[0]) if key in keys), None)


def check_reward(
    config: RewardConfig, examples: Sequence[Task], others: Callable[[], Sequence[Task] | None] = lambda: ()
) -> None:
    """ConfigError where a task can't be graded by the reward that it would get, or a key of `by_source` names no source.

    `examples`: a task of each source of the data at hand. `others` gives those of the run's other data, whose sources may be
    named too; it is asked only where a key is none of the examples', and None says that they aren't there to be looked at.
    Called at start.
    """
    for task in examples:
        found = source_key(task.source, config.by_source)
        name = config.type if found is None else config.by_source[found]
        key = "reward.type" if found is None else f"reward.by_source.{found}"
        if name == "gym" and "gym" not in task.extra:
            raise ConfigError(
                f"{key} is gym, and the task {task.id} isn't made by a reasoning-gym generator; choose another type"
            )
        if name != "gym" and not task.truth:
            raise ConfigError(
                f"{key} is {name}, and the task {task.id} has no one right answer: its generator scores answers by a rule of "
                f"its own; set {key} to gym"
            )
    _check_sources(config, examples, others)


def accepted_answers(task: Task) -> list[str]:
    """The truth and the other accepted answers, each once. GraderError where there are none."""
    accepted = [text for text in dict.fromkeys([task.truth, *task.extra.get("answers", [])]) if text]
    if not accepted:
        raise GraderError(f"the task {task.id} has no truth to compare with; its generator's own rule is reward.type gym")
    return accepted


def _check_sources(config: RewardConfig, examples: Sequence[Task], others: Callable[[], Sequence[Task] | None]) -> None:
    sources = {task.source for task in examples}
    if not _unknown(config, sources) or (more := others()) is None:
        return
    sources |= {task.source for task in more}
    if unknown := _unknown(config, sources):
        expected = expected_names(unknown[0], filter(None, sources))
        raise ConfigError(f"reward.by_source names {unknown[0]!r}, and no task has that source; {expected}")


def _unknown(config: RewardConfig, sources: Collection[str]) -> list[str]:
    """The keys of `by_source` that no source has, nor the part of one before its first "/"."""
    return [key for key in config.by_source if not any(source_key(source, (key,)) == key for source in sources)]


def _exact(answer: str, accepted: Sequence[str]) -> float:
    return float(any(answer.strip() == truth.strip() for truth in accepted))


def _of_type(name: RewardType, config: RewardConfig) -> Reward:
    if name in ("em", "f1"):
        from drmas.envs.search import scoring

        return TextReward(scoring.exact_match if name == "em" else scoring.f1)
    if name == "exact":
        return TextReward(_exact)
    return GymReward(config) if name == "gym" else MathReward(config)
