"""The tools of a run: what agents and teams may call, with a deadline, a budget and a record of every use.

    toolbox = Toolbox({"search": Search(...), "files": McpServer(...)})
    await toolbox.start()                                            # once per run; the command ends where a tool isn't there
    session = toolbox.session(episode)                               # one per episode
    messages = await session.answers(turn.text, config, "solver", 0, spent=0)     # what the model asked for, None if nothing
    result = await session.call("search", {"query": "tungsten"})     # what the team's own code asks for
    await toolbox.close()

What a model does wrong (no such tool, bad arguments, budget spent) is answered with a text that it reads. What goes wrong with
a tool (it can't be reached, hangs, breaks its own schema) is a ToolError and fails the episode; it is never an answer (I3).
Called by `dialogue` and `calls`; tools are made by `drmas.runtime.tools`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drmas.agents.agent import AgentConfig
from drmas.agents.tool_calls import ToolCall, compile_schema, find_calls, mismatch
from drmas.core.names import expected_names
from drmas.errors import ConfigError, TeamError, ToolError
from drmas.types import Episode, ToolUse

logger = logging.getLogger(__name__)

Spec = Mapping[str, Any]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": a JSON schema}}, as OpenAI has it."""


class Tool(Protocol):
    """One section of `tools`: one function (a search), or all those of a server."""

    @property
    def timeout_seconds(self) -> float:
        """Of one call."""
        ...

    @property
    def specs(self) -> Sequence[Spec]:
        """Its functions; known once it is started."""
        ...

    async def start(self) -> None:
        """Connect and check, in the loop in which it is called. ToolError or ConfigError with the reason."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The answer of its function `name`, and whether it is one: False where the tool says that it was asked wrongly.

        Many calls run at once. ToolError: trouble. Cancelled at the deadline, or when its episode ends.
        """
        ...

    async def close(self) -> None:
        """Let go of everything; also after a `start` that failed, and more than once."""
        ...


@dataclass(frozen=True, slots=True)
class ToolResult:
    """`ok` is False where the tool said that it was asked wrongly; the text says how."""

    text: str
    ok: bool


@dataclass(frozen=True, slots=True)
class _Function:
    """One function of a tool. `label` names it in records: SECTION, or SECTION.NAME where the section has several."""

    label: str
    section: str
    name: str
    tool: Tool
    spec: Spec
    validator: Any


class Toolbox:
    """All tools of a run, by section name. Started, used and closed in one event loop."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = dict(tools)
        self._functions: dict[str, _Function] = {}

    async def start(self) -> None:
        """Start all tools at once; if one can't be, all are closed.

        ConfigError: two functions of one name, or what a tool's section has wrong. ToolError: a tool that isn't there.
        """
        try:
            await _all(tool.start() for tool in self._tools.values())
            self._functions = self._collected()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all tools, also after a failed start; what that raises is logged."""
        self._functions = {}
        closed = await asyncio.gather(*(tool.close() for tool in self._tools.values()), return_exceptions=True)
        for section, error in zip(self._tools, closed, strict=True):
            if isinstance(error, Exception):
                logger.warning("tools.%s: closing it raised %s: %s", section, type(error).__name__, error)

    def session(self, episode: Episode) -> ToolSession:
        """The tools as one episode uses them."""
        return ToolSession(self, episode)

    def specs(self, allowed: Sequence[str]) -> list[dict[str, Any]]:
        """The schemas of the functions in `allowed`, for the chat template's `tools`.

        ConfigError: a name of `allowed` is neither a section (all its functions) nor SECTION.NAME.
        """
        return [dict(function.spec) for function in self.allowed(allowed).values()]

    def allowed(self, names: Sequence[str]) -> dict[str, _Function]:
        """Function name -> function, of `names` as in an agent's `tools`. ConfigError as for `specs`."""
        found: dict[str, _Function] = {}
        for name in names:
            functions = self._named(name)
            if not functions:
                raise ConfigError(f"an agent's `tools` names {name!r}; {expected_names(name, self._known())}")
            found |= {function.name: function for function in functions}
        return found

    def find(self, name: str) -> _Function:
        """The one function that SECTION, SECTION.NAME or NAME means. TeamError: none, or several."""
        functions = self._named(name) or [function for function in self._functions.values() if function.name == name]
        if not functions:
            raise TeamError(f"the team calls the tool {name!r}; {expected_names(name, self._known())}")
        if len(functions) > 1:
            labels = ", ".join(function.label for function in functions)
            raise TeamError(f"the team calls the tool {name!r}, which has several functions; expected one of {labels}")
        return functions[0]

    def _named(self, name: str) -> list[_Function]:
        return [
            function
            for function in self._functions.values()
            if name in (function.section, f"{function.section}.{function.name}")
        ]

    def _known(self) -> list[str]:
        return [*self._tools, *(function.label for function in self._functions.values() if function.label not in self._tools)]

    def _collected(self) -> dict[str, _Function]:
        functions: dict[str, _Function] = {}
        for section, tool in self._tools.items():
            for spec in tool.specs:
                name = spec["function"]["name"]
                if name in functions:
                    raise ConfigError(
                        f"tools.{section} and tools.{functions[name].section} both have a function {name!r}, and a model could "
                        f"not tell them apart; remove one (an MCP server's by `allow`), or rename it"
                    )
                try:
                    validator = compile_schema(spec["function"]["parameters"])
                except ValueError as error:
                    raise ToolError(f"tools.{section}: the parameters of {name} are no JSON schema: {error}") from error
                label = section if len(tool.specs) == 1 else f"{section}.{name}"
                functions[name] = _Function(label, section, name, tool, spec, validator)
        return functions


