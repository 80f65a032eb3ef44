from pathlib import Path

import pytest

from drmas.config.load import load
from drmas.config.schema import RunConfig


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The arithmetic-tiny recipe in a folder of its own, with four episodes a step."""
    words = ["--output", str(tmp_path), "--name", "run", "--rollout.tasks-per-step", "2", "--rollout.group-size", "2"]
    return load("arithmetic-tiny", words)
