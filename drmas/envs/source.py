"""Tasks in a seeded, shuffled, endless order, for the data types of `drmas.config.tasks`.

The controller takes a step's tasks with `take`, and keeps `state()` in its checkpoint. Each epoch has an order of its own; both
are functions of (seed, epoch), so that a resumed run reads on where it stopped or refuses (I9).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from drmas.config.tasks import DataConfig, JsonlData, ReasoningGymData
from drmas.envs.generated import GymTasks
from drmas.envs.jsonl import read_jsonl
from drmas.errors import CheckpointError
from drmas.types import Task


class TaskSource:
    """The tasks of `data`, shuffled anew in every epoch by `seed`."""

    def __init__(self, data: DataConfig, *, seed: int) -> None:
        """DataError or ConfigError if there are no such tasks."""
        self._tasks, self._fingerprint = _open(data)
        self._seed = seed
        self._taken = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        """Tasks in an epoch."""
        return len(self._tasks)

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks. From the second epoch on the id ends in the epoch's number (`train/7@1`), so that a task that
        comes twice in one step is two groups."""
        return [self._next() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Where the source stands; for `restore`."""
        return {"taken": self._taken, "seed": self._seed, "tasks": self._fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`. CheckpointError if it was taken from other tasks or another seed."""
        for key, mine in (("seed", self._seed), ("tasks", self._fingerprint)):
            if state[key] != mine:
                raise CheckpointError(
                    f"the checkpoint's task source has {key} {state[key]}, this run's has {mine}; resume with the data and the "
                    f"seed of the checkpoint's config.json, or start a new run"
                )
        self._taken = state["taken"]

    def _next(self) -> Task:
        epoch, position = divmod(self._taken, len(self._tasks))
        if self._order[0] != epoch:
            order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        self._taken += 1
        task = self._tasks[self._order[1][position]]
        if epoch == 0:
            return task
        return Task(f"{task.id}@{epoch}", task.question, task.truth, task.source, task.extra)


def _open(data: DataConfig) -> tuple[Sequence[Task], str]:
    """The tasks, and a fingerprint that changes when they do."""
    if isinstance(data, JsonlData):
        tasks: Sequence[Task] = read_jsonl(data.path)
        content: list[Any] = [[task.id, task.question, task.truth] for task in tasks]
    else:
        # generated tasks are a function of their settings
        tasks = GymTasks(data) if isinstance(data, ReasoningGymData) else _sums(data)
        content = [data.model_dump(mode="json")]
    return tasks, blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def _sums(data: Any) -> Sequence[Task]:
    from drmas.envs.sums import sums_tasks

    return sums_tasks(data)
