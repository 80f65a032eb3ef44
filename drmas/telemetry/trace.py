"""Where the time of a step goes: spans and counters, recorded by every rank while a step is traced.

    with trace.span("forward", policy="main"):      anywhere; while no step is traced it costs a call and a comparison
        ...
    with profile.step(4):                           the controller, around each step: records if the step was asked for
        ...

Every rank writes `rank_N.jsonl` line by line, so that what it did before it was killed is kept; rank 0 merges the files
(`drmas.telemetry.perfetto`). Ranks are aligned by their hosts' clocks. Times are the host's: on a GPU give `wait`
(torch.cuda.synchronize), so that a span holds the work that it started, at the price of some overlap.

The names in use: step, rollout, grade, advantage, moments, pack, forward, backward, optimiser, sync.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from drmas.errors import ConfigError
from drmas.telemetry.perfetto import merge

_OFF: AbstractContextManager[None] = contextlib.nullcontext()
_current: Tracer | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Of "steps=3-5", "3-5" or "4". ConfigError: anything else, step 0, or an end before the start."""
        found = re.fullmatch(r"(?:steps=)?(\d+)(?:-(\d+))?", text.strip())
        if found is None:
            raise ConfigError(f"telemetry.profile is {text!r}; expected steps such as steps=3-5 or steps=4")
        first = int(found[1])
        last = int(found[2]) if found[2] else first
        if not 1 <= first <= last:
            raise ConfigError(
                f"telemetry.profile is {text!r}; expected a first step of at least 1 and a last one not before it"
            )
        return cls(first, last)

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last


class Ranges(Protocol):
    """What `torch.cuda.nvtx` offers: ranges that may overlap, as those of concurrent episodes do."""

    def range_start(self, name: str) -> int: ...
    def range_end(self, range_id: int) -> None: ...


class _Open(NamedTuple):
    id: int
    policy: str | None


_open: ContextVar[_Open | None] = ContextVar("open_span", default=None)
"""The innermost open span of this thread or asyncio task; a task starts with that of the code that made it."""


class Tracer:
    """Writes one rank's spans and counters. Used by any thread; `nvtx` gets ranges of the spans' names."""

    def __init__(
        self, folder: Path, rank: int, *, nvtx: Ranges | None = None, wait: Callable[[], object] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank_{rank}.jsonl").open("w", encoding="utf-8", buffering=1)
        self._lock, self._ids = threading.Lock(), itertools.count(1)
        self._nvtx, self._wait = nvtx, wait
        self._epoch = time.time_ns() - time.perf_counter_ns()  # the host's clock, read once: it may jump later
        self._write({"rank": rank, "host": socket.gethostname(), "pid": os.getpid()})

    @contextmanager
    def span(self, name: str, policy: str | None = None, **args: Any) -> Iterator[None]:
        """Everything inside is part of `name`. Without a policy it belongs to that of the span around it."""
        parent = _open.get()
        if policy is None and parent is not None:
            policy = parent.policy
        own = _Open(next(self._ids), policy)
        token = _open.set(own)
        range_id = self._nvtx.range_start(name if policy is None else f"{name} {policy}") if self._nvtx else None
        begin = {"begin": own.id, "name": name, "policy": policy, "parent": parent and parent.id, "args": args}
        self._write(begin | {"ns": self._settled()})
        end: dict[str, Any] = {"end": own.id}
        try:
            yield
            end["ns"] = self._settled()
        except BaseException as error:  # the device may be in no state to be waited for
            end |= {"ns": self._now(), "error": type(error).__name__}
            raise
        finally:
            self._write(end)
            if range_id is not None:
                self._nvtx.range_end(range_id)
            _open.reset(token)

    def counter(self, name: str, value: float) -> None:
        self._write({"counter": name, "value": value, "ns": self._now()})

    def close(self) -> None:
        """What is recorded afterwards is dropped."""
        with self._lock:
            self._file.close()

    def _now(self) -> int:
        """Nanoseconds of the host's clock."""
        return self._epoch + time.perf_counter_ns()

    def _settled(self) -> int:
        """`_now`, once the device has done what it was given."""
        if self._wait is not None:
            self._wait()
        return self._now()

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, default=str)
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(text + "\n")
            except OSError as error:
                _warn(error)
                with contextlib.suppress(OSError):  # closing writes what was left over, and fails again
                    self._file.close()


def span(name: str, policy: str | None = None, **args: Any) -> AbstractContextManager[None]:
    """A span of the step that is being traced; nothing while none is."""
    return _OFF if _current is None else _current.span(name, policy, **args)


def counter(name: str, value: float) -> None:
    """A value at this moment, such as a GPU's power."""
    if _current is not None:
        _current.counter(name, value)


@contextmanager
def recording(tracer: Tracer) -> Iterator[None]:
    """`span` and `counter` go to `tracer`."""
    global _current
    before, _current = _current, tracer
    try:
        yield
    finally:
        _current = before


class Profile:
    """Traces the steps that were asked for, and nothing else. One per rank; rank 0 merges.

    Example: Profile(Steps.parse("steps=3-5"), run_dir / "profile", rank=0, num_ranks=4)
    """

    def __init__(
        self,
        steps: Steps | None,
        folder: Path,
        *,
        rank: int,
        num_ranks: int,
        nvtx: Ranges | None = None,
        wait: Callable[[], object] | None = None,
    ) -> None:
        self._steps, self._folder, self._rank, self._num_ranks = steps, folder, rank, num_ranks
        self._device = {"nvtx": nvtx, "wait": wait}
        self._tracer: Tracer | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step. The file is there after one step more, when every rank has left the traced ones, or at `close`."""
        tracer = self._tracer_for(step)
        if tracer is None:
            yield
            self.close()
        else:
            with recording(tracer), tracer.span("step", step=step):
                yield

    def _tracer_for(self, step: int) -> Tracer | None:
        if self._steps is None or step not in self._steps:
            return None
        if self._tracer is None:
            try:
                self._tracer = Tracer(self._folder, self._rank, **self._device)
            except OSError as error:
                _warn(error)
                self._steps = None
        return self._tracer

    def close(self) -> None:
        """Merge what was traced, if anything was. Call it also where a run ends early."""
        if self._tracer is None:
            return
        self._tracer.close()
        self._tracer = None
        if self._rank == 0:
            try:
                merge(self._folder, self._num_ranks)
            except OSError as error:
                _warn(error)


def _warn(error: OSError) -> None:
    warnings.warn(f"the trace ends here: {error}. The run goes on.", stacklevel=2)
