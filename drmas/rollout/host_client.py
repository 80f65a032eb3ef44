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
from drmas.rollout.host_wire import HandshakeError, Message

RETRY_SECONDS = 0.25
QUESTION_SECONDS = 5.0
"""How long a host may take to say how an engine ended, or how much memory it has."""


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

        EngineStartError: the host can't be reached, or it can't start one, and why.
        """
        request = {"do": "launch", "name": name, "model": str(model), "num_gpus": num_gpus, "threads": threads}
        connection, answer = self._ask({**request, "silence_seconds": self._silence}, name, self._patience)
        if "error" in answer:
            connection.close()
            raise EngineStartError(f"{answer['error']} ({self.url})")
        connection.settimeout(None)
        host_wire.set_keepalive(connection, self._silence)
        return RemoteProcess(self, answer["engine"], answer["log"]), connection

    def describe(self) -> Message:
        """`host` (its name), `device` ("cpu", "cuda"), `gpus` and `free` (indices), `facts` (versions and settings).

        EngineStartError: it can't be reached.
        """
        return self.question({"do": "describe"}, self._patience)

    def question(self, message: Message, patience: float = QUESTION_SECONDS) -> Message:
        """What the host says, within `patience` seconds for each step of the way. EngineStartError: nothing."""
        connection, answer = self._ask(message, "", patience)
        connection.close()
        return answer

    def _ask(self, message: Message, who: str, patience: float) -> tuple[socket.socket, Message]:
        who = f"engine {who}: " if who else ""
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
            return connection, host_wire.receive(connection)
        except (HandshakeError, OSError) as error:
            connection.close()
            given = f"{self._token_env} is {'set' if self._secret else 'not set'} here"
            raise EngineStartError(
                f"{who}the engine host {self.url} gave no answer: {error}; {given}, and must be as it is there"
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

    def __init__(self, host: RemoteHost, number: int, log: str) -> None:
        self.pid, self.where, self.log = number, f"process {number} at {host.url}", f"{log} at {host.url}"
        self._host, self._tail = host, f"--- its log is {log} at {host.url}"

    def kill(self) -> None:
        """Where the host doesn't answer the engine ends with its connection, which `Connection` shuts."""
        self._asked({"do": "kill", "engine": self.pid})

    def end(self) -> str:
        answer = self._asked({"do": "end", "engine": self.pid})
        if answer is None:
            return "is gone, and its host doesn't answer"
        self._tail = answer["tail"] or self._tail
        return answer["end"]

    def log_tail(self) -> str:
        return self._tail

    def peak_memory_bytes(self) -> int:
        answer = self._asked({"do": "memory", "engine": self.pid})
        return 0 if answer is None else answer["bytes"]

    def _asked(self, message: Message) -> Message | None:
        try:
            return self._host.question(message)
        except EngineStartError:
            return None
