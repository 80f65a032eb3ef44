"""What is refused, and by which words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from drmas.config.schema import PolicyConfig
from drmas.errors import ConfigError, ModelError
from drmas.policy.architecture import read_architecture


def changed(folder, tmp_path, **changes):
    """A copy of the folder's config.json with `changes`."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, r"model_type is 'gpt_neox'; supported are llama, qwen2, qwen3"),
        ({"use_sliding_window": True}, r"use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types has sliding_attention"),
        ({"attention_bias": True}, r"attention_bias is True"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; only 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, r"rope_type is 'yarn'; supported are"),
    ],
)
def test_unsupported_features_are_refused_by_name(models, tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        read_architecture(changed(models / "qwen3-tied", tmp_path, **changes))


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config.json; set policies.NAME.model"):
        read_architecture(tmp_path / "missing")


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, {"tensor_parallel": 3}, r"policies.main.tensor_parallel is 3; it must divide the model's 4 attention heads"),
        ({}, {"tensor_parallel": 8}, r"policies.main.tensor_parallel is 8; it must divide the model's 4 attention heads"),
        (
            {"ffn": 66},
            {"tensor_parallel": 4},
            r"policies.main.tensor_parallel is 4; it must divide the model's 66 feed-forward units",
        ),
        (
            {"heads": 6, "kv_heads": 3, "ffn": 66},
            {"tensor_parallel": 2},
            r"tensor_parallel is 2; it must divide the model's 3 key-value heads or be",
        ),
        (
            {"heads": 8, "kv_heads": 1, "head_dim": 6},
            {"tensor_parallel": 8},
            r"is 8; it must divide the 60 rows of the model's query, key and value weights, \(8 \+ 2 x 1\) heads x 6",
        ),
        (
            {"vocab": 5},
            {"tensor_parallel": 4},
            r"tensor_parallel is 4; with 2 of the model's 5 vocabulary rows per rank the last rank has none",
        ),
        ({}, {"pipeline_parallel": 4}, r"policies.main.pipeline_parallel is 4; it must divide the model's 2 layers"),
        (
            {"layers": 30},
            {"pipeline_parallel": 4},
            r"policies.main.pipeline_parallel is 4; it must divide the model's 30 layers",
        ),
        (
            {"ffn": 72},
            {"fp8": "hybrid"},
            r"policies.main.fp8 is 'hybrid'; a rank has 72 feed-forward units, and fp8 takes multiples of 16",
        ),
        (
            {"ffn": 96},
            {"fp8": "e4m3", "tensor_parallel": 4},
            r"policies.main.fp8 is 'e4m3'; a rank has 24 feed-forward units",
        ),
    ],
)
def test_a_layout_that_the_model_does_not_divide_into_is_refused(models, changes, layout, message):
    architecture = replace(read_architecture(models / "qwen3-tied"), **changes)
    with pytest.raises(ModelError, match=message):
        architecture.check_layout(PolicyConfig(model="", **layout), policy="main")
    architecture.check_layout(PolicyConfig(model=""), policy="main")


def test_a_layout_that_it_divides_into_is_not(models):
    architecture = read_architecture(models / "qwen3-tied")
    whole = {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 4, "fp8": "hybrid"}
    architecture.check_layout(PolicyConfig(model="", **whole), policy="main")


def test_a_layout_beyond_the_processes_is_refused(world, two_ranks):
    message = r"tensor x pipeline x context parallel is 2 x 1 x 1; their product must divide the 1 trainer processes"
    with pytest.raises(ConfigError, match=message):
        world.layout(tp=2)
    assert "is 4 x 1 x 1; their product must divide the 2 trainer processes" in two_ranks["refused"]


def test_vocabulary_is_padded_to_the_tensor_parallel_size(models):
    architecture = read_architecture(models / "qwen3-tied")
    assert [architecture.padded_vocab(tp) for tp in (1, 2, 4)] == [131, 132, 132]
