"""A deadline that can stand still: an episode's while its engine is being replaced, a turn's as well.

    deadline = Deadline(600.0)
    async with deadline.running:        # TimeoutError after 600 s
        with deadline.held():           # ... which don't count in here
            ...

Made by the player for each episode and by the gate for each turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Deadline:
    """`seconds` from when `running` is entered; None is no deadline."""

    def __init__(self, seconds: float | None) -> None:
        self.running = asyncio.timeout(seconds)
        self._holds = 0
        self._left: float | None = None

    @property
    def expired(self) -> bool:
        return self.running.expired()

    @contextmanager
    def held(self) -> Iterator[None]:
        """It doesn't come closer inside; several may hold it at once."""
        loop = asyncio.get_running_loop()
        if self._holds == 0:
            until = self.running.when()
            self._left = None if until is None else until - loop.time()
            self._reschedule(None)
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if self._holds == 0 and self._left is not None:
                self._reschedule(loop.time() + self._left)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # what it bounds is over, and left this call behind
            self.running.reschedule(when)
