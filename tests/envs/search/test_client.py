from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from drmas.envs.search.client import MAX_ANSWER_BYTES, RetrieverClient
from drmas.errors import ConfigError, ToolError
from tests.envs.search.conftest import good, hang, status


@pytest.fixture
async def client():
    """A client of these URLs with short pauses."""
    async with contextlib.AsyncExitStack() as stack:

        def make(*urls: str, timeout_seconds: float = 30.0, max_retries: int = 4) -> RetrieverClient:
            made = RetrieverClient(urls, timeout_seconds=timeout_seconds, max_retries=max_retries, pause_seconds=0.001)
            stack.push_async_callback(made.close)
            return made

        yield make


def contents(hits):
    return [hit.passage.contents for hit in hits]


async def garbage(writer):
    writer.write(b"\x00\x01 this is no HTTP\r\n\r\n")
    await writer.drain()


async def cut_short(writer):
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"result"')
    await writer.drain()


async def test_a_query_is_sent_as_the_first_implementation_sends_it(client, retriever):
    async with retriever(good("a", "b")) as server:
        hits = await client(server.url).search("São Tomé 東京 😀", 3)
    assert contents(hits) == ["a", "b"]
    assert [hit.score for hit in hits] == [0.5, 0.5]
    assert server.requests == [{"query": "São Tomé 東京 😀", "topk": 3, "return_scores": True}]


async def test_an_answer_without_scores_is_read_too(client, retriever):
    async with retriever(good("a", "b", "c", scores=False)) as server:
        hits = await client(f"{server.url}/retrieve").search("x", 2)
    assert [(hit.passage.contents, hit.score) for hit in hits] == [("a", 0.0), ("b", 0.0)]


@pytest.mark.parametrize("trouble", [status(503), status(500), status(502), status(504), garbage, cut_short])
async def test_two_failures_then_an_answer_are_one_logical_call(client, retriever, trouble):
    async with retriever(trouble, trouble, good("a")) as server:
        assert contents(await client(server.url).search("x", 3)) == ["a"]
    assert len(server.requests) == 3


async def test_503_for_ever_is_a_tool_error_with_the_url_and_the_last_cause(client, retriever):
    async with retriever(status(503, {"detail": "busy"})) as server:
        with pytest.raises(ToolError) as caught:
            await client(server.url, max_retries=3).search("x", 3)
    assert len(server.requests) == 4
    assert str(caught.value).startswith(f"""search: {server.url}/retrieve gave no answer in 4 attempts: status 503: '{{"det""")


async def test_a_server_that_hangs_is_left_at_the_deadline(client, retriever):
    async with retriever(hang) as server:
        with pytest.raises(ToolError, match=r"ReadTimeout after 0.5 s; 1 s are over"):
            await client(server.url, timeout_seconds=1.0).search("x", 3)


async def test_a_server_that_hangs_once_is_asked_again(client, retriever):
    async with retriever(hang, good("a")) as server:
        assert contents(await client(server.url, timeout_seconds=2.0).search("x", 3)) == ["a"]


async def test_a_server_that_writes_on_for_ever_is_left_at_the_deadline(client, retriever):
    async def dribble(writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with retriever(dribble) as server:
        with pytest.raises(ToolError, match=r"0.3 s are over"):
            await client(server.url, timeout_seconds=0.3).search("x", 3)


async def test_no_server_is_a_tool_error_that_says_what_to_do(client):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ToolError, match=r"in 3 attempts: ConnectError: .*drmas serve-retriever.*change the tool's url"):
        await client(url, max_retries=2).search("x", 3)


@pytest.mark.parametrize("code", [400, 404, 413, 422])
async def test_a_refusal_is_not_tried_again(client, retriever, code):
    async with retriever(status(code, {"detail": "no"})) as server:
        with pytest.raises(ToolError, match=f"answered with status {code}; expected a retriever.*no"):
            await client(server.url).search("x", 3)
    assert len(server.requests) == 1


