"""What a worker takes in a thread of its own, while its engine goes on with the weights that it has. Used by `shard_worker`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Staged(Generic[T]):
    """One update at most. Example: staged.begin(lambda: list(arriving)); staged.taken()"""

    def __init__(self) -> None:
        self._update: Future[T] | None = None

    def begin(self, take: Callable[[], T]) -> None:
        """Run `take` beside everything else; an older update is forgotten."""
        update: Future[T] = Future()

        def run() -> None:
            try:
                update.set_result(take())
            except BaseException as error:  # raised by `taken`
                update.set_exception(error)

        self._update = update
        threading.Thread(target=run, name="staging", daemon=True).start()

    def taken(self) -> T:
        """What `take` returned, once; or its error. RuntimeError: there was none."""
        update, self._update = self._update, None
        if update is None:
            raise RuntimeError("nothing was staged here")
        return update.result()
