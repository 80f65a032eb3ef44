"""The calls of one episode: how a team speaks with its agents and tools, and how what they say becomes turns.

    turn = await agents.solver(question=task.question)      # one call of one agent; its last turn
    left, right = await asyncio.gather(agents.left(x=1), agents.right(x=2))
    answer = await agents.inner.run_it(question="...")      # the agent `run_it` of the sub-team `inner`
    found = await agents.tools.search(query="element 74")   # a tool, called by the team itself

A call renders its prompt, asks its policy through a function that the collector hands in, and reads the answer. Every response
is a `Turn` of the episode and one training row: those that call tools, those that were invalid and sampled anew, and the last
one, which the call returns. What was read and sampled goes into the turn as ids and stays so (I1). `Calls` is the collector's
side; `Agents` is all that a team sees of it, so that any field name but `tools` can be an agent's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from drmas.agents.agent import AgentConfig
from drmas.agents.chat import ChatRenderer, Message
from drmas.agents.dialogue import AskRemote, Generate, LocalDialogue, RemoteDialogue, Said
from drmas.agents.parsers import make_parser
from drmas.agents.prompts import fill, scrub
from drmas.core.length_penalty import length_penalty
from drmas.core.names import expected_names
from drmas.errors import EngineError, PromptTooLong, TeamError, ToolError
from drmas.types import Episode, Turn

SILENT_CALLS = 1000
"""Calls of a silent agent in one episode: a team that asks until it likes the answer would ask for ever."""


class ToolResult(Protocol):
    """What a tool answered; `ok` is False where it answered with an error of its own."""

    @property
    def text(self) -> str: ...
    @property
    def ok(self) -> bool: ...


class ToolSession(Protocol):
    """The tools of one episode; `drmas.agents.tools.ToolSession` is one. ToolError: a tool could not be used."""

    def specs(self, allowed: Sequence[str]) -> list[dict[str, Any]]: ...
    async def call(self, name: str, arguments: dict[str, Any], /) -> ToolResult: ...
    async def answers(self, text: str, config: AgentConfig, agent: str, turn: int, spent: int) -> list[Message] | None: ...


class Calls:
    """All agent and tool calls of `episode`, made by the collector. Its turns are in order once it is closed."""

    def __init__(
        self,
        configs: Mapping[str, AgentConfig],
        renderers: Mapping[str, ChatRenderer],
        generate: Generate,
        episode: Episode,
        seed_of: Callable[[str, int], int],
        *,
        limits: Mapping[str, int],
        ask_remote: AskRemote,
        tools: ToolSession | None,
        silent: str | None = None,
    ) -> None:
        """`renderers` and `limits` (most prompt and response tokens) are by policy; a policy without a renderer is remote.

        `seed_of(agent, turn)` is the seed of that turn (I9). The agent `silent` says nothing: its calls ask nobody and leave no
        turn, as if it had answered with an empty text.
        """
        self.configs = configs
        self.trouble: Exception | None = None
        """The first EngineError, ToolError or PromptTooLong, also if the team caught it: such an episode is no sample (I3)."""
        self._renderers, self._limits, self._tools = renderers, limits, tools
        self._generate, self._ask_remote = generate, ask_remote
        self._episode = episode
        self._seed_of = seed_of
        self._silent = silent
        self._silences = 0
        self._started = 0
        self._open: set[asyncio.Task[Any] | None] = set()
        self._closed = False

    async def call(self, name: str, template: str | None, values: Mapping[str, object]) -> Turn:
        """One call of agent `name`; its last turn. Turns are numbered in the order in which their requests start."""
        with self._working(f"agent {name}"):
            config = self.configs[name]
            if name == self._silent:
                return await self._silence(name, config)
            dialogue = self._dialogue(name, config, _messages(name, config, template, values))
            retries, spent = config.retries, 0
            while True:
                turn = await self._turn(name, config, dialogue)
                if answers := await self._answers(turn, config, spent):
                    spent += len(answers)
                    dialogue.extend(answers)
                    continue
                _read(turn, config)
                if turn.valid or retries == 0:
                    return turn
                retries -= 1

    async def use_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """A tool call of the team itself. TeamError: the run has no such tool."""
        with self._working(f"tool {name}"):
            if self._tools is None:
                raise TeamError(f"the team calls the tool {name!r}, and the run has none; add a section [tools.{name}]")
            return await self._tools.call(name, arguments)

    async def close(self) -> None:
        """Cancel the calls that the team started and left behind, refuse later ones, put the turns in order."""
        self._closed = True
        left = [task for task in self._open if task is not None and task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._episode.turns.sort(key=lambda turn: turn.index)

    def _dialogue(self, name: str, config: AgentConfig, messages: list[Message]) -> LocalDialogue | RemoteDialogue:
        specs = self._tools.specs(config.tools) if self._tools is not None and config.tools else None
        if config.policy not in self._renderers:
            return RemoteDialogue(config, messages, ask=self._ask_remote, tools=specs)
        return LocalDialogue(
            name,
            config,
            messages,
            renderer=self._renderers[config.policy],
            generate=self._generate,
            limit=self._limits.get(config.policy),
            tools=specs,
        )

    async def _turn(self, name: str, config: AgentConfig, dialogue: LocalDialogue | RemoteDialogue) -> Turn:
        """Ask once; the response as a turn of the episode, not yet read."""
        index = self._started
        self._started += 1
        started = time.perf_counter()
        said = await dialogue.ask(seed=self._seed_of(name, index), key=f"{self._episode.id}/{index:03d}/{name}")
        turn = Turn(
            agent=name,
            policy=config.policy,
            index=index,
            prompt_ids=said.prompt_ids,
            response_ids=said.response_ids,
            logprobs=said.logprobs,
            versions=said.versions,
            finish_reason=said.finish_reason,
            text=said.text,
            penalty=_length_penalty(said, config),
            trained=config.trainable and isinstance(dialogue, LocalDialogue),
            prompt_text=said.prompt_text,
            seconds=time.perf_counter() - started,
        )
        self._episode.turns.append(turn)
        return turn

    async def _silence(self, name: str, config: AgentConfig) -> Turn:
        """What a call of the silent agent returns. TeamError: the team has called it too often."""
        await asyncio.sleep(0)  # others go on, and a team that catches the error meets its deadline here
        self._silences += 1
        if self._silences > SILENT_CALLS:
            raise TeamError(
                f"agent {name}, which is silent in this episode, was called more than {SILENT_CALLS} times; bound the loop "
                "that waits for its answer, or choose an advantage.preset that runs no episodes without it"
            )
        turn = Turn(name, config.policy, self._started, [], [], [], [], finish_reason="stop", text="", trained=False)
        _read(turn, config)
        return turn

    async def _answers(self, turn: Turn, config: AgentConfig, spent: int) -> list[Message] | None:
        """The messages that answer the turn's tool calls; None without any, or once the agent was told that none are left."""
        if self._tools is None or not config.tools or spent > config.max_tool_calls:
            return None
        answers = await self._tools.answers(turn.text, config, turn.agent, turn.index, spent)
        return answers and [{**answer, "content": scrub(answer["content"])} for answer in answers]

    @contextmanager
    def _working(self, what: str) -> Iterator[None]:
        """Around a call: refused after the team's end, cancelled with it, its trouble remembered."""
        if self._closed:
            raise TeamError(f"{what} was called after the team had returned; await every call inside `run`")
        task = asyncio.current_task()
        self._open.add(task)
        try:
            yield
        except (EngineError, ToolError, PromptTooLong) as error:
            self.trouble = self.trouble or error
            raise
        finally:
            self._open.discard(task)


