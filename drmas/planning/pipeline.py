"""Whole training steps in virtual time: rollouts, updates and weight syncs, on-policy, a step ahead, or carried over.

    for each step:   feed.take -> (feed.accept) -> train -> (settle) -> sync each policy -> the rest

The order is the controller's, and which groups a step takes, waits for or leaves in flight is decided by the run's own `Feed`,
which drives a simulated collector here: what is simulated can't drift from what runs. Dynamic sampling is off: which groups
would teach nothing isn't known. Called by `growth`, `validation` and `drmas plan`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy

from drmas.config.schema import DynamicSamplingConfig, RolloutConfig
from drmas.errors import ConfigError
from drmas.planning.simulation import Simulation
from drmas.planning.types import Engines, Workload
from drmas.planning.workload import Chains, Group, Source
from drmas.rollout.collector import Rollout as Submitted
from drmas.runtime.feed import Feed
from drmas.types import Episode, Task

_DRAWN = 256
"""Groups drawn at a time."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds of a step beside its rollout."""

    train: float
    """Scoring and updates, of a step with as many tokens as the workload has on the mean; others take as much more or less."""
    sync: Mapping[str, float]
    """By policy, in the order of their pushes."""
    other: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `rollout`: what was waited for; `lag_*`: steps between the launch of the groups that it took and itself."""

    rollout: float
    train: float
    sync: float
    other: float
    tokens: int
    lag_mean: float
    lag_max: int
    busy: Mapping[str, float]
    """Policy -> seconds in which its engines had work, on the mean over replicas."""

    @property
    def seconds(self) -> float:
        return self.rollout + self.train + self.sync + self.other


@dataclass(frozen=True, slots=True)
class Steady:
    """The mean over steps, the first ones left out."""

    seconds: float
    rollout: float
    train: float
    sync: float
    other: float
    tokens: float
    """Prompts' and responses', of the rows of a step."""
    lag_mean: float
    lag_max: int
    engine_idle: Mapping[str, float]
    """Policy -> share of the time in which its engines had nothing to do."""
    trainer_idle: float
    """Share of the time in which nothing is trained."""

    @property
    def bottleneck(self) -> str:
        """What a step spends most of its time on, as its loop sees it: a rollout that hides behind training counts as short."""
        parts = {"rollout": self.rollout, "train": self.train, "sync": self.sync, "other": self.other}
        return max(parts, key=parts.__getitem__)


def simulate_steps(
    workload: Workload,
    engines: Mapping[str, Engines],
    beside: Beside,
    rollout: RolloutConfig,
    *,
    steps: int = 8,
    source: Source | None = None,
    seed: int = 0,
    call_seconds: float = 0.0,
    trainer_shares: bool = False,
) -> list[Step]:
    """The first `steps` steps of a run that goes on after them.

    `rollout` says how far rollouts run ahead and whether they are carried over; tasks and group size are the workload's.
    `trainer_shares` and `call_seconds` as in `Simulation`. ConfigError: a sequence that an engine's KV cache has no room for.
    """
    config = rollout.model_copy(
        update={
            "tasks_per_step": workload.tasks,
            "group_size": workload.group_size,
            "dynamic": DynamicSamplingConfig(),
        }
    )
    simulation = Simulation(
        engines,
        max_concurrent_episodes=workload.max_concurrent_episodes,
        deterministic=config.deterministic,
        call_seconds=call_seconds,
        trainer_shares=trainer_shares,
    )
    collector = _Collector(simulation, workload, _stream(source or Chains(), workload, engines, seed), config.max_staleness)
    feed = Feed(collector, _Tasks(), config, last_step=steps + 2 + config.max_staleness)
    mean_tokens = workload.episodes * sum(
        agent.calls * (agent.prompt_tokens + agent.response.moment(1)) for agent in workload.agents
    )
    settles = config.max_staleness > 0 and not config.carry_over
    found, took = [], 0
    for step in range(1, steps + 1):
        started, busy = simulation.now, {name: simulation.busy_seconds(name) for name in engines}
        collector.step = step
        taken = feed.take(step)
        took += len(taken)
        collector.gone(took + feed.dropped)
        rolled = simulation.now
        feed.accept(step, taken)
        tokens = sum(collector.tokens.pop(group.task.id) for group in taken)
        simulation.train(beside.train * tokens / mean_tokens if mean_tokens else 0.0)
        trained = simulation.now
        if settles:
            feed.settle()
        waited = simulation.now - trained
        for name, seconds in beside.sync.items():
            simulation.hold(name)
            simulation.wait(seconds)
            simulation.release(name)
        simulation.wait(beside.other)
        lags = [step - group.step for group in taken]
        found.append(
            Step(
                rollout=rolled - started + waited,
                train=trained - rolled,
                sync=math.fsum(beside.sync.values()),
                other=beside.other,
                tokens=tokens,
                lag_mean=sum(lags) / len(lags),
                lag_max=max(lags),
                busy={name: simulation.busy_seconds(name) - before for name, before in busy.items()},
            )
        )
    return found


def steady(steps: Sequence[Step], *, skip: int = 2) -> Steady:
    """The mean of `steps` after the first `skip`, of all if there are no more."""
    chosen = steps[skip:] or steps
    total = math.fsum(step.seconds for step in chosen)

    def mean(name: str) -> float:
        return math.fsum(getattr(step, name) for step in chosen) / len(chosen)

    return Steady(
        seconds=total / len(chosen),
        rollout=mean("rollout"),
        train=mean("train"),
        sync=mean("sync"),
        other=mean("other"),
        tokens=mean("tokens"),
        lag_mean=mean("lag_mean"),
        lag_max=max(step.lag_max for step in chosen),
        engine_idle={name: 1 - math.fsum(step.busy[name] for step in chosen) / total for name in chosen[0].busy},
        trainer_idle=1 - math.fsum(step.train for step in chosen) / total,
    )


class _Tasks:
    """An endless source of tasks, as far as a feed needs one."""

    def __init__(self) -> None:
        self._numbers = count()

    def take(self, count: int) -> list[Task]:
        return [Task(str(next(self._numbers)), "", "") for _ in range(count)]

    def report(self, task: Task, rewards: Sequence[float]) -> None:
        """Tasks don't depend on how earlier ones went."""


