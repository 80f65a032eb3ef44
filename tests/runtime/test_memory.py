"""Counts per rank against models that are built, and bytes against arithmetic done by hand."""

from __future__ import annotations

import pytest

from drmas.config.schema import LoraConfig, PolicyConfig
from drmas.policy.architecture import Architecture
from drmas.runtime.memory import Model, Share, adapter_parameters, by_part, describe, held, rank_parameters

ARCHITECTURE = Architecture(
    family="qwen3",
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=64,
    vocab=131,
    eps=1e-6,
    rope_theta=1e4,
    tied=True,
    max_positions=256,
)
LAYER = 32 * 128 + 64 * 32 + 3 * 32 * 64
NORMS = 2 * 32 + 2 * 16
COUNT = 4 * (LAYER + NORMS) + 131 * 32 + 32


def share(ranks: int = 1, place: int = 0, **layout) -> Share:
    return Share(PolicyConfig(model="", **layout), tuple(range(ranks)), place)


def parts(config_share: Share, *, reference=None, critic=None, apart=False, gpu=False, frozen=0.0) -> dict[str, float]:
    model = Model("m", ARCHITECTURE, frozen)
    return by_part(held("main", config_share, model, reference, critic, apart=apart, gpu=gpu))


def test_counts_on_one_rank_and_shared_out():
    assert rank_parameters(ARCHITECTURE, share()) == COUNT
    halves = [rank_parameters(ARCHITECTURE, share(2, place, tensor_parallel=2)) for place in (0, 1)]
    assert halves == [4 * (LAYER // 2 + NORMS) + 66 * 32 + 32] * 2
    stages = [rank_parameters(ARCHITECTURE, share(2, place, pipeline_parallel=2)) for place in (0, 1)]
    assert stages == [2 * (LAYER + NORMS) + 131 * 32, 2 * (LAYER + NORMS) + 131 * 32 + 32]  # a copy of the tied table on each
    assert rank_parameters(ARCHITECTURE, share(), head=False) == COUNT  # the table is the embedding too
    last = share(2, 1, pipeline_parallel=2)
    assert rank_parameters(ARCHITECTURE, last, head=False) == stages[1] - 131 * 32


def test_stages_lie_furthest_apart():
    layout = {"tensor_parallel": 2, "pipeline_parallel": 2}
    places = [share(8, place, **layout) for place in range(8)]
    assert [each.stage for each in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {each.replicas for each in places} == {2}


@pytest.mark.parametrize(
    ("dtype", "replicas", "weights", "optimiser"), [("float32", 1, 4, 8), ("float32", 4, 4, 2), ("bfloat16", 4, 2, 3)]
)
def test_bytes_per_parameter(dtype, replicas, weights, optimiser):
    found = parts(share(replicas, dtype=dtype))
    assert found == {"weights": weights * COUNT, "gradients": 4 * COUNT, "optimiser": optimiser * COUNT}


def test_gradients_set_aside_for_agents_are_shared_out_over_replicas():
    assert parts(share(2), apart=True)["gradients"] == 4 * COUNT * 1.5


def test_an_offloaded_optimiser_is_told_apart_and_left_out_of_the_sum():
    config = share(2, dtype="bfloat16", offload_optimizer=True)
    found = parts(config, gpu=True)
    assert found["optimiser in host memory"] == 6 * COUNT
    assert describe(found).startswith(f"{6 * COUNT / 2**30:.2f} GiB (weights ")
    assert "optimiser" in parts(config, gpu=False)


def test_frozen_weights_have_neither_gradient_nor_state():
    assert parts(share(trainable=False)) == {"weights": 4 * COUNT}
    found = parts(share(), frozen=0.25)
    assert found == {"weights": 4 * COUNT, "gradients": 3 * COUNT, "optimiser": 6 * COUNT}


def test_adapters_train_beside_a_base_that_two_policies_hold_once():
    lora = LoraConfig(rank=2, targets=["qkv", "proj"])
    config = share(lora=lora)
    adapters = 4 * 2 * ((32 + 128) + (64 + 32))
    assert adapter_parameters(ARCHITECTURE, lora, config) == adapters
    cut = share(2, tensor_parallel=2, lora=lora)
    assert adapter_parameters(ARCHITECTURE, lora, cut) == 4 * 2 * ((32 + 64) + (32 + 32))
    model = Model("m", ARCHITECTURE)
    both = [part for name in "ab" for part in held(name, config, model, None, None, apart=False, gpu=False)]
    expected = {"base": 4 * COUNT, "weights": 8 * adapters, "gradients": 8 * adapters, "optimiser": 16 * adapters}
    assert by_part(both) == expected


def test_one_reference_serves_all_policies_of_a_layout_and_a_critic_is_trained():
    model = Model("m", ARCHITECTURE)
    config = share()
    both = [part for name in "ab" for part in held(name, config, model, model, None, apart=False, gpu=False)]
    assert by_part(both)["reference"] == 4 * COUNT
    assert by_part(both)["weights"] == 8 * COUNT
    assert parts(config, critic=model)["critic"] == 16 * COUNT
