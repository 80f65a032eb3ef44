"""An engine host as rank 0 sees it: start an engine there, learn how it ended. The other side is `host_server`.

Every question is a connection of its own, bounded in time; the one that starts an engine becomes the engine's. Called by
`vllm_engine`.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from drmas.config.cluster import ClusterConfig
from drmas.errors import EngineStartError
from drmas.rollout import host_wire
from drmas.rollout.engine_process import EXIT_GRACE_SECONDS
from drmas.rollout.host_wire import HandshakeError, Message

RETRY_SECONDS = 0.25
QUESTION_SECONDS = 5.0
"""How long a host may take to be reached, and to answer what it knows."""
END_SECONDS = EXIT_GRACE_SECONDS + host_wire.KILL_SECONDS + QUESTION_SECONDS
"""How long it may take to say how an engine ended, which it has to wait for."""


class RemoteHost:
    """`url` as in `cluster.engine_hosts`."""

    def __init__(self, url: str, cluster: ClusterConfig) -> None:
        self.url = url
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        self._address = (host.strip("[]"), int(port))
        self._secret = os.environ.get(cluster.token_env, "")
        self._token_env, self._patience = cluster.token_env, cluster.connect_timeout_seconds
        self._silence = cluster.host_timeout_seconds

    def launch(self, name: str, *, model: Path, num_gpus: int, threads: int | None) -> tuple[RemoteProcess, socket.socket]:
        """Start an engine's process there: it, and our end of its connection.

        GPUs that are taken are waited for: an engine that was killed gives them back in a moment, one whose trainer was cut off
        once it has noticed. EngineStartError: the host can't be reached, or it can't start one, and why.
        """
        request = {"do": "launch", "name": name, "model": str(model), "num_gpus": num_gpus, "threads": threads}
        deadline = time.monotonic() + max(self._patience, 2 * self._silence)
        while True:
            connection, answer = self._ask({**request, "silence_seconds": self._silence}, name, self._patience)
            if "error" not in answer:
                connection.settimeout(None)
                host_wire.set_keepalive(connection, self._silence)
                return RemoteProcess(self, answer), connection
            connection.close()
            if not answer.get("taken") or time.monotonic() >= deadline:
                raise EngineStartError(f"{answer['error']} ({self.url})")
            time.sleep(RETRY_SECONDS)

    def describe(self) -> Message:
        """`host` (its name), `device` ("cpu", "cuda"), `gpus` and `free` (indices), `facts` (versions and settings).

        EngineStartError: it can't be reached.
        """
        return self.question({"do": "describe"}, self._patience)

    def question(self, message: Message, patience: float = QUESTION_SECONDS, *, thinks: float | None = None) -> Message:
        """What the host says, within `patience` seconds for each step of the way; it may think for `thinks` seconds.

        EngineStartError: nothing.
        """
        connection, answer = self._ask(message, "", patience, thinks)
        connection.close()
        return answer

    def _ask(self, message: Message, who: str, patience: float, thinks: float | None = None) -> tuple[socket.socket, Message]:
        who = f"engine {who}: " if who else ""
        if not self._secret:
            raise EngineStartError(
                f"{who}{self._token_env} is not set here; it must hold the secret of the engine host {self.url} "
                "(cluster.token_env)"
            )
        try:
            connection = self._connected(patience)
        except OSError as error:
            raise EngineStartError(
                f"{who}the engine host {self.url} can't be reached within {patience:g} s: {error}; is drmas serve-engines "
                "running there (cluster.engine_hosts, policies.NAME.engine.hosts, cluster.connect_timeout_seconds)?"
            ) from error
        try:
            connection.settimeout(patience)
            host_wire.prove(connection, self._secret, server=False)
            host_wire.send(connection, message)
            connection.settimeout(thinks or patience)
            return connection, host_wire.receive(connection)
        except (HandshakeError, OSError) as error:
            connection.close()
            raise EngineStartError(
                f"{who}the engine host {self.url} can't be talked to: {error}; {self._token_env} must be here as it is there"
            ) from error

    def _connected(self, patience: float) -> socket.socket:
        """Tried again where nobody listens yet: engine hosts may be started together with the trainers."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return socket.create_connection(self._address, patience)
            except ConnectionRefusedError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_SECONDS)


class RemoteProcess:
    """An engine's process on another host, as `engine_process.EngineProcess` has it."""

    def __init__(self, host: RemoteHost, started: Message) -> None:
        """`started`: the host's answer."""
        self.pid, self.where = started["pid"], f"process {started['pid']} at {host.url}"
        self.log = f"{started['log']} at {host.url}"
        self._host, self._number, self._tail = host, started["engine"], f"--- its log is {self.log}"

    def kill(self) -> None:
        """Where the host doesn't answer the engine ends with its connection, which `Connection` shuts."""
        self._asked("kill")

    def end(self) -> str:
        answer = self._asked("end", thinks=END_SECONDS)
        if answer is None:
            return "is gone, and its host doesn't answer"
        self._tail = answer["tail"] or self._tail
        return answer["end"]

    def log_tail(self) -> str:
        return self._tail

    def peak_memory_bytes(self) -> int:
        answer = self._asked("memory")
        return 0 if answer is None else answer["bytes"]

    def _asked(self, do: str, thinks: float | None = None) -> Message | None:
        try:
            return self._host.question({"do": do, "engine": self._number}, thinks=thinks)
        except EngineStartError:
            return None
