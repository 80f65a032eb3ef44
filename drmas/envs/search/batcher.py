"""One thread that searches an index for many askers at once.

    batcher = Batcher(index, max_batch=64, max_wait_seconds=0.002)
    hits = await batcher.search(["element 74"], topk=3)

An index is used from one thread alone (FAISS and torch share their own threads below it), and a batch costs a dense index far
less than its queries one by one. Queries wait in a bounded queue; a query whose asker has gone is passed over. The thread is a
daemon: a search that never ends keeps no process alive. Called by `server` and `tool`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from drmas.envs.search.index import Hit, Index

_CLOSED = "the search was closed"


class Busy(Exception):
    """Too many queries wait already."""


@dataclass(slots=True)
class _Ask:
    query: str
    topk: int
    answer: Future[list[Hit]] = field(default_factory=Future)


class Batcher:
    """Takes queries from any event loop and answers them in batches."""

    def __init__(self, index: Index, *, max_batch: int = 64, max_wait_seconds: float = 0.002, max_waiting: int = 4096) -> None:
        """A batch begins with the first query and takes those that come within `max_wait_seconds`, at most `max_batch`."""
        self.index = index
        self._max_batch, self._max_wait_seconds, self._max_waiting = max_batch, max_wait_seconds, max_waiting
        self._asks: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._work, name="search", daemon=True).start()

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The hits of each query. Busy: no room in the queue. What the index raises is raised."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        if self._asks.qsize() + len(queries) > self._max_waiting:
            raise Busy(f"{self._asks.qsize()} queries wait already, of at most {self._max_waiting}")
        asks = [_Ask(query, topk) for query in queries]
        answers = [asyncio.wrap_future(ask.answer) for ask in asks]
        for ask in asks:
            self._asks.put(ask)
        return list(await asyncio.gather(*answers))

    def close(self) -> None:
        """End the thread after its current batch; queries that wait get a RuntimeError. Idempotent."""
        self._closed = True
        self._asks.put(None)

    def _work(self) -> None:
        while not self._closed:
            live = [ask for ask in self._gather() if ask.answer.set_running_or_notify_cancel()]
            if live:
                self._answer(live)
        while not self._asks.empty():
            ask = self._asks.get()
            if ask is not None and ask.answer.set_running_or_notify_cancel():
                ask.answer.set_exception(RuntimeError(_CLOSED))

    def _gather(self) -> list[_Ask]:
        """The next batch; empty when the batcher was closed."""
        asks: list[_Ask] = []
        ask = self._asks.get()
        deadline = time.monotonic() + self._max_wait_seconds
        while ask is not None:
            asks.append(ask)
            if len(asks) == self._max_batch:
                break
            try:
                ask = self._asks.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
        return asks

    def _answer(self, asks: list[_Ask]) -> None:
        queries = list(dict.fromkeys(ask.query for ask in asks))
        try:
            hits = dict(zip(queries, self.index.search(queries, max(ask.topk for ask in asks)), strict=True))
        except Exception as error:
            for ask in asks:
                ask.answer.set_exception(error)
            return
        for ask in asks:
            ask.answer.set_result(hits[ask.query][: ask.topk])
