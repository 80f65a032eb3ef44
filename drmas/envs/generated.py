"""Procedural tasks of reasoning-gym, generated when they are asked for, and the verdicts of their generators' own rules.

`GymTasks` is called by `tasks`; `gym_verdict` by the grader's worker, since a rule may run for ever on what a model wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from drmas.config.tasks import ReasoningGymData
from drmas.core.boxed import last_boxed
from drmas.core.names import expected_names
from drmas.errors import ConfigError, DataError
from drmas.types import Task

_HASHED = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Generators that go through Python sets of text, whose order changes from process to process unless PYTHONHASHSEED is set."""


class GymTasks(Sequence[Task]):
    """`config.size` tasks of the generator `config.name`; task i is a function of (settings, i) alone.

    A generator that accepts many answers names none: its tasks have the truth "" and need the reward `gym`, which finds the
    task again by `extra["gym"]`.

    ConfigError: no such generator or level, or it refuses its options.
    """

    def __init__(self, config: ReasoningGymData) -> None:
        datasets = load_generators()[0]
        if config.name not in datasets:
            raise ConfigError(f"data.name is {config.name!r}; {expected_names(config.name, datasets)}")
        if config.name in _HASHED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
            raise ConfigError(
                f"data.name is {config.name}, whose tasks depend on Python's hash seed; set PYTHONHASHSEED=0 in the "
                f"environment, so that every process gets the same ones"
            )
        self._config = config
        self._address = config.model_dump(mode="json")
        try:
            settings = _settings(config)
            settings.validate()
            self._dataset = datasets[config.name][0](settings)
        except (TypeError, ValueError, AssertionError, AttributeError, KeyError) as error:
            # its settings are dataclasses that check themselves with assert; an unknown option is a TypeError
            level = "" if config.difficulty is None else f" at data.difficulty {config.difficulty}"
            raise ConfigError(
                f"data.options {config.options} don't fit the generator {config.name}{level}: {error or type(error).__name__}"
            ) from error

    @property
    def fingerprint(self) -> list[Any]:
        """What the tasks are a function of: the settings, and the package that they are settings of."""
        return [self._address, version("reasoning-gym")]

    def __len__(self) -> int:
        return self._config.size

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry, name = self.entry(index), self._config.name
        answer = "" if entry["answer"] is None else str(entry["answer"])
        extra = {"metadata": entry.get("metadata", {}), "gym": {"data": self._address, "index": index}}
        return Task(f"{name}/{index}", entry["question"], answer, name, extra)

    def entry(self, index: int) -> dict[str, Any]:
        """Task `index` as reasoning-gym writes it. DataError: the generator failed on it."""
        try:
            return self._dataset[index]
        except Exception as error:  # the boundary to a hundred generators, each of which raises what it likes
            raise DataError(
                f"data.name {self._config.name}: the generator failed on task {index} of seed {self._config.seed}: "
                f"{type(error).__name__}: {error}; choose another seed, or other data.options"
            ) from error

    def score(self, answer: str, index: int) -> float:
        """What the generator gives `answer` for task `index`, from 0 to 1. A rule that fails on the answer alone gives 0."""
        entry = self.entry(index)
        try:
            score = self._dataset.score_answer(answer, entry)
        except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
            # where it can score another answer, it was this one that it could not read: a wrong answer. Else it raises again.
            self._dataset.score_answer("", entry)
            return 0.0
        if not 0.0 <= (score := float(score)) <= 1.0:  # also where it is no number
            raise ValueError(f"the generator {self._config.name} scored task {index} with {score}; expected 0 to 1")
        return score


def gym_truth(task: Task) -> str:
    """What `gym_verdict` takes for the truth of `task`: where it comes from."""
    return json.dumps({**task.extra["gym"], "question": task.question})


def gym_verdict(text: str, truth: str) -> float:
    r"""The reward of the answer in `text`: of the last \boxed{...} after the last </think>, else of all that stands there.

    Runs in the grader's worker, without a deadline. ValueError: the task is another one when it is generated anew.
    """
    address = json.loads(truth)
    tasks = _tasks_of(json.dumps(address["data"]))
    if tasks.entry(address["index"])["question"] != address["question"]:
        raise ValueError(f"task {address['index']} of {address['data']['name']} is another one when it is generated anew")
    answer = text.rpartition("</think>")[2]
    boxed = last_boxed(answer)
    return tasks.score(answer.strip() if boxed is None else boxed.strip(), address["index"])


@functools.lru_cache(maxsize=32)
def _tasks_of(data: str) -> GymTasks:
    return GymTasks(ReasoningGymData(**json.loads(data)))


def _settings(config: ReasoningGymData) -> Any:
    """The generator's settings: its own, or those of a level of its curriculum, with the options on top."""
    datasets, curricula = load_generators()
    basic = {"seed": config.seed, "size": config.size}
    if config.difficulty is None:
        return datasets[config.name][1](**{**basic, **config.options})
    if config.name not in curricula:
        raise ConfigError(
            f"data.difficulty is {config.difficulty}, and the generator {config.name} has no curriculum; unset it, and set "
            f"data.options"
        )
    curriculum = curricula[config.name]()
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if config.difficulty > highest:
        raise ConfigError(f"data.difficulty is {config.difficulty}; the generator {config.name} has the levels 0 to {highest}")
    curriculum.set_global_level(config.difficulty)
    return dataclasses.replace(curriculum.generate_configuration(basic), **config.options)


def load_generators() -> tuple[dict[str, Any], dict[str, Any]]:
    """reasoning-gym's generators, (data set, settings) by name, and their curricula."""
    try:
        from reasoning_gym.factory import CURRICULA, DATASETS
    except ImportError as error:
        hint = "; its fonts need pyfiglet 1.0.2 or a setuptools below 82" if error.name == "pkg_resources" else ""
        raise ConfigError(f"data.type is reasoning-gym, which can't be imported here: {error}{hint}") from error
    return DATASETS, CURRICULA
