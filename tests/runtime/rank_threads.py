"""Ranks as threads of a test: they share as `policy.broadcast.Broadcast` does, without processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from drmas.errors import DrmasError

PATIENCE = 60.0


class RankThreads:
    """`rank_threads.rank` is which one the calling thread is; `run` gives what each of them returns or raises on purpose."""

    def __init__(self, world: int) -> None:
        self._world, self._here = world, threading.local()
        self._barrier, self._said = threading.Barrier(world), [None] * world

    @property
    def rank(self) -> int:
        return self._here.rank

    def __call__(self, action: Callable[[], Any]) -> Any:
        return self.gather(action if self.rank == 0 else lambda: None)[0]

    def gather(self, action: Callable[[], Any]) -> list[Any]:
        try:
            self._said[self.rank] = json.loads(json.dumps(action()))
        except DrmasError as error:
            self._said[self.rank] = error
        self._barrier.wait(PATIENCE)
        said = list(self._said)
        self._barrier.wait(PATIENCE)
        if errors := [each for each in said if isinstance(each, DrmasError)]:
            raise errors[0]
        return said

    def run(self, what: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * self._world

        def one(rank: int) -> None:
            self._here.rank = rank
            try:
                found[rank] = what(rank)
            except DrmasError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self._world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found
