"""The same run under torchrun on two ranks, tensor- and data-parallel, gives the numbers of one rank (I5)."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[2] / "launchers" / "torchrun" / "single_node.sh"


@pytest.mark.parametrize("tensor_parallel", [2, 1])
def test_I5_two_ranks_equal_one(
    workplace: Path, environment, uninterrupted: Path, trained_model: Path, read_run, tensor_parallel: int
) -> None:
    name = f"tp{tensor_parallel}"
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    words = ["--output", str(workplace / "runs"), "--name", name, "--train.steps", "1"]
    words += ["--policies.main.model", str(trained_model), "--policies.main.tensor-parallel", str(tensor_parallel)]
    done = subprocess.run(
        [str(LAUNCHER), "2", "tiny.toml", *words],
        cwd=workplace,
        env={**environment, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (ours,), theirs = read_run(workplace / "runs" / name), read_run(uninterrupted)[0]
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_an_interrupt_under_torchrun_finishes_the_step_on_every_rank_and_saves(
    workplace: Path, environment, trained_model: Path
) -> None:
    folder = workplace / "runs" / "two-interrupted"
    words = ["--output", str(workplace / "runs"), "--name", "two-interrupted"]
    words += ["--train.steps", "500", "--policies.main.model", str(trained_model)]
    process = subprocess.Popen(
        [str(LAUNCHER), "2", "tiny.toml", *words],
        cwd=workplace,
        env={**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        metrics, limit = folder / "metrics.jsonl", time.monotonic() + 180
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            assert time.monotonic() < limit
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    steps = metrics.read_text().count("\n")
    assert (folder / "checkpoints" / f"step_{steps}" / "run.json").exists(), output
    assert "report" in output
