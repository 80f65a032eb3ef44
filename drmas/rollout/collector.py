"""The collector: keeps episodes running, `group_size` per task and those of its probes, while somebody else trains.

    submit(rollouts) -> slots -> the player runs each episode -> its Rollout is done
    wait(until)   <- the trainer's thread: until what it needs is done, or an engine is dead and must be brought back

Episodes are coroutines in one event loop, in a thread of its own, with no barrier between turns; engines batch across agents,
episodes and rollouts. An episode that fails is recorded with its kind and costs its siblings nothing (I3). It knows nothing of
training; the feed decides what is submitted, the driver restarts what died.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drmas.agents.agent import AgentConfig
from drmas.agents.chat import ChatRenderer
from drmas.agents.team import TeamConfig
from drmas.agents.tools import Toolbox
from drmas.config.schema import RolloutConfig
from drmas.core.estimators.base import Probe
from drmas.errors import EngineError, RolloutError, ToolError
from drmas.rollout.engine import Engine, Sampling
from drmas.rollout.gate import Gate
from drmas.rollout.loop_thread import LoopThread
from drmas.rollout.player import Player, RemoteModel, Reward
from drmas.types import Episode, Task

PATIENCE_SECONDS = 10.0
"""How long deterministic engines wait for an episode that awaits something else; less where episodes are given little time."""


@dataclass
class Rollout:
    """Episodes that are waited for together; each is whole once `left` doesn't count it any more."""

    episodes: list[Episode]
    step: int
    """Decides their seeds, with the run's own, the task and the sample (I9)."""
    on_progress: Callable[[Episode], None] | None = None
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.episodes)

    @property
    def done(self) -> bool:
        return self.left == 0


