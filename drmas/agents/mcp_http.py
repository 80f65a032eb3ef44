"""The way to an MCP server at a URL, which bounds what a broken server can make us hold.

    async with Client(http_transport("http://127.0.0.1:8000/mcp", key)) as client:         # of the package mcp
        ...

mcp speaks the protocol and reads each body whole, however long. Here a body ends after `MOST_BYTES`; in a stream of events that
holds for each event, since a stream may stay open as long as the run. Proxies of the environment are not used. Called by
`mcp_tools`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from drmas.core.endpoints import bearer

MOST_BYTES = 8 * 2**20
"""Of one body, or of one event of a stream."""
_TIMEOUT = httpx2.Timeout(30.0, read=300.0)
"""A stream of events may be silent for long; a call has its own deadline."""


class _TooMuch(httpx2.StreamError):
    """A kind that mcp answers its waiting call with."""


@asynccontextmanager
async def http_transport(url: str, key: str) -> AsyncIterator[Any]:
    """A transport of mcp's `Client`; `key` is sent as a bearer token where there is one."""
    async with (
        httpx2.AsyncClient(
            transport=_Bounded(),
            headers={"accept-encoding": "identity", **bearer(key)},
            timeout=_TIMEOUT,
            trust_env=False,
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MOST_BYTES) as streams,
    ):
        yield streams


class _Bounded(httpx2.AsyncHTTPTransport):
    """Ends bodies that are too long, and takes none that is packed: it would be bounded in its packed form alone."""

    def __init__(self) -> None:
        super().__init__(trust_env=False)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        packed = response.headers.get("content-encoding", "identity").strip().lower() != "identity"
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if packed or response.status_code != 200 or kind != "text/event-stream":
            response.stream = _Body(response.stream, packed)
        return response


class _Body(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, packed: bool) -> None:
        self._stream, self._packed = stream, packed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._packed:
            raise _TooMuch("the body is packed, which wasn't asked for")
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > MOST_BYTES:
                raise _TooMuch(f"the body has more than {MOST_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