class ToolSession:
    """The tools as one episode uses them; each use is recorded in `episode.tool_uses`, those of one text in its order."""

    def __init__(self, toolbox: Toolbox, episode: Episode) -> None:
        self._toolbox = toolbox
        self._episode = episode

    def specs(self, allowed: Sequence[str]) -> list[dict[str, Any]]:
        """As `Toolbox.specs`."""
        return self._toolbox.specs(allowed)

    async def call(
        self, section_or_name: str, arguments: dict[str, Any], *, agent: str | None = None, turn: int | None = None
    ) -> ToolResult:
        """What the team's own code asks for: SECTION, SECTION.NAME, or the function's name.

        TeamError: no such tool, or arguments against its schema. ToolError: trouble, or no answer before the deadline.
        """
        function = self._toolbox.find(section_or_name)
        if problem := _mismatch(function, arguments):
            raise TeamError(f"the team calls the tool {section_or_name!r} with arguments that it doesn't take: {problem}")
        use = self._recorded([await _use(function, arguments, agent, turn)])[0]
        return ToolResult(use.result, use.ok)

    async def answers(self, text: str, config: AgentConfig, agent: str, turn: int, spent: int) -> list[dict[str, str]] | None:
        """What the agent asked its tools for in `text`, answered: a message of the role "tool" for each call, in their order.
        None if there is no call in it, or the agent has no tools.

        The calls run at once. `spent` is what the agent's earlier turns of this call took of `max_tool_calls`.

        ToolError: trouble, or no answer before the deadline.
        """
        calls = find_calls(text) if config.tools else []
        if not calls:
            return None
        allowed = self._toolbox.allowed(config.tools)
        left = config.max_tool_calls - spent
        made = await _all(
            _answer(call, allowed, agent, turn, None if place < left else config.max_tool_calls)
            for place, call in enumerate(calls)
        )
        return [{"role": "tool", "content": use.result} for use in self._recorded(made)]

    def _recorded(self, made: Sequence[_Made]) -> list[ToolUse]:
        """The uses, all in the episode's record; raises the first trouble among them."""
        uses = [use for use, _ in made]
        self._episode.tool_uses.extend(uses)
        for _, trouble in made:
            if trouble is not None:
                raise trouble
        return uses


_Made = tuple[ToolUse, ToolError | None]
"""A use, and the trouble that it met."""


async def _answer(call: ToolCall, allowed: Mapping[str, _Function], agent: str, turn: int, budget: int | None) -> _Made:
    """One call of a model, made or refused; `budget` is what was spent before it, None if there is some left."""
    function = allowed.get(call.name)
    trouble: ToolError | None = None
    if budget is not None:
        problem: str | None = f"all {budget} tool calls are spent; answer without further ones"
    elif call.problem is not None:
        problem = call.problem
    elif function is None:
        problem = f"there is no tool {call.name!r}; {expected_names(call.name, allowed)}"
    else:
        try:
            problem = _mismatch(function, call.arguments)
        except ToolError as error:
            problem, trouble = str(error), error
        if problem is None:
            return await _use(function, call.arguments, agent, turn)
        problem = f"the arguments of {call.name}: {problem}"
    label = function.label if function else call.name
    return ToolUse(label, _written(call.arguments), f"Error: {problem}", ok=False, agent=agent, turn=turn), trouble


async def _use(function: _Function, arguments: dict[str, Any], agent: str | None, turn: int | None) -> _Made:
    started = time.perf_counter()
    trouble: ToolError | None = None
    try:
        text, ok = await _within_deadline(function, arguments)
    except ToolError as error:
        text, ok, trouble = str(error), False, error
    return ToolUse(function.label, _written(arguments), text, ok, agent, turn, time.perf_counter() - started), trouble


async def _within_deadline(function: _Function, arguments: dict[str, Any]) -> tuple[str, bool]:
    """Whatever goes wrong is a ToolError, other than that the episode is cancelled."""
    where, limit = f"tools.{function.section}", function.tool.timeout_seconds
    try:
        async with asyncio.timeout(limit) as deadline:
            answer = await function.tool.call(function.name, arguments)
    except ToolError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ToolError(f"{where}: {function.name} was cancelled from within") from error
    except Exception as error:  # the boundary to tools, which may be anybody's: what they raise is trouble (I3)
        if deadline.expired():
            raise ToolError(f"{where}: {function.name} gave no answer within {where}.timeout_seconds = {limit:g}") from error
        raise ToolError(f"{where}: {function.name} failed: {type(error).__name__}: {error}") from error
    match answer:
        case (str(text), bool(ok)):
            return text.encode(errors="replace").decode(), ok  # no tokenizer takes half a surrogate pair
    raise ToolError(f"{where}: {function.name} gave {type(answer).__name__}; expected a text and whether it is an answer")


def _mismatch(function: _Function, arguments: Mapping[str, Any]) -> str | None:
    try:
        return mismatch(function.validator, arguments)
    except Exception as error:  # a schema that refers to what isn't there shows it only when it is used
        raise ToolError(
            f"tools.{function.section}: the parameters of {function.name} are no usable JSON schema: {error}"
        ) from error


def shortened(text: str, most: int) -> str:
    """`text` as it is, or its first `most` characters and a mark that says how many are left out.

    Example: shortened("abcdef", 4) == "abcd [... 2 more characters]"
    """
    return text if len(text) <= most else f"{text[:most]} [... {len(text) - most} more characters]"


def _written(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False, default=str)


async def _all(coroutines: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results in order, once all have ended; raises the first error by place. Cancelling it cancels all."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
