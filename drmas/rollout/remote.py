"""A frozen model behind an OpenAI-compatible URL: messages in, text out. It is asked, never trained.

    remote = Remote("judge", RemoteConfig(url="http://127.0.0.1:8000/v1", model="m"))
    await remote.start()
    answer = await remote.ask(agent_config, [{"role": "user", "content": "..."}], seed=1, key="t1#0/000/judge")
    await remote.close()

Requests that a busy or flaky server loses are put again; what still fails then is an engine's trouble and fails the episode
(I3). The key of the API comes from the environment, goes into one header and nowhere else. Started and closed by the collector
in its event loop; asked by the player.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, Field, ValidationError

from drmas.agents.agent import AgentConfig
from drmas.config.schema import RemoteConfig
from drmas.core.endpoints import bearer, checked_url, key_of, without_key
from drmas.errors import EngineError, EngineStartError, EngineTimeout

logger = logging.getLogger(__name__)

CHAT = "chat/completions"
FIRST_PAUSE_SECONDS = 0.5
"""Before the second attempt; twice as long before each further one, and at random up to half less."""
MOST_PAUSE_SECONDS = 60.0
"""A server that asks for a longer pause isn't waited for."""
MOST_REPLY_BYTES = 16 * 2**20
MOST_MESSAGE_CHARACTERS = 300
"""What an error shows of the server's own message."""
SEED_BITS = 31
"""Servers differ in the seeds that they take; all take these. The lower bits of a seed are as good as all of it."""


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """One response. The counts are the server's own, 0 where it doesn't count."""

    text: str
    finish_reason: str
    prompt_tokens: int
    response_tokens: int


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str


