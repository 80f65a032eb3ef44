"""An engine host: starts vLLM engines for a trainer's rank 0 elsewhere and tells it how they end. Run by `drmas serve-engines`.

    rank 0 ── connect, prove, "launch" ──▶ this process: picks GPUs, starts `vllm_process` on that very connection
    rank 0 ◀──────── requests, answers, weights' control ────────▶ vllm_process (this process is out of the way)
    rank 0 ── connect, prove, "end" ────▶ this process: how it ended, the end of its log

An engine ends with its connection: when the trainer closes it, dies, or falls silent for as long as it said at the start. All
of them end with this process. Whoever knows the secret can start engines, and with them code; there always is one, since every
user of a machine reaches its loopback. One thread per connection; none of them lives as long as an engine but the one that
waits for its end.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drmas.errors import ConfigError, EngineStartError
from drmas.rollout import host_wire
from drmas.rollout.engine_process import EXIT_GRACE_SECONDS, LocalProcess
from drmas.rollout.host_wire import HandshakeError, Message, PeerLeft
from drmas.rollout.vllm_launch import check_model_folder, engine_device, engine_environment, spawn
from drmas.telemetry.environment import code_version, shared_settings, software

HANDSHAKE_SECONDS = 10.0
MOST_UNPROVEN = 64
"""Connections at a time of which it isn't known yet who they are."""
LEAST_SECRET = 16
_ENDED_KEPT = 256
"""Ended engines that are still known by how they ended."""


def _nothing(text: str) -> None:
    """Where nobody listens."""


class _NoneFree(EngineStartError):
    """The GPUs are there, and taken: by engines that may end."""


@dataclass
class _Engine:
    """`gpus` are given back when the process has ended; `end` says how, once it has."""

    name: str
    process: LocalProcess
    gpus: tuple[int, ...]
    ended: threading.Event
    end: str = ""


