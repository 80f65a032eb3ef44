"""What sections take from one another: policies that are like others, and what the dapo preset sets elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drmas.config.derived import merged
from drmas.config.load import dump, load
from drmas.errors import ConfigError

DAPO = ("--advantage.preset", "dapo")


def refused(recipe: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(recipe, words)
    return str(caught.value)


def read_back(config, tmp_path: Path, *words: str):
    path = tmp_path / "config.json"
    path.write_text(dump(config))
    return load(str(path), words)


def test_tables_are_merged_key_by_key_and_the_upper_one_goes_first():
    under, over = {"a": 1, "b": {"c": 1, "d": {"e": 1}}}, {"b": {"d": {"f": 2}, "c": 3}, "g": None}
    assert merged(under, over) == {"a": 1, "b": {"c": 3, "d": {"e": 1, "f": 2}}, "g": None}
    assert merged({"a": {"b": 1}}, {"a": 2}) == {"a": 2}
    assert (under["b"]["c"], over["b"]["d"]) == (1, {"f": 2})  # neither is changed


def test_dapo_sets_what_the_paper_changes_elsewhere(recipe):
    plain, dapo = load(recipe), load(recipe, DAPO)
    assert (plain.loss.clip_high, plain.rollout.dynamic.enabled) == (0.2, False)
    assert (dapo.loss.clip_low, dapo.loss.clip_high, dapo.loss.aggregation, dapo.loss.kl) == (0.2, 0.28, "token", None)
    assert (dapo.rollout.dynamic.enabled, dapo.rollout.dynamic.max_tries) == (True, 4)
    assert dapo.rollout.group_size == plain.rollout.group_size


def test_what_is_set_goes_before_dapos(recipe):
    words = ("--loss.clip-high", "0.4", "--loss.aggregation", "turn", "--loss.kl", "k3", "--rollout.dynamic.enabled", "false")
    config = load(recipe, (*words, *DAPO))
    assert (config.loss.clip_high, config.loss.aggregation, config.loss.kl) == (0.4, "turn", "k3")
    assert not config.rollout.dynamic.enabled
    some = load(recipe, (*DAPO, "--rollout.dynamic.max-tries", "9"))
    assert (some.rollout.dynamic.enabled, some.rollout.dynamic.max_tries) == (True, 9)


def test_the_runs_config_reads_back_as_the_same_run(recipe, tmp_path):
    for words in (DAPO, (*DAPO, "--rollout.dynamic.enabled", "false", "--loss.clip-high", "0.2"), ("--loss.clip-high", "0.3")):
        config = load(recipe, words)
        assert read_back(config, tmp_path) == config
    later = read_back(load(recipe), tmp_path, *DAPO)  # a whole configuration sets everything, so nothing is left to bring
    assert (later.advantage.preset, later.loss.clip_high) == ("dapo", 0.2)


def test_dynamic_sampling_that_dapo_switches_on_must_fit_the_rollouts(recipe):
    ahead = ("--rollout.deterministic", "false", "--rollout.carry-over", "--rollout.max-staleness", "1")
    many = ("--rollout.dynamic.oversample", "1.5")
    assert load(recipe, (*DAPO, *ahead)).rollout.carry_over
    assert load(recipe, (*many, *ahead)).rollout.dynamic.oversample == 1.5  # off, so it has no say
    assert "dynamic.oversample is 1.5 and carry_over is true" in refused(recipe, *DAPO, *many, *ahead)
    assert "dynamic.oversample is 1.5 and max_staleness is 0" in refused(recipe, *DAPO, *many)
    assert load(recipe, (*DAPO, *many, "--rollout.max-staleness", "1")).rollout.dynamic.enabled


def test_a_policy_that_is_like_another_has_its_settings_but_for_its_own(recipe, tmp_path):
    words = ["--policies.main.engine.threads", "2", "--policies.main.adam-beta2", "0.9", "--policies.main.loss.clip-low", "0.1"]
    other = ["--policies.other.like", "main", "--policies.other.engine.max-concurrent", "7", "--policies.other.lr", "3e-6"]
    config = load(recipe, [*words, *other, "--policies.third.like", "other", "--policies.third.model", "tiny:qwen3"])
    main, made, third = config.policies.values()
    changes = {"lr": 3e-6, "engine": main.engine.model_copy(update={"max_concurrent": 7})}
    assert made == main.model_copy(update=changes)
    assert third == made.model_copy(update={"model": "tiny:qwen3"})
    assert list(config.policies) == ["main", "other", "third"]
    assert read_back(config, tmp_path) == config
    assert json.loads(dump(config))["policies"]["other"]["like"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies.b.like", "mian"], "policies.b.like is 'mian'; expected one of main"),
        (["--policies.b.like", "b"], "policies.b.like is 'b'; expected one of main"),
        (["--policies.b.like", "c", "--policies.c.like", "b"], "policies.c.like is 'b'; expected one of main"),
        (["--policies.main.like", "main"], "policies.main.like is 'main'; expected another policy, and there is none"),
    ],
)
def test_a_policy_can_be_like_another_one_only(recipe, words, message):
    assert message in refused(recipe, *words)


def test_a_named_section_can_be_left_out(recipe):
    words = ["--policies.other.like", "main", "--policies.main.lora", '{"rank": 2}']
    assert list(load(recipe, [*words, "--policies.other", "null"]).policies) == ["main"]
    assert "other null: there is none to leave out; expected one of main" in refused(recipe, "--policies.other", "null")
    assert "policies is empty" in refused(recipe, "--policies.main", "null")
    assert "policies.other.like is 'main'" in refused(recipe, *words, "--policies.main", "null")


def test_updates_of_a_step_need_not_divide_its_tasks(recipe):
    words = ["--rollout.tasks-per-step", "128", "--train.updates-per-step"]
    assert load(recipe, [*words, "5"]).train.updates_per_step == 5
    assert "every update needs a task of its own" in refused(recipe, *words, "129")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--advantage.preset", '["dapo"]'], r"advantage.preset: ['dapo']; expected "),
        (["--advantage.preset", '{"name": "dapo"}'], "advantage.preset: {'name': 'dapo'}; expected "),
        (["--policies.b.like", '["main"]'], "policies.b.like is ['main']; expected one of main"),
        (["--policies.b.like", '{"name": "main"}'], "policies.b.like is {'name': 'main'}; expected one of main"),
    ],
)
def test_a_name_that_is_no_text_is_refused(recipe, tmp_path, words, message):
    """As a file has it: on the command line a text key takes the words as its text."""
    table = json.loads(dump(load(recipe)))
    *path, key = words[0].removeprefix("--").split(".")
    section = table
    for part in path:
        section = section.setdefault(part, {})
    section[key] = json.loads(words[1])
    (tmp_path / "mine.json").write_text(json.dumps(table))
    assert message in refused(str(tmp_path / "mine.json"))
