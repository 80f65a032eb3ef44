"""A pool of killable grader processes: what hangs or dies on an answer costs that answer, and nothing else.

Graders run libraries on text that a model wrote; some of it never ends (10**10**10). A deadline inside a process can't be
trusted (signal.alarm needs the main thread, big-integer arithmetic never looks at it), so the parent holds it: past the
deadline the worker is killed and replaced. Speaks JSON lines over pipes with `grading_worker`; safe to call from any thread
and from any event loop. Called by `math` and `rewards`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from drmas.errors import GraderError, GraderTimeout

START_SECONDS = 120.0
"""Until a new worker must be ready; importing sympy takes half a second, on a busy machine far more."""
MEMORY_BYTES = 4 * 2**30
"""Address space of a worker. Past it the worker's allocations fail, in the worker alone."""
_CHUNK = 65536


class GraderPool:
    """`workers` grader processes, started when first needed, that grade by `rule`: one of `grading_worker`'s."""

    def __init__(self, workers: int = 1, *, rule: str = "math", memory_bytes: int = MEMORY_BYTES) -> None:
        self._arguments = (str(memory_bytes), rule)
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)  # a place whose worker isn't started yet
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")
        self._closed = False
        self._lock = threading.Lock()
        self._started: set[_Worker] = set()

    def grade(self, text: str, truth: str, timeout_seconds: float) -> float:
        """The rule's verdict on `text`: from 0.0 to 1.0. The deadline runs from when a worker takes the answer.

        GraderTimeout: no verdict in time; the worker was killed. GraderError: the worker died, or the grader itself failed.
        """
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = self._start(worker)
            reply = worker.ask({"text": text, "truth": truth, "timeout_seconds": timeout_seconds}, timeout_seconds)
        except GraderError:
            self._stop(worker)
            worker = None
            raise
        finally:
            self._idle.put(worker)
        if "error" in reply:
            raise GraderError(
                f"the grader failed on an answer: {reply['error']}; answer: {_shown(text)}; truth: {_shown(truth)}"
            )
        return float(reply["reward"])

    async def grade_async(self, text: str, truth: str, timeout_seconds: float) -> float:
        """`grade` without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.grade, text, truth, timeout_seconds)

    def close(self) -> None:
        """Stop all workers, also busy ones; idempotent."""
        with self._lock:
            self._closed = True
            workers, self._started = self._started, set()
        for worker in workers:
            worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, former: _Worker | None) -> _Worker:
        self._stop(former)
        with self._lock:
            if self._closed:
                raise GraderError("the grader pool is closed")
            worker = _Worker(self._arguments)
            self._started.add(worker)
        return worker

    def _stop(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.stop()
            with self._lock:
                self._started.discard(worker)


class _Worker:
    """One grader process and the pipes to it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `stop`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "drmas.envs.grading_worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches the trainer, which then closes its workers
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Send one line, read one line. GraderTimeout or GraderError leave the worker unusable."""
        if not self._ready:
            self._exchange(b"", START_SECONDS)  # the line that says it is ready
            self._ready = True
        line = self._exchange(json.dumps(question).encode() + b"\n", timeout_seconds)
        return json.loads(line)

    def _exchange(self, outgoing: bytes, timeout_seconds: float) -> bytes:
        deadline = time.monotonic() + timeout_seconds
        incoming = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            if outgoing:
                selector.register(self._input, selectors.EVENT_WRITE)
            while not incoming.endswith(b"\n"):
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    raise GraderTimeout(f"no verdict after {timeout_seconds:g} s; the grader was killed and is replaced")
                for key, _ in ready:
                    if key.fd == self._input:
                        outgoing = outgoing[self._write(outgoing) :]
                        if not outgoing:
                            selector.unregister(self._input)
                    else:
                        read = os.read(self._output, _CHUNK)
                        if not read:
                            raise GraderError(self._obituary())
                        incoming += read
        return incoming

    def _write(self, data: bytes) -> int:
        try:
            return os.write(self._input, data[:_CHUNK])
        except BlockingIOError:
            return 0
        except BrokenPipeError as error:
            raise GraderError(self._obituary()) from error

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(0)
        # the last line of a traceback says what it was
        said = self._errors.read()[-2000:].decode(errors="replace").strip().rpartition("\n")[2]
        return f"the grader process died (status {self._process.poll()}) and is replaced" + (f": {said}" if said else "")

    def stop(self) -> None:
        """Kill and reap; idempotent, from any thread."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:100] + " ... " + text[-100:])
