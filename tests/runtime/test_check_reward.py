"""A run whose rewards don't fit its tasks is refused, by a dry run as by a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drmas.config.load import load
from drmas.errors import ConfigError
from drmas.runtime.run import train

SCRIPT = Path(__file__).with_name("scripted_train.py")
TYPO = ("--reward.by-source", "{smus = 'exact'}")
REFUSAL = "reward.by_source names 'smus', and no task has that source; the nearest is 'sums'"


def dry_run(tmp_path: Path, *words: str) -> Path:
    return train(load("arithmetic-tiny", ["--output", str(tmp_path), *words]), dry_run=True)


def test_a_dry_run_refuses_a_source_that_no_task_has_and_a_reward_that_cannot_grade(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSAL):
        dry_run(tmp_path, *TYPO)
    with pytest.raises(ConfigError, match=r"reward.type is gym, and the task sums/0 isn't made by a reasoning-gym generator"):
        dry_run(tmp_path, "--reward.type", "gym")
    assert list(tmp_path.iterdir()) == []


def test_a_source_of_the_data_of_evaluations_is_a_source_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"prompt": "1+1", "answer": "2", "source": "tests"}\n')
    data = f"{{type = 'jsonl', path = '{tmp_path / 'test.jsonl'}'}}"
    words = ("--reward.by-source", "{tests = 'exact'}", "--eval.data", data)
    assert dry_run(tmp_path / "runs", *words).parent == tmp_path / "runs"
    with pytest.raises(ConfigError, match="by_source names 'tests'"):
        dry_run(tmp_path / "runs", *words[:2])


def test_a_run_refuses_it_before_its_folder_is_settled(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "train",
            "arithmetic-tiny",
            "--output",
            "runs",
            "--name",
            "one",
            "--train.steps",
            "1",
            *TYPO,
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"drmas: {REFUSAL}")
    assert not (tmp_path / "runs" / "one" / "config.json").exists()
