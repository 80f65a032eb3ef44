"""Passes over the data as steps, which alone stand in the run's own config.json."""

from __future__ import annotations

import json

import pytest

from drmas.config.keys import suggest
from drmas.config.load import dump, load
from drmas.runtime.epochs import in_steps


@pytest.mark.parametrize(
    ("epochs", "size", "per_step", "steps"), [(1, 100, 32, 3), (2, 100, 32, 6), (3, 32, 32, 3), (1, 8, 32, 1)]
)
def test_epochs_are_steps_over_all_tasks(epochs, size, per_step, steps):
    words = ["--train.epochs", str(epochs), "--rollout.tasks-per-step", str(per_step)]
    config = load("arithmetic-tiny", words)
    assert in_steps(config, size).train.steps == steps
    assert in_steps(config, size).train.epochs is None
    assert in_steps(config, size).data == config.data


def test_steps_stay_where_no_epochs_are_set():
    config = load("arithmetic-tiny", ["--train.steps", "7"])
    assert in_steps(config, 100) is config


def test_the_runs_config_has_the_same_steps_again(tmp_path):
    config = in_steps(load("arithmetic-tiny", ["--train.epochs", "2"]), 4000)
    (tmp_path / "config.json").write_text(dump(config))
    again = load(str(tmp_path / "config.json"))
    assert again == in_steps(again, 4000) == config
    assert (again.train.steps, again.train.epochs) == (2 * 4000 // 32, None)


def test_the_option_for_steps_takes_the_place_of_a_recipes_epochs():
    config = in_steps(load("paper-maths-4b", ["--train.steps", "5"]), 1000)
    assert (config.train.steps, config.train.epochs) == (5, None)
    assert load("paper-maths-4b").train.epochs == 2


@pytest.mark.parametrize("word", ["total_epochs", "num_train_epochs", "num_epochs"])
def test_other_systems_words_for_epochs_lead_to_epochs(word):
    assert suggest(("train", word)) == "here this is train.epochs"


def test_epochs_are_steps_of_a_run_and_its_notes_know_them(run, tmp_path):
    """Of 9 tasks, 4 a step: one epoch is 2 steps, which the run's folder has in the place of epochs."""
    rows = [json.dumps({"question": f"{i}+1", "answer": str(i + 1)}) for i in range(9)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    data = ["--data.type", "jsonl", "--data.path", "t.jsonl", "--train.epochs", "1"]
    done, folder = run(*data, "--telemetry.profile", "steps=2-3")
    assert done.returncode == 0, done.stderr
    assert "telemetry.profile is steps=2-3; the run has 2 steps to trace" in done.stdout + done.stderr
    train = json.loads((folder / "config.json").read_text())["train"]
    assert (train["steps"], train["epochs"]) == (2, None)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_ranks_without_the_data_hear_of_the_steps_and_of_its_absence(run, tmp_path):
    """Two ranks: the data is opened by rank 0 alone, and where it isn't there both end with one error."""
    data = ["--data.type", "jsonl", "--data.path", "t.jsonl", "--train.epochs", "1", "--rollout.tasks-per-step", "2"]
    done, folder = run(*data, ranks=2)
    assert done.returncode != 0
    assert "t.jsonl" in done.stderr
    assert not folder.exists()
    rows = [json.dumps({"question": f"{i}+1", "answer": str(i + 1)}) for i in range(4)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    done, folder = run(*data, ranks=2, name="two", BLIND="1")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "config.json").read_text())["train"]["steps"] == 2
