"""Asking retrieval servers: `drmas serve-retriever`, Search-R1's, the method's first implementation's.

    client = RetrieverClient(["http://10.0.0.7:8000"], timeout_seconds=20.0, max_retries=4)
    hits = await client.search("element 74", topk=3)

A request carries one query, which every such server understands. What another attempt may mend (500, 502, 503, 504, no
connection, no answer) is tried again at the next server after a growing pause, within one deadline; everything else, and an
answer that isn't of the stated shape, is a ToolError at once: it never becomes text that an agent reads (I3). Proxies of the
environment are not used. Called by `tool`, in one event loop.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx

from drmas.core.endpoints import bearer, checked_url
from drmas.envs.search.corpus import Passage
from drmas.envs.search.index import Hit
from drmas.errors import ToolError

RETRIED = (500, 502, 503, 504)
MAX_ANSWER_BYTES = 16 * 2**20
_LONGEST_PAUSE_SECONDS = 5.0
_PROBE = "What is the capital of France?"


class _TryAgain(Exception):
    """Why an attempt failed that another one may mend."""


class RetrieverClient:
    """Asks the servers at `urls` in turn."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_seconds: float,
        max_retries: int,
        key: str = "",
        section: str = "search",
        pause_seconds: float = 0.25,
        seed: int = 0,
    ) -> None:
        """`timeout_seconds` is for a query with its retries; one attempt gets at most half of it, where there are retries.

        The first pause is about `pause_seconds`, each later one twice the one before. `key` is sent as a bearer token and never
        shown. ConfigError, about tools.SECTION.url: a URL isn't http or https, or holds more than host and path.
        """
        self._urls = [_endpoint(url, section) for url in urls]
        self._key = key.encode()
        self._timeout_seconds, self._max_retries, self._pause_seconds = timeout_seconds, max_retries, pause_seconds
        self._random = random.Random(seed)
        self._asked = 0
        self._client = httpx.AsyncClient(
            timeout=timeout_seconds / 2 if max_retries else timeout_seconds,
            limits=httpx.Limits(max_connections=512, max_keepalive_connections=128),
            headers={"accept-encoding": "identity", **bearer(key)},
            trust_env=False,
        )

    async def search(self, query: str, topk: int) -> list[Hit]:
        """The hits of `query`, best first. ToolError: no server answered in time, or one answered against the schema."""
        first = self._asked % len(self._urls)
        self._asked += 1
        return await self._ask(query, topk, self._urls[first:] + self._urls[:first])

    async def check(self, topk: int) -> None:
        """Ask every server once. ToolError names the one that doesn't answer as it should."""
        for url in self._urls:
            await self._ask(_PROBE, topk, [url])

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, query: str, topk: int, urls: Sequence[httpx.URL]) -> list[Hit]:
        """Attempts at `urls` in turn, within the deadline."""
        url, cause, attempts = urls[0], "no answer", 0
        try:
            async with asyncio.timeout(self._timeout_seconds):
                for attempts in range(1, self._max_retries + 2):
                    url = urls[(attempts - 1) % len(urls)]
                    try:
                        return await self._attempt(url, query, topk)
                    except _TryAgain as error:
                        cause = str(error)
                    if attempts <= self._max_retries:
                        await asyncio.sleep(self._pause(attempts))
        except TimeoutError:
            cause = f"{cause}; {self._timeout_seconds:g} s are over"
        raise ToolError(
            f"search: {url} gave no answer in {attempts} attempts: {cause}; expected a retrieval server there "
            f"(drmas serve-retriever): see to it, or change the tool's url, max_retries or timeout_seconds"
        )

    def _pause(self, attempt: int) -> float:
        longest = min(self._pause_seconds * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
        return longest * self._random.uniform(0.5, 1.0)

    async def _attempt(self, url: httpx.URL, query: str, topk: int) -> list[Hit]:
        try:
            request = {"query": query, "topk": topk, "return_scores": True}
            async with self._client.stream("POST", url, json=request) as answer:
                body = await _read(answer, url)
                if self._key:
                    body = body.replace(self._key, b"[key]")  # some servers send it back
        except httpx.TimeoutException as error:
            raise _TryAgain(f"{type(error).__name__} after {self._client.timeout.read:g} s") from error
        except httpx.RequestError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        if answer.status_code in RETRIED:
            raise _TryAgain(f"status {answer.status_code}: {_excerpt(body)}")
        if answer.status_code != 200:
            raise ToolError(
                f"search: {url} answered with status {answer.status_code}; expected a retriever, which answers POST with 200: "
                f"{_excerpt(body)}"
            )
        return hits_of(body, topk, str(url))


async def _read(answer: httpx.Response, url: httpx.URL) -> bytes:
    body = bytearray()
    async for chunk in answer.aiter_bytes():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise ToolError(f"search: {url} answered with more than {MAX_ANSWER_BYTES} bytes; expected a few passages")
    return bytes(body)


def hits_of(body: bytes, topk: int, where: str) -> list[Hit]:
    """The hits of an answer to one query, with or without scores (then they are 0). ToolError: it has another shape."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _against_schema(where, f"the body is not JSON: {_excerpt(body)}") from error
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
        raise _against_schema(where, f"found {_excerpt(body)}")
    return [_hit(entry, position, where) for position, entry in enumerate(result[0][:topk])]


def _hit(entry: Any, position: int, where: str) -> Hit:
    document = entry.get("document", entry) if isinstance(entry, dict) else None
    if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        raise _against_schema(where, f"result[0][{position}] is {_excerpt(json.dumps(entry).encode())}")
    score = entry.get("score", 0.0)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise _against_schema(where, f"result[0][{position}] has the score {_excerpt(json.dumps(score).encode())}")
    title = document.get("title")
    contents = document["contents"].encode("utf-8", "replace").decode()
    return Hit(Passage(str(document.get("id", position)), title if isinstance(title, str) else "", contents), float(score))


def _against_schema(where: str, found: str) -> ToolError:
    return ToolError(
        f'search: {where} answered against its schema: {found}; expected {{"result": [[...]]}}, one list of passages, each '
        f'{{"document": {{"contents": text}}, "score": number}} or {{"contents": text}}'
    )


def _endpoint(url: str, section: str) -> httpx.URL:
    parsed = httpx.URL(checked_url(f"tools.{section}.url", url, example="http://127.0.0.1:8000"))
    return parsed.copy_with(path="/retrieve") if parsed.path in ("", "/") else parsed


def _excerpt(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace")
    return repr(text + " ..." if len(body) > 200 else text)
