from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from drmas.agents import python_tools
from drmas.agents.python_tools import PythonFunction
from drmas.agents.tools import Toolbox, ToolSession
from drmas.config.tasks import PythonTool
from drmas.errors import ConfigError, ToolError
from drmas.types import Episode, Task

FILE = '''
from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Annotated, Any, Literal, Optional

from pydantic import BaseModel, Field

released = threading.Event()


class Point(BaseModel):
    x: int
    title: str = "p"


def convert(
    amount: float,
    count: int,
    schema: str,
    unit: Literal["m", "ft"] = "m",
    where: Optional[Point] = None,
    tags: list[str] = [],
    note: Annotated[str, Field(description="a remark")] = "",
    fallback: dict = {},
    other: Any = object(),
) -> str:
    """Convert a length.

    It says what it got.
    """
    if amount < 0:
        raise ValueError("a length is at least 0")
    return f"{amount!r} {count!r} {schema} {unit} {where!r} {tags} {fallback}"


async def later(text: str) -> dict:
    await asyncio.sleep(0)
    return {"text": text, "thread": threading.current_thread() is threading.main_thread()}


def thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def raises(kind: str):
    if kind == "json":
        return json.loads("{")
    if kind == "exit":
        sys.exit(1)
    if kind == "stop":
        raise StopIteration
    raise {"key": KeyError, "os": OSError, "interrupt": KeyboardInterrupt}[kind](kind)


async def raises_later(kind: str):
    return raises(kind)


def waits() -> str:
    released.wait()
    return "released"


async def waits_for_ever():
    await asyncio.sleep(60)


def returns(kind: str):
    return {"none": None, "number": 3, "bytes": b"x", "long": "y" * 100, "loop": LOOP}[kind]


LOOP = []
LOOP.append(LOOP)
number = 3


def unannotated(x): ...
def positional(x: int, /): ...
def variadic(*words: str): ...
def keywords(**words: str): ...
def unknown(x: Nowhere): ...
def unspeakable(x: threading.Event): ...
'''


@pytest.fixture
def load(tmp_path: Path):
    file = tmp_path / "tool.py"
    file.write_text(FILE)

    def make(name: str, **settings: Any) -> PythonFunction:
        return PythonFunction("own", PythonTool(path=f"{file}:{name}", **settings))

    return make


async def session_of(tool: PythonFunction) -> ToolSession:
    toolbox = Toolbox({"own": tool})
    await toolbox.start()
    return toolbox.session(Episode(Task("t", "?", "5"), 0))


def test_the_signature_and_the_docstring_are_the_schema(load) -> None:
    (spec,) = load("convert").specs
    assert spec["function"]["name"] == "convert"
    assert spec["function"]["description"] == "Convert a length.\n\nIt says what it got."
    parameters = spec["function"]["parameters"]
    assert (parameters["type"], parameters["additionalProperties"]) == ("object", False)
    assert parameters["required"] == ["amount", "count", "schema"]
    properties = parameters["properties"]
    assert properties["amount"] == {"type": "number"}
    assert properties["count"] == {"type": "integer"}
    assert properties["unit"] == {"type": "string", "enum": ["m", "ft"], "default": "m"}
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}, "default": []}
    assert properties["note"] == {"type": "string", "description": "a remark", "default": ""}
    assert properties["fallback"] == {"type": "object", "additionalProperties": True, "default": {}}
    assert properties["other"] == {}
    assert properties["where"]["anyOf"] == [{"$ref": "#/$defs/Point"}, {"type": "null"}]
    assert "title" in parameters["$defs"]["Point"]["properties"]  # a name, which is no title of a schema
    assert load("thread").specs[0]["function"]["parameters"]["properties"] == {}


async def test_arguments_arrive_in_the_types_that_were_asked_for(load) -> None:
    tool = load("convert")
    text, ok = await tool.call("convert", {"amount": 3, "count": 3.0, "schema": "s", "where": {"x": 1}})
    assert (text, ok) == ("3.0 3 s m Point(x=1, title='p') [] {}", True)


