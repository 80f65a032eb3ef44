"""Hosts that watch each other: over socket pairs, with what would end the process recorded instead."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading

import pytest

from drmas.errors import ConfigError
from drmas.runtime import watch
from drmas.runtime.watch import LOST_HOST, Peer, Watch, hosts_of, start_watch

A, B, C = Peer("a", (0, 1)), Peer("b", (2,)), Peer("c", (3,))
SHORT, LONG = 0.5, 60.0


class Ends:
    """Rank 0's watch and those of the other hosts; `gone` gets who gave up and why."""

    def __init__(self, *others: Peer, timeout: float) -> None:
        self.gone: queue.Queue[tuple[str, str]] = queue.Queue()
        self.watches = {A: self._watch(A, timeout)}
        for peer in others:
            near, far = socket.socketpair()
            self.watches[peer] = self._watch(peer, timeout)
            self.watches[A].add(peer, near)
            self.watches[peer].add(A, far)

    def _watch(self, mine: Peer, timeout: float) -> Watch:
        return Watch(mine, timeout, None, give_up=lambda why: self.gone.put((mine.name, why)))

    def begin(self, *peers: Peer) -> None:
        for peer in peers:
            self.watches[peer].begin()

    def all_gone(self, count: int) -> dict[str, str]:
        return dict(self.gone.get(timeout=30) for _ in range(count))

    def close(self) -> None:
        for each in self.watches.values():
            each.close()


@pytest.fixture
def ends():
    made = []

    def make(*others: Peer, timeout: float) -> Ends:
        made.append(Ends(*others, timeout=timeout))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_ranks_are_put_together_by_host():
    assert hosts_of([[0, "a"], [0, "a"], [1, "b"], [2, "b"]]) == [A, B, Peer("b", (3,))]  # two nodes of one name are two
    assert str(A) == "host a (ranks 0, 1)"
    assert str(B) == "host b (rank 2)"


def test_a_silent_host_is_given_up_by_rank_0_which_tells_the_others(ends):
    job = ends(B, C, timeout=SHORT)
    job.begin(A, C)  # b never beats
    found = job.all_gone(2)
    assert found.keys() == {"a", "c"}
    assert set(found.values()) == {found["a"]}
    assert found["a"].startswith("host b (rank 2) was silent for")
    assert "cluster.host_timeout_seconds" in found["a"]


def test_a_silent_rank_0_is_given_up_by_all_others(ends):
    job = ends(B, C, timeout=SHORT)
    job.begin(B, C)
    found = job.all_gone(2)
    assert found.keys() == {"b", "c"}
    assert all(why.startswith("host a (ranks 0, 1) was silent for") for why in found.values())


def test_beats_keep_a_job_alive(ends):
    job = ends(B, timeout=SHORT)
    job.begin(A, B)
    with pytest.raises(queue.Empty):
        job.gone.get(timeout=4 * SHORT)


def test_a_connection_that_ends_without_a_goodbye_is_an_end(ends):
    job = ends(B, C, timeout=LONG)
    job.begin(A, B, C)
    next(iter(job.watches[B]._connections.values())).shutdown(socket.SHUT_RDWR)
    found = job.all_gone(3)
    assert found["a"] == found["c"] == "host b (rank 2) closed its connection: its process ended without a word, or was killed"
    assert found["b"].startswith("host a (ranks 0, 1) closed its connection")


def test_a_goodbye_is_no_alarm(ends):
    job = ends(B, C, timeout=SHORT)
    job.begin(A, B, C)
    job.watches[B].close()
    with pytest.raises(queue.Empty):
        job.gone.get(timeout=4 * SHORT)
    job.watches[A].close()
    with pytest.raises(queue.Empty):
        job.gone.get(timeout=4 * SHORT)


