"""Ranks that watch each other: over socket pairs, with what would end the process recorded instead."""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from drmas.errors import ConfigError
from drmas.runtime import watch
from drmas.runtime.watch import LOST_HOST, Peer, Watch, _Ending, hosts_of, watched
from tests.runtime.rank_threads import RankThreads

SHORT, BRISK, LONG = 0.5, 2.0, 60.0
"""Seconds of silence: until what is silent is noticed, in which what isn't shall beat, and that no test waits for."""
A, B, C = "host a (ranks 0, 1)", "host b (rank 2)", "host c (rank 3)"


class Job:
    """A star of watches: the first name's is in the middle. `gone` gets who gave up, why, and whether it was told."""

    def __init__(self, *names: str, timeout: float, far: bool = True) -> None:
        self.gone: queue.Queue[tuple[str, str, bool]] = queue.Queue()
        self.watches = {name: self._watch(name, timeout) for name in names}
        self.ends: dict[str, socket.socket] = {}
        middle, *others = names
        for name in others:
            near, self.ends[name] = socket.socketpair()
            self.watches[middle].add(name, near, far=far)
            self.watches[name].add(middle, self.ends[name], far=far)

    def _watch(self, name: str, timeout: float) -> Watch:
        return Watch(timeout, lambda why, told: self.gone.put((name, why, told)))

    def begin(self, *names: str) -> None:
        for name in names:
            self.watches[name].begin()

    def all_gone(self, count: int) -> dict[str, tuple[str, bool]]:
        return {name: (why, told) for name, why, told in (self.gone.get(timeout=30) for _ in range(count))}

    def nobody_goes(self, seconds: float) -> None:
        with pytest.raises(queue.Empty):
            self.gone.get(timeout=seconds)


@pytest.fixture
def job():
    made: list[Job] = []

    def make(*names: str, **settings) -> Job:
        made.append(Job(*names, **settings))
        return made[-1]

    yield make
    for each in made:
        for own in each.watches.values():
            own.close()


def test_ranks_are_put_together_by_host():
    assert hosts_of([[0, "a"], [0, "a"], [1, "b"], [2, "b"]]) == [  # two nodes of one name are two
        Peer("a", (0, 1)),
        Peer("b", (2,)),
        Peer("b", (3,)),
    ]
    assert (str(Peer("a", (0, 1))), str(Peer("b", (2,)))) == (A, B)


def test_a_silent_host_is_given_up_by_rank_0_which_tells_the_others(job):
    made = job(A, B, C, timeout=SHORT)
    made.begin(A, C)  # b never beats
    found = made.all_gone(2)
    assert found.keys() == {A, C}
    why, told = found[A]
    assert why.startswith(f"{B} was silent for")
    assert "cluster.host_timeout_seconds" in why
    assert not told
    assert found[C] == (why, True)


def test_a_silent_rank_0_is_given_up_by_all_others(job):
    made = job(A, B, C, timeout=SHORT)
    made.begin(B, C)
    found = made.all_gone(2)
    assert found.keys() == {B, C}
    assert all(why.startswith(f"{A} was silent for") and not told for why, told in found.values())


def test_beats_keep_a_job_alive(job):
    made = job(A, B, timeout=BRISK)
    made.begin(A, B)
    made.nobody_goes(2 * BRISK)


def test_a_connection_that_ends_without_a_goodbye_is_an_end(job):
    made = job(A, B, C, timeout=LONG)
    made.begin(A, B, C)
    made.ends[B].shutdown(socket.SHUT_RDWR)
    found = made.all_gone(3)
    why = f"{B} closed its connection: its process ended without a word, or was killed"
    assert (found[A], found[C]) == ((why, False), (why, True))
    assert found[B][0].startswith(f"{A} closed its connection")


def test_what_is_no_message_is_an_end(job):
    made = job(A, B, timeout=LONG)
    made.begin(A)
    made.ends[B].sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert made.all_gone(1)[A][0].startswith(f"{B} closed its connection")


