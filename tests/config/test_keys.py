"""The schema as keys: what exists, and how a key is explained."""

import pytest

from drmas.config.keys import ALIASES, NAME, ROOT, describe, find
from drmas.config.schema import RunConfig
from drmas.errors import ConfigError


def test_every_key_of_the_schema_is_known_and_nothing_else():
    keys = {node.key for node in ROOT.walk() if node.path}
    for name, info in RunConfig.model_fields.items():
        assert name in keys
        if hasattr(info.annotation, "model_fields"):
            assert {f"{name}.{inner}" for inner in info.annotation.model_fields} <= keys
    assert {"policies.NAME.engine.threads", "data.largest", "data.path", "warm_start.error_rate"} <= keys
    assert find(["train", "stpes"]) is None
    assert find(["train", "steps", "x"]) is None


def test_names_stand_for_any_name_and_free_tables_take_any_key():
    assert find(["policies", "judge", "lr"]).path == ("policies", NAME, "lr")
    assert find(["team", "solver", "anything"]).key == "team"
    assert find(["data", "options", "anything"]).key == "data.options"


def test_words_of_other_systems_lead_to_keys_that_exist():
    for word, keys in ALIASES.items():
        assert find([word]) is None
        for key in keys:
            assert find(key.split(".")) is not None, key


def test_a_key_is_explained_with_type_default_and_help():
    assert describe("loss.clip-low") == "loss.clip_low: number >= 0; default 0.2. The ratio's lower bound is 1 - clip_low."
    assert describe("policies.main.model").startswith("policies.NAME.model: text; required. A Hugging Face folder")
    assert describe("advantage.mean") == "advantage.mean: agent | task | none, or unset; default unset"
    assert describe("telemetry.report") == "telemetry.report: true | false; default true"


def test_a_section_is_explained_with_its_keys():
    lines = describe("train").split("\n")
    assert lines[0] == "train: section. The length of the run and of its pieces."
    keys = ["train.steps", "train.epochs", "train.ranks", "train.updates_per_step", "train.placement", "train.threads"]
    assert [line.split(":")[0].strip() for line in lines[1:]] == keys


def test_a_section_of_several_shapes_lists_the_keys_under_the_shape_that_has_them():
    lines = describe("data").split("\n")
    assert lines[1].startswith("  data.type: reasoning-gym | jsonl | parquet")
    starts = [line.split(":")[0] for line in lines]
    sums, lookups, mix = (starts.index(f"  {shape}") for shape in ("sums", "lookups", "mix"))
    assert starts[lookups + 1 : mix] == ["    data.size", "    data.seed"]
    assert starts[sums + 1 : lookups] == [f"    data.{key}" for key in ("largest", "terms", "size", "seed")]
    assert starts[mix + 1 :] == ["    data.parts"]


def test_a_key_that_shapes_of_a_section_share_is_explained_for_each():
    assert describe("data.size").split("\n") == [
        "data.type reasoning-gym, sums, lookups: data.size: integer > 0; default 1000",
        "data.type facts: data.size: integer > 0, or unset; default unset. All of them if unset, else so many, drawn by "
        "`seed`.",
    ]
    assert describe("data.hops") == "data.hops: list of integer >= 1 and <= 3; default [1, 2]"


def test_a_table_of_named_sections_is_explained_with_the_keys_of_one():
    assert [line.split(":")[0] for line in describe("data.parts").split("\n")] == [
        "data.parts",
        "  data.parts.NAME",
        "    data.parts.NAME.weight",
        "    data.parts.NAME.data",
    ]
    assert "data.parts.NAME.data.largest: integer > 0; default 9" in describe("data.parts.maths.data")
    assert "tools.NAME.topk: integer > 0; default 3" in describe("tools")
    assert describe("reward.by_source.maths") == "reward.by_source.NAME: math | exact | em | f1 | gym"


def test_an_unknown_key_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"train\.stpes: unknown key; the nearest valid key is train\.steps"):
        describe("train.stpes")
