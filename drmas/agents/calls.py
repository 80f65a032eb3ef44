"""The calls of one episode: how a team speaks with its agents, and how what they say becomes turns.

    turn = await agents.solver(question=task.question)      # one call of one agent, one training row
    left, right = await asyncio.gather(agents.left(x=1), agents.right(x=2))

A call renders its prompt, asks the engine of the agent's policy through a function that the collector hands in, reads the
answer, and appends the `Turn` to the episode. What was read and sampled goes into the turn as ids and stays so (I1). `Calls` is
the collector's side; `Agents` is all that a team sees of it, so that any field name can be an agent's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from drmas.agents.agent import AgentConfig
from drmas.agents.chat import ChatRenderer, Message
from drmas.agents.parsers import make_parser
from drmas.agents.prompts import fill
from drmas.core.names import expected_names
from drmas.errors import EngineError, TeamError
from drmas.types import Episode, Turn


class Response(Protocol):
    """What a policy answered; `drmas.rollout.engine.Completion` is one."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...
    @property
    def versions(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str: ...


class Generate(Protocol):
    """Asks the engine of `agent.policy`; EngineError if it can't be served."""

    def __call__(self, agent: AgentConfig, prompt_ids: Sequence[int], *, seed: int, key: str) -> Awaitable[Response]: ...


class Calls:
    """All agent calls of `episode`, made by the collector. Its turns are in order once it is closed."""

    def __init__(
        self,
        configs: Mapping[str, AgentConfig],
        renderers: Mapping[str, ChatRenderer],
        generate: Generate,
        episode: Episode,
        seed_of: Callable[[str, int], int],
    ) -> None:
        """`renderers` are by policy; `seed_of(agent, turn)` is the seed of that call (I9)."""
        self.configs = configs
        self.engine_error: EngineError | None = None
        """The first call that an engine failed, also when the team caught the error: such an episode is no sample (I3)."""
        self._renderers = renderers
        self._generate = generate
        self._episode = episode
        self._seed_of = seed_of
        self._started = 0
        self._open: set[asyncio.Task[Any] | None] = set()
        self._closed = False

    async def call(self, name: str, template: str | None, values: Mapping[str, object]) -> Turn:
        """One call of agent `name`. Turns are numbered in the order in which calls start."""
        if self._closed:
            raise TeamError(f"agent {name} was called after the team had returned; await every call inside `run`")
        config = self.configs[name]
        renderer = self._renderers[config.policy]
        prompt_ids = renderer.render(_messages(name, config, template, values), config.chat_template_options)
        index = self._started
        self._started += 1
        key = f"{self._episode.id}/{index:03d}/{name}"
        response = await self._ask(config, prompt_ids, seed=self._seed_of(name, index), key=key)
        text = renderer.decode(response.token_ids)
        parsed = make_parser(config.parser)(text)
        turn = Turn(
            agent=name,
            policy=config.policy,
            index=index,
            prompt_ids=prompt_ids,
            response_ids=response.token_ids,
            logprobs=response.logprobs,
            versions=response.versions,
            finish_reason=response.finish_reason,
            text=text,
            parsed=parsed.value,
            valid=parsed.valid,
            penalty=0.0 if parsed.valid else config.invalid_penalty,
        )
        self._episode.turns.append(turn)
        return turn

    async def _ask(self, config: AgentConfig, prompt_ids: list[int], *, seed: int, key: str) -> Response:
        task = asyncio.current_task()
        self._open.add(task)
        try:
            return await self._generate(config, prompt_ids, seed=seed, key=key)
        except EngineError as error:
            self.engine_error = self.engine_error or error
            raise
        finally:
            self._open.discard(task)

    async def close(self) -> None:
        """Cancel the calls that the team started and left behind, refuse later ones, put the turns in order."""
        self._closed = True
        left = [task for task in self._open if task is not None and task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._episode.turns.sort(key=lambda turn: turn.index)


class Agents:
    """The agents of one episode, by attribute or by name: all that `TeamConfig.run` gets to speak with them."""

    def __init__(self, calls: Calls) -> None:
        self.__calls = calls

    def __getattr__(self, name: str) -> Agent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Agent:
        """TeamError with the nearest name if the team has no such agent."""
        if name not in self.__calls.configs:
            raise TeamError(f"the team calls the agent {name!r}; {expected_names(name, self.__calls.configs)}")
        return Agent(name, self.__calls)


class Agent:
    """One agent of one episode: awaiting a call gives its turn."""

    def __init__(self, name: str, calls: Calls) -> None:
        self._name = name
        self._calls = calls

    async def __call__(self, template: str | None = None, /, **values: object) -> Turn:
        """Ask the agent. `values` fill its templates; `template` is used in place of its `prompt`.

        TeamError: a placeholder without a value. EngineError: the engine can't serve the call; the episode fails with it.
        """
        return await self._calls.call(self._name, template, values)


def _messages(name: str, config: AgentConfig, template: str | None, values: Mapping[str, object]) -> list[Message]:
    messages: list[Message] = []
    try:
        if config.system is not None:
            messages.append({"role": "system", "content": fill(config.system, values)})
        messages.append({"role": "user", "content": fill(config.prompt if template is None else template, values)})
    except KeyError as error:
        missing = str(error.args[0])
        raise TeamError(
            f"the template of agent {name} asks for {{{missing}}}, which the team doesn't pass; "
            f"{expected_names(missing, values)}"
        ) from error
    return messages
