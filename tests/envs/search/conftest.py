from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from drmas.envs.search.corpus import Passage

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def passages() -> list[Passage]:
    return [
        Passage("w", "Tungsten", "Tungsten is the chemical element with atomic number 74. It melts at 3422 degrees."),
        Passage("l", "Lima", "Lima is the capital of Peru, on the Pacific coast."),
        Passage("s", "São Tomé", "The lakes of São Tomé are small."),
        Passage("k", "東京", "東京は日本の首都です。"),
        Passage("u", "", "Element without a title: a plain passage about tungsten lamps."),
    ]


def status(code: int, body: Any = None) -> Reply:
    """A reply with this status and JSON (or, for bytes, this very body)."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (code, len(data)) + data)
        await writer.drain()

    return reply


def good(*contents: str, scores: bool = True) -> Reply:
    """The answer of a retriever with these passages."""
    documents = [{"contents": text} for text in contents]
    return status(200, {"result": [[{"document": one, "score": 0.5} for one in documents] if scores else documents]})


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


class FakeServer:
    """A server that gives the replies it was told, the last one for ever; `requests` holds what it was asked."""

    def __init__(self, *replies: Reply) -> None:
        self._replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            self.requests.append(json.loads(await reader.readexactly(length)))
            await self._replies[min(len(self.requests), len(self._replies)) - 1](writer)
        writer.close()


@pytest.fixture
def retriever():
    """`async with retriever(reply, ...) as server`: a FakeServer on a free port."""

    @contextlib.asynccontextmanager
    async def start(*replies: Reply) -> AsyncIterator[FakeServer]:
        server = FakeServer(*replies)
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.create_task(server.answer(reader, writer)))

        listening = await asyncio.start_server(accept, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield server
        finally:
            listening.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return start