def test_the_process_ends_with_the_status_and_says_why_in_the_log_whatever_its_main_thread_does(tmp_path):
    log = tmp_path / "logs" / "watch.log"
    program = f"""
import socket, sys, threading
from pathlib import Path
from drmas.runtime.watch import Peer, Watch
near, far = socket.socketpair()
watch = Watch(Peer("a", (0,)), 0.5, Path({str(log)!r}))
watch.add(Peer("b", (1,)), near)
watch.begin()
threading.Lock().acquire() and threading.Event().wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == LOST_HOST == 75
    assert "drmas: host a (rank 0): host b (rank 1) was silent for" in done.stderr
    assert "start it again with --auto-resume" in log.read_text()


class Threads:
    """Ranks as threads that share as `Broadcast` does; what they need to know of themselves they get from `environments`."""

    def __init__(self, world: int) -> None:
        self._barrier, self._said, self.world = threading.Barrier(world), [None] * world, world

    def of(self, rank: int):
        outer = self

        class Share:
            def __call__(self, action):
                return self.gather(action if rank == 0 else lambda: None)[0]

            def gather(self, action):
                try:
                    outer._said[rank] = action()
                except ConfigError as error:
                    outer._said[rank] = error
                outer._barrier.wait(30)
                said = list(outer._said)
                outer._barrier.wait(30)
                if errors := [each for each in said if isinstance(each, ConfigError)]:
                    raise errors[0]
                return said

        return Share()


def start_all(monkeypatch, nodes: list[int], **changes) -> list:
    """`start_watch` on ranks that are threads: each one's watch, None, or its error."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    here = threading.local()

    class Environment(dict):
        def get(self, name, default=None):
            return str(nodes[here.rank]) if name == "GROUP_RANK" else os.environ.get(name, default)

    class Os:
        environ = Environment()

    monkeypatch.setattr(watch, "os", Os)
    threads, found, job = [], [None] * len(nodes), Threads(len(nodes))

    def run(rank: int) -> None:
        here.rank = rank
        try:
            found[rank] = start_watch(job.of(rank), rank=rank, timeout=LONG, log=None, **changes)
        except ConfigError as error:
            found[rank] = error

    for rank in range(len(nodes)):
        threads.append(threading.Thread(target=run, args=(rank,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return found


def test_the_first_rank_of_every_host_is_connected_with_rank_0(monkeypatch):
    found = start_all(monkeypatch, [0, 0, 1, 1, 2])
    try:
        assert [each is not None for each in found] == [True, False, True, False, True]
        assert {peer.ranks for peer in found[0]._connections} == {(2, 3), (4,)}
        assert [peer.ranks for peer in found[2]._connections] == [(0, 1)]
    finally:
        for each in found:
            if each is not None:
                each.close()


def test_a_job_on_one_host_has_nothing_to_watch(monkeypatch):
    assert start_all(monkeypatch, [0, 0]) == [None, None]


def test_a_host_that_never_connects_is_named(monkeypatch):
    monkeypatch.setattr(watch, "MEETING_SECONDS", 0.5)
    monkeypatch.setattr(watch, "_join", lambda *_: None)
    found = start_all(monkeypatch, [0, 1])
    assert all("(rank 1) did not reach rank 0 at" in str(error) for error in found)


def test_a_stopped_process_counts_as_silent(tmp_path):
    """SIGSTOP stops its beats, too."""
    ours, theirs = socket.socketpair()
    program = """
import socket, sys, threading
from drmas.runtime.watch import Peer, Watch
watch = Watch(Peer("b", (1,)), 60, None)
watch.add(Peer("a", (0,)), socket.socket(fileno=int(sys.argv[1])))
watch.begin()
print("beating", flush=True)
threading.Event().wait()
"""
    command = [sys.executable, "-c", program, str(theirs.fileno())]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        gone: queue.Queue[str] = queue.Queue()
        mine = Watch(Peer("a", (0,)), 5.0, None, give_up=gone.put)
        mine.add(Peer("b", (1,)), ours)
        mine.begin()
        with pytest.raises(queue.Empty):
            gone.get(timeout=6)
        process.send_signal(signal.SIGSTOP)
        assert gone.get(timeout=60).startswith("host b (rank 1) was silent for")
        process.kill()
