import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drmas.config.load import load
from drmas.config.schema import RunConfig

SCRIPT = Path(__file__).with_name("scripted_train.py")
TEAM = """
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

[data]
type = "sums"
largest = 9

[reward]
type = "exact"

[rollout]
tasks_per_step = 4
group_size = 4

[train]
steps = 2
threads = 1

[checkpoint]
every_steps = 1

[telemetry]
tensorboard = false
report = false
"""
"""A recipe without policies."""
ONE_POLICY = '[policies.main]\nmodel = "tiny:qwen3"\nlr = 1e-3\n'

Run = Callable[..., tuple[subprocess.CompletedProcess[str], Path]]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The arithmetic-tiny recipe in a folder of its own, with four episodes a step."""
    words = ["--output", str(tmp_path), "--name", "run", "--rollout.tasks-per-step", "2", "--rollout.group-size", "2"]
    return load("arithmetic-tiny", words)


@pytest.fixture(scope="session")
def scripted_run() -> Callable[..., Run]:
    """scripted_run(folder, policies): a function that trains the small recipe in `folder` with scripted engines."""

    def made(folder: Path, policies: str = ONE_POLICY) -> Run:
        (folder / "small.toml").write_text(policies + TEAM)

        def run(*words: str, name: str = "one", ranks: int = 1, **variables: str):
            """With more words, on so many ranks; capitals are the script's environment. The process, and the run's folder."""
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
            command = [sys.executable, *torchrun, str(SCRIPT), "train", "small.toml"]
            done = subprocess.run(
                [*command, "--output", str(folder / "runs"), "--name", name, *words],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **variables},
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            return done, folder / "runs" / name

        return run

    return made


@pytest.fixture
def run(scripted_run, tmp_path: Path) -> Run:
    """The small recipe with one policy, in a folder of its own."""
    return scripted_run(tmp_path)


@pytest.fixture(scope="session")
def metrics_of() -> Callable[[Path], list[dict[str, float]]]:
    """What a run measured, step by step."""

    def read(folder: Path) -> list[dict[str, float]]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read
