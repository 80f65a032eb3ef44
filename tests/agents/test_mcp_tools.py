from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drmas.agents import mcp_stdio, mcp_tools
from drmas.agents.mcp_tools import McpServer
from drmas.agents.tools import Toolbox, ToolResult, ToolSession
from drmas.config.tasks import McpTool
from drmas.errors import ConfigError, ToolError
from drmas.types import Episode, Task

SERVER = Path(__file__).with_name("mcp_server.py")
SOON = 30.0
"""Until what must happen at once has happened, on a busy machine too."""


def server(mode: str = "", **settings: Any) -> McpServer:
    command = [sys.executable, str(SERVER), *([mode] if mode else [])]
    return McpServer("own", McpTool(command=command, **settings))


@pytest.fixture
async def started():
    """`await started(tool)` gives a session; all tools are closed at the end."""
    boxes = []

    async def start(tool: McpServer) -> ToolSession:
        boxes.append(Toolbox({"own": tool}))
        await boxes[-1].start()
        return boxes[-1].session(Episode(Task("t", "?", "5"), 0))

    yield start
    for box in boxes:
        await box.close()


async def ask(session: ToolSession, name: str, **arguments: Any) -> ToolResult:
    return await session.call(f"own.{name}", arguments)


def lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # dead, and not yet waited for by whoever inherited it


async def dies(process: int) -> bool:
    deadline = time.monotonic() + SOON
    while lives(process) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return not lives(process)


async def test_its_tools_are_listed_over_all_pages_and_answer(started) -> None:
    tool = server()
    session = await started(tool)
    names = [spec["function"]["name"] for spec in tool.specs]
    assert len(names) == 11
    assert names[0] == "echo"
    assert tool.specs[0]["function"]["description"] == "Gives the text back."
    assert tool.specs[0]["function"]["parameters"]["required"] == ["text"]
    assert await ask(session, "echo", text="héllo") == ToolResult("héllo", True)
    results = await asyncio.gather(*(ask(session, "echo", text=str(number)) for number in range(20)))
    assert [result.text for result in results] == [str(number) for number in range(20)]


async def test_the_servers_own_errors_are_the_agents_to_read(started) -> None:
    session = await started(server())
    assert await ask(session, "refuse") == ToolResult("no such file", False)
    assert await ask(session, "invalid") == ToolResult("text is too short", False)


async def test_content_that_is_no_text_is_described(started) -> None:
    session = await started(server())
    text = "[image of type image/png, 3 bytes, which can't be shown]\n[link to file:///a.txt]\na cat"
    assert await ask(session, "picture") == ToolResult(text, True)


async def test_a_long_result_is_cut(started) -> None:
    session = await started(server(max_result_chars=5))
    assert (await ask(session, "echo", text="x" * 50)).text == "xxxxx [... 45 more characters]"


async def test_allow_limits_the_tools_and_names_only_what_is_there(started) -> None:
    tool = server(allow=["refuse", "echo"])
    await started(tool)
    assert [spec["function"]["name"] for spec in tool.specs] == ["refuse", "echo"]
    with pytest.raises(ConfigError, match=r"tools.own.allow names 'ecko'; the nearest is 'echo'"):
        await started(server(allow=["ecko"]))


async def test_a_started_server_has_no_environment_but_what_is_passed(started, monkeypatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "1234")
    monkeypatch.setenv("WANTED", "yes")
    session = await started(server(pass_env=["WANTED"]))
    names = set((await ask(session, "environment")).text.split())
    assert names - {"LC_CTYPE"} == {"PATH", "HOME", "WANTED"}  # Python sets LC_CTYPE itself where there is no locale


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": ["no-such-program"]}, "tools.own.command starts with 'no-such-program'; there is no such program in PATH"),
        ({"command": [str(SERVER.with_name("nothing.py"))]}, "there is no such program"),
        ({"command": ["sh"], "pass_env": ["UNSET_7Q"]}, "tools.own.pass_env names 'UNSET_7Q', which isn't set"),
        ({"url": "localhost:80"}, "tools.own.url is no address of a server; expected such as http://127.0.0.1:8000/mcp"),
        ({"url": "http://me:hunter2@host/mcp"}, "tools.own.url holds more than host and path; use tools.own.api_key_env"),
        ({"url": "http://host/mcp?key=hunter2"}, "tools.own.url holds more than host and path; use tools.own.api_key_env"),
        ({"url": "http://me:hunter2@host:port"}, "tools.own.url is no URL"),
        ({"url": "http://host", "api_key_env": "UNSET_7Q"}, "tools.own.api_key_env is 'UNSET_7Q', which isn't set"),
    ],
)
def test_what_can_not_be_started_is_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        McpServer("own", McpTool(**settings))
    assert "hunter2" not in str(caught.value)


