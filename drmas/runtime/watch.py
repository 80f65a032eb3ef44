"""The ranks of one trainer job watch each other, so that one that goes away is noticed, named, and nobody waits for it.

    rank 0 ─────────── first rank of every other host      a beat each second, both ways
      │                     │
    the other ranks of    the other ranks of               no beats; only that a connection ends
    its host              its host

A collective that waits for a host without power would wait for as long as its timeout allows, which is long because rollouts
are. Here

- a host is given up that is silent for `cluster.host_timeout_seconds`;
- a rank whose connection ends without a goodbye, because its process was killed or crashed, is given up at once;
- a rank that ended with an error is given up if the others don't end, too, within that time (most errors are everybody's).

Whoever notices tells its other connections who it was, so that all ranks hear of it. The first rank of every host says it on
stderr, and in `logs/watch.log` of the run where it sees the run's folder. Then the processes end with status LOST_HOST,
whatever their main threads wait for; engines end with rank 0. Beats come from a thread: a process that is stopped, or that
holds Python's lock for so long, is silent. Time in which the watching process itself was stopped doesn't count. A network that
is away for less than about half the bound is forgiven (TCP sends again after ever longer pauses).

Connections are made once, between ranks that know a secret told over the control group, and are neither encrypted nor of
any other use. Called by the run on every rank. Engine hosts are watched by their connections (`rollout.host_client`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from drmas.errors import ConfigError, UserError
from drmas.rollout import host_wire
from drmas.rollout.host_wire import HandshakeError
from drmas.weights.wire import LOOPBACK, address_towards

LOST_HOST = 75
"""Exit status (EX_TEMPFAIL): a rank or host is gone; start the job again with --auto-resume. torchrun itself ends with 1."""
MEETING_SECONDS = 30.0
"""How long the connections of the watch may take to be made at the start."""
STRANGER_SECONDS = 10.0
"""How long one that connects may take to prove itself."""
LAST_WORDS_SECONDS = 5.0
"""How long saying why may hold up the end, where a terminal or a file system hangs."""
CAUSE_SECONDS = 2.0
"""How long a rank with an error waits for news of a lost one that may be behind it."""

RUN_ID = "TORCHELASTIC_RUN_ID"
"""In the environment of ranks that torchrun started."""


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
    """The hosts of the job, rank 0's first, from every rank's node number and host name.

    Example: hosts_of([[0, "a"], [0, "a"], [1, "b"]]) == [Peer("a", (0, 1)), Peer("b", (2,))]
    """
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for rank, (node, name) in enumerate(places):
        ranks.setdefault((node, name), []).append(rank)
    return [Peer(name, tuple(own)) for (_, name), own in ranks.items()]


@contextmanager
def watched(share: Share, *, rank: int, timeout: float, run_dir: Path) -> Iterator[None]:
    """While the block runs, this rank watches and is watched. Collective over all ranks. `timeout` in seconds.

    ConfigError, on every rank: they can't reach each other.
    """
    watch = _meet(share, rank=rank, timeout=timeout, run_dir=run_dir)
    if watch is None:
        yield
        return
    watch.begin()
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            watch.await_cause()
        watch.close(failed=f"{type(error).__name__}: {error}".partition("\n")[0])
        raise
    watch.close()


@dataclass
class _Link:
    """A connection. `far`: it leads to another host. `quiet` is how many seconds nothing came, in the running time of this
    process. `failed` is the error that the other end said it ends with."""

    who: str
    connection: socket.socket
    far: bool
    quiet: float = 0.0
    failed: str = ""


class Watch:
    """One rank's end. `add` its connections, `begin`, and `close` when the job ends here."""

    def __init__(self, timeout: float, end: Callable[[str, bool], None]) -> None:
        """`end(why, told)` ends the process; `told`: another rank found out, and said so."""
        self._timeout, self._end = timeout, end
        self._links: list[_Link] = []
        self._launcher = os.getppid() if RUN_ID in os.environ else None
        self._closed = threading.Event()
        self._lock = threading.Lock()  # one message at a time, and one loss at a time

    def add(self, who: str, connection: socket.socket, *, far: bool) -> None:
        connection.settimeout(None)
        self._links.append(_Link(who, connection, far))

    def begin(self) -> None:
        for link in self._links:
            threading.Thread(target=self._listen, args=(link,), name=f"watch {link.who}", daemon=True).start()
        threading.Thread(target=self._beat, name="watch", daemon=True).start()

    def await_cause(self) -> None:
        """Where a collective breaks because a rank went away, torch's error doesn't say which: the watch does, and ends the
        process. It notices at the same time, so it is waited for."""
        if self._closed.wait(CAUSE_SECONDS):
            time.sleep(2 * LAST_WORDS_SECONDS)  # ends with the process

    def close(self, *, failed: str = "") -> None:
        """Say goodbye, after which it is no alarm that this rank leaves; or that it leaves because it `failed`."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for link in self._links:
                with contextlib.suppress(OSError):
                    host_wire.send(link.connection, {"failed": failed} if failed else {"goodbye": True})
                    link.connection.shutdown(socket.SHUT_WR)  # closed with beats unread, it could take the goodbye along

    def _beat(self) -> None:
        """Beats, and whether others are quiet for too long."""
        interval = min(1.0, self._timeout / 4)
        while not self._closed.wait(interval):
            if self._launcher not in (None, os.getppid()):  # nobody would start this rank again, or wait for it
                self._lose("torchrun, which started this rank, is gone; it was killed")
            for link in self._links:
                with self._lock, contextlib.suppress(OSError):  # `_listen` finds out
                    if link.far:
                        host_wire.send(link.connection, {})
                link.quiet += interval
                if link.quiet < self._timeout:
                    continue
                if link.failed:
                    self._lose(f"{link.who} ended with an error that isn't everybody's: {link.failed}")
                elif link.far:
                    self._lose(f"{link.who} was silent for {link.quiet:.0f} s (cluster.host_timeout_seconds)")

    def _listen(self, link: _Link) -> None:
        try:
            while True:
                message = host_wire.receive(link.connection)
                link.quiet = 0.0
                if "lost" in message:
                    return self._lose(message["lost"], told=True)
                if "goodbye" in message:
                    with self._lock:
                        self._links = [each for each in self._links if each is not link]
                    return None
                link.failed = message.get("failed", "")
        except (HandshakeError, OSError) as error:
            if link.failed:
                return None  # `_beat` waits for this rank to end, too
            if isinstance(error, HandshakeError | ConnectionError):
                return self._lose(f"{link.who} closed its connection: its process ended without a word, or was killed")
            return self._lose(f"{link.who} can't be reached any more: {error}")

    def _lose(self, why: str, *, told: bool = False) -> None:
        """Tell the others, then end."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for link in self._links:
                link.connection.settimeout(1.0)
                with contextlib.suppress(OSError):
                    host_wire.send(link.connection, {"lost": why})
        self._end(why, told)


