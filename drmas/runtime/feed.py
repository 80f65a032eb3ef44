"""The feed: which groups of episodes are on their way, and which of them make up a step.

    source -> launch -> [ group | group | ... ] -> those that are done and teach something -> a step's groups
                          in flight or waiting

On-policy, a step's groups are launched when the step begins and all are waited for. With `max_staleness` the next steps' groups
run while a step is trained: the feed never has more of them on their way than may still be taken in time, and waits for those
that would be too stale a step later. With `carry_over` a step takes the groups that are done and leaves slow ones in flight.
Dynamic sampling drops groups whose rewards are all equal and launches fresh tasks in their place. Called by the driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from drmas.config.schema import RolloutConfig
from drmas.envs.source import TaskSource
from drmas.rollout.collector import Collector, Rollout
from drmas.types import Episode, Failure, Task, ToolUse, Turn


@dataclass
class Group:
    """The episodes of one task and of its probes, which come and go together. `step` is the one with whose weights they were
    launched; it decides their seeds, too."""

    task: Task
    step: int
    rollout: Rollout

    @property
    def done(self) -> bool:
        return self.rollout.done

    @property
    def episodes(self) -> list[Episode]:
        """Those that are trained on, without the probes'."""
        return [episode for episode in self.rollout.episodes if episode.probe is None]

    def teaches(self) -> bool:
        """Whether two of its finished episodes were rewarded differently."""
        rewards = {
            (episode.reward, *sorted(episode.agent_rewards.items())) for episode in self.episodes if episode.failure is None
        }
        return len(rewards) > 1


