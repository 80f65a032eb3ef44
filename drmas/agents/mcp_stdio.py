"""The pipes to an MCP server that drmas starts: one JSON-RPC message per line, in a process group that never outlives the run.

    server = StdioServer(["uvx", "mcp-server-time"], environment)
    async with Client(server) as client:                            # of the package mcp, whose Transport this is
        ...
    server.last_words                                               # the end of what it wrote to stderr

mcp has such a transport too (`stdio_client`). This one gives the server no environment but the one it is given, bounds what a
broken server can make us hold, keeps stderr off the console, and kills the children of a server that ended by itself. Called by
`mcp_tools`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

GUARD = Path(__file__).with_name("mcp_guard.py")

EXIT_SECONDS = 1.0
"""What a server gets to end by itself, once its stdin is closed."""
KILL_SECONDS = 5.0
"""Until a killed group must be gone; only one that waits for a broken device isn't."""
MOST_LINE_BYTES = 8 * 2**20
"""The longest message; a longer one ends the connection."""
MOST_JUNK_LINES = 1000
"""Lines on stdout that are no messages (banners, prints). More end the connection."""
_QUEUE = 1024
_TAIL_BYTES = 2000
_SHOWN = 400


class StdioServer:
    """A server process and the pipes to it, as a transport of mcp's `Client`: entered and left once."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._patience = EXIT_SECONDS
        self._tail = b""
        self._junk = ""

    @property
    def alive(self) -> bool:
        """Whether messages can still come from it."""
        return bool(self._tasks) and not self._tasks[0].done()

    async def heard_out(self) -> None:
        """Where it died: wait for what it still had to say, its exit status too."""
        if self._tasks and not self.alive:
            await asyncio.wait(self._tasks[2:], timeout=EXIT_SECONDS)

    def give_up(self) -> None:
        """It hangs or writes nonsense: when it is left, it gets no time to end by itself."""
        self._patience = 0.0

    @property
    def last_words(self) -> str:
        """What it wrote last to stderr, and the first thing on stdout that was no message; empty if nothing."""
        said = " ".join(self._tail.decode(errors="replace").split())
        parts = [f"its stdout held {self._junk!r}, which is no message"] if self._junk else []
        parts += [f"its stderr ends with: {said[-_SHOWN:]}"] if said else []
        return "; ".join(parts)

    async def __aenter__(self) -> tuple[MemoryObjectReceiveStream[Any], MemoryObjectSendStream[SessionMessage]]:
        """OSError: there is no process to be had."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(GUARD), str(os.getpid()), *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            limit=MOST_LINE_BYTES,
            start_new_session=True,
        )
        incoming, to_client = anyio.create_memory_object_stream[Any](0)
        from_client, outgoing = anyio.create_memory_object_stream[SessionMessage](_QUEUE)
        self._tasks = [
            asyncio.create_task(self._read(process.stdout, incoming)),
            asyncio.create_task(self._write(process.stdin, outgoing)),
            asyncio.create_task(self._listen(process.stderr)),
        ]
        return to_client, from_client

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.close()
            if self._patience:
                await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=self._patience)
        finally:
            # the group's leader is our child: while it isn't reaped, the number is its own
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([asyncio.ensure_future(process.wait()), *self._tasks], timeout=KILL_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, stdout: asyncio.StreamReader, incoming: MemoryObjectSendStream[Any]) -> None:
        """Until stdout ends or can't be taken seriously; the client then finds its connection closed."""
        junk_lines = 0
        with incoming, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            while junk_lines <= MOST_JUNK_LINES:
                try:
                    line = await stdout.readline()
                except ValueError:  # longer than the reader's limit
                    self._junk = self._junk or f"a line of more than {MOST_LINE_BYTES} bytes"
                    break
                if not line:
                    return
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    junk_lines += bool(line.strip())
                    self._junk = self._junk or line[:_SHOWN].decode(errors="replace").strip()
                    continue
                await incoming.send(SessionMessage(message))
            self.give_up()

    async def _write(self, stdin: asyncio.StreamWriter, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        with outgoing, contextlib.suppress(OSError):
            async for item in outgoing:
                stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        while read := await stderr.read(65536):
            self._tail = (self._tail + read)[-_TAIL_BYTES:]
