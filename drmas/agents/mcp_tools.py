"""The tools of a Model Context Protocol server: started by a command and spoken with over pipes, or reached at a URL.

    server = McpServer("time", McpTool(command=["uvx", "mcp-server-time"], allow=["get_current_time"]))
    await server.start()
    text, ok = await server.call("get_current_time", {"timezone": "UTC"})
    await server.close()

A server that died, or let a call run into its deadline and answers nothing else either, is stopped and started anew for the
next call; the call that met the trouble fails its episode (I3). An answer that the server itself calls an error is the agent's
to read. A server started by a command gets PATH and HOME and what `pass_env` names, and nothing else. Made by
`drmas.runtime.tools`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from mcp import Client, MCPError
from mcp_types import INVALID_PARAMS, CallToolResult
from mcp_types import Tool as ListedTool

from drmas.agents.mcp_http import http_transport
from drmas.agents.mcp_stdio import StdioServer
from drmas.agents.tools import Spec, shortened
from drmas.config.tasks import McpTool
from drmas.core.endpoints import checked_url, key_of, without_key
from drmas.core.names import expected_names
from drmas.errors import ConfigError, ToolError

logging.getLogger("mcp").addHandler(logging.NullHandler())  # what a server does wrong is told in ToolErrors, not on the console

MOST_STARTS = 5
"""Starts in a row after which no call was answered; further ones wait until `PAUSE_SECONDS` after the last."""
PAUSE_SECONDS = 30.0
CHECK_SECONDS = 5.0
"""What a server that met trouble gets to list its tools, before it is taken for dead; a quarter of a call's time if less."""
CLOSE_SECONDS = 10.0
_MOST_PAGES = 100
_SHOWN = 300
_HUNG = 0.9
"""A call that is cancelled after this share of its time was cancelled by its deadline, not by the end of its episode."""


class McpServer:
    """The server of `tools.SECTION` as a tool. ConfigError: no such command or variable, or a URL that is none
    or holds more than host and path."""

    def __init__(self, section: str, config: McpTool) -> None:
        self.timeout_seconds = config.timeout_seconds
        self.specs: Sequence[Spec] = ()
        self._where, self._config = f"tools.{section}", config
        self._command = _command(config, self._where)
        self._environment = _environment(config, self._where)
        self._key = key_of(f"{self._where}.api_key_env", config.api_key_env)
        self._connection: _Connection | None = None
        self._starting: asyncio.Task[_Connection] | None = None
        self._starts_in_vain = 0
        self._last_start = 0.0

    async def start(self) -> None:
        """Start or reach the server and list its tools.

        ToolError: it doesn't come up within `start_timeout_seconds`. ConfigError: `allow` names a tool that it doesn't list.
        """
        connection = await self._live()
        listed = {tool.name: tool for tool in connection.listed}
        for name in self._config.allow:
            if name not in listed:
                raise ConfigError(f"{self._where}.allow names {name!r}; {expected_names(name, listed)}")
        self.specs = [_spec(listed[name]) for name in self._config.allow or listed]

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """As `Tool.call`. Content that isn't text is described in words."""
        connection = await self._live()
        started = asyncio.get_running_loop().time()
        try:
            result = await connection.client.call_tool(name, arguments)
        except asyncio.CancelledError:
            hung = asyncio.get_running_loop().time() - started > _HUNG * self.timeout_seconds
            connection.suspect = connection.suspect or hung
            raise
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                self._starts_in_vain = 0
                return self._shortened(error.message), False
            connection.suspect = True
            raise ToolError(
                f"{self._where}: {name} failed: {self._shown(error.message)}{await connection.last_words()}"
            ) from error
        except Exception as error:  # the client raises what its parts raise, for answers against the protocol too
            connection.suspect = True
            raise ToolError(
                f"{self._where}: {name} failed: {self._shown(_first(error))}{await connection.last_words()}"
            ) from error
        self._starts_in_vain = 0
        return self._shortened(_text(result)), not result.is_error

    async def close(self) -> None:
        """End the session, and the server where we started it, with its children."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def _shortened(self, text: str) -> str:
        return shortened(without_key(text, self._key), self._config.max_result_chars)

    def _shown(self, text: str) -> str:
        """A server's own words, for an error."""
        return shortened(" ".join(without_key(text, self._key).split()), _SHOWN)

    async def _live(self) -> _Connection:
        """A connection that answers as far as we know. One start serves all calls that wait for it, and survives them."""
        connection = self._connection
        if connection is not None and connection.alive and not connection.suspect:
            return connection
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._renewed())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to whoever waits
        return await asyncio.shield(self._starting)

    async def _renewed(self) -> _Connection:
        former = self._connection
        if former is not None:
            if former.alive and await former.answers(min(CHECK_SECONDS, self.timeout_seconds / 4)):
                former.suspect = False
                return former
            await former.close(patient=False)
            self._connection = None
        now = asyncio.get_running_loop().time()
        if self._starts_in_vain >= MOST_STARTS and now - self._last_start < PAUSE_SECONDS:
            raise ToolError(
                f"{self._where}: the server was started {self._starts_in_vain} times without answering a call; the next start "
                f"is {PAUSE_SECONDS:g} s after the last"
            )
        self._starts_in_vain += 1
        self._last_start = now
        self._connection = await self._opened()
        return self._connection

    async def _opened(self) -> _Connection:
        limit = self._config.start_timeout_seconds
        stdio = StdioServer(self._command, self._environment) if self._command else None
        connection = _Connection(stdio or http_transport(self._config.url, self._key), stdio)
        try:
            async with asyncio.timeout(limit) as deadline:
                await connection.ready()
                connection.listed = await connection.list_tools()
        except BaseException as error:
            await connection.close(patient=not deadline.expired())
            if not isinstance(error, Exception):
                raise
            why = (
                f"not ready within {self._where}.start_timeout_seconds = {limit:g}"
                if deadline.expired()
                else self._shown(_first(error))
            )
            raise ToolError(f"{self._where}: the server did not come up: {why}{await connection.last_words()}") from error
        return connection