class Feed:
    """`last_step` is the run's last; nothing is launched for steps after it."""

    def __init__(
        self,
        collector: Collector,
        source: TaskSource,
        config: RolloutConfig,
        *,
        last_step: int,
        on_progress: Callable[[Episode], None] | None = None,
    ) -> None:
        self._collector, self._source, self._config, self._last_step = collector, source, config, last_step
        self._on_progress = on_progress
        self._groups: list[Group] = []
        self._unlaunched: list[Rollout] = []
        self._round: tuple[int, int] = (0, 0)  # a step, and how often tasks were launched for it
        self.dropped = 0
        """Groups that taught nothing, or were left over for too long, so far."""

    @property
    def in_flight(self) -> int:
        """Groups that were launched and aren't done."""
        return sum(not group.done for group in self._groups) - len(self._unlaunched)

    @property
    def ahead(self) -> int:
        """Groups on their way, done or not."""
        return len(self._groups)

    def take(self, step: int) -> list[Group] | None:
        """The groups of `step`, in the order in which they were launched; None where an engine is dead: call again when it is
        back. Then comes `accept`, or `put_back`."""
        if self._round[0] != step:
            self._round = (step, 1)
            self._drop(lambda group: step - group.step > self._config.max_staleness)
            ahead = min(self._config.max_staleness, self._last_step - step) if self._config.carry_over else 0
            self._launch(step, self._missing(ahead=ahead))
        while True:
            if not self._collector.wait(lambda: self._ready(step)):
                return None
            if self._round[1] == self._tries:
                break
            self._drop(lambda group: group.done and not group.teaches())
            if len(self._choose()) == self._config.tasks_per_step:
                break
            if missing := self._missing(ahead=0):
                self._round = (step, self._round[1] + 1)
                self._launch(step, missing)
        taken = self._choose()
        chosen = {id(group) for group in taken}
        self._groups = [group for group in self._groups if id(group) not in chosen]
        return taken

    def accept(self, step: int, taken: Sequence[Group]) -> None:
        """`step` is trained with `taken`: the source hears of their rewards, and what may run meanwhile is launched."""
        for group in taken:
            self._report(group)
        ahead = min(self._config.max_staleness, self._last_step - step)
        if ahead > 0:
            self._launch(step, self._missing(ahead=ahead - 1))

    def settle(self) -> bool:
        """Wait until nothing is in flight. False where an engine is dead: call again when it is back."""
        return self._collector.wait(lambda: self.in_flight == 0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: where the source stands, and the groups on their way, with the episodes of those that are
        done."""
        groups = [
            {
                "task": asdict(group.task),
                "step": group.step,
                "episodes": [_saved(episode) for episode in group.rollout.episodes] if group.done else None,
            }
            for group in self._groups
        ]
        return {"source": self._source.state(), "groups": groups}

    def put_back(self, groups: Sequence[Group]) -> None:
        """Have `groups` on their way again from their start, as the next step's first, as before they were taken."""
        fresh = [self._unstarted(group.task, group.step) for group in groups]
        self._unlaunched = [*(group.rollout for group in fresh), *self._unlaunched]
        self._groups = [*fresh, *self._groups]

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`: the next `take` launches groups that weren't done again, with the seeds that they had."""
        self._source.restore(state["source"])
        for saved in state["groups"]:
            task, step = Task(**saved["task"]), saved["step"]
            if saved["episodes"] is None:
                group = self._unstarted(task, step)
                self._unlaunched.append(group.rollout)
            else:
                group = Group(task, step, Rollout([_restored(task, episode) for episode in saved["episodes"]], step))
                group.rollout.left = 0
            self._groups.append(group)

    def _unstarted(self, task: Task, step: int) -> Group:
        return Group(task, step, self._collector.rollout([task], step=step, on_progress=self._on_progress))

    @property
    def _tries(self) -> int:
        return self._config.dynamic.max_tries if self._config.dynamic.enabled else 1

    def _missing(self, *, ahead: int) -> int:
        """Groups to launch so that there are enough for a step and `ahead` more."""
        return max(0, self._config.tasks_per_step * (1 + ahead) - len(self._groups))

    def _launch(self, step: int, count: int) -> None:
        if self._config.dynamic.enabled:
            count = math.ceil(count * self._config.dynamic.oversample)
        fresh = [self._unstarted(task, step) for task in self._source.take(count)]
        waiting, self._unlaunched = self._unlaunched, []
        self._collector.submit([*waiting, *(group.rollout for group in fresh)])
        self._groups += fresh

    def _ready(self, step: int) -> bool:
        """Whether `step` can be taken: it has enough groups, and those it leaves can all be taken in time by later steps."""
        if self.in_flight == 0:
            return True
        if not self._config.carry_over:
            return False
        size, ahead = self._config.tasks_per_step, self._config.max_staleness
        chosen = {id(group) for group in self._choose()}
        left = [step - group.step for group in self._groups if id(group) not in chosen]
        return len(chosen) == size and all(
            sum(age + later >= ahead for age in left) <= later * size for later in range(ahead + 1)
        )

    def _drop(self, useless: Callable[[Group], bool]) -> None:
        dropped = [group for group in self._groups if useless(group)]
        for group in dropped:
            self._report(group)
        gone = {id(group.rollout) for group in dropped}
        self._groups = [group for group in self._groups if id(group.rollout) not in gone]
        self._unlaunched = [rollout for rollout in self._unlaunched if id(rollout) not in gone]
        self.dropped += len(dropped)

    def _choose(self) -> list[Group]:
        """A step's groups: those that teach something first, else in the order of their launch; returned in that order."""
        done = [group for group in self._groups if group.done]
        if self._config.dynamic.enabled:
            done.sort(key=lambda group: not group.teaches())
        chosen = {id(group) for group in done[: self._config.tasks_per_step]}
        return [group for group in self._groups if id(group) in chosen]

    def _report(self, group: Group) -> None:
        self._source.report(group.task, [episode.reward for episode in group.episodes if episode.reward is not None])


def mark_stale(
    groups: Sequence[Group], bounds: Mapping[str, int], versions: Mapping[str, int], *, versions_per_step: int
) -> None:
    """Mark the turns whose oldest token lags further behind its policy's version than its agent may, in steps."""
    for group in groups:
        for episode in group.episodes:
            for turn in episode.turns:
                if turn.versions:
                    lag = versions[turn.policy] - min(turn.versions)
                    turn.stale = lag > bounds[turn.agent] * versions_per_step


def _saved(episode: Episode) -> dict[str, Any]:
    """An episode as JSON; its task stands with the group, and what turns were parsed to has served."""
    saved = {each.name: getattr(episode, each.name) for each in fields(episode) if each.name != "task"}
    saved["turns"] = [
        {each.name: getattr(turn, each.name) for each in fields(turn) if each.name != "parsed"} for turn in episode.turns
    ]
    saved["tool_uses"] = [asdict(use) for use in episode.tool_uses]
    saved["failure"] = asdict(episode.failure) if episode.failure else None
    return saved


def _restored(task: Task, saved: dict[str, Any]) -> Episode:
    turns = [Turn(**turn) for turn in saved["turns"]]
    uses = [ToolUse(**use) for use in saved["tool_uses"]]
    failure = Failure(**saved["failure"]) if saved["failure"] else None
    return Episode(task=task, **(saved | {"turns": turns, "tool_uses": uses, "failure": failure}))
