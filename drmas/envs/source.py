"""Tasks in a seeded, endless order, for the data types of `drmas.config.tasks`: shuffled, mixed, and by success rates if asked.

The controller takes a step's tasks with `take`, tells of finished groups with `report`, and keeps `state()` in its checkpoint.
Every task is a function of the seed, the number of tasks before it and the reports before it, so that a resumed run reads on
where it stopped or refuses (I9).

    source = TaskSource(config.data, seed=config.seed, curriculum=config.curriculum)
    for task in source.take(8): source.report(task, [1.0, 0.0, 0.0, 1.0])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drmas.config.tasks import CurriculumConfig, DataConfig
from drmas.envs.curriculum import BySuccess, InOrder
from drmas.envs.mix import Rota
from drmas.envs.tasks import fingerprint, parts_of
from drmas.errors import CheckpointError
from drmas.types import Task


class TaskSource:
    """The tasks of `data` in an order by `seed`; each part of a mix has an order, and success rates, of its own."""

    def __init__(self, data: DataConfig, *, seed: int, curriculum: CurriculumConfig | None = None) -> None:
        """DataError or ConfigError if there are no such tasks."""
        self._parts = parts_of(data)
        self._rota = Rota([part.weight for part in self._parts])
        rule = curriculum if curriculum is not None and curriculum.enabled else None
        self._identity = {
            "seed": seed,
            "tasks": fingerprint(self._parts),
            "curriculum": rule.model_dump(exclude={"enabled"}) if rule else None,
        }
        self._draws: list[InOrder | BySuccess] = []
        for part in self._parts:
            key = f"{seed}/{part.name}" if part.name else str(seed)
            size = len(part.tasks)
            self._draws.append(BySuccess(size, key, rule) if rule else InOrder(size, key))
        self._out: dict[str, tuple[int, int]] = {}
        self._reported: dict[str, tuple[int, float]] = {}
        """Since `stats` was last asked: source -> groups, and the sum of their success rates."""

    def __len__(self) -> int:
        """Tasks in all: of one epoch, where nothing is mixed."""
        return sum(len(part.tasks) for part in self._parts)

    def examples(self) -> list[Task]:
        """The first task of each source, for checks at start; none is taken."""
        found: dict[str, Task] = {}
        for part in self._parts:
            one_source = part.name or hasattr(part.tasks, "fingerprint")  # a part of a mix, or a generator's
            for index in range(1 if one_source else len(part.tasks)):
                task = part.task(index)
                found.setdefault(task.source, task)
        return list(found.values())

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks. A task that comes again has in its id how often it came (`train/7@1`), so that a task that
        comes twice in one step is two groups."""
        return [self._next() for _ in range(count)]

    def report(self, task: Task, rewards: Sequence[float]) -> None:
        """The rewards of a finished group, of those of its episodes that have one.

        A curriculum needs it of every group, also of one that failed whole (no rewards): until then the task isn't drawn by its
        success rate again. The success rate is the mean of the rewards, each brought into 0 to 1. ValueError: under a
        curriculum, `task` wasn't taken, or was reported before.
        """
        success = sum(min(max(reward, 0.0), 1.0) for reward in rewards) / len(rewards) if rewards else None
        if success is not None:
            groups, total = self._reported.get(task.source, (0, 0.0))
            self._reported[task.source] = (groups + 1, total + success)
        if self._identity["curriculum"] is None:
            return
        if task.id not in self._out:
            raise ValueError(f"the task {task.id} is reported, and no such task is out; expected each taken task once")
        part, index = self._out.pop(task.id)
        self._draws[part].report(index, success)

    def stats(self) -> dict[str, float]:
        """Of the groups reported since the last call, by source: their mean success rate, and their share of all.

        Example: {"data/maths/success_rate": 0.4, "data/maths/share": 0.75, ...}
        """
        in_all = sum(groups for groups, _ in self._reported.values())
        found = {}
        for source, (groups, total) in sorted(self._reported.items()):
            prefix = f"data/{source.replace('/', '-')}" if source else "data"
            found |= {f"{prefix}/success_rate": total / groups, f"{prefix}/share": groups / in_all}
        self._reported.clear()
        return found

    def state(self) -> dict[str, Any]:
        """Where the source stands, as JSON; for `restore`."""
        out = {name: list(place) for name, place in self._out.items()}
        parts = [draws.state() for draws in self._draws]
        return {**self._identity, "draws": list(self._rota.counts), "parts": parts, "out": out}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`. CheckpointError if it was taken from other tasks, another seed or another curriculum."""
        for key, mine in self._identity.items():
            if (theirs := state.get(key)) != mine:
                raise CheckpointError(
                    f"the checkpoint's task source has {key} {theirs}, this run's has {mine}; resume with the data, the "
                    f"curriculum and the seed of the checkpoint's config.json, or start a new run"
                )
        self._rota.counts = list(state["draws"])
        for draws, theirs in zip(self._draws, state["parts"], strict=True):
            draws.restore(theirs)
        self._out = {name: (part, index) for name, (part, index) in state["out"].items()}

    def _next(self) -> Task:
        part = self._rota.next()
        index, repeat = self._draws[part].next()
        task = self._parts[part].task(index)
        if repeat:
            task = replace(task, id=f"{task.id}@{repeat}")
        if self._identity["curriculum"] is not None:
            self._out[task.id] = (part, index)
        return task