def test_a_command_has_no_key_of_its_own() -> None:
    with pytest.raises(ValueError, match="a command gets its key by pass_env"):
        McpTool(command=["sh"], api_key_env="KEY")


@pytest.mark.parametrize(
    ("mode", "seconds", "message"),
    [
        ("exit", SOON, r"Connection closed \(its stderr ends with: started in mode exit \[it ended with status 3\]"),
        ("garbage", SOON, r"Connection closed \(its stdout held 'no message', which is no message"),
        ("endless", SOON, r"its stdout held 'a line of more than \d+ bytes'"),
        ("silent", 1.0, r"not ready within tools.own.start_timeout_seconds = 1 "),
    ],
)
async def test_a_server_that_does_not_come_up_says_why_and_leaves_nothing(
    started, monkeypatch, mode: str, seconds: float, message: str
) -> None:
    processes = []
    real = asyncio.create_subprocess_exec

    async def noted(*arguments: Any, **settings: Any):
        processes.append(await real(*arguments, **settings))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    with pytest.raises(ToolError, match=r"tools.own: the server did not come up: .*" + message):
        await started(server(mode, start_timeout_seconds=seconds))
    assert await dies(processes[0].pid)


async def test_a_line_that_is_no_message_does_no_harm(started, caplog, capfd) -> None:
    session = await started(server("banner"))
    assert (await ask(session, "echo", text="x")).ok
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


async def test_I3_trouble_with_the_server_fails_the_call(started) -> None:
    session = await started(server())
    with pytest.raises(ToolError, match=r"tools.own: broken failed: the disk is full"):
        await ask(session, "broken")
    with pytest.raises(ToolError, match=r"tools.own: nonsense failed: ValidationError"):
        await ask(session, "nonsense")
    first = (await ask(session, "process")).text
    assert first == (await ask(session, "process")).text


async def test_a_server_that_answers_others_is_not_restarted_after_an_error(started) -> None:
    session = await started(server())
    before = await ask(session, "process")
    with pytest.raises(ToolError):
        await ask(session, "broken")
    assert await ask(session, "process") == before


async def test_a_server_that_died_fails_its_calls_and_is_started_again_for_the_next(started) -> None:
    session = await started(server())
    first = (await ask(session, "process")).text
    with pytest.raises(
        ToolError,
        match=r"tools.own: die failed: Connection closed \(its stderr ends with: .* I die now \[it ended with status 9\]",
    ):
        await ask(session, "die")
    second = (await ask(session, "process")).text
    assert second != first
    assert await dies(int(first))
    waiting = asyncio.create_task(ask(session, "hang"))
    await asyncio.sleep(0.05)
    os.kill(int(second), signal.SIGKILL)
    with pytest.raises(ToolError, match=r"tools.own: hang failed: Connection closed"):
        await waiting
    assert (await ask(session, "process")).text not in (first, second)


async def test_a_server_that_died_between_two_calls_costs_neither(started) -> None:
    tool = server()
    session = await started(tool)
    first = (await ask(session, "process")).text
    os.kill(int(first), signal.SIGKILL)
    while tool._connection.alive:
        await asyncio.sleep(0.01)
    others = await asyncio.gather(*(ask(session, "process") for _ in range(10)))
    assert len({other.text for other in others} - {first}) == 1  # one start served them all


async def test_a_server_that_hangs_is_cut_off_and_started_again_for_the_next_call(started, monkeypatch) -> None:
    monkeypatch.setattr(mcp_tools, "CHECK_SECONDS", 0.1)
    tool = server(timeout_seconds=SOON)
    session = await started(tool)
    before = (await ask(session, "process")).text
    tool.timeout_seconds = 1.0
    with pytest.raises(ToolError, match=r"hang gave no answer within tools.own.timeout_seconds = 1"):
        await ask(session, "hang")
    tool.timeout_seconds = SOON
    after = (await ask(session, "process")).text
    assert after != before
    assert await dies(int(before))


async def test_a_server_that_dies_of_every_call_is_not_started_for_ever(started, monkeypatch) -> None:
    monkeypatch.setattr(mcp_tools, "MOST_STARTS", 3)
    session = await started(server("once"))
    for _ in range(3):
        with pytest.raises(ToolError, match="Connection closed"):
            await ask(session, "echo", text="x")
    with pytest.raises(ToolError, match="was started 3 times without answering a call; the next start is 30 s after the last"):
        await ask(session, "echo", text="x")
    monkeypatch.setattr(mcp_tools, "PAUSE_SECONDS", 0.0)
    with pytest.raises(ToolError, match="Connection closed"):
        await ask(session, "echo", text="x")


