from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest

from drmas.envs.search.batcher import Batcher
from drmas.envs.search.index import Bm25Index
from drmas.envs.search.server import Limits, RetrieverServer


class CountingIndex(Bm25Index):
    """Counts the queries that reach it; waits for `gate`, and fails on the query boom."""

    def __init__(self, passages):
        super().__init__(passages)
        self.gate, self.entered, self.asked = threading.Event(), threading.Event(), []
        self.gate.set()

    def search(self, queries, topk):
        self.asked += queries
        self.entered.set()
        self.gate.wait()
        if "boom" in queries:
            raise ValueError("the index is broken")
        return super().search(queries, topk)


@pytest.fixture
def index(passages):
    index = CountingIndex(passages)
    yield index
    index.gate.set()


@pytest.fixture
async def serve(index):
    """A client of a server with these limits around `index`."""
    opened = []

    def start(limits: Limits = Limits(), **options) -> httpx.AsyncClient:  # noqa: B008
        batcher = Batcher(index, **options)
        server = RetrieverServer(index, limits, batcher=batcher)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server")
        opened.append((client, batcher))
        return client

    yield start
    for client, batcher in opened:
        await client.aclose()
        batcher.close()


async def post(client, request):
    content = request if isinstance(request, bytes) else json.dumps(request)
    answer = await client.post("/retrieve", content=content)
    return answer.status_code, answer.json()


LIMA = {"id": "l", "contents": '"Lima"\nLima is the capital of Peru, on the Pacific coast.'}


async def test_one_query_in_the_shape_of_the_first_implementation(serve):
    status, answer = await post(serve(), {"query": "capital of Peru", "topk": 1, "return_scores": True})
    assert status == 200
    assert list(answer) == ["result"]
    (((hit),),) = answer["result"]
    assert hit == {"document": LIMA, "score": pytest.approx(hit["score"])}
    assert hit["score"] > 0


async def test_several_queries_in_the_shape_of_search_r1_a_list_each(serve):
    request = {"queries": ["capital of Peru", "zyzzyva", "", "capital of Peru"], "topk": 1, "return_scores": False}
    assert await post(serve(), request) == (200, {"result": [[LIMA], [], [], [LIMA]]})
    assert await post(serve(), {"queries": []}) == (200, {"result": []})


async def test_topk_defaults_to_three_and_scores_are_left_out(serve):
    for request in ({}, {"topk": None, "return_scores": None}):
        _, answer = await post(serve(), {"query": "tungsten lakes capital 東", **request})
        assert len(answer["result"][0]) == 3
        assert all(set(document) == {"id", "contents"} for document in answer["result"][0])


async def test_a_contents_that_has_its_title_is_served_unchanged(serve):
    _, answer = await post(serve(), {"query": "passage without title"})
    assert answer["result"][0][0]["contents"] == "Element without a title: a plain passage about tungsten lamps."


async def test_health_names_index_and_corpus(serve):
    answer = await serve(Limits(topk=7)).get("/health")
    assert answer.json() == {"status": "ok", "index": "bm25", "passages": 5, "topk_limit": 7}


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        ([], 422, "either `query`, a text, or `queries`"),
        ({}, 422, "either `query`, a text, or `queries`"),
        ({"query": "x", "queries": ["x"]}, 422, "either `query`, a text, or `queries`"),
        ({"query": ["x"]}, 422, "`query` to be a text"),
        ({"queries": "x"}, 422, "`queries` to be a list of texts"),
        ({"queries": ["x", None]}, 422, "`queries` to be a list of texts"),
        ({"queries": ["x"] * 4}, 422, "`queries` holds 4 texts; at most 3 are answered"),
        ({"query": "x", "topk": 0}, 422, "`topk` is 0; expected an integer from 1 to 9"),
        ({"query": "x", "topk": 10}, 422, "`topk` is 10; expected an integer from 1 to 9"),
        ({"query": "x", "topk": True}, 422, "`topk` is true"),
        ({"query": "x", "topk": "3"}, 422, '`topk` is "3"'),
        ({"query": "x", "return_scores": "yes"}, 422, '`return_scores` is "yes"; expected true or false'),
        ({"query": "x" * 1000}, 413, "more than 900 bytes"),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(serve, index, request_, status, words):
    limits = Limits(topk=9, queries=3, body_bytes=100_000 if isinstance(request_, bytes) else 900)
    code, answer = await post(serve(limits), request_)
    assert (code, list(answer)) == (status, ["detail"])
    assert words in answer["detail"]
    assert index.asked == []


async def test_other_paths_and_methods_are_refused_in_json(serve):
    client = serve()
    assert (await client.get("/retrieve")).status_code == 405
    assert (await client.get("/nowhere")).json() == {"detail": "Not Found"}


async def test_an_answer_is_kept_by_query_and_topk(serve, index):
    client = serve()
    answers = [await post(client, {"query": "tungsten", "topk": topk}) for topk in (1, 1, 2, 1)]
    assert answers[0] == answers[1] == answers[3]
    assert [len(answer["result"][0]) for _, answer in answers] == [1, 1, 2, 1]
    assert index.asked == ["tungsten", "tungsten"]
    await post(client, {"queries": ["tungsten", "Lima", "Lima"], "topk": 1})
    assert index.asked == ["tungsten", "tungsten", "Lima"]


async def test_without_a_cache_every_query_is_searched(serve, index):
    client = serve(Limits(cache_size=0))
    for _ in range(2):
        await post(client, {"query": "Peru"})
    assert index.asked == ["Peru", "Peru"]


async def test_past_the_deadline_the_answer_is_503_and_the_server_lives(serve, index):
    client = serve(Limits(deadline_seconds=0.05))
    index.gate.clear()
    status, answer = await post(client, {"query": "slow"})
    assert (status, answer) == (
        503,
        {"detail": "no answer within 0.05 s; ask again later, or start the server with a larger --deadline-seconds"},
    )
    index.gate.set()
    while (await post(client, {"query": "Peru"}))[0] != 200:  # until the thread is done with the slow one
        await asyncio.sleep(0.01)


async def test_a_full_queue_is_503(serve, index):
    client = serve(Limits(queries=3), max_waiting=2, max_wait_seconds=0.0)
    status, answer = await post(client, {"queries": ["a", "b", "c"]})
    assert (status, answer) == (503, {"detail": "the server is busy: 0 queries wait already, of at most 2; ask again later"})


async def test_a_broken_index_is_500_and_not_cached(serve, index, capfd):
    client = serve()
    for _ in range(2):
        assert await post(client, {"query": "boom"}) == (
            500,
            {"detail": "the search failed: ValueError: the index is broken"},
        )
    assert index.asked == ["boom", "boom"]
    assert capfd.readouterr().err.startswith("drmas: the search failed: ValueError")


async def test_200_queries_at_once_get_each_its_own_answer(serve, passages):
    client = serve()
    queries = [f"{('capital of Peru', 'atomic number', 'sao tome lakes', '東京 日本')[n % 4]} {n}" for n in range(200)]
    answers = await asyncio.gather(*(post(client, {"query": query, "topk": 1}) for query in queries))
    found = [answer["result"][0][0]["id"] for status, answer in answers if status == 200]
    assert found == ["l", "w", "s", "k"] * 50