def test_a_goodbye_is_no_alarm(job):
    made = job(A, B, C, timeout=BRISK)
    made.begin(A, B, C)
    made.watches[B].close()
    made.nobody_goes(2 * BRISK)
    made.watches[A].close()
    made.nobody_goes(2 * BRISK)


def test_an_error_that_everybody_has_is_no_alarm(job):
    made = job(A, B, C, timeout=LONG)
    made.begin(A, B, C)
    for name in (B, C, A):
        made.watches[name].close(failed="ConfigError: no")
        made.ends.get(name, made.ends[B]).close()
    made.nobody_goes(1)


@pytest.mark.parametrize("far", [True, False])
def test_an_error_that_the_others_dont_have_ends_them_in_time(job, far):
    made = job(A, B, timeout=2.0, far=far)
    made.begin(A, B)
    started = time.monotonic()
    made.watches[B].close(failed="ValueError: 17")
    made.ends[B].shutdown(socket.SHUT_RDWR)  # its process is gone
    assert made.all_gone(1) == {A: (f"{B} ended with an error that isn't everybody's: ValueError: 17", False)}
    assert time.monotonic() - started > 1.0


def test_on_one_host_only_an_end_counts_and_not_silence(job):
    """A process that a debugger holds is no lost host."""
    made = job("rank 0 on host a", "rank 1 on host a", timeout=SHORT, far=False)
    made.begin("rank 0 on host a")
    made.nobody_goes(4 * SHORT)
    made.ends["rank 1 on host a"].shutdown(socket.SHUT_RDWR)
    assert made.all_gone(1)["rank 0 on host a"][0].startswith("rank 1 on host a closed its connection")


def test_time_in_which_the_watching_process_was_stopped_doesnt_count():
    """Both ends are stopped for longer than the bound, as a scheduler suspends a job; they go on afterwards."""
    pair = socket.socketpair()
    program = """
import socket, sys, threading
from drmas.runtime.watch import Watch
watch = Watch(4.0, lambda why, told: print(why, flush=True))
watch.add("the other", socket.socket(fileno=int(sys.argv[1])), far=True)
print("ready", flush=True)
sys.stdin.readline()
watch.begin()
sys.stdin.readline()
watch.close()
"""
    processes = []
    for end in pair:
        command = [sys.executable, "-c", program, str(end.fileno())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, pass_fds=[end.fileno()], **pipes))
        end.close()
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
        for process in processes:
            process.stdin.write("begin\n")
            process.stdin.flush()
        for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 2)):  # stopped for more than the bound
            for process in processes:
                process.send_signal(number)
            time.sleep(seconds)
        assert [process.communicate("\n", timeout=60)[0] for process in processes] == ["", ""]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_stopped_process_is_silent():
    """SIGSTOP stops its beats, too."""
    ours, theirs = socket.socketpair()
    program = """
import socket, sys, threading
from drmas.runtime.watch import Watch
watch = Watch(60, print)
watch.add("a", socket.socket(fileno=int(sys.argv[1])), far=True)
watch.begin()
print("beating", flush=True)
threading.Event().wait()
"""
    command = [sys.executable, "-c", program, str(theirs.fileno())]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            gone: queue.Queue[str] = queue.Queue()
            mine = Watch(5.0, lambda why, told: gone.put(why))
            mine.add(B, ours, far=True)
            mine.begin()
            with pytest.raises(queue.Empty):
                gone.get(timeout=6)
            process.send_signal(signal.SIGSTOP)
            assert gone.get(timeout=60).startswith(f"{B} was silent for")
        finally:
            process.kill()


def ended(run_dir, *, leads: bool = True, stderr=subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """A process whose main thread waits for ever and whose peer never beats."""
    program = f"""
import socket, threading
from pathlib import Path
from drmas.runtime.watch import Watch, _Ending
near, far = socket.socketpair()
watch = Watch(0.5, _Ending("host a (rank 0)", {leads}, Path({str(run_dir)!r})))
watch.add("host b (rank 1)", near, far=True)
print("a last line that is in a buffer", end="")
watch.begin()
threading.Event().wait()
"""
    command = [sys.executable, "-c", program]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120, check=False, env=buffered)


