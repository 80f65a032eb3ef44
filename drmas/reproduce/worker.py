"""One unit of work in a process of its own, which costs itself alone when it is killed, raises or leaks.

Processes are forked from one server (multiprocessing's "forkserver") that imported everything once and runs no thread, so that
a process is there in milliseconds, and with one thread each. No worker outlives the process that asked for it, and each keeps
the folder's lock open to its end, so that no other run begins beside it.
Called by `drmas.reproduce.runner`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, reduction, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from drmas.telemetry.sinks import replace_text

LOG = "log.txt"
CAUSE_LENGTH = 300
"""Signs of a cause; the log has all of it."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Of the server and all that it forks. OpenMP reads it when torch is imported."""
SIGNALS = {signal.SIGINT, signal.SIGTERM}
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Unit:
    """A call of `entry` ("module:function") that leaves `result` behind; what it returns, unless None, is written there."""

    key: str
    folder: Path
    """Its own, emptied before it starts; `log.txt` in it has what it prints."""
    result: Path
    entry: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    """Keys of the units that must be done before."""
    names: Mapping[str, Any] = field(default_factory=dict)
    """Which unit it is, for the record that is written of it if it crashes."""


class Worker:
    """The process of `unit`, started at once. `lock` stays open in it. Not to be interrupted: see `signals_wait`."""

    def __init__(self, unit: Unit, lock: int) -> None:
        if unit.folder.exists():
            shutil.rmtree(unit.folder)
        unit.folder.mkdir(parents=True)
        unit.result.unlink(missing_ok=True)
        self.unit = unit
        self._said, causes = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_work, args=(unit, causes, _Descriptor(lock)), name=unit.key)
        self._began = time.monotonic()
        self._process.start()
        causes.close()

    @property
    def sentinel(self) -> int:
        """Readable when the process has ended."""
        return self._process.sentinel

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def end(self) -> None:
        """Kill the process and all of its group, and wait until they are gone."""
        self._process.kill()
        self.reap()

    def reap(self) -> str | None:
        """Wait for the end. Why the process failed, in a line; None if it didn't."""
        self._process.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it started and left
        with self._said, contextlib.suppress(EOFError, OSError):  # it said nothing, or was killed while it did
            if self._said.poll():
                return self._said.recv()
        code = self._process.exitcode
        if code == 0:
            return None
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def start_server(modules: list[str]) -> None:
    """Start the server and have it import `modules`. ImportError: one of them can't be; nothing is to be run then."""
    os.environ.update(ENVIRONMENT)
    _context.set_forkserver_preload([__name__, *modules])
    resource_tracker.ensure_running()  # it would let signals through again
    with signals_wait():
        forkserver.ensure_running()
    said, causes = _context.Pipe(duplex=False)
    process = _context.Process(target=_import, args=(modules, causes), name="import")
    process.start()
    causes.close()
    try:
        cause = said.recv()
    except EOFError:
        cause = "the process that imports it was killed"
    finally:
        process.kill()
        process.join()
    if cause:
        raise ImportError(f"{', '.join(modules)}: {cause}")


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM are held back inside. Processes that are started inside (the server) never see them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Descriptor:
    """A file descriptor that travels into a process that is started with it, and is open there."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(sent: Any) -> _Descriptor:
    return _Descriptor(sent.detach())


def _import(modules: list[str], causes: connection.Connection) -> None:
    cause = ""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        traceback.print_exc()
        cause = _in_a_line(error)
    with contextlib.suppress(BrokenPipeError):  # who asked was interrupted meanwhile
        causes.send(cause)


def _work(unit: Unit, causes: connection.Connection, lock: _Descriptor) -> NoReturn:
    """The whole life of a worker's process."""
    os.setsid()  # a group of its own, out of reach of the terminal's Ctrl-C
    threading.Thread(target=_end_with_starter, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    log = os.open(unit.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    code = 1
    try:
        module, _, name = unit.entry.partition(":")
        made = getattr(importlib.import_module(module), name)(*unit.arguments, **unit.options)
        if made is not None:
            replace_text(unit.result, json.dumps(made, allow_nan=False) + "\n")
        code = 0
    except BaseException as error:
        traceback.print_exc()
        causes.send(_in_a_line(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that the unit left running don't hold it


def _end_with_starter() -> None:
    """End this process group when the process that asked for it is gone. Its parent is the server, which would live on."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    connection.wait([starter.sentinel])
    os.killpg(0, signal.SIGKILL)


def _in_a_line(error: BaseException) -> str:
    said = " ".join("".join(traceback.format_exception_only(error)).split())
    return said if len(said) <= CAUSE_LENGTH else said[: CAUSE_LENGTH - 4] + " ..."