class Agents:
    """The agents of one episode, by attribute or by name: all that `TeamConfig.run` gets to speak with them.

    `agents.tools` are the run's tools; where the team has a sub-team `inner`, `agents.inner` are that one's agents.
    """

    def __init__(self, calls: Calls, scope: str = "") -> None:
        self.__calls, self.__scope = calls, scope

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        """TeamError with the nearest name if the team has no such agent."""
        if name == "tools":
            return Tools(self.__calls)
        full = self.__scope + name
        if full in self.__calls.configs:
            return Agent(full, self.__calls)
        inside = [key.removeprefix(self.__scope) for key in self.__calls.configs if key.startswith(self.__scope)]
        if any(key.startswith(f"{name}.") for key in inside):
            return Agents(self.__calls, f"{full}.")
        raise TeamError(f"the team calls the agent {name!r}; {expected_names(name, inside)}")

    def __call__(self, *_: object, **__: object) -> None:
        name = self.__scope.removesuffix(".")
        own = f"; or run it: `await self.{name}.run(task, agents.{name})`" if name else ""
        raise TeamError(f"{name or 'agents'} is a team, not an agent; call one of its agents by name{own}")


class Agent:
    """One agent of one episode: awaiting a call gives its turn."""

    def __init__(self, name: str, calls: Calls) -> None:
        self._name = name
        self._calls = calls

    async def __call__(self, template: str | None = None, /, **values: object) -> Turn:
        """Ask the agent; the last turn of the call. `values` fill its templates; `template` takes the place of its `prompt`.

        TeamError: a placeholder without a value. EngineError, ToolError, PromptTooLong: the call can't be served; the episode
        fails with it.
        """
        return await self._calls.call(self._name, template, values)


class Tools:
    """The tools of the run, by attribute or by name, for teams that call them by themselves."""

    def __init__(self, calls: Calls) -> None:
        self.__calls = calls

    def __getattr__(self, name: str) -> Tool:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Tool:
        return Tool(name, self.__calls)


class Tool:
    """One tool of one episode: awaiting a call gives its result."""

    def __init__(self, name: str, calls: Calls) -> None:
        self._name = name
        self._calls = calls

    async def __call__(self, /, **arguments: object) -> ToolResult:
        """`text`, and `ok`: False where the tool answered with an error of its own. ToolError: it could not be used (I3)."""
        return await self._calls.use_tool(self._name, arguments)


def _length_penalty(said: Said, config: AgentConfig) -> float:
    """Of any response, also one that calls tools; a remote model's tokens aren't known, only that they were cut."""
    return length_penalty(
        len(said.response_ids),
        max_tokens=config.max_tokens,
        buffer=config.length_buffer,
        penalty=config.length_penalty,
        cut=said.finish_reason == "length",
    )


def _read(turn: Turn, config: AgentConfig) -> None:
    """Parse the last response of a call. An empty one is invalid whatever the parser says."""
    parsed = make_parser(config.parser)(turn.text)
    turn.valid = parsed.valid and bool(turn.text or turn.response_ids)
    turn.parsed = parsed.value if turn.valid or config.on_invalid == "fail_closed" else parsed.lenient
    turn.penalty += 0.0 if turn.valid else config.invalid_penalty


def _messages(name: str, config: AgentConfig, template: str | None, values: Mapping[str, object]) -> list[Message]:
    messages: list[Message] = []
    try:
        if config.system is not None:
            messages.append({"role": "system", "content": scrub(fill(config.system, values))})
        messages.append({"role": "user", "content": scrub(fill(config.prompt if template is None else template, values))})
    except KeyError as error:
        missing = str(error.args[0])
        raise TeamError(
            f"the template of agent {name} asks for {{{missing}}}, which the team doesn't pass; "
            f"{expected_names(missing, values)}"
        ) from error
    return messages