async def test_nothing_of_a_server_outlives_its_close(started) -> None:
    tool = server()
    session = await started(tool)
    own, child = int((await ask(session, "process")).text), int((await ask(session, "child")).text)
    assert lives(own)
    assert lives(child)
    await tool.close()
    await tool.close()
    assert await dies(own)
    assert await dies(child)


async def test_a_server_that_does_not_end_by_itself_is_killed(started, monkeypatch) -> None:
    monkeypatch.setattr(mcp_stdio, "EXIT_SECONDS", 0.05)
    tool = server()
    session = await started(tool)
    own = int((await ask(session, "process")).text)
    hanging = asyncio.create_task(ask(session, "hang"))
    await asyncio.sleep(0.1)
    await tool.close()
    with pytest.raises(ToolError):
        await hanging
    assert await dies(own)


async def test_nothing_of_a_server_outlives_a_run_that_was_killed() -> None:
    script = f"""
import asyncio, os, signal, sys
from drmas.agents.mcp_tools import McpServer
from drmas.config.tasks import McpTool

async def main():
    tool = McpServer("own", McpTool(command=[sys.executable, {str(SERVER)!r}]))
    await tool.start()
    print((await tool.call("process", {{}}))[0], (await tool.call("child", {{}}))[0], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    processes = [int(number) for number in run.stdout.split()]
    assert len(processes) == 2, run.stderr
    assert [await dies(process) for process in processes] == [True, True]


def serve(port: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "http", str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.fixture
async def http_url():
    process, port = await asyncio.to_thread(serve, 0)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flood", f"the body has more than {2**23} bytes"),
        ("events", f"exceeded the {2**23} byte limit"),
        ("packed", "the body is packed, which wasn't asked for"),
    ],
)
async def test_a_body_without_end_ends_the_call_and_not_the_connection(started, http_url, name: str, message: str) -> None:
    tool = McpServer("own", McpTool(url=http_url, timeout_seconds=SOON))
    session = await started(tool)
    with pytest.raises(ToolError, match=rf"tools.own: {name} failed: .*{message}"):
        await tool.call(name, {})
    assert await ask(session, "echo", text="x") == ToolResult("x", True)


async def test_a_result_as_long_as_over_pipes_is_taken_over_http(started, http_url) -> None:
    session = await started(McpServer("own", McpTool(url=http_url, timeout_seconds=SOON, max_result_chars=2**23)))
    assert len((await ask(session, "echo", text="x" * (2**23 - 1000))).text) == 2**23 - 1000


async def test_the_key_goes_into_a_header_and_comes_back_to_nobody(started, http_url, monkeypatch, caplog) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("MY_KEY", "hunter2\n")
    tool = McpServer("own", McpTool(url=http_url, api_key_env="MY_KEY"))
    await started(tool)
    assert await tool.call("key", {}) == ("Bearer [key]", True)
    assert "hunter2" not in caplog.text


async def test_the_environments_proxies_are_not_used_for_a_url(started, http_url, monkeypatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    session = await started(McpServer("own", McpTool(url=http_url)))
    assert await ask(session, "echo", text="x") == ToolResult("x", True)


async def test_a_message_over_pipes_that_is_too_long_ends_the_connection(started, monkeypatch) -> None:
    monkeypatch.setattr(mcp_stdio, "MOST_LINE_BYTES", 2**16)
    session = await started(server(max_result_chars=2**20))
    assert (await ask(session, "echo", text="x" * 2**15)).ok
    with pytest.raises(ToolError, match="its stdout held 'a line of more than 65536 bytes', which is no message"):
        await ask(session, "echo", text="x" * 2**17)
    assert (await ask(session, "echo", text="y")).ok


async def test_a_server_at_a_url_is_spoken_with_over_http_and_reached_again_after_its_end(started) -> None:
    process, port = await asyncio.to_thread(serve, 0)
    try:
        tool = McpServer("own", McpTool(url=f"http://127.0.0.1:{port}/mcp"))
        session = await started(tool)
        assert await ask(session, "echo", text="x") == ToolResult("x", True)
        assert await ask(session, "refuse") == ToolResult("no such file", False)
        process.kill()
        process.wait()
        with pytest.raises(ToolError, match=r"tools.own: echo failed"):
            await ask(session, "echo", text="x")
        with pytest.raises(ToolError, match=r"tools.own: the server did not come up: "):
            await ask(session, "echo", text="x")
        process, _ = await asyncio.to_thread(serve, port)
        assert await ask(session, "echo", text="y") == ToolResult("y", True)
    finally:
        process.kill()
        process.wait()
