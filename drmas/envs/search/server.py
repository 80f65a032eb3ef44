"""Retrieval over HTTP: `POST /retrieve` for both request shapes in use, `GET /health`. Called by `drmas serve-retriever`.

    {"query": "element 74", "topk": 3, "return_scores": true}             one query: Dr. MAS
    {"queries": ["element 74", "..."], "topk": 3, "return_scores": true}  several: Search-R1

    {"result": [[{"document": {"id": ..., "contents": ...}, "score": 7.1}, ...], ...]}   a list per query
    {"result": [[{"id": ..., "contents": ...}, ...], ...]}                               without scores

`contents` begins with the title in quotation marks on a line of its own, which both clients take apart. What is wrong with a
request is answered with 4xx and words under `detail`; 503 means that the server is too busy, and asking again is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from drmas.envs.search.batcher import Batcher, Busy
from drmas.envs.search.cache import LruCache
from drmas.envs.search.index import Hit, Index

DEFAULT_TOPK = 3
"""Where a request has none, or null."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how long it may take."""

    topk: int = 100
    queries: int = 512
    body_bytes: int = 2**20
    deadline_seconds: float = 10.0
    cache_size: int = 10000
    """Answers that are kept, by query and number of passages; 0 keeps none."""


class RetrieverServer:
    """The application around one index; `app` is what uvicorn serves."""

    def __init__(self, index: Index, limits: Limits = Limits(), *, batcher: Batcher | None = None) -> None:
        self._limits = limits
        self._batcher = batcher or Batcher(index)
        self._cache: LruCache[tuple[str, int], list[Hit]] = LruCache(limits.cache_size)
        self._about = {"status": "ok", "index": index.kind, "passages": len(index.passages), "topk_limit": limits.topk}
        self.app = Starlette(
            routes=[
                Route("/retrieve", self._retrieve, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _refusal},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self._batcher.close()

    async def _health(self, request: Request) -> Response:
        return JSONResponse(self._about)

    async def _retrieve(self, request: Request) -> Response:
        seconds = self._limits.deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                queries, topk, with_scores = self._wanted(await self._body(request))
                hits = await self._search(queries, topk)
        except TimeoutError as error:
            raise HTTPException(
                503, f"no answer within {seconds:g} s; ask again later, or start the server with a larger --deadline-seconds"
            ) from error
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse({"result": [[_document(hit, with_scores) for hit in of_query] for of_query in hits]})

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limits.body_bytes:
                raise HTTPException(
                    413,
                    f"the body has more than {self._limits.body_bytes} bytes; send fewer queries at once",
                    headers={"connection": "close"},  # the rest of the body isn't read
                )
        return bytes(body)

    def _wanted(self, body: bytes) -> tuple[list[str], int, bool]:
        """Queries, topk and whether scores are wanted; HTTPException 400 or 422 where the request says something else."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(
                400, f"the body is not JSON ({str(error)[:200]}); expected an object with query or queries"
            ) from error
        if not isinstance(request, dict) or ("query" in request) == ("queries" in request):
            raise HTTPException(422, "expected an object with either `query`, a text, or `queries`, a list of texts")
        queries = [request["query"]] if "query" in request else request["queries"]
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise HTTPException(422, "expected `query` to be a text, or `queries` to be a list of texts")
        if len(queries) > self._limits.queries:
            raise HTTPException(
                422, f"`queries` holds {len(queries)} texts; at most {self._limits.queries} are answered at once"
            )
        topk = DEFAULT_TOPK if request.get("topk") is None else request["topk"]
        if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= self._limits.topk:
            raise HTTPException(422, f"`topk` is {json.dumps(topk)[:50]}; expected an integer from 1 to {self._limits.topk}")
        with_scores = request.get("return_scores", False)
        if not isinstance(with_scores, bool | None):
            raise HTTPException(422, f"`return_scores` is {json.dumps(with_scores)[:50]}; expected true or false")
        return queries, topk, bool(with_scores)

    async def _search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        found = {query: self._cache.get((query, topk)) for query in queries}
        missing = [query for query, hits in found.items() if hits is None]
        if missing:
            for query, hits in zip(missing, await self._ask(missing, topk), strict=True):
                found[query] = hits
                self._cache.put((query, topk), hits)
        return [found[query] or [] for query in queries]

    async def _ask(self, queries: list[str], topk: int) -> list[list[Hit]]:
        try:
            return await self._batcher.search(queries, topk)
        except Busy as error:
            raise HTTPException(503, f"the server is busy: {error}; ask again later") from error
        except Exception as error:
            reason = f"the search failed: {type(error).__name__}: {error}"
            sys.stderr.write(f"drmas: {reason}\n")
            raise HTTPException(500, reason) from error


def _document(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": hit.passage.text}
    return {"document": document, "score": hit.score} if with_score else document


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)
