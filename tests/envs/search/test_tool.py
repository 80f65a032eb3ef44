from __future__ import annotations

import asyncio
import json
import threading

import pytest

from drmas.config.tasks import SearchTool
from drmas.envs.search import tool as module
from drmas.envs.search.corpus import Passage
from drmas.envs.search.index import Bm25Index
from drmas.envs.search.tool import NO_HITS, NO_QUERY, Search, shown
from drmas.errors import ConfigError, DataError, ModelError, ToolError
from tests.envs.search.conftest import good, hang, status


@pytest.fixture
def corpus(tmp_path, passages, monkeypatch):
    """The path of a file with the passages; dense indices are kept beside it."""
    monkeypatch.setenv("DRMAS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"id": one.id, "title": one.title, "contents": one.contents}) for one in passages]
    file.write_text("\n".join(lines))
    return str(file)


@pytest.fixture
async def started():
    """A started Search of these settings."""
    made = []

    async def start(**settings) -> Search:
        search = Search(SearchTool(**settings))
        made.append(search)
        await search.start()
        return search

    yield start
    for search in made:
        await search.close()


def test_its_schema_is_one_function_of_a_query():
    (spec,) = Search(SearchTool(topk=5)).specs
    function = spec["function"]
    assert (spec["type"], function["name"]) == ("function", "search")
    assert "5 passages" in function["description"]
    assert function["parameters"]["required"] == ["query"] == list(function["parameters"]["properties"])
    assert json.loads(json.dumps(spec)) == spec


@pytest.mark.parametrize("index", ["bm25", "dense"])
async def test_passages_are_numbered_under_their_titles(started, corpus, index):
    search = await started(corpus=corpus, index=index, topk=2)
    text, ok = await search.call("search", {"query": "element tungsten atomic number"})
    assert ok
    assert text == (
        "[1] Tungsten\nTungsten is the chemical element with atomic number 74. It melts at 3422 degrees.\n\n"
        "[2] Element without a title: a plain passage about tungsten lamps."
    )


async def test_the_packaged_facts_answer_by_default(started):
    search = await started()
    text, ok = await search.call("search", {"query": "What is the capital of Peru?"})
    assert ok
    assert text.startswith("[1] Peru\n")
    assert "Lima" in text


@pytest.mark.parametrize("arguments", [{}, {"query": ""}, {"query": " \n"}, {"query": None}, {"query": 3}, {"q": "Lima"}])
async def test_no_query_is_told_to_the_agent(started, corpus, arguments):
    search = await started(corpus=corpus)
    assert await search.call("search", arguments) == (NO_QUERY, False)


async def test_a_query_that_fits_nothing_is_a_proper_call(started, corpus):
    search = await started(corpus=corpus)
    assert await search.call("search", {"query": "zyzzyva"}) == (NO_HITS, True)
    assert await search.call("search", {"query": "\ud800"}) == (NO_HITS, True)


def test_passages_are_cut_with_a_mark():
    passage = Passage("0", "", "x" * 50 + " " + "y" * 50)
    assert shown([passage], 101) == f"[1] {passage.contents}"
    assert shown([passage], 57) == "[1] " + "x" * 50 + " [...]"
    for chars in range(1, 110):
        assert len(shown([passage], chars)) <= len("[1] ") + max(chars, len(" [...]"))


@pytest.mark.parametrize(
    ("passage", "text"),
    [
        (Passage("0", "Lima", "A city."), "[1] Lima\nA city."),
        (Passage("0", "", '"Lima"\nA city.'), "[1] Lima\nA city."),
        (Passage("0", "Lima", '"Lima"\nA city.'), "[1] Lima\nA city."),
        (Passage("0", "Lima", '"Quito"\nis another city.'), '[1] Lima\n"Quito"\nis another city.'),
        (Passage("0", "", "A city.\nOn the coast."), "[1] A city.\nOn the coast."),
        (Passage("0", "", '""\nA city.'), '[1] ""\nA city.'),
    ],
)
def test_a_title_stands_on_a_line_of_its_own_wherever_the_corpus_has_it(passage, text):
    assert shown([passage], 100) == text


@pytest.mark.parametrize("index", ["bm25", "dense"])
async def test_search_objects_with_the_same_settings_share_one_index(started, corpus, index, monkeypatch):
    built = []

    def counted(*arguments, **options):
        built.append(arguments[1])
        return real(*arguments, **options)

    real = module.open_index
    monkeypatch.setattr(module, "open_index", counted)
    first, second = await asyncio.gather(
        started(corpus=corpus, index=index), started(corpus=corpus, index=index, topk=1, max_passage_chars=9)
    )
    assert built == [index]
    await first.close()
    assert (await second.call("search", {"query": "capital of Peru"}))[1]
    with open(corpus, "a") as file:
        file.write('\n{"contents": "A new passage about zyzzyvas."}')
    third = await started(corpus=corpus, index=index, topk=1)
    assert (await third.call("search", {"query": "zyzzyva passage"}))[0] == "[1] A new passage about zyzzyvas."
    assert built == [index, index]


async def test_a_dense_index_is_kept_for_the_next_run(started, corpus, tmp_path, monkeypatch):
    await started(corpus=corpus, index="dense")
    (folder,) = (tmp_path / "cache" / "search").iterdir()
    stamp = (folder / "vectors.faiss").stat().st_mtime_ns
    module._indices.clear()
    monkeypatch.setattr("drmas.envs.search.encoder.Encoder.passages", lambda *_: pytest.fail("encoded again"))
    search = await started(corpus=corpus, index="dense", topk=1)
    assert (await search.call("search", {"query": "capital of Peru"}))[0].startswith("[1] Lima\n")
    assert (folder / "vectors.faiss").stat().st_mtime_ns == stamp


async def test_a_server_is_asked_once_at_the_start_and_then_once_per_query(started, retriever):
    async with retriever(good('"Lima"\nA city.')) as server:
        search = await started(url=server.url)
        assert len(server.requests) == 1
        for _ in range(2):
            assert await search.call("search", {"query": " capital of Peru "}) == ("[1] Lima\nA city.", True)
        await search.call("search", {"query": "Quito"})
    assert [request["query"] for request in server.requests[1:]] == ["capital of Peru", "Quito"]


async def test_a_server_with_another_schema_is_found_at_the_start(started, retriever):
    async with retriever(status(200, {"documents": []})) as server:
        with pytest.raises(ToolError, match="answered against its schema"):
            await started(url=server.url)


@pytest.mark.parametrize("trouble", [status(503), status(200, {"result": [["x"]]}), status(200, b"garbage"), hang])
async def test_I3_trouble_is_raised_never_read_by_the_agent_and_never_kept(started, retriever, trouble):
    async with retriever(good("a"), trouble, good("b")) as server:
        search = await started(url=server.url, max_retries=0, timeout_seconds=2.0)
        with pytest.raises(ToolError):
            await search.call("search", {"query": "x"})
        assert await search.call("search", {"query": "x"}) == ("[1] b", True)


async def test_I3_an_index_that_hangs_or_breaks_is_trouble(started, corpus, monkeypatch):
    gate = threading.Event()

    def search(self, queries, topk):
        if queries == ["boom"]:
            raise ValueError("the index is broken")
        gate.wait()
        return [[] for _ in queries]

    monkeypatch.setattr("drmas.envs.search.index.Bm25Index.search", search)
    tool = await started(corpus=corpus, timeout_seconds=1.0)
    with pytest.raises(ToolError, match="the bm25 index failed: ValueError: the index is broken"):
        await tool.call("search", {"query": "boom"})
    try:
        with pytest.raises(ToolError, match=r"no answer from the bm25 index within 0.95 s; raise the tool's timeout_seconds"):
            await tool.call("search", {"query": "slow"})
    finally:
        gate.set()


async def test_a_call_before_the_start_or_after_the_close_is_trouble(corpus):
    search = Search(SearchTool(corpus=corpus))
    with pytest.raises(ToolError, match="before its start"):
        await search.call("search", {"query": "x"})
    await search.start()
    await search.close()
    await search.close()
    with pytest.raises(ToolError, match="after its close"):
        await search.call("search", {"query": "x"})


async def test_a_setting_that_cannot_work_is_named(corpus, started, tmp_path):
    for url in ("", "localhost:8000"):
        with pytest.raises(ConfigError, match=r"expected such as http://127.0.0.1:8000"):
            Search(SearchTool(url=url))
    with pytest.raises(ConfigError, match=r"tools.web.api_key_env is 'UNSET_7Q', which isn't set in the environment"):
        Search(SearchTool(url="http://host", api_key_env="UNSET_7Q"), "web")
    with pytest.raises(ValueError, match="set url, or leave it out"):
        SearchTool(api_key_env="UNSET_7Q")
    with pytest.raises(DataError, match=r"none.jsonl: no such file; expected a JSONL file of passages, or facts"):
        Search(SearchTool(corpus=str(tmp_path / "none.jsonl")))
    with pytest.raises(ModelError, match=r"no config.json there"):
        Search(SearchTool(corpus=corpus, index="dense", encoder=str(tmp_path)))
    (tmp_path / "bad.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"bad.jsonl:1: `contents` is empty or missing"):
        await started(corpus=str(tmp_path / "bad.jsonl"))


async def test_I9_200_calls_at_once_are_searched_one_by_one_and_get_each_its_own_passages(started, corpus, monkeypatch):
    def search(self, queries, topk):
        together.append(len(queries))
        return real(self, queries, topk)

    together, real = [], Bm25Index.search
    monkeypatch.setattr(Bm25Index, "search", search)
    search = await started(corpus=corpus, topk=1, cache_size=0)
    queries = [f"{('capital of Peru', 'atomic number', 'sao tome lakes')[n % 3]} {n}" for n in range(200)]
    answers = await asyncio.gather(*(search.call("search", {"query": query}) for query in queries))
    heads = [text.partition("\n")[0] for text, ok in answers if ok]
    assert heads == [f"[1] {('Lima', 'Tungsten', 'São Tomé')[n % 3]}" for n in range(200)]
    assert together == [1] * 200
