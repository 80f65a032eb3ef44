"""An event loop in a thread of its own, so that episodes go on while the trainer trains.

    loop = LoopThread("rollout")
    loop.run(coroutine())          # from any other thread: waits for the result
    loop.call(function, argument)  # runs it in the loop, waits for nothing
    loop.close()

A task that raises SystemExit, as a user's code may, ends itself alone. Used by the collector.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

END_SECONDS = 10.0
"""How long what is cancelled may take to end when the loop is closed; what takes longer is left to the process's end."""

Result = TypeVar("Result")


class LoopThread:
    """Starts at once; `close` ends it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result, or what it raises. An interrupt while waiting cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run a function in the loop soon; calls keep their order."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel what runs, wait for it to end, stop; harmless when repeated."""
        if self.closed:
            return
        asyncio.run_coroutine_threadsafe(_end_all(), self._loop).result()
        self._ending = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        while not self._ending:
            with suppress(SystemExit, KeyboardInterrupt):  # asyncio keeps it for the task, and raises it out of here as well
                self._loop.run_forever()


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_SECONDS)
    await asyncio.get_running_loop().shutdown_asyncgens()
