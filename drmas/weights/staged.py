"""What a worker takes in a thread of its own, while its engine goes on with the weights that it has, and how it lets go of it.

Used by `receiver` and `shard_worker`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from drmas.weights.meeting import Broken, Meeting, Refused

logger = logging.getLogger("vllm.drmas")
T = TypeVar("T")


class Staged(Generic[T]):
    """One update at most, taken in `meeting`. Example: staged.begin(lambda: list(arriving)); staged.taken()"""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._update: Future[T] | None = None

    def begin(self, take: Callable[[], T]) -> None:
        """Run `take` beside everything else; an older update is forgotten. If it fails, the other ends hear of it now."""
        update: Future[T] = Future()

        def run() -> None:
            try:
                update.set_result(take())
            except BaseException as error:  # raised by `taken`, if anybody still asks
                foreseen = isinstance(error, Refused | Broken)
                logger.warning("weights: staging: %s: %s", type(error).__name__, error, exc_info=not foreseen)
                self._meeting.failed(error)
                update.set_exception(error)

        self._update = update
        threading.Thread(target=run, name="staging", daemon=True).start()

    def taken(self) -> T:
        """What `take` returned, once; or its error. RuntimeError: there was none."""
        update, self._update = self._update, None
        if update is None:
            raise RuntimeError("nothing was staged here")
        return update.result()


def given_away(held: list[T]) -> Iterator[T]:
    """In order, without keeping them."""
    held.reverse()
    while held:
        yield held.pop()