class _Connection:
    """One session with a server, opened and closed by one task, as mcp demands; calls may come from any."""

    def __init__(self, transport: Any, stdio: StdioServer | None) -> None:
        self.suspect = False
        """Something went wrong; whether it still answers must be seen before it is used again."""
        self.listed: list[ListedTool] = []
        self._stdio = stdio
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._task = asyncio.create_task(self._hold(transport))

    @property
    def client(self) -> Client:
        return self._client.result()

    @property
    def alive(self) -> bool:
        return not self._task.done() and (self._stdio is None or self._stdio.alive)

    async def last_words(self) -> str:
        """What the server said, for the end of an error."""
        if self._stdio is None:
            return ""
        await self._stdio.heard_out()
        return f" ({self._stdio.last_words})" if self._stdio.last_words else ""

    async def ready(self) -> None:
        await asyncio.shield(self._client)

    async def list_tools(self) -> list[ListedTool]:
        tools: list[ListedTool] = []
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await self.client.list_tools(cursor=cursor)
            tools.extend(page.tools)
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    async def answers(self, limit_seconds: float) -> bool:
        try:
            async with asyncio.timeout(limit_seconds):
                await self.client.list_tools()
        except Exception:
            return False
        return True

    async def close(self, *, patient: bool = True) -> None:
        """Never raises what the session raises at its end; harmless when repeated."""
        if self._stdio is not None and not patient:
            self._stdio.give_up()
        self._leave.set()
        if self._client.done():
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _hold(self, transport: Any) -> None:
        try:
            async with Client(transport, cache=None) as client:
                self._client.set_result(client)
                await self._leave.wait()
        except Exception as error:
            if not self._client.done():
                self._client.set_exception(error)
        finally:
            self._client.cancel()


def _command(config: McpTool, where: str) -> list[str]:
    if not config.command:
        checked_url(f"{where}.url", str(config.url), example="http://127.0.0.1:8000/mcp")
        return []
    program, *arguments = config.command
    found = shutil.which(program)
    if found is None:
        raise ConfigError(f"{where}.command starts with {program!r}; there is no such program in PATH, nor such a file to run")
    return [found, *arguments]


def _environment(config: McpTool, where: str) -> dict[str, str]:
    for name in config.pass_env:
        if name not in os.environ:
            raise ConfigError(f"{where}.pass_env names {name!r}, which isn't set in the environment")
    return {name: os.environ[name] for name in ("PATH", "HOME", *config.pass_env) if name in os.environ}


def _spec(tool: ListedTool) -> Spec:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
    }


def _text(result: CallToolResult) -> str:
    """The content of a result as text; structured content where that is all there is."""
    parts = [_described(block.model_dump(mode="json")) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


def _described(block: Mapping[str, Any]) -> str:
    match block:
        case {"type": "text", "text": text} | {"type": "resource", "resource": {"text": text}}:
            return text
        case {"type": ("image" | "audio") as kind, "mime_type": form, "data": data}:
            return f"[{kind} of type {form}, {_bytes(data)} bytes, which can't be shown]"
        case {"type": "resource", "resource": {"uri": uri, "blob": data}}:
            return f"[binary resource {uri}, {_bytes(data)} bytes, which can't be shown]"
        case {"type": "resource_link", "uri": uri}:
            return f"[link to {uri}]"
    return f"[content of type {block.get('type')}, which can't be shown]"


def _bytes(base64: str) -> int:
    return len(base64.rstrip("=")) * 3 // 4


def _first(error: BaseException) -> str:
    """The first real error in a group of them, which task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
