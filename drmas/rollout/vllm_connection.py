"""One engine process as seen from the trainer: requests out, answers in, and its death noticed at once.

A background thread reads the answers and resolves futures. When the process is gone, that thread kills what is left of its
process group, reaps it, and fails everything that still waits with the exit status and the log's tail. A process that is
silent for too long is killed as well, so that EngineDied always means a process that is gone. Used by `vllm_engine`, which
makes a new connection for every start.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
from concurrent.futures import Future
from typing import Any

from drmas.errors import EngineDied, EngineError
from drmas.rollout.engine_process import EXIT_GRACE_SECONDS, EngineProcess

SEND_TIMEOUT_SECONDS = 30


class Connection:
    """`process` and our end of its socket."""

    def __init__(self, name: str, process: EngineProcess, connection: socket.socket) -> None:
        self.process = process
        self._name, self._socket = name, connection
        self._pending: dict[int, Future[Any]] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards _pending and _death, and keeps messages whole and in order
        self._death: str | None = None
        self._verdict = ""  # why it was killed from here, if it was
        # A process that stops reading is given up on; without this, a full socket would block the caller's event loop for good.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_SECONDS, 0))
        self._reader = threading.Thread(target=self._read, name=f"engine-{name}", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._death is None

    @property
    def own_address(self) -> str:
        """Of this host, as the process sees it."""
        return self._socket.getsockname()[0] if self._socket.family in (socket.AF_INET, socket.AF_INET6) else "127.0.0.1"

    def request(self, do: str, **fields: Any) -> tuple[int, Future[Any]]:
        """Send a message that gets an answer: its id and the future of the result. EngineDied: the process is gone."""
        number, future = next(self._ids), Future()
        with self._lock:
            if self._death is not None:
                raise EngineDied(self._death)
            self._pending[number] = future
            self._send({"do": do, "id": number, **fields})
        return number, future

    def call(self, do: str, *arguments: Any, timeout: float) -> Any:
        """A control message and its result. EngineError: it failed there. EngineDied: gone, or killed for its silence."""
        _, future = self.request(do, arguments=arguments)
        try:
            return future.result(timeout)
        except TimeoutError:
            raise self.give_up(f"gave no answer to {do} within {timeout:g} s (engine.request_timeout_seconds)") from None

    def forget(self, number: int) -> None:
        """Give up on a request, or on an advance, that has no answer yet: the engine stops working on it."""
        with self._lock:
            if self._pending.pop(number, None) is not None and self._death is None:
                self._send({"do": "abort", "request": number})

    @property
    def waiting(self) -> int:
        """Messages without an answer so far."""
        return len(self._pending)

    def close(self) -> None:
        """Ask the process to end, and kill it if it doesn't soon. Returns when it is gone; harmless when repeated."""
        with self._lock:
            if self._death is None:
                self._send({"do": "shutdown"})
        self._reader.join(EXIT_GRACE_SECONDS)
        if self._reader.is_alive():
            self.kill()

    def give_up(self, why: str) -> EngineDied:
        """Kill a process that doesn't answer: the error to raise, to which those who wait with the caller are told as well."""
        if self.alive:
            self._verdict = f"{why}, so it was killed"
        self.kill()
        return EngineDied(self._death)

    def kill(self) -> None:
        """End the process and its children now. Its socket is shut as well: a host that is gone can't be asked to."""
        if self.alive:
            self.process.kill()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()

    def _send(self, message: dict[str, Any]) -> None:
        """With the lock held. A broken socket is no error here: the reader sees it too and says what happened."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (TimeoutError, BlockingIOError):
            self._verdict = f"took no message for {SEND_TIMEOUT_SECONDS} s, so it was killed"
            self.process.kill()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines, contextlib.suppress(OSError):
                for line in lines:
                    if line.endswith(b"\n"):  # a process that is killed while it sends leaves part of a line
                        self._receive(json.loads(line))
        except ValueError as error:
            self._verdict = f"sent an answer that isn't JSON ({error}), so it was killed"
        finally:  # whatever ended the reading, nobody may wait for an answer from now on
            self._bury()

    def _receive(self, message: dict[str, Any]) -> None:
        for answer in message.get("answers", [message]):
            with self._lock:
                future = self._pending.pop(answer["id"], None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if "error" in answer:
                future.set_exception(EngineError(f"engine {self._name}: {answer['error']}"))
            else:
                future.set_result(answer["result"])

    def _bury(self) -> None:
        """Nothing more is read: let the process end, end its children, say what happened to all who wait."""
        who = f"engine {self._name} ({self.process.where})"
        with self._lock:
            self._death = f"{who} closed its connection"  # before anything that takes time or could fail
        try:
            end = self.process.end()
            with self._lock:
                self._death = f"{who} {self._verdict or end}\n{self.process.log_tail()}"
        finally:
            with self._lock:
                pending, self._pending = self._pending, {}
            self._socket.close()
            for future in pending.values():
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineDied(self._death))
