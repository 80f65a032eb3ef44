"""Hosts of one trainer job watch each other, so that one that goes away is noticed, named, and nobody waits for it.

    local rank 0 of every other host  ── a beat each second, both ways ──  rank 0

A collective that waits for a host without power would wait for as long as its timeout allows, which is long because rollouts
are. Here a host is given up that is silent for `cluster.host_timeout_seconds`, or whose connection ends without a goodbye:
rank 0 tells the other hosts who it was, everybody writes it to stderr (rank 0 also to `logs/watch.log` of the run), and the
processes end with status LOST_HOST, whatever their main threads wait for. torchrun ends the other ranks of a host, engines end
with rank 0. Beats come from a thread: a process that is stopped, or that holds Python's lock for so long, counts as silent.

Made by the run on every rank; connections are between ranks that know a secret told over the control group, on the address
that the ranks met at (MASTER_ADDR). On one host there is nothing to watch: torchrun does it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from drmas.errors import ConfigError
from drmas.rollout import host_wire
from drmas.rollout.host_wire import HandshakeError

LOST_HOST = 75
"""Exit status (EX_TEMPFAIL): another host is gone; start the job again with --auto-resume."""
MEETING_SECONDS = 30.0
"""How long the connections of the watch may take to be made at the start."""


class Share(Protocol):
    """The part of `policy.broadcast.Broadcast` that is needed here."""

    def __call__(self, action: Callable[[], Any]) -> Any: ...

    def gather(self, action: Callable[[], Any]) -> list[Any]: ...


class Peer(NamedTuple):
    """A host of the job."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.ranks))
        return f"host {self.name} (rank{'s' if len(self.ranks) > 1 else ''} {numbers})"


def hosts_of(places: Sequence[Sequence[Any]]) -> list[Peer]:
    """The hosts of the job, rank 0's first, from every rank's [node number, host name].

    Example: hosts_of([[0, "a"], [0, "a"], [1, "b"]]) == [Peer("a", (0, 1)), Peer("b", (2,))]
    """
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(tuple(place), []).append(rank)
    return [Peer(place[1], tuple(own)) for place, own in ranks.items()]


def start_watch(share: Share, *, rank: int, timeout: float, log: Path) -> Watch | None:
    """Collective over all ranks. None on a host that needs none of its own: of a job on one host, or not its first rank."""
    places = share.gather(lambda: [int(os.environ.get("GROUP_RANK", 0)), socket.gethostname()])
    peers = hosts_of(places)
    if len(peers) == 1:
        return None
    mine = next(peer for peer in peers if rank in peer.ranks)
    leads = rank == mine.ranks[0]
    listener = _listen() if rank == 0 else None
    told = share(lambda: {"port": listener.getsockname()[1], "secret": secrets.token_hex(16)})
    watch = Watch(mine, timeout, log if rank == 0 else None) if leads else None

    def meet() -> None:
        if listener is not None:
            _accept(listener, watch, peers[1:], told["secret"])
        elif leads:
            _join(watch, peers[0], told["port"], told["secret"])

    share.gather(meet)
    if watch is not None:
        watch.begin()
    return watch


class Watch:
    """One host's end. `mine` is this host; `add` its connections, then `begin`, and `close` when the job ends."""

    def __init__(self, mine: Peer, timeout: float, log: Path | None, *, give_up: Callable[[str], None] | None = None) -> None:
        """`give_up(why)` ends the process; another one is for tests."""
        self._mine, self._timeout, self._log = mine, timeout, log
        self._give_up = give_up or self._leave
        self._connections: dict[Peer, socket.socket] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()  # one message at a time on a connection, and one host given up at a time

    @property
    def first_rank(self) -> int:
        return self._mine.ranks[0]

    def add(self, peer: Peer, connection: socket.socket) -> None:
        connection.settimeout(self._timeout)
        self._connections[peer] = connection

    def begin(self) -> None:
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        for peer, connection in self._connections.items():
            threading.Thread(target=self._listen_to, args=(peer, connection), name=f"watch-{peer.name}", daemon=True).start()

    def close(self) -> None:
        """Say goodbye: that this host leaves is no alarm any more."""
        self._closed.set()
        with self._lock:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    host_wire.send(connection, {"goodbye": True})
                connection.close()

    def _beat(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout / 4)):
            with self._lock:
                for connection in self._connections.values():
                    with contextlib.suppress(OSError):  # whoever listens to it finds out
                        host_wire.send(connection, {})

    def _listen_to(self, peer: Peer, connection: socket.socket) -> None:
        started = time.monotonic()
        try:
            while True:
                message = host_wire.receive(connection)
                started = time.monotonic()
                if "lost" in message:
                    return self._lose(message["lost"])
                if "goodbye" in message:
                    return None
        except TimeoutError:
            self._lose(f"{peer} was silent for {time.monotonic() - started:.0f} s (cluster.host_timeout_seconds)")
        except (HandshakeError, OSError):
            self._lose(f"{peer} closed its connection: its process ended without a word, or was killed")

    def _lose(self, why: str) -> None:
        """Tell the other hosts, then end. Only rank 0's host has others to tell; a connection that blocks isn't waited for."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        for connection in self._connections.values():
            connection.settimeout(1.0)
            with contextlib.suppress(OSError):
                host_wire.send(connection, {"lost": why})
        self._give_up(why)

    def _leave(self, why: str) -> None:
        line = f"{why}; the job ends here with status {LOST_HOST}: start it again with --auto-resume"
        with contextlib.suppress(OSError):
            print(f"drmas: {self._mine}: {line}", file=sys.stderr, flush=True)  # noqa: T201 - there is no other thread to say it
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
        os._exit(LOST_HOST)  # the main thread may be in a collective that never ends


def _listen() -> socket.socket:
    """On the address that the ranks met at, which leads to this host; on every address where its name doesn't tell."""
    address = os.environ.get("MASTER_ADDR", "")
    try:
        return socket.create_server((socket.gethostbyname(address), 0))
    except OSError:
        return socket.create_server(("", 0))


def _accept(listener: socket.socket, watch: Watch, expected: Sequence[Peer], secret: str) -> None:
    """The connections of all `expected` hosts. Others that come by are turned away."""
    missing, deadline = {peer.ranks[0]: peer for peer in expected}, time.monotonic() + MEETING_SECONDS
    with listener:
        while missing:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                names = ", ".join(map(str, missing.values()))
                raise ConfigError(
                    f"{names} did not reach rank 0 at {listener.getsockname()} within {MEETING_SECONDS:g} s"
                ) from None
            try:
                connection.settimeout(MEETING_SECONDS)
                host_wire.prove(connection, secret, server=True)
                peer = missing.pop(host_wire.receive(connection)["rank"])
            except (HandshakeError, OSError, KeyError):
                connection.close()
                continue
            watch.add(peer, connection)


def _join(watch: Watch, leader: Peer, port: int, secret: str) -> None:
    address = (os.environ.get("MASTER_ADDR", "127.0.0.1"), port)
    try:
        connection = socket.create_connection(address, MEETING_SECONDS)
        host_wire.prove(connection, secret, server=False)
        host_wire.send(connection, {"rank": watch.first_rank})
    except (HandshakeError, OSError) as error:
        raise ConfigError(
            f"{leader} can't be reached at {address[0]}:{address[1]}, where the hosts of the job watch each other: {error}; "
            "they must reach each other on all ports"
        ) from error
    watch.add(leader, connection)
