"""How it was done, in words: settings are a trial's own, and nothing is said where there are none."""

import json

import pytest

from drmas.reproduce.method import paragraphs
from drmas.reproduce.page import write_page
from tests.reproduce.fabricated import trial, write

POLICY = {"lr": 0.0003, "lr_schedule": "constant", "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad_norm": 1.0}
CONFIG = {
    "policies": {"main": POLICY},
    "rollout": {"tasks_per_step": 8, "group_size": 4},
    "eval": {"temperature": 0.6},
    "team": {"name": "t", "solver": {"temperature": 0.5}},
    "train": {"updates_per_step": 1},
}


def test_settings_are_those_of_the_configuration():
    text = " ".join(paragraphs(CONFIG, {"a": {"steps": 50}, "b": {"steps": 50}}))
    assert "learning rate 0.0003, constant; 8 tasks × 4 episodes and 1 update(s) per step, 50 steps" in text
    assert "sampled at temperature 0.5, evaluated at 0.6. The gradient's norm is clipped at 1." in text
    assert "With one update per step the ratio of policies is 1" in text


def test_an_evaluation_at_the_agents_own_temperatures_is_said():
    text = " ".join(paragraphs(CONFIG | {"eval": {"temperature": None}}, {}))
    assert "sampled at temperature 0.5, evaluated at the same." in text


def test_a_warm_up_is_said():
    text = " ".join(paragraphs(CONFIG | {"policies": {"main": POLICY | {"lr_warmup_steps": 5}}}, {}))
    assert "learning rate 0.0003, constant after 5 steps of warm-up; 8 tasks" in text


def test_what_does_not_hold_is_not_said():
    changed = CONFIG | {"policies": {"main": POLICY | {"clip_grad_norm": None}}, "train": {"updates_per_step": 2}}
    text = " ".join(paragraphs(changed, {"a": {"steps": 50}}))
    assert "2 update(s) per step" in text
    assert "clipped at" not in text
    assert "ratio of policies" not in text


@pytest.mark.parametrize("config", [{}, {"policies": {}}, {"policies": 3}, CONFIG | {"train": {}}])
def test_without_a_configuration_there_is_one_paragraph_less(config):
    assert len(paragraphs(config, {})) == len(paragraphs(CONFIG, {})) - 1


def test_the_page_has_the_settings_of_its_first_trial(tmp_path):
    write(tmp_path, [trial("maths-shared", "grpo", 0, steps=3)])
    assert "Settings of all methods" not in write_page(tmp_path).read_text()
    folder = tmp_path / "trials" / "maths-shared" / "grpo" / "seed-0" / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert "1 update(s) per step, 3 steps; sampled at temperature 0.5" in write_page(tmp_path).read_text()