def test_the_process_ends_with_the_status_and_says_why_whatever_its_main_thread_does(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = ended(tmp_path)
    assert done.returncode == LOST_HOST == 75
    assert done.stdout == "a last line that is in a buffer"
    assert "drmas: host a (rank 0): host b (rank 1) was silent for" in done.stderr
    assert done.stderr.count("\n") == 1
    log = (tmp_path / "logs" / "watch.log").read_text()
    assert " host a (rank 0): host b (rank 1) was silent for" in log
    assert "start it again with --auto-resume" in log


def test_nothing_is_left_in_the_folder_of_a_run_that_never_stood(tmp_path):
    assert ended(tmp_path).returncode == LOST_HOST
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_that_takes_no_more_words_doesnt_hold_up_the_end(tmp_path):
    """stderr is a full pipe that nobody reads."""
    read, write = os.pipe()
    os.write(write, bytes(fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)))
    try:
        assert ended(tmp_path, stderr=write).returncode == LOST_HOST
    finally:
        os.close(read)
        os.close(write)


def test_of_a_host_only_its_first_rank_repeats_what_it_was_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(watch.os, "_exit", lambda status: None)
    for leads, told in ((False, True), (False, False), (True, True)):
        _Ending("me", leads, tmp_path)("why", told)
        assert ("drmas: me: why" in capsys.readouterr().err) is (leads or not told)


def meet_all(monkeypatch, nodes: list[int], addresses: list[str] | None = None) -> list:
    """What `_meet` gives each of the ranks, which are threads: a watch, None, or an error."""
    job, where = RankThreads(len(nodes)), addresses or ["127.0.0.1"] * len(nodes)
    monkeypatch.setattr(watch, "_place", lambda: [nodes[job.rank], f"h{nodes[job.rank]}", where[job.rank]])
    return job.run(lambda rank: watch._meet(job, rank=rank, timeout=LONG, run_dir=None))


def test_hosts_are_connected_by_their_first_ranks_and_the_ranks_of_a_host_with_its_first(monkeypatch):
    found = meet_all(monkeypatch, [0, 0, 1, 1, 2])
    links = [{(link.who, link.far) for link in each._links} for each in found]
    assert links == [
        {("rank 1 on host h0", False), ("host h1 (ranks 2, 3)", True), ("host h2 (rank 4)", True)},
        {("rank 0 on host h0", False)},
        {("host h0 (ranks 0, 1)", True), ("rank 3 on host h1", False)},
        {("rank 2 on host h1", False)},
        {("host h0 (ranks 0, 1)", True)},
    ]
    for each in found:
        each.close()


def test_a_connection_leads_to_whom_it_names(monkeypatch):
    found = meet_all(monkeypatch, [0, 1, 2, 2])
    gone: queue.Queue[tuple[int, str]] = queue.Queue()
    for rank, each in enumerate(found):
        each._end = lambda why, told, rank=rank: gone.put((rank, why))
        each.begin()
    found[3]._links[0].connection.shutdown(socket.SHUT_RDWR)
    said = dict(gone.get(timeout=30) for _ in found)
    closed = "closed its connection: its process ended without a word, or was killed"
    assert said == {0: f"rank 3 on host h2 {closed}", 1: said[0], 2: said[0], 3: f"rank 2 on host h2 {closed}"}


def test_one_rank_has_nobody_to_watch(monkeypatch):
    assert meet_all(monkeypatch, [0]) == [None]


def test_rank_0_listens_on_the_address_that_leads_to_the_others(monkeypatch):
    """Not on all of them, nor on what its own name stands for, which may be loopback on any of 127.0.0.0/8."""
    asked, listened, create = [], [], socket.create_server
    monkeypatch.setattr(watch, "address_towards", lambda host: asked.append(host) or "127.0.0.3")
    monkeypatch.setattr(watch.socket, "create_server", lambda *a, **k: listened.append(a[0]) or create(*a, **k))
    for each in meet_all(monkeypatch, [0, 0, 1, 1], ["127.0.1.1", "127.0.1.1", "10.9.8.7", "10.9.8.7"]):
        each.close()
    assert asked == ["10.9.8.7"]
    assert sorted(listened) == [("127.0.0.1", 0), ("127.0.0.3", 0)]


