"""The same run under torchrun on two ranks, tensor- and data-parallel, gives the numbers of one rank (I5)."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[2] / "launchers" / "torchrun" / "single_node.sh"


def start_two(workplace: Path, environment, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A run of the tiny recipe on two ranks, as the launcher starts it."""
    return subprocess.run(
        [str(LAUNCHER), "2", "tiny.toml", "--output", str(workplace / "runs"), "--name", name, *words],
        cwd=workplace,
        env={**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("tensor_parallel", [2, 1])
def test_I5_two_ranks_equal_one(
    workplace: Path, environment, uninterrupted: Path, trained_model: Path, read_run, tensor_parallel: int
) -> None:
    name = f"tp{tensor_parallel}"
    words = ["--train.steps", "1", "--policies.main.model", str(trained_model)]
    done = start_two(workplace, environment, name, *words, "--policies.main.tensor-parallel", str(tensor_parallel))
    assert done.returncode == 0, done.stderr
    (ours,), theirs = read_run(workplace / "runs" / name), read_run(uninterrupted)[0]
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key.endswith(("computed_tokens", "tokens_saved", "flops")):
            continue  # replicas share prefixes within their own rows only
        assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_I10_policies_on_ranks_of_their_own_reach_their_engines(
    workplace: Path, environment, trained_model: Path, read_run
) -> None:
    """The verifier's trainer isn't where the engines are; its log-prob gap says whether its weights got there."""
    model = f"model = '{trained_model}', lr = 1e-2"
    engine = "engine = {max_model_tokens = 64, max_concurrent = 32, kv_cache_bytes = 8388608, threads = 1}"
    policies = f"{{main = {{{model}, {engine}}}, other = {{{model}, {engine}}}}}"
    words = ["--train.steps", "2", "--train.placement", "split", "--policies", policies, "--team.verifier.policy", "other"]
    done = start_two(workplace, environment, "split", *words)
    assert done.returncode == 0, done.stderr
    first, second = read_run(workplace / "runs" / "split")
    for agent in ("solver", "verifier"):
        assert first[f"rollout/{agent}/logprob_gap_max"] < 1e-4
        assert second[f"rollout/{agent}/logprob_gap_max"] < 1e-4
    assert first["train/other/grad_norm"] > 0
    assert (second["sync/main/version"], second["sync/other/version"]) == (2, 2)
    assert (workplace / "runs" / "split" / "export" / "other" / "model.safetensors").is_file()


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
