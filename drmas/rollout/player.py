"""The player: runs the team on one task, and grades what comes out.

    team.run (agents -> gate -> engines; remote models; tools) -> answer -> reward

Whatever goes wrong fails this episode alone, with its kind (I3). Called by the collector, in its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents, Calls
from drmas.agents.chat import ChatRenderer, Message
from drmas.agents.team import TeamConfig
from drmas.agents.tools import Toolbox
from drmas.config.schema import RolloutConfig
from drmas.core.estimators.base import Probe
from drmas.core.names import expected_names
from drmas.core.seeds import sample_seed
from drmas.errors import EngineError, PromptTooLong, ToolError, TurnTimeout
from drmas.rollout.deadline import Deadline
from drmas.rollout.engine import Completion, Sampling
from drmas.rollout.gate import Gate
from drmas.telemetry.trace import span
from drmas.types import Episode, Failure, FailureKind, Outcome, Task

logger = logging.getLogger(__name__)

Reward = Callable[[Task, str | None], Awaitable[float]]
"""Scores a team's answer; `drmas.envs.rewards` makes them. Raising means "couldn't be graded", never a bad answer."""


class RemoteModel(Protocol):
    """A frozen model that is asked with messages; `drmas.rollout.remote.Remote` is one."""

    async def ask(self, agent: AgentConfig, messages: Sequence[Message], *, seed: int, key: str) -> Any: ...


class Player:
    """Plays episodes of one team. `sampling` says how an agent samples, where that isn't as its configuration has it; `probes`,
    by name, what is different in the episodes that run for one."""

    def __init__(
        self,
        team: TeamConfig,
        gate: Gate,
        renderers: Mapping[str, ChatRenderer],
        limits: Mapping[str, int],
        reward: Reward,
        config: RolloutConfig,
        *,
        seed: int,
        tools: Toolbox | None,
        remotes: Mapping[str, RemoteModel],
        sampling: Callable[[AgentConfig], Sampling] | None,
        probes: Mapping[str, Probe],
    ) -> None:
        self._team, self._gate, self._renderers, self._limits, self._reward = team, gate, renderers, limits, reward
        self._config, self._seed, self._tools, self._remotes = config, seed, tools, remotes
        self._sampling, self._probes = sampling or _as_configured, probes
        self._agents = team.agents

    async def play(self, episode: Episode, step: int) -> None:
        """Run the team; sets the answer, or the failure."""
        started = time.perf_counter()
        limit = self._config.episode_timeout_seconds
        deadline = Deadline(limit)
        calls = self._calls(episode, step, deadline)
        try:
            async with deadline.running:
                _settle(episode, await self._team.run(episode.task, Agents(calls)), self._agents)
        except asyncio.CancelledError as error:
            if _being_cancelled():
                raise
            _fail(episode, "team", self._said(error))
        except (Exception, SystemExit) as error:  # the boundary to the user's code: whatever it raises fails this episode alone
            if deadline.expired:
                _fail(episode, "timeout", f"not done after rollout.episode_timeout_seconds = {limit:g}")
            else:
                _fail(episode, "team", self._said(error))
        finally:
            await calls.close()
            episode.seconds = time.perf_counter() - started
        if (trouble := calls.trouble) is not None:
            _fail(episode, _kind(trouble), str(trouble))

    async def grade(self, episode: Episode) -> None:
        """The reward of an episode that didn't fail."""
        if episode.failure is None:
            try:
                with span("grade", episode=episode.id):
                    reward = float(await self._reward(episode.task, episode.answer))
            except (Exception, SystemExit) as error:  # the boundary to graders, which may be the user's (I3)
                _fail(episode, "grader", str(error) or type(error).__name__)
            else:
                if math.isfinite(reward):
                    episode.reward = reward
                else:
                    _fail(episode, "grader", f"the reward is {reward}; expected a finite number")
        if episode.failure is not None:
            first_line = episode.failure.message.partition("\n")[0]
            logger.warning("episode %s failed (%s): %s", episode.id, episode.failure.kind, first_line)

    def _calls(self, episode: Episode, step: int, deadline: Deadline) -> Calls:
        probe = self._probes[episode.probe] if episode.probe is not None else None
        greedy = probe is not None and probe.greedy

        def again() -> None:
            episode.retried += 1

        async def generate(agent: AgentConfig, prompt_ids: Sequence[int], *, seed: int, key: str) -> Completion:
            sampling = self._sampling(agent)
            sampling = replace(sampling, temperature=0.0) if greedy else sampling
            return await self._gate.generate(
                agent.policy, episode.id, prompt_ids, sampling, seed=seed, key=key, deadline=deadline, on_retry=again
            )

        async def ask_remote(agent: AgentConfig, messages: Sequence[Message], *, seed: int, key: str) -> Any:
            asked = agent.model_copy(update={"temperature": 0.0}) if greedy else agent
            return await self._remotes[agent.policy].ask(asked, messages, seed=seed, key=key)

        return Calls(
            self._agents,
            self._renderers,
            generate,
            episode,
            lambda agent, turn: sample_seed(self._seed, step, episode.task.id, episode.sample, agent, turn),
            limits=self._limits,
            ask_remote=ask_remote,
            tools=self._tools.session(episode) if self._tools else None,
            silent=probe and probe.without,
        )

    def _said(self, error: BaseException) -> str:
        """The error, and the line of the team's own file that it came through."""
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(type(self._team).__module__), "__file__", None)
        own = [frame for frame in frames if frame.filename == file] or frames
        return f"{type(error).__name__}: {error} ({own[-1].filename}:{own[-1].lineno})"


def _as_configured(agent: AgentConfig) -> Sampling:
    return Sampling(max_tokens=agent.max_tokens, temperature=agent.temperature, stop=agent.stop)


def _settle(episode: Episode, result: Any, agents: Mapping[str, AgentConfig]) -> None:
    """Take what `run` returned: an answer, none, or an `Outcome`."""
    outcome = result if isinstance(result, Outcome) else Outcome(result)
    if outcome.answer is not None and not isinstance(outcome.answer, str):
        _fail(episode, "team", f"`run` returned {type(outcome.answer).__name__}; expected str, None or Outcome")
        return
    for agent, reward in outcome.rewards.items():
        if agent not in agents:
            _fail(episode, "team", f"`run` rewards the agent {agent!r}; {expected_names(agent, agents)}")
            return
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            _fail(episode, "team", f"`run` rewards agent {agent} with {reward!r}; expected a finite number")
            return
    episode.answer, episode.agent_rewards = outcome.answer, {agent: float(value) for agent, value in outcome.rewards.items()}


_KINDS: dict[type[Exception], FailureKind] = {
    TurnTimeout: "timeout",
    EngineError: "engine",
    ToolError: "tool",
    PromptTooLong: "overlong",
}


def _kind(trouble: Exception) -> FailureKind:
    return next(kind for error, kind in _KINDS.items() if isinstance(trouble, error))


def _fail(episode: Episode, kind: FailureKind, message: str) -> None:
    episode.failure = Failure(kind, message)
    episode.answer = episode.reward = None
    episode.agent_rewards = {}


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
