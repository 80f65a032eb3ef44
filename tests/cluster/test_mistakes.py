"""Jobs that are started wrongly end soon, with one clear message."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_meeting_place_that_is_taken_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        meeting = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
        done = run(str(BIN / "torchrun"), *meeting, "--module", "drmas.cli", "train", "arithmetic-tiny")
    assert done.returncode != 0
    (*_, last) = done.stderr.strip().splitlines()
    assert f"port: {port}" in last
    assert "address already in use" in last


def test_jobs_beside_each_other_find_ports_of_their_own(tmp_path):
    """As single_node.sh starts them. Each writes where its ranks met, and waits until the other has, too."""
    script = tmp_path / "meet.py"
    script.write_text(
        "import os, sys, time; from pathlib import Path\n"
        "mine, other = (Path(sys.argv[1]) / name for name in sys.argv[2:])\n"
        "mine.with_suffix(f'.{os.environ[\"RANK\"]}').write_text(os.environ['MASTER_PORT'])\n"
        "while not other.with_suffix('.0').exists(): time.sleep(0.05)\n"
    )
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path)]
    jobs = [subprocess.Popen([*command, *names]) for names in (("a", "b"), ("b", "a"))]
    try:
        assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    ports = [(tmp_path / name).read_text() for name in ("a.0", "a.1", "b.0", "b.1")]
    assert ports[0] == ports[1] != ports[2] == ports[3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--train.ranks", "4"), "drmas: train.ranks is 4 and the job has 3 trainer rank(s); start it with"),
        (("--policies.main.tensor_parallel", "2"), "it must divide the policy's 3 trainer rank(s)"),
    ],
)
def test_a_job_with_another_number_of_ranks_is_refused_before_they_meet(words, message):
    done = run(str(BIN / "drmas"), "train", "arithmetic-tiny", *words, RANK="0", WORLD_SIZE="3")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