def test_a_rank_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr(watch, "MEETING_SECONDS", 0.5)
    monkeypatch.setattr(watch, "_join", lambda *_: socket.socketpair()[0])
    found = meet_all(monkeypatch, [0, 1])
    assert all("host h1 (rank 1) did not come to 127.0.0.1:" in str(error) for error in found)


def test_strangers_are_turned_away(monkeypatch):
    """One says nothing and leaves, one knows no secret."""
    join, joined = watch._join, []

    def after_strangers(who, address, secret, rank):
        socket.create_connection(address[:2]).close()
        with pytest.raises(ConfigError, match=r"can't be reached at .* has another secret"):
            join(who, address, "guessed", rank)
        joined.append(rank)
        return join(who, address, secret, rank)

    monkeypatch.setattr(watch, "_join", after_strangers)
    found = meet_all(monkeypatch, [0, 1])
    assert joined == [1]
    assert [len(each._links) for each in found] == [1, 1]
    for each in found:
        each.close()


def test_the_block_says_goodbye_or_what_it_fails_with(monkeypatch):
    words = []

    class Quiet:
        def begin(self): ...

        def await_cause(self):
            words.append("waits")

        def close(self, **what):
            words.append(what)

    block = {"rank": 0, "timeout": LONG, "run_dir": None}
    monkeypatch.setattr(watch, "_meet", lambda *_, **__: Quiet())
    with watched(None, **block):
        pass
    with pytest.raises(ValueError, match="17"), watched(None, **block):
        raise ValueError("17\nand more")
    with pytest.raises(ConfigError, match="a key"), watched(None, **block):
        raise ConfigError("a key")  # its cause is known
    monkeypatch.setattr(watch, "_meet", lambda *_, **__: None)
    with watched(None, **block):
        pass
    assert words == [{}, "waits", {"failed": "ValueError: 17"}, {"failed": "ConfigError: a key"}]


def test_an_error_behind_which_a_lost_rank_is_waits_for_its_name(monkeypatch):
    """Both are noticed at the same time, and whatever the error does, the process ends by the loss."""
    near, theirs = socket.socketpair()
    gone: queue.Queue[str] = queue.Queue()
    made = Watch(LONG, lambda why, told: gone.put(why))
    made.add(B, near, far=True)
    monkeypatch.setattr(watch, "_meet", lambda *_, **__: made)
    monkeypatch.setattr(watch, "CAUSE_SECONDS", 60.0)
    monkeypatch.setattr(watch, "LAST_WORDS_SECONDS", 0.1)
    threading.Timer(0.2, theirs.close).start()
    with pytest.raises(RuntimeError), watched(None, rank=0, timeout=LONG, run_dir=None):
        raise RuntimeError("Connection closed by peer")
    assert gone.get(timeout=30).startswith(f"{B} closed its connection")


def test_a_rank_whose_torchrun_was_killed_ends(monkeypatch):
    """Its parent is another one then. Without torchrun, whoever started it may go."""
    for started_by_torchrun in (True, False):
        gone: queue.Queue[str] = queue.Queue()
        with monkeypatch.context() as patch:
            if started_by_torchrun:
                patch.setenv("TORCHELASTIC_RUN_ID", "x")
            watch = Watch(1.0, lambda why, told, gone=gone: gone.put(why))
            watch.begin()
            with pytest.raises(queue.Empty):
                gone.get(timeout=1)
            another = os.getppid() + 1
            patch.setattr("os.getppid", lambda another=another: another)
            if started_by_torchrun:
                assert gone.get(timeout=10) == "torchrun, which started this rank, is gone; it was killed"
            else:
                with pytest.raises(queue.Empty):
                    gone.get(timeout=1)
            watch.close()