WRONG = [
    b"<html>hello</html>",
    b"\xff\xfe",
    b"[" * 100_000,
    b"",
    [],
    {"results": [[]]},
    {"result": []},
    {"result": [[], []]},
    {"result": {}},
    {"result": ["text"]},
    {"result": [["text"]]},
    {"result": [[{"text": "x"}]]},
    {"result": [[{"contents": 3}]]},
    {"result": [[{"document": "x", "score": 1}]]},
    {"result": [[{"document": {"contents": "x"}, "score": "high"}]]},
]


@pytest.mark.parametrize("body", WRONG, ids=[str(one)[:40] for one in WRONG])
async def test_an_answer_against_the_schema_is_a_tool_error_at_once(client, retriever, body):
    async with retriever(status(200, body)) as server:
        with pytest.raises(ToolError, match=r"answered against its schema: .*; expected"):
            await client(server.url).search("x", 3)
    assert len(server.requests) == 1


async def test_a_huge_answer_is_not_read_to_its_end(client, retriever):
    written = 0

    async def huge(writer):
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while written < 8 * MAX_ANSWER_BYTES:
            writer.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
            await writer.drain()
            written += 2**20

    async with retriever(huge) as server:
        with pytest.raises(ToolError, match=f"more than {MAX_ANSWER_BYTES} bytes"):
            await client(server.url).search("x", 3)
    assert written < 2 * MAX_ANSWER_BYTES


async def test_servers_take_turns_and_another_one_is_asked_when_one_fails(client, retriever):
    async with retriever(good("a")) as one, retriever(status(503)) as other:
        asking = client(one.url, other.url)
        assert [contents(await asking.search("x", 3)) for _ in range(4)] == [["a"]] * 4
    assert (len(one.requests), len(other.requests)) == (4, 2)


async def test_check_asks_every_server(client, retriever):
    async with retriever(good("a")) as one, retriever(status(200, {"hello": 1})) as other:
        with pytest.raises(ToolError, match=f"{other.url}/retrieve answered against its schema"):
            await client(one.url, other.url).check(3)
    assert len(one.requests) == 1


async def test_half_a_surrogate_pair_in_an_answer_is_made_harmless(client, retriever):
    async with retriever(status(200, b'{"result": [[{"contents": "a \\ud800 b"}]]}')) as server:
        assert contents(await client(server.url).search("x", 3)) == ["a ? b"]


def test_pauses_grow_and_are_the_same_in_every_run():
    def pauses():
        client = RetrieverClient(["http://host"], timeout_seconds=20, max_retries=9, seed=3)
        return [client._pause(attempt) for attempt in range(1, 9)]

    found = pauses()
    assert found == pauses()
    assert all(0.125 * 2**n <= pause <= 0.25 * 2**n for n, pause in enumerate(found[:5]))
    assert all(2.5 <= pause <= 5.0 for pause in found[5:])


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "file:///etc/passwd", "http://[::1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"tools.web.url is no .*; expected such as http://127.0.0.1:8000"):
        RetrieverClient([url], timeout_seconds=1, max_retries=0, section="web")


@pytest.mark.parametrize("url", ["http://me:hunter2@host", "http://host/find?key=hunter2", "http://me:hunter2@host:port"])
def test_a_url_that_may_hold_a_secret_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match=r"tools.search.url (holds more than host and path|is no URL)") as caught:
        RetrieverClient([url], timeout_seconds=1, max_retries=0)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_the_key_goes_into_a_header_and_into_no_error(retriever):
    seen = []

    async def refuse(writer):
        body = b"wrong key hunter2"
        writer.write(b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()

    async with retriever(refuse) as server:
        keyed = RetrieverClient([server.url], timeout_seconds=30, max_retries=0, key="hunter2")
        keyed._client.event_hooks["request"].append(note(seen))
        with pytest.raises(ToolError, match=r"answered with status 401; .*'wrong key \[key\]'"):
            await keyed.search("x", 3)
        await keyed.close()
    assert seen == ["Bearer hunter2"]


def note(seen):
    async def hook(request):
        seen.append(request.headers["authorization"])

    return hook


async def test_the_environments_proxies_are_not_used(client, retriever, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with retriever(good("a")) as server:
        assert contents(await client(server.url, max_retries=0).search("x", 3)) == ["a"]