class Collector:
    """Runs episodes. `engines` and `tokenizers` are by policy; `seed` is the run's.

    `start` and `close` open and close what the episodes need; a `with` statement does both. Methods are called from one thread,
    which isn't the loop's.
    """

    def __init__(
        self,
        team: TeamConfig,
        engines: Mapping[str, Engine],
        tokenizers: Mapping[str, Any],
        reward: Reward,
        config: RolloutConfig,
        *,
        seed: int,
        tools: Toolbox | None = None,
        remotes: Mapping[str, RemoteModel] | None = None,
        sampling: Callable[[AgentConfig], Sampling] | None = None,
        probes: Sequence[Probe] = (),
    ) -> None:
        """`sampling`: how an agent samples, where that isn't as its configuration has it (for evaluations). `probes`: whose
        episodes run beside each group."""
        self.team, self.config, self.tools, self.remotes = team, config, tools, dict(remotes or {})
        self.probes = {probe.name: probe for probe in probes}
        self._gate = Gate(
            engines,
            deterministic=config.deterministic,
            patience_seconds=min(PATIENCE_SECONDS, 0.1 * config.episode_timeout_seconds),
            turn_timeout_seconds=config.turn_timeout_seconds,
            on_death=self._tell,
        )
        self._player = Player(
            team,
            self._gate,
            {policy: ChatRenderer(tokenizer) for policy, tokenizer in tokenizers.items()},
            {policy: engine.max_model_tokens for policy, engine in engines.items()},
            reward,
            config,
            seed=seed,
            tools=tools,
            remotes=self.remotes,
            sampling=sampling,
            probes=self.probes,
        )
        self._loop = LoopThread("rollout")
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        # the rest is the loop's own
        self._waiting: deque[tuple[Rollout, Episode]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = 0
        self._stepping: asyncio.Task[None] | None = None
        self._running: set[str] = set()

    def start(self) -> None:
        """Connect to tools and remote models.

        RolloutError: one of them can't be used. ConfigError: an agent names a tool that its server doesn't have.
        """
        try:
            for opened in (self.tools, *self.remotes.values()):
                if opened is not None:
                    self._loop.run(opened.start())
            for agent in self.team.agents.values() if self.tools is not None else ():
                self.tools.specs(agent.tools)
        except BaseException as error:
            self.close()
            if isinstance(error, ToolError | EngineError):
                raise RolloutError(str(error)) from error
            raise

    def close(self) -> None:
        """Cancel what runs and close tools and remote models; harmless when repeated."""
        if self._loop.closed:
            return
        self._loop.call(self._cancel)
        for opened in (self.tools, *self.remotes.values()):
            if opened is not None:
                self._loop.run(opened.close())
        self._loop.close()

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def collect(
        self,
        tasks: Sequence[Task],
        *,
        step: int,
        on_progress: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """`group_size` episodes per task, and those of its probes, in the order of the tasks; waits for all of them.

        `on_progress` gets each episode when it is done. What needs an engine that died fails, as nobody brings it back
        meanwhile. ValueError: two tasks with one id.
        """
        rollout = self.rollout(tasks, step=step, on_progress=on_progress)
        self.submit([rollout])
        while not self.wait(lambda: rollout.done):
            for policy in self.dead:
                self._loop.run(_do(self._gate.give_up, policy))
        return rollout.episodes

    @property
    def episodes_per_task(self) -> int:
        """Those of its group and of its probes."""
        return self.config.group_size + sum(probe.episodes for probe in self.probes.values())

    def rollout(
        self,
        tasks: Sequence[Task],
        *,
        step: int,
        on_progress: Callable[[Episode], None] | None = None,
    ) -> Rollout:
        """The episodes that `collect` would run, for `submit`.

        An episode's seeds depend on nothing but the run's seed, the step and its own place, so that running one again gives it
        the same ones (I9).
        """
        if len({task.id for task in tasks}) < len(tasks):
            raise ValueError("two of the tasks have the same id; expected distinct ones (I4)")
        names = [probe.name for probe in self.probes.values() for _ in range(probe.episodes)]
        episodes: list[Episode] = []
        for task in tasks:
            episodes += [Episode(task, sample) for sample in range(self.config.group_size)]
            episodes += [Episode(task, -1 - number, probe=name) for number, name in enumerate(names)]
        return Rollout(episodes, step, on_progress)

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Start rollouts, all at once: engines don't step between them."""
        self._loop.call(self._start, list(rollouts))

    def wait(self, until: Callable[[], bool]) -> bool:
        """Until `until()` holds, which is looked at whenever a rollout is done: True; or until an engine is dead: False.

        Raises what a scripted rule or `on_progress` raised; trouble of a single episode never comes through here.
        """
        with self._changed:
            while True:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if until():
                    return True
                if self.dead:
                    return False
                self._changed.wait()

    def cause_of_death(self, policy: str) -> str:
        """Why the policy's engine died, in a line; empty where no request noticed."""
        return self._gate.cause_of_death(policy)

    def hold(self, policy: str) -> None:
        """Nothing asks the policy's engine until `revive`, though it may be alive: it hasn't the right weights yet."""
        self._loop.run(_do(self._gate.hold, policy))

    def revive(self, policy: str) -> None:
        """The policy's engine serves again, with the weights that it should have: what waited for it goes on."""
        self._loop.run(_do(self._gate.revive, policy))

    @property
    def dead(self) -> set[str]:
        """The policies whose engine has died under a request, and that weren't revived yet."""
        return self._gate.dead

    # in the loop

    def _start(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            for episode in rollout.episodes:
                if episode.id in self._running:
                    self._end(ValueError(f"episode {episode.id} is submitted while it runs; expected distinct ones (I4)"))
                    return
                self._running.add(episode.id)
                self._waiting.append((rollout, episode))
        for _ in range(min(self.config.max_concurrent_episodes - self._slots, len(self._waiting))):
            self._slots += 1
            self._spawn(self._slot())
        if self.config.deterministic and self._stepping is None:
            self._stepping = self._spawn(self._gate.run())

    async def _slot(self) -> None:
        """Play episodes one after the other. The next one is live before the gate can see a gap; grading needs no slot."""
        try:
            while self._waiting:
                rollout, episode = self._waiting.popleft()
                self._gate.enter(episode.id)
                try:
                    await self._player.play(episode, rollout.step)
                finally:
                    self._gate.leave(episode.id)
                self._spawn(self._finish(rollout, episode))
        finally:
            self._slots -= 1

    async def _finish(self, rollout: Rollout, episode: Episode) -> None:
        await self._player.grade(episode)
        self._running.discard(episode.id)
        if rollout.on_progress is not None:
            rollout.on_progress(episode)
        rollout.left -= 1
        if rollout.done:
            self._tell()

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """A fault that isn't an episode's own: everything stops, and `wait` raises it."""
        self._cancel()
        self._error = self._error or error
        self._tell()

    def _cancel(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._stepping = None
        for task in self._tasks:
            task.cancel()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


async def _do(function: Callable[..., object], *arguments: Any) -> None:
    function(*arguments)
