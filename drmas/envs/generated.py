"""Procedural tasks of reasoning-gym, generated when they are asked for. Called by `source`."""

from __future__ import annotations

from collections.abc import Sequence

from drmas.config.tasks import ReasoningGymData
from drmas.core.names import expected_names
from drmas.errors import ConfigError, DataError
from drmas.types import Task


class GymTasks(Sequence[Task]):
    """`config.size` tasks of the generator `config.name`; task i is a function of (settings, i) alone.

    ConfigError: no such generator, or it refuses its options.
    """

    def __init__(self, config: ReasoningGymData) -> None:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS

        if config.name not in DATASETS:
            raise ConfigError(f"data.name is {config.name!r}; {expected_names(config.name, DATASETS)}")
        self._name = config.name
        try:
            self._dataset = create_dataset(config.name, seed=config.seed, size=config.size, **config.options)
        except (TypeError, ValueError, AssertionError) as error:
            # its settings are dataclasses that check themselves with assert; an unknown option is a TypeError
            raise ConfigError(f"data.options {config.options} don't fit the generator {config.name}: {error}") from error

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._dataset[index]
        answer = entry["answer"]
        if not isinstance(answer, str):
            raise DataError(
                f"data.name {self._name}: task {index} has the answer {answer!r}; expected text; this generator scores answers "
                f"by a rule of its own, choose another"
            )
        return Task(f"{self._name}/{index}", entry["question"], answer, self._name, {"metadata": entry.get("metadata", {})})
