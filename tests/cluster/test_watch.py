"""Ranks on two hosts, two on each, that wait for what never comes: who ends when one of them goes away, and how soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.netns import Host, hosts

SECONDS = 6.0
"""The bound of silence."""
PATIENCE = 60.0
"""For what ends at once, on a busy machine; far below the 600 s after which torchrun kills ranks here."""
SCRIPT = Path(__file__).with_name("watch_rank.py")


class Job:
    """Its hosts, and what it leaves in its folder."""

    def __init__(self, pair: list[Host], folder: Path) -> None:
        self.pair, self.folder = pair, folder
        (folder / "config.json").write_text("{}")
        self.agents = [self._start(node, host) for node, host in enumerate(pair)]
        limit = time.monotonic() + 120
        while len(list(folder.glob("pid-*"))) < 4:
            assert all(agent.poll() is None for agent in self.agents), self.said(0) + self.said(1)
            assert time.monotonic() < limit, self.said(0) + self.said(1)
            time.sleep(0.05)

    def _start(self, node: int, host: Host) -> subprocess.Popen[bytes]:
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nnodes", "2", "--node-rank", str(node)]
        meeting = ["--master-addr", "drmas-h0", "--master-port", "29500", "--local-addr", host.address, "--nproc-per-node", "2"]
        words = [str(SCRIPT), str(self.folder), str(SECONDS)]
        env = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
        return host.start([*torchrun, *meeting, *words], log=self.folder / f"{host.name}.log", env=env)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def statuses(self, seconds: float = PATIENCE) -> list[int]:
        limit = time.monotonic() + seconds
        return [agent.wait(timeout=max(0.1, limit - time.monotonic())) for agent in self.agents]

    def said(self, node: int) -> str:
        return (self.folder / f"drmas-h{node}.log").read_text()

    def left(self) -> list[int]:
        return [pid for host in self.pair for pid in host.processes()]


@pytest.fixture
def job(tmp_path) -> Iterator[Job]:
    with hosts(2) as pair:
        yield Job(pair, tmp_path)


def test_a_host_that_vanishes_ends_all_ranks_on_both_sides(job):
    job.pair[1].vanish()
    started = time.monotonic()
    assert job.statuses() == [1, 1]
    assert time.monotonic() - started > SECONDS / 2
    for here, host, ranks in ((0, "drmas-h1", "2, 3"), (1, "drmas-h0", "0, 1")):
        (line,) = [line for line in job.said(here).splitlines() if line.startswith("drmas: ")]
        assert f"host {host} (ranks {ranks}) was silent for" in line
        assert job.said(here).count("exitcode  : 75") == 2
    assert "host drmas-h1 (ranks 2, 3) was silent" in (job.folder / "logs" / "watch.log").read_text()
    assert job.left() == []


def test_a_rank_that_is_killed_ends_all_ranks_of_all_hosts_at_once(job):
    """It isn't the first of its host, so word of it travels over that and over rank 0."""
    os.kill(job.pid(3), signal.SIGKILL)
    assert job.statuses() == [1, 1]
    why = "rank 3 on host drmas-h1 closed its connection: its process ended without a word, or was killed"
    assert f"drmas: host drmas-h0 (ranks 0, 1): {why}" in job.said(0)
    assert f"drmas: host drmas-h1 (ranks 2, 3): {why}" in job.said(1)
    assert job.left() == []


def test_ranks_whose_torchrun_is_killed_are_no_orphans_and_the_others_end_with_them(job):
    os.kill(parent(job.pid(2)), signal.SIGKILL)
    assert job.statuses()[0] == 1
    assert "drmas: host drmas-h1 (ranks 2, 3): torchrun, which started this rank, is gone; it was killed" in job.said(1)
    assert "torchrun, which started this rank, is gone" in job.said(0)
    limit = time.monotonic() + PATIENCE
    while job.left():
        assert time.monotonic() < limit, job.left()
        time.sleep(0.05)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_an_error_of_one_rank_ends_the_others_when_they_had_time_for_their_own(job):
    (job.folder / "fail-1").touch()
    assert job.statuses() == [1, 1]
    assert "ValueError: 17 is odd" in job.said(0)
    assert "rank 1 on host drmas-h0 ended with an error that isn't everybody's: ValueError: 17 is odd" in job.said(1)
    assert job.left() == []


def test_a_network_that_comes_back_is_forgiven_and_an_end_is_no_alarm(job):
    job.pair[1].vanish()
    time.sleep(2)  # of the 6 that are the bound
    job.pair[1].return_()
    time.sleep(SECONDS + 1)
    assert all(agent.poll() is None for agent in job.agents)
    (job.folder / "end").touch()
    assert job.statuses() == [0, 0]
    assert "drmas:" not in job.said(0) + job.said(1)
    assert job.left() == []
