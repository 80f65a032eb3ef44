"""Recipes and overrides: what is read, what is refused, and what the refusal says."""

import json
from pathlib import Path

import pytest

from drmas.config.load import dump, literal, load, load_advantage, parse_overrides, recipes, split_words
from drmas.errors import ConfigError


def error_of(recipe: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(recipe, words)
    return str(caught.value)


def test_a_recipe_gives_its_values_and_the_schema_the_rest(recipe):
    config = load(recipe, [])
    assert (config.name, config.policies["main"].lr, config.data.size, config.team["solver"]) == (
        "pair",
        1e-6,
        7,
        {"max_tokens": 16},
    )
    assert (config.rollout.group_size, config.loss.dual_clip, config.warm_start) == (4, 3.0, None)


@pytest.mark.parametrize(
    ("words", "value_of", "expected"),
    [
        (["--train.steps", "5"], lambda c: c.train.steps, 5),
        (["--train.steps=5"], lambda c: c.train.steps, 5),
        (["--rollout.group-size", "8"], lambda c: c.rollout.group_size, 8),
        (["--rollout.group_size", "8"], lambda c: c.rollout.group_size, 8),
        (["--policies.main.lr", "1e-5"], lambda c: c.policies["main"].lr, 1e-5),
        (["--policies.main.engine.max-model-tokens", "99"], lambda c: c.policies["main"].engine.max_model_tokens, 99),
        (["--policies.my-judge.model", "other"], lambda c: c.policies["my-judge"].model, "other"),
        (["--team.solver.max-tokens", "64"], lambda c: c.team["solver"]["max_tokens"], 64),
        (["--team.rounds", "3", "--team.rounds", "4"], lambda c: c.team["rounds"], 4),
        (["--telemetry.report", "false"], lambda c: c.telemetry.report, False),
        (["--policies.main.sequence-parallel"], lambda c: c.policies["main"].sequence_parallel, True),
        (
            ["--policies.main.sequence-parallel", "--seed", "-1"],
            lambda c: (c.policies["main"].sequence_parallel, c.seed),
            (True, -1),
        ),
        (["--policies.main.recompute", "full"], lambda c: c.policies["main"].recompute, "full"),
        (["--policies.main.lora.rank", "4"], lambda c: c.policies["main"].lora.rank, 4),
        (["--policies.main.loss.clip-high", "0.28"], lambda c: c.policies["main"].loss.clip_high, 0.28),
        (["--loss.dual-clip", "null"], lambda c: c.loss.dual_clip, None),
        (["--advantage.mean", "none"], lambda c: c.advantage.mean, "none"),
        (["--advantage.preset=mean=agent,std=task"], lambda c: c.advantage.preset, "mean=agent,std=task"),
        (["--name", "5"], lambda c: c.name, "5"),
        (["--data.options", '{"min_terms": 2}'], lambda c: c.data.options, {"min_terms": 2}),
        (["--data.options", "{min_terms = 2}"], lambda c: c.data.options, {"min_terms": 2}),
        (["--data.options.min-terms", "2"], lambda c: c.data.options, {"min_terms": 2}),
        (["--team.solver.stop", '["\\n", "END"]'], lambda c: c.team["solver"]["stop"], ["\n", "END"]),
        (["--team.solver", '{"temperature": 0.5}'], lambda c: c.team["solver"], {"max_tokens": 16, "temperature": 0.5}),
        (["--warm-start.steps", "9", "--data.type", "sums"], lambda c: c.warm_start.steps, 9),
    ],
)
def test_overrides_reach_their_key(recipe, words, value_of, expected):
    assert value_of(load(recipe, words)) == expected


def test_another_shape_of_a_section_drops_the_old_ones_settings_in_any_order(recipe):
    for words in (["--data.type", "sums", "--data.size", "3"], ["--data.size", "3", "--data.type", "sums"]):
        assert load(recipe, words).data.model_dump() == {"type": "sums", "largest": 9, "terms": 2, "size": 3, "seed": 0}


def test_the_same_shape_keeps_the_settings(recipe):
    assert load(recipe, ["--data.type", "reasoning-gym"]).data.name == "chain_sum"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--train.stpes", "5"], ["train.stpes: unknown key", "--train.stpes", "nearest valid key is train.steps"]),
        (["--train.group_size", "5"], ["train.group_size", "nearest valid key is rollout.group_size"]),
        (["--lr", "5"], ["lr: unknown key", "policies.NAME.lr"]),
        (["--policies.main.lrr", "5"], ["policies.main.lrr", "nearest valid key is policies.main.lr"]),
        (["--rollout.n", "8"], ["here this is rollout.group_size"]),
        (["--num_generations", "8"], ["here this is rollout.group_size"]),
        (["--rollout.n_samples_per_prompt", "8"], ["here this is rollout.group_size"]),
        (["--loss.eps_clip", "0.1"], ["here this is loss.clip_low and loss.clip_high"]),
        (["--algorithm.adv_estimator", "grpo"], ["here this is advantage.preset"]),
        (["--actor.ppo_mini_batch_size", "8"], ["here this is train.updates_per_step"]),
        (
            ["--data.largest", "3"],
            ["data.largest", "data.type reasoning-gym", "it takes type, name, size, seed, difficulty, options"],
        ),
        (["--train.steps", "-3"], ["train.steps: -3; expected integer >= 0 (from --train.steps)"]),
        (["--train.steps", "x"], ["train.steps: 'x'; expected integer >= 0"]),
        (["--train.steps"], ["--train.steps: has no value; expected integer >= 0"]),
        (["--train.steps.x", "5"], ["--train.steps.x: train.steps is a value"]),
        (["--train", "5"], ["train: 5; expected the keys steps, epochs, ranks, updates_per_step, placement"]),
        (["--train", '{"stps": 3}'], ["train.stps: unknown key (from --train)"]),
        (["--advantage.mean", "agnt"], ["advantage.mean: 'agnt'; expected agent | task | none"]),
        (
            ["--data.type", "smus"],
            ["data.type: smus; expected reasoning-gym | jsonl | parquet | huggingface | facts | sums | lookups | mix"],
        ),
        (["--policies.mian.lr", "1"], ["policies.mian.model: missing (from --policies.mian.lr)", "main"]),
        (["--loss.dual-clip", "0.5"], ["dual_clip is 0.5; it must exceed 1", "--loss.dual-clip"]),
        (["--policies.main.loss.dual-clip", "1"], ["policies.main.loss", "dual_clip is 1.0; it must exceed 1"]),
        (["--policies.main.lora.rank", "4", "--policies.main.trainable", "false"], ["lora is set and trainable is false"]),
        (
            ["--policies.main.lora.rank", "4", "--policies.main.freeze", '["model.*"]'],
            ["lora is set and freeze is ['model.*']"],
        ),
        (
            ["--policies.main.lora.rank", "4", "--policies.main.reference", "m"],
            ["lora is set and reference is 'm'", "unset it"],
        ),
        (["--rollout.tasks-per-step", "3", "--train.updates-per-step", "4"], ["every update needs a task of its own"]),
        (["steps=5"], ["'steps=5': unexpected; expected --section.key value"]),
        (["--train..steps", "5"], ["--train..steps: has an empty part"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_and_what_was_expected(recipe, words, parts):
    message = error_of(recipe, *words)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_every_fault_gets_its_line(recipe):
    lines = error_of(recipe, "--train.steps", "-1", "--loss.clip-low", "-1").split("\n")
    assert lines == [
        "loss.clip_low: -1; expected number >= 0 (from --loss.clip-low)",
        "train.steps: -1; expected integer >= 0 (from --train.steps)",
    ]


def test_an_unknown_key_of_a_file_names_the_file_and_another_systems_word(tmp_path):
    path = tmp_path / "theirs.toml"
    path.write_text("[algorithm]\nadv_estimator = 'grpo'\n")
    assert error_of(str(path)) == f"algorithm.adv_estimator: unknown key (from {path}); here this is advantage.preset"


def test_missing_sections_are_named(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    lines = error_of(str(path)).split("\n")
    assert [line.partition(":")[0] for line in lines] == ["policies", "team", "data"]
    assert all("missing" in line and str(path) in line for line in lines)


def test_null_in_a_toml_file_unsets(recipe):
    with open(recipe, "a") as file:
        file.write('[loss]\ndual_clip = "null"\n')
    assert load(recipe, []).loss.dual_clip is None


def test_yaml_reads_the_same(recipe, tmp_path):
    text = (
        "name: pair\npolicies: {main: {model: folder, lr: 1e-6}}\n"
        "team: {name: solver-verifier, rounds: 2, solver: {max_tokens: 16}}\n"
        "data: {type: reasoning-gym, name: chain_sum, size: 7}\n"
    )
    path = tmp_path / "pair.yaml"
    path.write_text(text)
    assert load(str(path), []) == load(recipe, [])


@pytest.mark.parametrize(("name", "text"), [("x.toml", "a = [1"), ("x.yaml", "a: [1"), ("x.json", "{"), ("x.yml", "- 1")])
def test_a_damaged_file_is_named(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    message = error_of(str(path))
    assert message.startswith(str(path))
    assert "\n" not in message


def test_a_recipe_that_is_not_there_lists_those_that_are():
    message = error_of("quikstart")
    assert message.startswith("quikstart: no such recipe")
    for name in recipes():
        assert name in message
    assert "quickstart" in error_of("nowhere/x.toml")
    assert "expected one of .toml" in error_of(__file__)


def test_dump_reads_back_as_the_same_configuration(recipe, tmp_path):
    config = load(
        recipe, ["--policies.main.lr", "3.3e-7", "--loss.dual-clip", "null", "--warm-start.steps", "2", "--data.type", "sums"]
    )
    path = tmp_path / "config.json"
    path.write_text(dump(config))
    assert load(str(path), []) == config
    assert json.loads(dump(config))["rollout"]["group_size"] == 4


def test_literals():
    texts = ["1e-5", "true", "[1, 2]", "null", "x = 1", "1\ny = 2", "1_000", "a b", "'quoted'"]
    assert [literal(text) for text in texts] == [1e-5, True, [1, 2], None, "x = 1", "1\ny = 2", 1000, "a b", "quoted"]


def test_words_are_told_from_overrides_wherever_they_stand():
    assert split_words(["--a.b", "5", "recipe", "--c.d=1", "other"]) == (["recipe", "other"], ["--a.b", "5", "--c.d=1"])
    assert [(o.path, o.text) for o in parse_overrides(["--a.b", "--c=", "--d", "-1"])] == [
        (("a", "b"), None),
        (("c",), ""),
        (("d",), "-1"),
    ]


def test_the_advantage_section_alone():
    config = load_advantage(["--advantage.preset", "grpo", "--advantage.ddof", "0"], {"preset": "rloo", "eps": 0.5})
    assert (config.preset, config.ddof, config.eps, config.std) == ("grpo", 0, 0.5, None)
    with pytest.raises(ConfigError, match=r"--train\.steps: unknown option"):
        load_advantage(["--train.steps", "5"])
    with pytest.raises(ConfigError, match=r"advantage\.ddof: 2; expected integer >= 0 and <= 1"):
        load_advantage(["--advantage.ddof", "2"])


def test_recipes_say_what_they_are():
    assert {"quickstart", "arithmetic-tiny"} <= set(recipes())
    assert all(about and not about.startswith("#") for about in recipes().values())


def test_a_folder_is_no_recipe(tmp_path: Path):
    assert "no such file" in error_of(f"{tmp_path}/")


def test_a_section_given_whole_in_another_shape_replaces_the_old_one():
    config = load("quickstart", ["--data", "{type = 'jsonl', path = 'x.jsonl'}"])
    assert config.data.model_dump() == {"type": "jsonl", "path": "x.jsonl"}
    same = load("quickstart", ["--data", "{type = 'reasoning-gym', size = 7}"])
    assert (same.data.size, same.data.name) == (7, "basic_arithmetic")


def test_a_warm_start_needs_data_that_can_be_demonstrated():
    with pytest.raises(ConfigError, match="warm_start needs demonstrations, which data"):
        load("quickstart", ["--warm-start.steps", "3"])


def test_another_team_drops_the_settings_of_the_recipes_team():
    config = load("quickstart", ["--team.solver.max-tokens", "7", "--team.name", "single"])
    assert config.team == {"name": "single", "solver": {"max_tokens": 7}}


MIX = ["--data.type", "mix", "--data.parts.sums.data.type", "sums"]


def test_the_parts_of_a_mix_are_reached_by_overrides_in_any_order():
    words = ["--data.parts.sums.data.size", "4", *MIX, "--data.parts.sums.weight", "3", "--data.parts.b.data.type", "sums"]
    parts = load("quickstart", words).data.parts
    assert {name: (part.weight, part.data.size) for name, part in parts.items()} == {"sums": (3.0, 4), "b": (1.0, 1000)}
    other = load("quickstart", [*words, "--data.parts.b.data.type", "facts"]).data.parts["b"].data
    assert (other.type, other.hops) == ("facts", [1, 2])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--data.parts.sums.data.sze", "4"],
            "data.parts.sums.data.sze: unknown key (from --data.parts.sums.data.sze); the nearest valid key is "
            "data.parts.sums.data.size",
        ),
        (
            ["--data.parts.sums.data.path", "x"],
            "data.parts.sums.data.path: unknown key of data.parts.NAME.data.type sums (from --data.parts.sums.data.path); it "
            "takes type, largest, terms, size, seed",
        ),
        (
            ["--data.parts.sums.data.size", "x"],
            "data.parts.sums.data.size: 'x'; expected integer > 0 (from --data.parts.sums.data.size)",
        ),
        (
            ["--data.parts.b.data.type", "mix"],
            "data.parts.b.data.type: mix; expected reasoning-gym | jsonl | parquet | huggingface | facts | sums | lookups "
            "(from --data.parts.b.data.type)",
        ),
        (["--data.parts.sums.weight", "0"], "data.parts.sums.weight: 0; expected number > 0 (from --data.parts.sums.weight)"),
        (
            ["--eval.data.type", "sums", "--eval.data.path", "x"],
            "eval.data.path: unknown key of eval.data.type sums (from --eval.data.path); it takes type, largest, terms, size, "
            "seed",
        ),
        (
            ["--reward.by-source.sums", "emm"],
            "reward.by_source.sums: 'emm'; expected math | exact | em | f1 | gym (from --reward.by-source.sums)",
        ),
    ],
)
def test_a_mistake_in_a_nested_section_is_named_by_the_users_key(words, line):
    assert error_of("quickstart", *MIX, *words) == line


def test_tables_of_named_values_and_sections_are_reached_by_overrides():
    config = load("quickstart", ["--reward.by-source.maths", "math", "--tools.wiki.type", "search", "--tools.wiki.topk", "5"])
    assert (config.reward.by_source, config.tools["wiki"].topk) == ({"maths": "math"}, 5)
    assert error_of("quickstart", "--data.type", "mix", "--data.parts", "{}") == (
        "data.parts: {}; expected a table of named entries (from --data.parts)"
    )


def test_a_run_of_no_steps_needs_a_warm_start(recipe):
    assert "no warm_start" in error_of(recipe, "--train.steps", "0")
    assert load("maths-tiny", ["--train.steps", "0"]).train.steps == 0


@pytest.mark.parametrize("data", ["facts", "reasoning-gym"])
def test_only_some_tasks_have_demonstrations(data):
    assert "sums and lookups can write" in error_of("maths-tiny", "--data", json.dumps({"type": data}))


@pytest.mark.parametrize(
    ("words", "steps", "epochs"),
    [
        (["--train", '{"steps": 5}'], 5, None),
        (["--train", '{"steps": 5, "epochs": 3}'], 5, 3),
        (["--train", '{"updates_per_step": 2}'], 10, 2),
        (["--train.steps", "5"], 5, None),
    ],
)
def test_steps_of_the_command_line_take_the_place_of_the_recipes_epochs(words, steps, epochs):
    train = load("paper-maths-4b", words).train
    assert (train.steps, train.epochs, train.ranks) == (steps, epochs, 4)
