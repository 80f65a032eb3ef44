from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from drmas.agents.agent import AgentConfig
from drmas.agents.tools import Toolbox, ToolResult, shortened
from drmas.errors import ConfigError, TeamError, ToolError
from drmas.types import Episode, Task

QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
LONG = 60.0


class Scripted:
    """A tool that answers by a function; `log` holds what was done to it."""

    def __init__(
        self,
        answer: Callable[[str, dict[str, Any]], Awaitable[Any]],
        names: Sequence[str] = ("search",),
        *,
        parameters: Any = QUERY,
        timeout_seconds: float = LONG,
        start_error: Exception | None = None,
    ) -> None:
        self.answer, self.timeout_seconds, self.start_error = answer, timeout_seconds, start_error
        self.log: list[str] = []
        self.specs = [
            {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}} for name in names
        ]

    async def start(self) -> None:
        self.log.append("start")
        if self.start_error:
            raise self.start_error

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        self.log.append(f"{name} {arguments}")
        return await self.answer(name, arguments)

    async def close(self) -> None:
        self.log.append("close")


async def found(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    return f"{name} found {arguments.get('query')}", True


async def hang(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    await asyncio.sleep(LONG)
    return "", True


def raising(error: BaseException):
    async def answer(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        raise error

    return answer


def episode() -> Episode:
    return Episode(Task("t", "?", "5"), 0)


async def session_of(**tools: Scripted):
    toolbox = Toolbox(tools)
    await toolbox.start()
    return toolbox.session(episode())


def call(name: str, arguments: str = '{"query": "x"}') -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def agent(*tools: str, max_tool_calls: int = 4) -> AgentConfig:
    return AgentConfig(tools=tools, max_tool_calls=max_tool_calls)


async def test_a_text_with_calls_is_answered_in_their_order_and_recorded() -> None:
    started = asyncio.Event()

    async def second_first(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        if arguments["query"] == "a":
            await started.wait()  # only if both run at once does this end
        started.set()
        return f"about {arguments['query']}", arguments["query"] == "a"

    session = await session_of(wiki=Scripted(second_first))
    messages = await session.answers(
        call("search", '{"query": "a"}') + call("search", '{"query": "b"}'), agent("wiki"), "s", 7, 0
    )
    assert messages == [{"role": "tool", "content": "about a"}, {"role": "tool", "content": "about b"}]
    uses = session._episode.tool_uses
    assert [(use.tool, use.arguments, use.result, use.ok, use.agent, use.turn) for use in uses] == [
        ("wiki", '{"query": "a"}', "about a", True, "s", 7),
        ("wiki", '{"query": "b"}', "about b", False, "s", 7),
    ]
    assert all(use.seconds > 0 for use in uses)


async def test_a_text_without_calls_and_an_agent_without_tools_are_left_alone() -> None:
    session = await session_of(search=Scripted(found))
    assert await session.answers("The answer is 5.", agent("search"), "s", 0, 0) is None
    assert await session.answers(call("search"), agent(), "s", 0, 0) is None
    assert session._episode.tool_uses == []


@pytest.mark.parametrize(
    ("text", "answer", "tool"),
    [
        (call("serch"), "Error: there is no tool 'serch'; the nearest is 'search'; expected one of search", "serch"),
        (call("delete"), "Error: there is no tool 'delete'; expected one of search", "delete"),
        (call("search", "{}"), "Error: the arguments of search: 'query' is a required property", "files.search"),
        (call("search", '{"query": 3}'), "Error: the arguments of search: query: 3 is not of type 'string'", "files.search"),
        ('<tool_call>{"name": "search"', "Error: this tool call is no JSON", ""),
        (call("search", "[]"), "Error: the arguments of search: they are []; expected a JSON object", "files.search"),
    ],
)
async def test_what_the_model_does_wrong_is_an_answer_and_reaches_no_tool(text: str, answer: str, tool: str) -> None:
    files = Scripted(found, ["search", "delete"])
    session = await session_of(files=files)
    messages = await session.answers(text, agent("files.search"), "s", 0, 0)
    assert messages is not None
    assert messages[0]["content"].startswith(answer)
    (use,) = session._episode.tool_uses
    assert (use.tool, use.result, use.ok) == (tool, messages[0]["content"], False)
    assert files.log == ["start"]


async def test_calls_past_the_budget_are_answered_with_a_word_of_it() -> None:
    tool = Scripted(found)
    session = await session_of(search=tool)
    config = agent("search", max_tool_calls=3)
    messages = await session.answers(call("search") * 4, config, "s", 0, spent=1)
    spent = "Error: all 3 tool calls are spent; answer without further ones"
    assert messages is not None
    assert [message["content"] for message in messages] == ["search found x"] * 2 + [spent] * 2
    assert len(tool.log) == 3
    assert (await session.answers(call("search"), config, "s", 1, spent=3)) == [{"role": "tool", "content": spent}]
    assert [use.ok for use in session._episode.tool_uses] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raising(ToolError("tools.search: 503 for ever")), "tools.search: 503 for ever"),
        (raising(ValueError("boom")), "tools.search: search failed: ValueError: boom"),
        (raising(TimeoutError("of its own")), "tools.search: search failed: TimeoutError: of its own"),
        (raising(asyncio.CancelledError()), "tools.search: search was cancelled from within"),
        (lambda name, arguments: asyncio.sleep(0, "text"), "search gave str; expected a text and whether it is an answer"),
        (lambda name, arguments: asyncio.sleep(0, ("text", None)), "search gave tuple"),
        (lambda name, arguments: asyncio.sleep(0, (b"text", True)), "search gave tuple"),
    ],
    ids=["ToolError", "any error", "own timeout", "own cancel", "text alone", "no verdict", "bytes"],
)
async def test_I3_trouble_with_a_tool_is_raised_and_never_an_answer(answer: Any, message: str) -> None:
    session = await session_of(search=Scripted(answer))
    for ask in (session.answers(call("search"), agent("search"), "s", 3, 0), session.call("search", {"query": "x"})):
        with pytest.raises(ToolError, match=re.escape(message)):
            await ask
    assert [(use.ok, use.turn) for use in session._episode.tool_uses] == [(False, 3), (False, None)]
    assert message in session._episode.tool_uses[0].result


async def test_I3_a_tool_that_hangs_is_cut_off_at_its_deadline_which_is_named() -> None:
    session = await session_of(search=Scripted(hang, timeout_seconds=0.05))
    with pytest.raises(ToolError, match=r"gave no answer within tools.search.timeout_seconds = 0.05"):
        await session.call("search", {"query": "x"})


async def test_the_siblings_of_a_call_in_trouble_are_recorded_with_it() -> None:
    async def one_fails(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        if arguments["query"] == "a":
            raise ToolError("down")
        return "fine", True

    session = await session_of(search=Scripted(one_fails))
    with pytest.raises(ToolError, match="down"):
        await session.answers(call("search", '{"query": "a"}') + call("search", '{"query": "b"}'), agent("search"), "s", 0, 0)
    assert [(use.result, use.ok) for use in session._episode.tool_uses] == [("down", False), ("fine", True)]


async def test_a_cancelled_episode_cancels_its_calls() -> None:
    cancelled = []
    waiting = asyncio.Event()

    async def wait(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        waiting.set()
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            cancelled.append(arguments["query"])
            raise
        return "", True

    session = await session_of(search=Scripted(wait))
    text = call("search", '{"query": "a"}') + call("search", '{"query": "b"}')
    playing = asyncio.create_task(session.answers(text, agent("search"), "s", 0, 0))
    await waiting.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert sorted(cancelled) == ["a", "b"]


async def test_the_team_calls_tools_by_section_or_by_name() -> None:
    session = await session_of(wiki=Scripted(found), files=Scripted(found, ["read", "list"]))
    assert await session.call("wiki", {"query": "x"}) == ToolResult("search found x", True)
    assert await session.call("search", {"query": "x"}, agent="s", turn=2) == ToolResult("search found x", True)
    assert await session.call("files.read", {"query": "x"}) == ToolResult("read found x", True)
    uses = [(use.tool, use.agent, use.turn) for use in session._episode.tool_uses]
    assert uses == [("wiki", None, None), ("wiki", "s", 2), ("files.read", None, None)]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("wikki", {"query": "x"}, "the team calls the tool 'wikki'; the nearest is 'wiki'"),
        ("files", {"query": "x"}, "'files', which has several functions; expected one of files.read, files.list"),
        ("wiki", {"quary": "x"}, "the team calls the tool 'wiki' with arguments that it doesn't take: 'query' is a required"),
    ],
)
async def test_what_the_teams_own_code_does_wrong_is_the_teams_error(
    name: str, arguments: dict[str, str], message: str
) -> None:
    session = await session_of(wiki=Scripted(found), files=Scripted(found, ["read", "list"]))
    with pytest.raises(TeamError, match=re.escape(message)):
        await session.call(name, arguments)


async def test_an_agent_is_given_the_functions_that_its_settings_name_and_no_others() -> None:
    toolbox = Toolbox({"wiki": Scripted(found), "files": Scripted(found, ["read", "list"])})
    await toolbox.start()

    def names(*allowed: str) -> list[str]:
        return [spec["function"]["name"] for spec in toolbox.specs(allowed)]

    assert names() == []
    assert names("files.list", "wiki") == ["list", "search"]
    assert names("files", "files.list") == ["read", "list"]
    with pytest.raises(ConfigError, match=r"names 'files.lst'; the nearest is 'files.list'"):
        names("files.lst")
    with pytest.raises(ConfigError, match=r"names 'search'"):
        names("search")  # a function's name alone says nothing about where it comes from


async def test_two_functions_of_one_name_are_refused_and_everything_is_closed() -> None:
    tools = {"wiki": Scripted(found), "web": Scripted(found)}
    with pytest.raises(ConfigError, match=r"tools.web and tools.wiki both have a function 'search'"):
        await Toolbox(tools).start()
    assert [tool.log for tool in tools.values()] == [["start", "close"]] * 2


async def test_a_tool_that_does_not_start_ends_the_start_and_closes_the_others() -> None:
    tools = {"wiki": Scripted(found), "web": Scripted(found, ["go"], start_error=ToolError("tools.web: no answer"))}
    with pytest.raises(ToolError, match=r"tools.web: no answer"):
        await Toolbox(tools).start()
    assert [tool.log for tool in tools.values()] == [["start", "close"]] * 2


async def test_a_tool_that_fails_to_close_keeps_none_open(caplog) -> None:
    class Stuck(Scripted):
        async def close(self) -> None:
            await super().close()
            raise OSError("busy")

    stuck, other = Stuck(found), Scripted(found, ["other"])
    toolbox = Toolbox({"stuck": stuck, "other": other})
    await toolbox.start()
    await toolbox.close()
    assert (stuck.log[-1], other.log[-1]) == ("close", "close")
    assert "tools.stuck: closing it raised OSError: busy" in caplog.text


async def test_a_tool_whose_own_schema_is_broken_is_trouble() -> None:
    with pytest.raises(ToolError, match=r"tools.search: the parameters of search are no JSON schema"):
        await session_of(search=Scripted(found, parameters={"type": "text"}))
    session = await session_of(search=Scripted(found, parameters={"$ref": "http://127.0.0.1:1/schema"}))
    with pytest.raises(ToolError, match="no usable JSON schema"):
        await session.answers(call("search"), agent("search"), "s", 0, 0)


async def test_half_a_character_in_an_answer_does_not_reach_a_tokenizer() -> None:
    session = await session_of(search=Scripted(lambda name, arguments: asyncio.sleep(0, ("a\ud800b", True))))
    assert (await session.call("search", {"query": "x"})).text == "a?b"


def test_a_long_answer_is_cut_with_a_mark() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdef", 4) == "abcd [... 2 more characters]"
