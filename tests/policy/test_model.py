"""Logits of the Megatron model against transformers: configuration, weights, packing, rotary positions and attention."""

from __future__ import annotations

import pytest
import torch

from drmas.config.schema import PolicyConfig
from drmas.policy import host_platform
from drmas.policy import model as model_module
from drmas.policy.architecture import read_architecture
from drmas.policy.layers import PackedAttention
from drmas.runtime.models import PACKAGED, resolve_model

MODELS = [f"{family}-{tying}" for family in ("llama", "qwen2", "qwen3") for tying in ("tied", "untied")]
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_on_one_rank(kit, trainer_of, models, name):
    rows = kit.make_rows()
    found = kit.whole_logits(trainer_of(name), rows)
    torch.testing.assert_close(found, kit.reference_logits(models / name, rows), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", ["tp2", "tp2-sp"])
@pytest.mark.parametrize("name", [*MODELS, "qwen3-one-kv-head"])
def test_logits_equal_transformers_on_two_tensor_parallel_ranks(kit, two_ranks, models, name, layout):
    found = two_ranks["logits"][f"{name}/{layout}"]
    torch.testing.assert_close(found, kit.reference_logits(models / name, kit.make_rows()), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaled_rotary_positions_equal_transformers(kit, world, tmp_path, scaling):
    folder = kit.write_model(tmp_path / "model", "llama", True, rope_parameters={"rope_theta": 500.0, **scaling})
    rows = kit.make_rows()
    found = kit.whole_logits(kit.make_trainer(folder, world), rows)
    torch.testing.assert_close(found, kit.reference_logits(folder, rows), atol=TOLERANCE, rtol=0)
    plain = kit.write_model(tmp_path / "plain", "llama", True, rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    assert (found - kit.reference_logits(plain, rows)).abs().max() > 1e-2  # the scaling matters on these rows


def test_smollm2_logits_equal_transformers(kit, world):
    folder = resolve_model(PACKAGED)
    rows = kit.make_rows(3)
    found = kit.whole_logits(kit.make_trainer(folder, world, trainable=False), rows)
    expected = kit.reference_logits(folder, rows)
    assert expected.abs().max() > 10  # a trained model's logits, not noise around zero
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_float32_on_cuda_takes_our_attention_beside_transformer_engine(models, monkeypatch):
    """TransformerEngine has no attention over packed float32 rows; what is built must be what `drmas doctor` says."""
    monkeypatch.setattr(host_platform, "is_host", lambda: False)
    monkeypatch.setattr(model_module, "find_spec", lambda name: object())
    assert model_module.takes_transformer_engine(torch.bfloat16)
    assert not model_module.takes_transformer_engine(torch.float32)
    policy = PolicyConfig(model="", dtype="float32")
    config = model_module.transformer_config(read_architecture(models / "qwen3-tied"), policy, tp=1)
    assert (config.apply_rope_fusion, config.bias_activation_fusion) == (False, False)
    spec = model_module._block_spec(config, 0)
    assert {layer.submodules.self_attention.submodules.core_attention for layer in spec.layer_specs} == {PackedAttention}


def test_recomputed_activations_give_the_same_update(kit, trainer_of):
    plain, recomputed = trainer_of("qwen3-tied"), trainer_of("qwen3-tied", recompute=True)
    assert kit.run_updates(plain, 2) == kit.run_updates(recomputed, 2)
    assert kit.largest_difference(kit.weights(plain), kit.weights(recomputed)) == 0.0
