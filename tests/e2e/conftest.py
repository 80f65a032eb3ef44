"""Whole runs as a user starts them: the `drmas` command in its own process, a real engine, a real trainer, a tiny model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RECIPE = """
name = "tiny"
seed = 7

[policies.main]
model = "tiny:qwen3"
lr = 1e-3
weight_decay = 0.0

[policies.main.engine]
max_model_tokens = 64
max_concurrent = 32
kv_cache_bytes = 8388608
threads = 1

[team]
name = "solver-verifier"
rounds = 2
revise = ""

[team.solver]
prompt = "{question}="
parser = "text"
max_tokens = 4

[team.verifier]
prompt = "{question}={answer}?"
parser = "verdict:yes,no"
max_tokens = 4
invalid_penalty = 0.1

[data]
type = "sums"
largest = 3
size = 50

[reward]
type = "exact"

[rollout]
tasks_per_step = 4
group_size = 4

[train]
steps = 4
threads = 1

[telemetry]
tensorboard = false
"""

TIMED = ("seconds", "per_second", "memory_bytes", "mfu")


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def environment(workplace: Path) -> dict[str, str]:
    return {**os.environ, "DRMAS_CACHE": str(workplace / "cache"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def command(workplace: Path, environment: dict[str, str]) -> Callable[..., list[str]]:
    """The command line of a run of the tiny recipe; `overrides` are further words."""
    recipe = workplace / "tiny.toml"
    recipe.write_text(RECIPE)
    drmas = Path(sys.executable).with_name("drmas")

    def build(*overrides: str) -> list[str]:
        return [str(drmas), "train", str(recipe), "--output", str(workplace / "runs"), *overrides]

    return build


@pytest.fixture(scope="session")
def run(workplace: Path, command, environment) -> Callable[..., subprocess.CompletedProcess[str]]:
    def go(*overrides: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*overrides), cwd=workplace, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    return go


@pytest.fixture(scope="session")
def trained_model(workplace: Path, run) -> Path:
    """A tiny model after a supervised warm start, so that rewards differ and there is something to reinforce."""
    done = run("--name", "warm", "--train.steps", "1", "--warm-start.steps", "60", "--warm-start.error-rate", "0.4")
    assert done.returncode == 0, done.stderr
    return workplace / "runs" / "warm" / "warm_start" / "main"


@pytest.fixture(scope="session")
def uninterrupted(workplace: Path, run, trained_model: Path) -> Path:
    """The run folder of four steps straight; other runs are compared with it."""
    done = run("--name", "straight", "--policies.main.model", str(trained_model))
    assert done.returncode == 0, done.stderr
    return workplace / "runs" / "straight"


@pytest.fixture(scope="session")
def read_run() -> Callable[[Path], list[dict[str, float]]]:
    """The metrics of every step, without those that a clock decides."""

    def read(folder: Path) -> list[dict[str, float]]:
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in step.items() if not key.endswith(TIMED)} for step in steps]

    return read
