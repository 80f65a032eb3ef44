"""A run whose engine sleeps during updates is the run whose engine doesn't: the same rewards, tokens and weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def slept(workplace: Path, run, trained_model: Path) -> Path:
    engine = ("--policies.main.engine.gpus", "shared", "--policies.main.engine.sleep", "true")
    done = run("--name", "slept", "--policies.main.model", str(trained_model), *engine)
    assert done.returncode == 0, done.stderr
    assert "policies.main.engine.sleep has no effect: an engine on a CPU waits during updates" in done.stdout
    return workplace / "runs" / "slept"


def test_rewards_tokens_and_weights_are_equal_with_and_without_sleep(slept: Path, uninterrupted: Path, read_run) -> None:
    assert read_run(slept) == read_run(uninterrupted)
    for step in range(1, 5):
        name = Path("episodes") / f"step_{step}.jsonl"
        assert _untimed(slept / name) == _untimed(uninterrupted / name)
    mine, theirs = (load_file(folder / "export" / "main" / "model.safetensors") for folder in (slept, uninterrupted))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_vllm_was_told_to_sleep_and_to_wake_in_every_step(slept: Path, uninterrupted: Path) -> None:
    log = (slept / "logs" / "engine-main.log").read_text()
    assert log.count("seconds to fall asleep") == 4
    assert log.count("seconds to wake up tags ['weights']") == 4
    assert log.count("seconds to wake up tags ['kv_cache']") == 3  # not after the last step
    assert "fall asleep" not in (uninterrupted / "logs" / "engine-main.log").read_text()


def _untimed(file: Path) -> list[str]:
    """Its lines without what a clock decides."""
    return [re.sub(r'"[a-z_]*seconds": [-\d.e]+', "", line) for line in file.read_text().splitlines()]