class _Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Reply(BaseModel):
    """The part of a chat completion that is read."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


class _Retry(Exception):
    """This attempt is lost; another may succeed after `seconds`, where the server said so."""

    def __init__(self, cause: str, *, seconds: float | None = None, late: bool = False) -> None:
        super().__init__(cause)
        self.seconds, self.late = seconds, late


class Remote:
    """The model of `remotes.NAME`. Bound to the event loop in which it is started, until it is closed."""

    def __init__(self, name: str, config: RemoteConfig) -> None:
        """ConfigError: the URL isn't one, or has a user or a password in it."""
        self._name, self._config = name, config
        self._url = checked_url(f"remotes.{name}.url", config.url, example="http://127.0.0.1:8000/v1").rstrip("/")
        self._client: httpx.AsyncClient | None = None
        self._room: asyncio.Semaphore | None = None
        self._secret = ""

    async def start(self) -> None:
        """Connect and ask for the list of models, which a server need not have.

        ConfigError: the key's environment variable isn't set. EngineStartError: no answer, or a refusal (of the key, say).
        """
        self._secret = key_of(f"remotes.{self._name}.api_key_env", self._config.api_key_env)
        headers = {"Content-Type": "application/json", **bearer(self._secret)}
        limits = httpx.Limits(max_connections=self._config.max_concurrent)
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits)
        self._room = asyncio.Semaphore(self._config.max_concurrent)
        try:
            status, body = await self._attempts("GET", "models")
            if not httpx.codes.is_success(status) and status not in (404, 405):
                raise EngineError(f"{self._who('models')} answered {status}: {self._said(body)}")
        except EngineError as error:
            await self.close()
            raise EngineStartError(str(error)) from None

    async def ask(self, agent: AgentConfig, messages: Sequence[Mapping[str, Any]], *, seed: int, key: str) -> RemoteAnswer:
        """One response to `messages`, sampled with the agent's settings; `key` names the request in errors.

        EngineTimeout: the last attempt took longer than `timeout_seconds`. EngineError: anything else that stands after the
        retries, a request that the server refuses, or a reply that is no chat completion.
        """
        request = {
            "model": self._config.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": agent.max_tokens,
            "temperature": agent.temperature,
            "seed": seed % 2**SEED_BITS,
        }
        if agent.stop:
            request["stop"] = list(agent.stop)
        status, body = await self._attempts("POST", CHAT, request, key=key)
        if not httpx.codes.is_success(status):
            raise EngineError(f"{self._who(CHAT, key)} answered {status}: {self._said(body)}")
        try:
            reply = _Reply.model_validate_json(body)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            what = ": ".join(filter(None, [".".join(map(str, fault["loc"])), fault["msg"]]))
            raise EngineError(f"{self._who(CHAT, key)} sent no chat completion ({what}): {self._said(body)}") from None
        choice, usage = reply.choices[0], reply.usage or _Usage()
        return RemoteAnswer(choice.message.content or "", choice.finish_reason, usage.prompt_tokens, usage.completion_tokens)

    async def close(self) -> None:
        """Drop the connections; harmless when repeated."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _attempts(self, method: str, path: str, request: Any = None, *, key: str = "") -> tuple[int, bytes]:
        """The first answer that another attempt wouldn't better: its status and body."""
        attempts = self._config.max_retries + 1
        for attempt in range(1, attempts + 1):
            try:
                return await self._attempt(method, path, request)
            except _Retry as lost:
                if attempt == attempts or (lost.seconds or 0.0) > MOST_PAUSE_SECONDS:
                    kind = EngineTimeout if lost.late else EngineError
                    given_up = f"given up at attempt {attempt} of {attempts} (remotes.{self._name}.max_retries)"
                    raise kind(f"{self._who(path, key)} {lost}; {given_up}") from None
                pause = min(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), MOST_PAUSE_SECONDS) * random.uniform(0.5, 1.0)
                pause = max(pause, lost.seconds or 0.0)
                logger.info("%s %s; attempt %d of %d in %.1f s", self._who(path, key), lost, attempt + 1, attempts, pause)
                await asyncio.sleep(pause)
        raise AssertionError("max_retries is at least 0")

    async def _attempt(self, method: str, path: str, request: Any) -> tuple[int, bytes]:
        if self._client is None:
            raise EngineError(f"remote {self._name} isn't started")
        limit = self._config.timeout_seconds
        content = None if request is None else json.dumps(request, ensure_ascii=False).encode(errors="replace")
        async with self._room:
            try:
                async with asyncio.timeout(limit) as deadline:
                    async with self._client.stream(method, f"{self._url}/{path}", content=content) as response:
                        body = await self._body(path, response)
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise _Retry(f"gave no answer within {limit:g} s (remotes.{self._name}.timeout_seconds)", late=True) from None
            except httpx.RequestError as error:
                raise _Retry(f"can't be reached: {self._clean(str(error) or type(error).__name__)}") from None
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
            wait = _seconds_of(response.headers.get("Retry-After"))
            raise _Retry(f"answered {response.status_code}: {self._said(body)}{_asks(wait)}", seconds=wait)
        return response.status_code, body

    async def _body(self, path: str, response: httpx.Response) -> bytes:
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MOST_REPLY_BYTES:
                raise EngineError(f"{self._who(path)} sent more than {MOST_REPLY_BYTES} bytes; expected a chat completion")
        return bytes(body)

    def _who(self, path: str, key: str = "") -> str:
        place = f"remote {self._name} ({self._url}/{path})"
        return f"{place}, asked for {key}," if key else place

    def _said(self, body: bytes) -> str:
        """The server's own message, as far as it is short: its `error.message`, else the text itself."""
        try:
            error = _Refusal.model_validate_json(body).error
            text = error if isinstance(error, str) else error.message
        except ValidationError:
            text = body.decode(errors="replace")
        return repr(self._clean(text))

    def _clean(self, text: str) -> str:
        """`text` short, in one line, and without the key, which some servers send back."""
        line = " ".join(without_key(text, self._secret).split())
        return line if len(line) <= MOST_MESSAGE_CHARACTERS else f"{line[:MOST_MESSAGE_CHARACTERS]}..."


class _Details(BaseModel):
    message: str


class _Refusal(BaseModel):
    """The body of an error in OpenAI's manner, and in that of some others."""

    error: _Details | str


def _seconds_of(header: str | None) -> float | None:
    """What a Retry-After header asks for: seconds, or a date."""
    if header is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", header, re.ASCII):
        return float(header)
    try:
        return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _asks(seconds: float | None) -> str:
    return "" if seconds is None or seconds <= MOST_PAUSE_SECONDS else f" and asks for a pause of {seconds:.0f} s"
