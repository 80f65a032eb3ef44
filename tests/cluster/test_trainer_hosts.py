"""A trainer job over two hosts: it is the same job, and a host that goes away is noticed, named, and no loss for long."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drmas.runtime.watch import LOST_HOST
from tests.cluster.netns import Host, hosts

SILENCE = 6.0
STEPS = 4
RUN = [
    *("--train.steps", str(STEPS), "--rollout.tasks_per_step", "4", "--train.threads", "1", "--data.largest", "3"),
    *("--warm_start.steps", "80", "--warm_start.batch_size", "16"),
    *("--checkpoint.every_steps", "1", "--checkpoint.keep", "9"),
    *("--cluster.host_timeout_seconds", str(SILENCE), "--telemetry.tensorboard", "false"),
]
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


def start(
    host: Host, rank: int, folder: Path, *more: str, nodes: int = 2, env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """One node of the job, as launchers/torchrun/multi_node.sh starts it."""
    meeting = ["--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", "drmas-h0", "--master-port", "29500"]
    ranks = ["--nproc-per-node", str(2 // nodes), "--local-addr", host.address, "--rdzv-conf", "timeout=120"]
    train = ["--module", "drmas.cli", "train", "maths-tiny", "--output", str(folder), "--name", "job", *RUN, *more]
    log = folder / f"{host.name}.log"
    return host.start(
        [TORCHRUN, *meeting, *ranks, *train], log=log, env={"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", **(env or {})}
    )


def finish(processes: list[subprocess.Popen[bytes]], folder: Path) -> list[int]:
    """The exit statuses. The logs go to stdout, for where a test fails."""
    try:
        return [process.wait(timeout=240) for process in processes]
    finally:
        for log in sorted(folder.glob("*.log")):
            sys.stdout.write(f"== {log.name}\n{log.read_text()[-3000:]}")


def rewards(folder: Path) -> list[float]:
    return [json.loads(line)["reward/mean"] for line in (folder / "job/metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> bytes:
    return (folder / "job/export/main/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The job on two hosts, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with hosts(2) as pair:
        statuses = finish([start(host, rank, folder) for rank, host in enumerate(pair)], folder)
    assert statuses == [0, 0]
    return folder


def test_two_hosts_do_what_two_ranks_of_one_host_do(whole, tmp_path):
    with hosts(1) as (alone,):
        assert finish([start(alone, 0, tmp_path, nodes=1)], tmp_path) == [0]
    assert rewards(whole) == rewards(tmp_path)
    assert 0 < min(rewards(whole)) < max(rewards(whole)) < 1  # so that there is something to learn
    assert weights(whole) == weights(tmp_path)
    assert not (whole / "job/logs/watch.log").exists()


def test_I9_a_host_that_vanishes_is_noticed_and_named_and_the_job_resumes_where_it_was(whole, tmp_path):
    """The bound is the configured silence, and what it takes to end processes on a busy machine."""
    with hosts(2) as pair:
        processes = [start(host, rank, tmp_path) for rank, host in enumerate(pair)]
        saved = tmp_path / "job/checkpoints/step_2"
        while not saved.exists() and all(process.poll() is None for process in processes):
            time.sleep(0.05)
        pair[1].vanish()
        started = time.monotonic()
        statuses = finish(processes, tmp_path)
        assert time.monotonic() - started < SILENCE + 30
        assert 0 not in statuses
        for host, other, rank in ((0, 1, 1), (1, 0, 0)):
            said = (tmp_path / f"drmas-h{host}.log").read_text()
            assert f"host drmas-h{other} (rank {rank}) was silent for" in said
            assert f"status {LOST_HOST}: start it again with --auto-resume" in said
        assert "host drmas-h1 (rank 1)" in (tmp_path / "job/logs/watch.log").read_text()

        pair[1].return_()
        again = [start(host, rank, tmp_path, "--auto-resume") for rank, host in enumerate(pair)]
        assert finish(again, tmp_path) == [0, 0]
    assert rewards(tmp_path) == rewards(whole)
    assert weights(tmp_path) == weights(whole)


def test_a_killed_rank_ends_the_job_by_name(tmp_path):
    """Its connections close at once, so nobody waits for the silence."""
    with hosts(2) as pair:
        processes = [start(host, rank, tmp_path, "--cluster.host_timeout_seconds", "200") for rank, host in enumerate(pair)]
        while not (tmp_path / "job/checkpoints/step_1").exists() and processes[0].poll() is None:
            time.sleep(0.05)
        pair[1].kill()
        assert finish(processes, tmp_path)[0] != 0
    assert "host drmas-h1 (rank 1) closed its connection" in (tmp_path / "drmas-h0.log").read_text()


def test_ranks_with_unequal_settings_are_refused_by_name(tmp_path):
    with hosts(2) as pair:
        settings = ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"})
        processes = [start(host, rank, tmp_path, env=settings[rank]) for rank, host in enumerate(pair)]
        assert 0 not in finish(processes, tmp_path)
    assert (
        "NCCL_ALGO is Ring on rank 0 (drmas-h0, local rank 0) and Tree on rank 1 (drmas-h1, local rank 0)"
        in (tmp_path / "drmas-h0.log").read_text()
    )
    assert not (tmp_path / "job").exists()


def test_two_jobs_on_two_hosts_never_share_a_folder(tmp_path):
    """The lock is of the file system, which both see."""
    with hosts(2) as pair:
        command = [sys.executable, "-m", "drmas.cli", "train", "maths-tiny", "--output", str(tmp_path), "--name", "job"]
        first = pair[0].start([*command, *RUN, "--train.steps", "400"], log=tmp_path / "drmas-h0.log")
        while not (tmp_path / "job/checkpoints/step_1").exists() and first.poll() is None:
            time.sleep(0.05)
        second = pair[1].start([*command, *RUN, "--overwrite"], log=tmp_path / "drmas-h1.log")
        assert second.wait(timeout=120) == 2
        assert first.poll() is None
        pair[0].kill()
        first.wait(timeout=60)
    said = (tmp_path / "drmas-h1.log").read_text()
    assert "another process writes to" in said
    assert "drmas-h0" in said