async def test_arguments_against_the_schema_are_answered_before_the_function_runs(load) -> None:
    session = await session_of(load("convert"))
    from drmas.agents.agent import AgentConfig

    text = '<tool_call>{"name": "convert", "arguments": {"amount": "3", "count": 1, "schema": "s"}}</tool_call>'
    messages = await session.answers(text, AgentConfig(tools=("own",)), "a", 0, 0)
    assert messages == [{"role": "tool", "content": "Error: the arguments of convert: amount: '3' is not of type 'number'"}]


async def test_a_plain_value_error_is_told_to_the_agent(load) -> None:
    answer = await load("convert").call("convert", {"amount": -1, "count": 1, "schema": "s"})
    assert answer == ("a length is at least 0", False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("key", "raised KeyError: 'key'"),
        ("os", "raised OSError: os"),
        ("json", "raised JSONDecodeError: "),  # a ValueError too, and yet a sign of trouble elsewhere
        ("exit", "raised SystemExit: 1"),
        ("stop", "raised StopIteration: "),
    ],
)
async def test_I3_whatever_else_the_function_raises_is_trouble(load, kind: str, message: str) -> None:
    with pytest.raises(ToolError, match=f"tools.own: raises {message}"):
        await load("raises").call("raises", {"kind": kind})
    if kind != "stop":  # Python itself makes another error of that one
        with pytest.raises(ToolError, match=f"tools.own: raises_later {message}"):
            await load("raises_later").call("raises_later", {"kind": kind})


async def test_an_interrupt_that_the_function_raises_ends_nothing_but_its_episode(load) -> None:
    with pytest.raises(ToolError, match="raised KeyboardInterrupt"):
        await load("raises").call("raises", {"kind": "interrupt"})


async def test_functions_run_in_threads_unless_they_are_async(load) -> None:
    assert await load("thread").call("thread", {}) == ("false", True)
    assert await load("later").call("later", {"text": "é"}) == ('{"text": "é", "thread": true}', True)


async def test_answers_that_are_no_text_are_json_and_others_are_trouble(load) -> None:
    tool = load("returns", max_result_chars=10)
    assert await tool.call("returns", {"kind": "none"}) == ("null", True)
    assert await tool.call("returns", {"kind": "number"}) == ("3", True)
    assert await tool.call("returns", {"kind": "long"}) == ("y" * 10 + " [... 90 more characters]", True)
    for kind in ("bytes", "loop"):
        with pytest.raises(ToolError, match="expected a text or a JSON value"):
            await tool.call("returns", {"kind": kind})


@pytest.mark.parametrize("name", ["waits", "waits_for_ever"])
async def test_I3_a_function_that_hangs_is_cut_off_and_hung_threads_do_not_starve_the_loop(load, name: str) -> None:
    tool = load(name, timeout_seconds=0.05)
    session = await session_of(tool)
    with pytest.raises(ToolError, match=r"gave no answer within tools.own.timeout_seconds"):
        await session.call("own", {})
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 5), 60) == 5
    if name == "waits":
        tool._function.__globals__["released"].set()


async def test_hung_threads_are_bounded_and_a_released_one_makes_room(load, monkeypatch) -> None:
    monkeypatch.setattr(python_tools, "MOST_THREADS", 2)
    tool = load("waits", timeout_seconds=0.05)
    session = await session_of(tool)
    before = threading.active_count()
    for _ in range(4):
        with pytest.raises(ToolError, match="gave no answer"):
            await session.call("own", {})
    assert threading.active_count() == before + 2
    tool._function.__globals__["released"].set()
    tool.timeout_seconds = 60.0
    assert (await session.call("own", {})).text == "released"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cnvert", "tools.own.path is .*the nearest is 'convert'"),
        ("number", "which is no function but 3"),
        ("Point", "which is no function but <class"),
        ("unannotated", "the parameter x of unannotated has no annotation"),
        ("positional", "positional has the parameter x: .*passed by name"),
        ("variadic", r"variadic has the parameter \*words"),
        ("keywords", r"keywords has the parameter \*\*words"),
        ("unknown", "the annotations of unknown can't be read: NameError"),
        ("unspeakable", "a parameter of unspeakable is of a type that JSON can't carry"),
    ],
)
def test_a_function_that_is_no_tool_is_refused_before_anything_starts(load, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tools.own.path.*there is no file nowhere.py"):
        PythonFunction("own", PythonTool(path="nowhere.py:f"))