class EngineHost:
    """Listens from its making; `serve` answers until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: str,
        gpus: Sequence[int],
        logs: Path,
        say: Callable[[str], None] = _nothing,
        token_env: str = "DRMAS_ENGINE_TOKEN",
    ) -> None:
        """`gpus`: those that engines may have, as indices into what this process sees. `say` hears what happens. `token_env`:
        where the secret comes from.

        ConfigError: the address can't be had, or the secret is missing or short.
        """
        if len(secret) < LEAST_SECRET:
            raise ConfigError(
                f"{token_env} has {len(secret)} characters; whoever knows it can run code here, so set it to at least "
                f"{LEAST_SECRET} random ones (openssl rand -hex 16), the same here and for the trainer"
            )
        try:
            self._listener = _listening(host, port)
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port} can't be served: {error}; take another --port, or 0 for a free one"
            ) from error
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.device = engine_device()
        self.gpus = tuple(gpus)
        self._secret, self._logs, self._say = secret, logs, say
        self._closing = threading.Event()
        self._unproven = threading.Semaphore(MOST_UNPROVEN)
        self._numbers = (f"{secrets.token_hex(3)}-{count}" for count in itertools.count(1))  # no other start has the same
        self._engines: dict[str, _Engine] = {}
        self._lock = threading.Lock()  # guards _engines and the choice of GPUs

    def serve(self) -> None:
        """Answer until `close`. Whatever goes wrong with one connection, engines go on."""
        while not self._closing.is_set():
            try:
                self._accept()
            except (OSError, RuntimeError) as error:  # too many files, too many threads, a peer that left already
                if not self._closing.is_set():
                    self._say(f"a connection was lost: {error}")
                    self._closing.wait(1.0)

    def _accept(self) -> None:
        connection, peer = self._listener.accept()
        if not self._unproven.acquire(blocking=False):
            connection.close()
            self._say(f"refused {peer[0]}: {MOST_UNPROVEN} connections have proved nothing yet")
            return
        try:
            threading.Thread(target=self._answer, args=(connection, peer[0]), name=f"peer-{peer[0]}", daemon=True).start()
        except RuntimeError:
            self._unproven.release()
            connection.close()
            raise

    def close(self) -> None:
        """Stop listening and end all engines."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            engines = list(self._engines.values())
        for engine in engines:
            engine.process.kill()
        for engine in engines:
            engine.ended.wait(HANDSHAKE_SECONDS)

    def _answer(self, connection: socket.socket, peer: str) -> None:
        """One connection: who it is, what it wants. An engine's process has a copy of the socket when ours is closed."""
        with connection, contextlib.suppress(OSError):
            connection.settimeout(HANDSHAKE_SECONDS)
            try:
                host_wire.prove(connection, self._secret, server=True)
                message = host_wire.receive(connection)
            except PeerLeft:  # as probes do that only ask whether somebody listens
                return
            except HandshakeError as error:
                self._say(f"refused {peer}: {error}")
                return
            finally:
                self._unproven.release()
            if (answer := self._answer_to(message, connection)) is not None:
                host_wire.send(connection, answer)

    def _answer_to(self, message: Message, connection: socket.socket) -> Message | None:
        try:
            return self._do(message, connection)
        except EngineStartError as error:
            return {"error": str(error), "taken": isinstance(error, _NoneFree)}
        except (KeyError, TypeError, ValueError) as error:
            return {"error": f"a bad message: {error!r}"}
        except OSError as error:  # no room for its log, no memory for its process, a model's folder that can't be read
            self._say(f"an engine can't be started: {error}")
            return {"error": f"an engine can't be started on {socket.gethostname()}: {error}"}

    def _do(self, message: Message, connection: socket.socket) -> Message | None:
        """The answer; None where `launch` has sent it and the connection is the engine's."""
        match message["do"]:
            case "describe":
                gpus = {"gpus": list(self.gpus), "free": self._free()}
                facts = software() | {"drmas": code_version()} | shared_settings()
                return {"host": socket.gethostname(), "device": self.device, "facts": facts, **gpus}
            case "launch":
                return self._launch(message, connection)
            case "kill":
                if (engine := self._engines.get(message["engine"])) is not None:
                    engine.process.kill()
                return {}
            case "end":
                return self._end(message["engine"])
            case "memory":
                engine = self._engines.get(message["engine"])
                return {"bytes": 0 if engine is None or engine.ended.is_set() else engine.process.peak_memory_bytes()}
        raise ValueError(f"do is {message['do']!r}")

    def _launch(self, message: Message, connection: socket.socket) -> Message | None:
        name, model = str(message["name"]), Path(message["model"])
        check_model_folder(model, name, where=f" on {socket.gethostname()}; it must have the same path on every host")
        with self._lock:
            number = next(self._numbers)
            log = self._logs / f"engine-{_file_part(name)}-{number}.log"
            gpus = self._take(int(message["num_gpus"]), name)
            environment = engine_environment(self.device, message["threads"], gpus or None)
            host_wire.set_keepalive(connection, float(message["silence_seconds"]))
            connection.settimeout(None)
            process = spawn(environment, log, connection)
            engine = _Engine(name, process, gpus, threading.Event())
            self._engines[number] = engine
        threading.Thread(target=self._await, args=(engine,), name=f"engine-{name}", daemon=True).start()
        host_wire.send(connection, {"engine": number, "pid": process.pid, "gpus": list(gpus), "log": str(log.absolute())})
        return None

    def _take(self, count: int, name: str) -> tuple[int, ...]:
        """With the lock held. EngineStartError: so many GPUs aren't free. On a host without GPUs there is nothing to take."""
        if self.device == "cpu":
            return ()
        free = self._free()
        if count > len(free):
            taken = ", ".join(f"{engine.name} {list(engine.gpus)}" for engine in self._running())
            raise (_NoneFree if count <= len(self.gpus) else EngineStartError)(
                f"engine {name} needs {count} GPU(s); {socket.gethostname()} serves {len(self.gpus)}, of which {len(free)} are "
                f"free ({taken or 'none is taken'})"
            )
        return tuple(free[:count])

    def _free(self) -> list[int]:
        taken = {gpu for engine in self._running() for gpu in engine.gpus}
        return [gpu for gpu in self.gpus if gpu not in taken]

    def _running(self) -> list[_Engine]:
        return [engine for engine in list(self._engines.values()) if not engine.ended.is_set()]

    def _await(self, engine: _Engine) -> None:
        """Until it has ended, however long that takes; then its children go, too."""
        engine.end = engine.process.end(patience=None)
        engine.ended.set()
        self._say(f"engine {engine.name} ({engine.process.where}) {engine.end}")
        with self._lock:
            ended = [number for number, each in self._engines.items() if each.ended.is_set()]
            for number in ended[:-_ENDED_KEPT]:
                del self._engines[number]

    def _end(self, number: str) -> Message:
        engine = self._engines.get(number)
        if engine is None:
            return {"end": "is unknown to its host, which was started anew since", "tail": ""}
        if not engine.ended.wait(EXIT_GRACE_SECONDS):
            engine.process.kill()
            engine.ended.wait(host_wire.KILL_SECONDS)
        return {"end": engine.end or "can't be killed", "tail": engine.process.log_tail()}


def _listening(host: str, port: int) -> socket.socket:
    """Of the address family that `host` has, IPv4 where it has both. OSError: it can't be had."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return socket.create_server(address, family=family)


def _file_part(name: str) -> str:
    """`name` as a part of a file's name: it comes from outside."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)[:100]