class _Collector:
    """A collector in virtual time, as far as a feed needs one. `tokens`: task -> those of its group's rows; `step`: the one
    that the feed is asked for."""

    def __init__(self, simulation: Simulation, workload: Workload, groups: Iterator[Group], max_staleness: int) -> None:
        self._simulation, self._workload, self._drawn, self._max_staleness = simulation, workload, groups, max_staleness
        self.tokens: dict[str, int] = {}
        self.step = 1
        self._scripts: dict[str, Group] = {}
        self._flying: Counter[int] = Counter()  # by the step of their launch
        self._done = self._gone = 0

    def rollout(self, tasks: Sequence[Task], *, step: int, on_progress: object = None) -> Submitted:
        (task,) = tasks
        group = self._scripts[task.id] = next(self._drawn)
        self.tokens[task.id] = sum([call.prompt + call.response for script in group for call in script])
        return Submitted([Episode(task, sample) for sample in range(len(group))], step)

    def submit(self, rollouts: Sequence[Submitted]) -> None:
        for rollout in rollouts:
            self._flying[rollout.step] += 1
            task = rollout.episodes[0].task.id
            done = self._done_with(rollout)
            for script in self._scripts.pop(task):
                self._simulation.submit(script, task, done)

    def wait(self, until: Callable[[], bool]) -> bool:
        return self._simulation.run(lambda: self._may_hold() and until())

    def _may_hold(self) -> bool:
        """A feed goes through all groups to say that it is ready. It never is while a step's groups aren't done, or one is in
        flight that the next step couldn't take any more; unless nothing is in flight."""
        if self._done - self._gone < self._workload.tasks:
            return not self._flying
        return all(self.step - launched < self._max_staleness for launched in self._flying)

    def gone(self, groups: int) -> None:
        """So many groups have been taken or dropped so far."""
        self._gone = groups

    def _done_with(self, rollout: Submitted) -> Callable[[], None]:
        def done() -> None:
            rollout.left -= 1
            if not rollout.left:
                self._done += 1
                self._flying[rollout.step] -= 1
                if not self._flying[rollout.step]:
                    del self._flying[rollout.step]

        return done


def _stream(source: Source, workload: Workload, engines: Mapping[str, Engines], seed: int) -> Iterator[Group]:
    random = numpy.random.default_rng(seed)
    while True:
        for group in source.groups(workload, _DRAWN, random):
            for call in (call for script in group for call in script):
                tokens, own = call.prompt + call.response, engines.get(call.policy)
                if own is not None and tokens > own.speed.kv_tokens:
                    raise ConfigError(
                        f"the engine of {call.policy} has room for {own.speed.kv_tokens} tokens, {call.agent} a sequence of "
                        f"{tokens}; give policies.{call.policy}.engine more memory or more tensor_parallel"
                    )
            yield group
