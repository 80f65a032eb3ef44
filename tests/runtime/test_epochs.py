"""Passes over the data as steps, which alone stand in the run's own config.json."""

from __future__ import annotations

import pytest

from drmas.config.load import dump, load
from drmas.errors import DataError
from drmas.runtime.epochs import in_steps


@pytest.mark.parametrize(
    ("epochs", "size", "per_step", "steps"), [(1, 100, 32, 3), (2, 100, 32, 6), (3, 32, 32, 3), (1, 8, 32, 1)]
)
def test_epochs_are_steps_over_all_tasks(epochs, size, per_step, steps):
    words = ["--train.epochs", str(epochs), "--data.size", str(size), "--rollout.tasks-per-step", str(per_step)]
    config = load("arithmetic-tiny", words)
    assert in_steps(config).train.steps == steps
    assert in_steps(config).train.epochs is None
    assert in_steps(config).data == config.data


def test_steps_stay_where_no_epochs_are_set():
    config = load("arithmetic-tiny", ["--train.steps", "7"])
    assert in_steps(config) is config


def test_the_runs_config_has_the_same_steps_again(tmp_path):
    config = in_steps(load("arithmetic-tiny", ["--train.epochs", "2"]))
    (tmp_path / "config.json").write_text(dump(config))
    again = load(str(tmp_path / "config.json"))
    assert again == in_steps(again) == config
    assert (again.train.steps, again.train.epochs) == (2 * 4000 // 32, None)


def test_the_option_for_steps_takes_the_place_of_a_recipes_epochs():
    config = in_steps(load("paper-maths-4b", ["--train.steps", "5"]))
    assert (config.train.steps, config.train.epochs) == (5, None)
    assert load("paper-maths-4b").train.epochs == 2


def test_data_that_is_not_there_is_refused(tmp_path):
    words = ["--data.type", "jsonl", "--data.path", str(tmp_path / "no.jsonl"), "--train.epochs", "1", "--warm-start", "null"]
    with pytest.raises(DataError, match=r"no\.jsonl"):
        in_steps(load("arithmetic-tiny", words))
