"""The tasks behind a `data` section, by its type. Called by `source`, which orders them, and by who wants all of them.

To add a type: a section in `drmas.config.tasks`, a reader that gives a list of tasks, a line in `_leaf`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from drmas.config.tasks import (
    DataConfig,
    FactsData,
    HuggingFaceData,
    JsonlData,
    LookupsData,
    MixData,
    ParquetData,
    ReasoningGymData,
    SumsData,
)
from drmas.types import Task


@dataclass(frozen=True)
class Part:
    """One source of tasks: the only one, with the name "", or one of a mix.

    Example: Part(name="maths", weight=2.0, tasks=tasks)
    """

    name: str
    weight: float
    tasks: Sequence[Task]

    def task(self, index: int) -> Task:
        """In a mix a task's id starts with its part's name, which is its source too."""
        task = self.tasks[index]
        return replace(task, id=f"{self.name}/{task.id}", source=self.name) if self.name else task


def parts_of(data: DataConfig) -> list[Part]:
    """The sources of `data`, in the order of the configuration. DataError or ConfigError if there are no such tasks."""
    if isinstance(data, MixData):
        return [Part(name, part.weight, _leaf(part.data)) for name, part in data.parts.items()]
    return [Part("", 1.0, _leaf(data))]


def open_tasks(data: DataConfig) -> list[Task]:
    """All tasks of `data` once, in their own order; of a mix one part after the other, whatever the shares."""
    return [part.task(index) for part in parts_of(data) for index in range(len(part.tasks))]


def fingerprint(parts: Sequence[Part]) -> str:
    """Changes when the tasks or their shares do: a hash of all of them; of generated ones, of their settings and a few."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(json.dumps([part.name, part.weight if len(parts) > 1 else 1.0]).encode())
        settings = getattr(part.tasks, "fingerprint", None)
        digest.update(json.dumps(settings).encode())
        for index in range(len(part.tasks) if settings is None else min(_FIRST, len(part.tasks))):
            task = part.tasks[index]
            digest.update(json.dumps([task.id, task.question, task.truth, task.extra.get("answers")]).encode())
    return digest.hexdigest()


_FIRST = 4
"""Generated tasks that are looked at: enough to see that they are others than before."""


def _leaf(data: DataConfig) -> Sequence[Task]:
    if isinstance(data, JsonlData):
        from drmas.envs.jsonl import read_jsonl

        return read_jsonl(data.path)
    if isinstance(data, ParquetData):
        from drmas.envs.parquet import read_parquet

        return read_parquet(data.path)
    if isinstance(data, HuggingFaceData):
        from drmas.envs.hub import read_huggingface

        return read_huggingface(data)
    if isinstance(data, ReasoningGymData):
        from drmas.envs.generated import GymTasks

        return GymTasks(data)
    if isinstance(data, FactsData):
        from drmas.envs.facts import questions

        return questions(data)
    if isinstance(data, LookupsData):
        from drmas.envs.lookups import lookup_tasks

        return lookup_tasks(data)
    assert isinstance(data, SumsData)
    from drmas.envs.sums import sums_tasks

    return sums_tasks(data)
