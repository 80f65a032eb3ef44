"""The collector: runs the team on tasks, `group_size` times each, and grades what comes out.

    tasks x samples -> slots -> team.run (agents -> gate -> engines) -> reward -> episodes, in the order of the tasks

Episodes are coroutines with no barrier between turns; engines batch across agents and episodes. An episode that fails is
recorded with its kind and costs its siblings nothing (I3). The collector doesn't retry: the controller restarts what died and
collects again, only those episodes. It knows nothing of training.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents, Calls
from drmas.agents.chat import ChatRenderer
from drmas.agents.team import TeamConfig
from drmas.config.schema import RolloutConfig
from drmas.core.seeds import sample_seed
from drmas.errors import EngineDied, EngineError, EngineTimeout
from drmas.rollout.engine import Completion, Engine, Sampling
from drmas.rollout.gate import Gate
from drmas.telemetry.trace import span
from drmas.types import Episode, Failure, FailureKind, Task

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""How long deterministic engines wait for an episode that awaits something else; less where episodes are given little time."""

Reward = Callable[[Task, str | None], Awaitable[float]]
"""Scores a team's answer; `drmas.envs.rewards` makes them. Raising means "couldn't be graded", never a bad answer."""


class Collector:
    """Collects the episodes of a step. `engines` and `tokenizers` are by policy; `seed` is the run's."""

    def __init__(
        self,
        team: TeamConfig,
        engines: Mapping[str, Engine],
        tokenizers: Mapping[str, Any],
        reward: Reward,
        config: RolloutConfig,
        *,
        seed: int,
    ) -> None:
        self.team = team
        self.engines = dict(engines)
        self.renderers = {policy: ChatRenderer(tokenizer) for policy, tokenizer in tokenizers.items()}
        self.reward = reward
        self.config = config
        self.seed = seed

    def collect(
        self,
        tasks: Sequence[Task],
        *,
        step: int,
        only: Iterable[tuple[int, int]] | None = None,
        on_progress: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """One episode per (task, sample), in that order; with `only`, one per (task index, sample) of it, in its order.

        Blocks until all have a reward or a failure. `on_progress` gets each episode when it is done. An episode's seeds depend
        on nothing but the run's seed, the step and its own place, so that collecting one again gives it the same ones (I9).

        ValueError: two tasks with one id, or one episode twice. What a scripted rule or `on_progress` raises goes through;
        trouble of a single episode never does.
        """
        cells = [(i, k) for i in range(len(tasks)) for k in range(self.config.group_size)] if only is None else list(only)
        if len({tasks[index].id for index, _ in cells}) < len({index for index, _ in cells}) or len(set(cells)) < len(cells):
            raise ValueError("two of the episodes have the same task id and sample; expected distinct ones (I4)")
        rollout = _Rollout(self, step, on_progress)
        return asyncio.run(rollout.run([(tasks[index], sample) for index, sample in cells]))


class _Rollout:
    """One `collect`: its event loop, its gate and its slots."""

    def __init__(self, collector: Collector, step: int, on_progress: Callable[[Episode], None] | None) -> None:
        self._collector = collector
        self._step = step
        self._on_progress = on_progress
        patience = min(PATIENCE_SECONDS, 0.1 * collector.config.episode_timeout_seconds)
        self._gate = Gate(collector.engines, deterministic=collector.config.deterministic, patience_seconds=patience)
        self._grading: list[asyncio.Task[None]] = []

    async def run(self, cells: list[tuple[Task, int]]) -> list[Episode]:
        episodes = [Episode(task=task, sample=sample) for task, sample in cells]
        waiting = deque(episodes)
        slots = min(len(episodes), self._collector.config.max_concurrent_episodes)
        gate = asyncio.create_task(self._gate.run()) if self._collector.config.deterministic else None
        workers = [asyncio.create_task(self._slot(waiting)) for _ in range(slots)]
        try:
            await _all_unless(workers, gate)
            await asyncio.gather(*self._grading)
        finally:
            await _cancelled([*workers, *self._grading, *([gate] if gate else [])])
        return episodes

    async def _slot(self, waiting: deque[Episode]) -> None:
        """Play episodes one after the other. The next one is live before the gate can see a gap; grading needs no slot."""
        while waiting:
            episode = waiting.popleft()
            self._gate.enter(episode.id)
            try:
                await self._play(episode)
            finally:
                self._gate.leave(episode.id)
            self._grading.append(asyncio.create_task(self._finish(episode)))

    async def _play(self, episode: Episode) -> None:
        """Run the team; sets the answer, or the failure."""
        started = time.perf_counter()
        calls = Calls(
            self._collector.team.agents,
            self._collector.renderers,
            self._speaker(episode.id),
            episode,
            lambda agent, turn: sample_seed(self._collector.seed, self._step, episode.task.id, episode.sample, agent, turn),
        )
        limit = self._collector.config.episode_timeout_seconds
        try:
            async with asyncio.timeout(limit) as deadline:
                answer = await self._collector.team.run(episode.task, Agents(calls))
            if answer is None or isinstance(answer, str):
                episode.answer = answer
            else:
                _fail(episode, "team", f"`run` returned {type(answer).__name__}; expected str or None")
        except asyncio.CancelledError as error:
            if _being_cancelled():
                raise
            _fail(episode, "team", self._said(error))
        except Exception as error:  # the boundary to the user's code: whatever it raises fails this episode alone
            if deadline.expired():
                _fail(episode, "timeout", f"not done after rollout.episode_timeout_seconds = {limit:g}")
            else:
                _fail(episode, "team", self._said(error))
        finally:
            await calls.close()
            episode.seconds = time.perf_counter() - started
        if calls.engine_error is not None:
            _fail(
                episode, "engine", str(calls.engine_error), transient=isinstance(calls.engine_error, EngineDied | EngineTimeout)
            )

    async def _finish(self, episode: Episode) -> None:
        """Grade the answer of an episode that didn't fail, and report."""
        if episode.failure is None:
            try:
                with span("grade", episode=episode.id):
                    reward = float(await self._collector.reward(episode.task, episode.answer))
            except Exception as error:  # the boundary to graders, which may be the user's: trouble is never a reward of 0 (I3)
                _fail(episode, "grader", str(error) or type(error).__name__)
            else:
                if math.isfinite(reward):
                    episode.reward = reward
                else:
                    _fail(episode, "grader", f"the reward is {reward}; expected a finite number")
        if episode.failure is not None:
            first_line = episode.failure.message.partition("\n")[0]
            logger.warning("episode %s failed (%s): %s", episode.id, episode.failure.kind, first_line)
        if self._on_progress is not None:
            self._on_progress(episode)

    def _said(self, error: BaseException) -> str:
        """The error, and the line of the team's own file that it came through."""
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(type(self._collector.team).__module__), "__file__", None)
        own = [frame for frame in frames if frame.filename == file] or frames
        return f"{type(error).__name__}: {error} ({own[-1].filename}:{own[-1].lineno})"

    def _speaker(self, episode: str) -> Callable[..., Awaitable[Completion]]:
        """What the episode's agents ask: the engine of their policy, through the gate."""

        async def generate(agent: AgentConfig, prompt_ids: Sequence[int], *, seed: int, key: str) -> Completion:
            most = self._collector.engines[agent.policy].max_model_tokens
            if len(prompt_ids) + agent.max_tokens > most:
                raise EngineError(
                    f"{key}: the prompt has {len(prompt_ids)} tokens and max_tokens is {agent.max_tokens}; together at most "
                    f"{most} (policies.{agent.policy}.engine.max_model_tokens)"
                )
            sampling = Sampling(max_tokens=agent.max_tokens, temperature=agent.temperature, stop=agent.stop)
            return await self._gate.generate(agent.policy, episode, prompt_ids, sampling, seed=seed, key=key)

        return generate


def _fail(episode: Episode, kind: FailureKind, message: str, *, transient: bool = False) -> None:
    episode.failure = Failure(kind, message, transient)
    episode.answer = episode.reward = None


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _all_unless(workers: list[asyncio.Task[None]], gate: asyncio.Task[None] | None) -> None:
    """Until all workers are done; raises what one of them, or the gate, raised."""
    left: set[asyncio.Task[None]] = set(workers)
    while left:
        done, _ = await asyncio.wait(left | ({gate} if gate else set()), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        left -= done


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
