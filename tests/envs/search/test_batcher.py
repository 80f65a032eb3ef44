from __future__ import annotations

import asyncio
import threading

import pytest

from drmas.envs.search.batcher import Batcher, Busy
from drmas.envs.search.corpus import Passage
from drmas.envs.search.index import Bm25Index, Hit


class GatedIndex:
    """Answers every query with passages named after it, once `gate` is open; keeps the batches that it was given."""

    kind = "gated"

    def __init__(self) -> None:
        self.passages = [Passage("0", "", "x")]
        self.gate, self.entered = threading.Event(), threading.Event()
        self.batches: list[tuple[list[str], int]] = []

    def search(self, queries, topk):
        self.batches.append((list(queries), topk))
        self.entered.set()
        self.gate.wait()
        if "boom" in queries:
            raise ValueError("boom")
        return [[Hit(Passage(f"{query}{n}", "", query), -n) for n in range(topk)] for query in queries]


@pytest.fixture
def index():
    index = GatedIndex()
    yield index
    index.gate.set()


@pytest.fixture
def started(index):
    batchers = []

    def start(**options):
        batchers.append(Batcher(index, **options))
        return batchers[-1]

    yield start
    for batcher in batchers:
        batcher.close()


async def entered(index):
    await asyncio.to_thread(index.entered.wait)


async def test_queries_that_wait_together_are_searched_together_once_each(index, started):
    batcher = started(max_wait_seconds=0.0)
    first = asyncio.create_task(batcher.search(["first"], 1))
    await entered(index)
    rest = [asyncio.create_task(batcher.search(queries, topk)) for queries, topk in ((["a", "b"], 1), (["b"], 3), (["c"], 2))]
    await asyncio.sleep(0)
    index.gate.set()
    hits = await asyncio.gather(first, *rest)
    assert index.batches == [(["first"], 1), (["a", "b", "c"], 3)]
    assert [[[hit.passage.id for hit in of_query] for of_query in answer] for answer in hits] == [
        [["first0"]],
        [["a0"], ["b0"]],
        [["b0", "b1", "b2"]],
        [["c0", "c1"]],
    ]


async def test_a_batch_has_at_most_max_batch_queries(index, started):
    index.gate.set()
    batcher = started(max_batch=3, max_wait_seconds=5.0)
    await batcher.search([f"q{n}" for n in range(9)], 1)
    assert [len(queries) for queries, _ in index.batches] == [3, 3, 3]


async def test_a_full_queue_is_busy_and_harms_nobody(index, started):
    batcher = started(max_waiting=2, max_wait_seconds=0.0)
    first = asyncio.create_task(batcher.search(["first"], 1))
    await entered(index)
    waiting = asyncio.create_task(batcher.search(["a", "b"], 1))
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="2 queries wait already, of at most 2"):
        await batcher.search(["c"], 1)
    index.gate.set()
    await asyncio.gather(first, waiting)
    assert index.batches == [(["first"], 1), (["a", "b"], 1)]


async def test_a_query_whose_asker_has_gone_is_not_searched(index, started):
    batcher = started(max_wait_seconds=0.0)
    first = asyncio.create_task(batcher.search(["first"], 1))
    await entered(index)
    gone, stays = asyncio.create_task(batcher.search(["gone"], 1)), asyncio.create_task(batcher.search(["stays"], 1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    index.gate.set()
    await asyncio.gather(first, stays)
    assert index.batches == [(["first"], 1), (["stays"], 1)]


async def test_what_the_index_raises_reaches_its_askers_and_the_next_batch_is_answered(index, started):
    index.gate.set()
    batcher = started()
    with pytest.raises(ValueError, match="boom"):
        await batcher.search(["boom", "with it"], 1)
    assert len(await batcher.search(["next"], 1)) == 1


async def test_a_closed_batcher_says_so_also_to_those_who_wait(index, started):
    batcher = started(max_wait_seconds=0.0)
    first = asyncio.create_task(batcher.search(["first"], 1))
    await entered(index)
    waiting = asyncio.create_task(batcher.search(["waiting"], 1))
    await asyncio.sleep(0)
    batcher.close()
    index.gate.set()
    await first
    with pytest.raises(RuntimeError, match="closed"):
        await waiting
    with pytest.raises(RuntimeError, match="closed"):
        await batcher.search(["late"], 1)


def test_askers_of_different_event_loops_share_it(passages):
    batcher = Batcher(Bm25Index(passages))
    answers = [asyncio.run(batcher.search(["capital of Peru"], 1)) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][0][0].passage.id == "l"
    batcher.close()