@dataclass(frozen=True)
class _Ending:
    """How a process ends for a loss. `me`: as messages name this rank."""

    me: str
    leads: bool
    run_dir: Path

    def __call__(self, why: str, told: bool) -> None:
        if self.leads or not told:  # one line per host, of the many ranks that hear of it
            words = threading.Thread(target=self.say, args=(why,), daemon=True)
            words.start()
            words.join(LAST_WORDS_SECONDS)
        os._exit(LOST_HOST)  # the main thread may be in a collective that never ends

    def say(self, why: str) -> None:
        line = f"{why}; the job ends here with status {LOST_HOST}: start it again with --auto-resume"
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write(f"drmas: {self.me}: {line}\n")
            sys.stderr.flush()
        if (self.run_dir / "config.json").is_file():  # the run stands, and this host sees it
            with contextlib.suppress(OSError):
                log = self.run_dir / "logs" / "watch.log"
                log.parent.mkdir(exist_ok=True)
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {self.me}: {line}\n")


def _place() -> list[Any]:
    """This rank's node, host name, and the host's address as rank 0 sees it."""
    meeting = os.environ.get("MASTER_ADDR", LOOPBACK)
    return [int(os.environ.get("GROUP_RANK", 0)), socket.gethostname(), address_towards(meeting)]


def _meet(share: Share, *, rank: int, timeout: float, run_dir: Path) -> Watch | None:
    """This rank's watch, with its connections; None if the job has one rank that no torchrun started."""
    places = share.gather(_place)
    if len(places) == 1 and RUN_ID not in os.environ:
        return None
    hosts = hosts_of([place[:2] for place in places])
    mine = next(host for host in hosts if rank in host.ranks)
    first = mine.ranks[0]
    below = {each: f"rank {each} on host {mine.name}" for each in mine.ranks[1:]} if rank == first else {}
    far = {host.ranks[0]: str(host) for host in hosts[1:]} if rank == 0 else {}
    me = str(mine) if rank == first else f"rank {rank} on host {mine.name}"
    watch = Watch(timeout, _Ending(me, rank == first, run_dir))
    listeners: list[socket.socket] = []

    def listen() -> list[Any] | None:
        """Where this rank waits for others, on no other address than they need."""
        if not below and not far:
            return None
        address = address_towards(places[hosts[1].ranks[0]][2]) if far else LOOPBACK
        listeners.append(socket.create_server((address, 0), family=_family(address), backlog=len(below | far) + 16))
        return list(listeners[0].getsockname()[:2])

    def join() -> None:
        if rank != 0:
            above, leads = (0, str(hosts[0])) if rank == first else (first, f"rank {first} on host {mine.name}")
            watch.add(leads, _join(leads, addresses[above], secret, rank), far=rank == first)
        for listener in listeners:
            for each, connection in _accept(listener, below | far, secret).items():
                watch.add((below | far)[each], connection, far=each in far)

    secret = share(lambda: secrets.token_hex(16))
    addresses = share.gather(listen)
    share.gather(join)
    return watch


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _accept(listener: socket.socket, expected: Mapping[int, str], secret: str) -> dict[int, socket.socket]:
    """The connections of all `expected` ranks. Others that come by are turned away."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + MEETING_SECONDS
    with listener:
        while missing := [who for each, who in expected.items() if each not in found]:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                place = "{}:{}".format(*listener.getsockname()[:2])
                raise ConfigError(f"{', '.join(missing)} did not come to {place} within {MEETING_SECONDS:g} s") from None
            try:
                connection.settimeout(STRANGER_SECONDS)
                host_wire.prove(connection, secret, server=True)
                found[host_wire.receive(connection)["rank"]] = connection
            except (HandshakeError, OSError, KeyError):
                connection.close()
    return found


def _join(who: str, address: Sequence[Any], secret: str, rank: int) -> socket.socket:
    try:
        connection = socket.create_connection((address[0], address[1]), MEETING_SECONDS)
        host_wire.prove(connection, secret, server=False)
        host_wire.send(connection, {"rank": rank})
    except (HandshakeError, OSError) as error:
        raise ConfigError(
            f"{who} can't be reached at {address[0]}:{address[1]}, where the ranks of the job watch each other: {error}; the "
            "hosts of a job must reach each other on all ports"
        ) from error
    return connection
