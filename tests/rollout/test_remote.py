"""A remote model against a server on loopback that does what servers do."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from drmas.agents.agent import AgentConfig
from drmas.config.schema import RemoteConfig
from drmas.errors import ConfigError, EngineDied, EngineError, EngineStartError, EngineTimeout
from drmas.rollout import remote as remote_module
from drmas.rollout.remote import Remote, RemoteAnswer

KEY = "sk-very-secret-0123456789"
VARIABLE = "DRMAS_TEST_REMOTE_KEY"
USER = [{"role": "user", "content": "What is 3 + 4?"}]
AGENT = AgentConfig(max_tokens=7, temperature=0.5)

Answer = Callable[[Request], Response]


def completion(text: str | None = "It is 7.", **changes) -> dict:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    return {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage} | changes


class Server:
    """Answers chat completions with `script` in turn, the last one again and again; keeps what it was asked."""

    def __init__(self) -> None:
        self.script: list[Answer | Response] = []
        self.models: Response = JSONResponse({"data": []})
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        routes = [Route("/v1/models", self._models), Route("/v1/chat/completions", self._chat, methods=["POST"])]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    async def _models(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return self.models

    async def _chat(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = self.script[min(len(self.requests), len(self.script)) - 1]
        return answer if isinstance(answer, Response) else await answer(request)

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server(running, monkeypatch) -> Server:
    running.script, running.models = [JSONResponse(completion())], JSONResponse({"data": []})
    running.requests.clear()
    running.headers.clear()
    monkeypatch.setattr(remote_module, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return running


def settings(server: Server, **changes) -> RemoteConfig:
    return RemoteConfig(**{"url": server.url, "model": "m", "timeout_seconds": 20, "max_retries": 2, **changes})


async def ask(server: Server, agent: AgentConfig = AGENT, messages=USER, *, seed: int = 1, **changes) -> RemoteAnswer:
    remote = Remote("judge", settings(server, **changes))
    await remote.start()
    try:
        return await remote.ask(agent, messages, seed=seed, key="t1#0/000/judge")
    finally:
        await remote.close()


def error(status: int, message: str = "busy", **headers: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status, headers=headers)


async def test_a_request_has_the_agents_settings_and_the_answer_what_was_said(server) -> None:
    agent = AgentConfig(max_tokens=7, temperature=0.5, stop=("\n\n", ";"))
    answer = await ask(server, agent, [{"role": "system", "content": "Be brief."}, *USER], seed=2**40 + 9)
    assert answer == RemoteAnswer("It is 7.", "stop", 11, 5)
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, *USER],
            "max_tokens": 7,
            "temperature": 0.5,
            "seed": 9,
            "stop": ["\n\n", ";"],
        }
    ]
    assert "authorization" not in server.headers[0]
    await ask(server)
    assert "stop" not in server.requests[1]


async def test_text_of_any_script_passes_and_half_a_sign_is_no_trouble(server) -> None:
    text = "Größe ≥ 七 \N{MATHEMATICAL BOLD CAPITAL A} 🙂\u0000\u2028"
    server.script = [JSONResponse(completion(text))]
    answer = await ask(server, messages=[{"role": "user", "content": text + "\ud800"}])
    assert answer.text == text
    assert server.requests[0]["messages"][0]["content"] == text + "?"


@pytest.mark.parametrize("lost", [error(503), error(500), error(429), PlainTextResponse("bad gateway", status_code=502)])
async def test_what_a_busy_server_loses_is_put_again(server, lost) -> None:
    server.script = [lost, lost, JSONResponse(completion())]
    assert (await ask(server)).text == "It is 7."
    assert len(server.requests) == 3
    assert server.requests[0] == server.requests[1] == server.requests[2]


async def test_I3_a_server_that_answers_503_for_ever_is_an_error_with_its_last_word(server) -> None:
    server.script = [error(500, "first"), error(503, "no room today")]
    with pytest.raises(EngineError) as caught:
        await ask(server)
    message = str(caught.value)
    assert f"remote judge ({server.url}/chat/completions), asked for t1#0/000/judge, answered 503: 'no room today'" in message
    assert "attempt 3 of 3 (remotes.judge.max_retries)" in message
    assert not isinstance(caught.value, EngineTimeout | EngineDied)
    assert len(server.requests) == 3


@pytest.mark.parametrize("asked", ["7", "0.5", "date"])
async def test_a_pause_that_the_server_asks_for_is_made(server, monkeypatch, asked) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(remote_module, "asyncio", _Asyncio(sleep))
    header = formatdate(time.time() + 30, usegmt=True) if asked == "date" else asked
    server.script = [error(429, **{"Retry-After": header}), error(429), JSONResponse(completion())]
    await ask(server)
    first, second = pauses
    if asked == "date":
        assert 20 < first <= 30
    else:
        assert first == float(asked)
    assert 0 < second <= 2 * remote_module.FIRST_PAUSE_SECONDS


class _Asyncio:
    """The module asyncio with another `sleep`."""

    def __init__(self, sleep) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str):
        return getattr(asyncio, name)


async def test_a_pause_of_an_hour_is_not_waited_for(server) -> None:
    server.script = [error(429, "quota", **{"Retry-After": "3600"})]
    with pytest.raises(EngineError, match=r"'quota' and asks for a pause of 3600 s; given up at attempt 1 of 3"):
        await ask(server)


async def test_pauses_grow(server, monkeypatch) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(remote_module, "asyncio", _Asyncio(sleep))
    monkeypatch.setattr(remote_module, "FIRST_PAUSE_SECONDS", 1.0)
    server.script = [error(503)]
    with pytest.raises(EngineError):
        await ask(server, max_retries=9)
    assert len(pauses) == 9
    most = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, most, strict=True))


async def test_a_server_that_hangs_is_a_timeout(server) -> None:
    async def hang(request: Request) -> Response:
        await asyncio.sleep(30)
        return JSONResponse(completion())

    server.script = [hang]
    remote = Remote("judge", settings(server, max_retries=1))
    await remote.start()
    remote._config = settings(server, max_retries=1, timeout_seconds=0.2)
    late = r"no answer within 0\.2 s \(remotes\.judge\.timeout_seconds\); given up at attempt 2 of 2"
    with pytest.raises(EngineTimeout, match=late):
        await remote.ask(AGENT, USER, seed=1, key="k")
    await remote.close()


async def test_a_cancelled_request_ends_at_once(server) -> None:
    arrived = threading.Event()

    async def hang(request: Request) -> Response:
        arrived.set()
        await asyncio.sleep(30)
        return JSONResponse(completion())

    server.script = [hang]
    task = asyncio.create_task(ask(server))
    await asyncio.to_thread(arrived.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_server_that_is_not_there_is_an_error_that_names_it(server) -> None:
    remote = Remote("judge", settings(server))
    await remote.start()
    remote._url = "http://127.0.0.1:9/v1"
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1/chat/completions.*can't be reached: .*attempt 3 of 3"):
        await remote.ask(AGENT, USER, seed=1, key="k")
    await remote.close()
    with pytest.raises(EngineStartError, match=r"127\.0\.0\.1:9/v1/models.*can't be reached"):
        await ask(server, url="http://127.0.0.1:9/v1")


@pytest.mark.parametrize("status", [400, 401, 404, 422, 301])
async def test_a_refusal_is_not_put_again_and_says_what_the_server_said(server, status) -> None:
    server.script = [error(status, "context length exceeded\n" + "x" * 10_000, **{"X-Secret": "header"})]
    with pytest.raises(EngineError, match=f"answered {status}: 'context length exceeded x") as caught:
        await ask(server)
    assert len(server.requests) == 1
    assert len(str(caught.value)) < 600
    assert "header" not in str(caught.value)


BAD = {
    "no JSON": (PlainTextResponse("<html>hello</html>"), r"Invalid JSON.*<html>hello"),
    "empty": (PlainTextResponse(""), "Invalid JSON"),
    "another shape": (JSONResponse({"text": "7"}), "choices: Field required"),
    "no choice": (JSONResponse(completion(choices=[])), "choices: List should have at least 1 item"),
    "no message": (JSONResponse(completion(choices=[{"finish_reason": "stop"}])), r"choices\.0\.message: Field required"),
    "a number": (JSONResponse(completion(7)), r"choices\.0\.message\.content: Input should be a valid string"),
    "no reason": (JSONResponse(completion(choices=[{"message": {"content": "7"}}])), r"choices\.0\.finish_reason: Field"),
    "half a sign": (
        Response(b'{"choices": [{"message": {"content": "\\ud800"}, "finish_reason": "stop"}]}'),
        "Invalid JSON",
    ),
}


@pytest.mark.parametrize("fault", BAD)
async def test_I3_a_reply_that_is_no_completion_is_an_error(server, fault) -> None:
    reply, message = BAD[fault]
    server.script = [reply]
    with pytest.raises(EngineError, match=rf"sent no chat completion \(.*{message}"):
        await ask(server)
    assert len(server.requests) == 1


async def test_a_reply_without_end_is_an_error(server, monkeypatch) -> None:
    monkeypatch.setattr(remote_module, "MOST_REPLY_BYTES", 1000)
    server.script = [JSONResponse(completion("x" * 2000))]
    with pytest.raises(EngineError, match="sent more than 1000 bytes"):
        await ask(server)


async def test_an_answer_without_text_is_the_models_and_a_server_need_not_count(server) -> None:
    server.script = [JSONResponse(completion(None, usage=None))]
    assert await ask(server) == RemoteAnswer("", "stop", 0, 0)


async def test_no_more_requests_at_a_time_than_allowed(server) -> None:
    open_now = most = 0

    async def slow(request: Request) -> Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        return JSONResponse(completion())

    server.script = [slow]
    remote = Remote("judge", settings(server, max_concurrent=3))
    await remote.start()
    await asyncio.gather(*(remote.ask(AGENT, USER, seed=i, key=f"{i}") for i in range(12)))
    await remote.close()
    assert len(server.requests) == 12
    assert most == 3


@pytest.mark.parametrize("status", [200, 404, 405])
async def test_a_server_need_not_have_a_list_of_models(server, status) -> None:
    server.models = error(status)
    assert (await ask(server)).text == "It is 7."


async def test_a_server_that_refuses_at_the_start_ends_it(server) -> None:
    server.models = error(401, "bad key")
    with pytest.raises(EngineStartError, match=r"remote judge \(.*/models\) answered 401: 'bad key'"):
        await ask(server)


async def test_the_key_goes_into_one_header_and_nowhere_else(server, monkeypatch, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(VARIABLE, f"{KEY}\n")
    remote = Remote("judge", settings(server, api_key_env=VARIABLE))
    await remote.start()
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    said = []
    for reply in (
        error(401, f"wrong key {KEY}"),
        error(503, f"{'x' * 290}{KEY}"),
        PlainTextResponse(f"{'y' * 1195}{KEY}", status_code=400),
        PlainTextResponse(f"no JSON {KEY}"),
    ):
        server.requests.clear()
        server.script = [reply]
        with pytest.raises(EngineError) as caught:
            await remote.ask(AGENT, USER, seed=1, key="k")
        said.append(str(caught.value))
    await remote.close()
    assert "wrong key [key]" in said[0]
    for text in (*said, repr(remote), str(server.requests), caplog.text):
        assert KEY[:12] not in text


async def test_a_key_that_is_not_there_is_named_before_anything_is_sent(server, monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=rf"remotes\.judge\.api_key_env is '{VARIABLE}', which isn't set in the environment"):
        await ask(server, api_key_env=VARIABLE)
    monkeypatch.setenv(VARIABLE, "sk-\N{EURO SIGN}")
    with pytest.raises(ConfigError, match="no header can carry") as caught:
        await ask(server, api_key_env=VARIABLE)
    assert "sk-" not in str(caught.value)
    assert server.headers == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000/v1", "expected such as"),
        ("ftp://host/v1", "expected such as"),
        ("http:///v1", "expected such as"),
        ("http://user:hunter2@host/v1", "holds more than host and path"),
        ("http://host/v1?key=hunter2", "holds more than host and path"),
        ("http://host:port/v1", "is no URL"),
    ],
)
def test_a_url_that_is_none_or_holds_secrets_is_refused(url, message) -> None:
    with pytest.raises(ConfigError, match=rf"remotes\.judge\.url .*{message}") as caught:
        Remote("judge", RemoteConfig(url=url, model="m"))
    assert "hunter2" not in str(caught.value)


async def test_a_remote_is_started_again_after_a_close_and_refuses_before_a_start(server) -> None:
    remote = Remote("judge", settings(server, url=f"{server.url}/"))
    with pytest.raises(EngineError, match="isn't started"):
        await remote.ask(AGENT, USER, seed=1, key="k")
    for _ in range(2):
        await remote.start()
        assert (await remote.ask(AGENT, USER, seed=1, key="k")).text == "It is 7."
        await remote.close()
        await remote.close()
