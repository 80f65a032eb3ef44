"""The policy's optimiser beside torch.optim.AdamW with clip_grad_norm_, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drmas.core.schedule import learning_rate
from drmas.errors import ConfigError
from drmas.policy import optimizer
from drmas_kernels.backend import use
from drmas_kernels.spec import KernelSpec
from tests.kernels import interpreter
from tests.policy.optimizer_kit import EMBEDDING, Oracle, Trained, largest_state_difference

CASES = (
    "dp2",
    "dp2-overlap",
    "dp2-bf16-overlap",
    "dp2-frozen-embedding",
    "tp2",
    "tp2-bf16",
    "pp2-tied",
    "pp2-untied",
    "pp2-frozen-stage",
    "cp2",
)
CLOSE = 5e-7
"""Weights are drawn from a normal distribution: two units in the last place of the largest."""


@pytest.fixture
def trained_on(world, models):
    """trained_on("qwen3-tied", lr=...): a model and its optimiser in this process."""
    return lambda name, **changes: Trained(models / name, world, **changes)


@pytest.fixture(scope="session")
def on_two_ranks(kit, models, tmp_path_factory) -> dict[str, Any]:
    """What optimizer_ranks.py found."""
    shared = tmp_path_factory.mktemp("optimizer")
    return kit.launch("optimizer_ranks.py", 2, models, shared) | {"shared": shared}


def beside_torch(trained: Trained, oracle: Oracle, steps: int = 3) -> None:
    for step in range(1, steps + 1):
        flags = trained.update(step)
        assert float(flags.norm) == pytest.approx(oracle.update(step), rel=1e-6)
        assert bool(flags.applied)
    assert oracle.main_difference(trained) < CLOSE


@pytest.mark.parametrize("clip", [20.0, 1e9], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-untied"])
def test_steps_are_those_of_torch(trained_on, name, dtype, clip):
    trained = trained_on(name, dtype=dtype, clip_grad_norm=clip)
    oracle = Oracle(trained)
    beside_torch(trained, oracle)
    if dtype == "float32":
        assert oracle.difference(trained) < CLOSE
    for _, parameter in trained.named():
        place = trained.optimizer.megatron._get_main_param_and_optimizer_states(parameter)["param"]
        assert torch.equal(place.view(parameter.shape).to(parameter.dtype), parameter)


@pytest.mark.parametrize("kinds", [[], ["norm"], ["bias"], ["embedding"], ["norm", "bias", "embedding"]], ids=" ".join)
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-untied"])
def test_weight_decay_leaves_out_what_the_configuration_says(trained_on, name, kinds):
    trained = trained_on(name, no_decay=kinds, weight_decay=2.0)
    beside_torch(trained, Oracle(trained), steps=1)


def test_a_checkpoint_holds_the_groups_that_decay(trained_on):
    trained = trained_on("qwen2-untied", no_decay=["embedding", "norm"])
    decayed, others = (group["params"] for group in trained.optimizer.megatron.optimizer.param_groups)
    assert sum(p.numel() for p in others) == sum(
        p.numel() for name, p in trained.named() if "norm" in name or name == EMBEDDING
    )
    assert sum(p.numel() for p in decayed + others) == sum(p.numel() for _, p in trained.named())


def test_transformer_engine_s_names_of_norms_are_known():
    weight = torch.nn.Parameter(torch.ones(2))
    names = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "norm",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "norm",
        "decoder.layers.0.mlp.linear_fc1.weight": "weight",
        "decoder.final_layernorm.weight": "norm",
        "output_layer.weight": "weight",
    }
    assert {name: optimizer._kind(name, weight) for name in names} == names


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "wsd"])
def test_a_step_has_the_schedule_s_rate(trained_on, style):
    changes = {"lr_schedule": style, "lr_warmup_steps": 2, "lr_min": 1e-3, "lr_decay_share": 0.5}
    trained = trained_on("llama-tied", total_steps=4, **changes)
    settings = {"style": style, "lr": 1e-2, "lr_min": 1e-3, "warmup_steps": 2, "total_steps": 4, "decay_share": 0.5}
    oracle, rates = Oracle(trained), []
    assert trained.optimizer.lr == 5e-3
    for step in (1, 2, 3, 4):
        trained.update(step)
        rates.append(trained.optimizer.lr)
        oracle.update(step, lr=learning_rate(step, **settings))
    assert rates == [learning_rate(step, **settings) for step in (1, 2, 3, 4)]
    assert oracle.difference(trained) < CLOSE


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), 1e20], ids=["nan", "inf", "too large to square"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_that_isn_t_finite_changes_nothing(trained_on, dtype, spoil):
    trained = trained_on("qwen3-tied", dtype=dtype)
    oracle = Oracle(trained)
    trained.update(1), oracle.update(1)
    state, rate = trained.snapshot(), trained.optimizer.lr
    flags = trained.update(2, spoil=spoil)
    assert not bool(flags.applied)
    assert largest_state_difference(trained.snapshot(), state) == 0.0
    assert (trained.optimizer.steps, trained.optimizer.lr) == (1, rate)
    counts = trained.optimizer._shards.state
    assert (counts.step.tolist(), counts.skipped.tolist()) == ([1, 1], [1, 1])
    trained.update(3), oracle.update(3)
    assert oracle.main_difference(trained) < CLOSE


def test_what_is_set_aside_is_measured_apart_and_summed(trained_on):
    """Three parts; the last stays where it is."""
    trained = trained_on("qwen3-tied")
    oracle = Oracle(trained)
    for step in (10, 20):
        trained.optimizer.zero_grad()
        for part in range(3):
            trained.backward(step + part)
            alone = Oracle(trained).update(step + part)
            assert float(trained.optimizer.set_aside()) ** 0.5 == pytest.approx(alone, rel=1e-6)
        norm = float(trained.finish().norm)
        assert norm == pytest.approx(oracle.update(step, step + 1, step + 2), rel=1e-6)
        assert oracle.difference(trained) < CLOSE


def test_passes_after_the_last_part_count_too(trained_on):
    trained = trained_on("qwen3-tied")
    oracle = Oracle(trained)
    trained.optimizer.zero_grad()
    trained.backward(1)
    trained.optimizer.set_aside()
    trained.backward(2)
    trained.finish(), oracle.update(1, 2)
    assert oracle.difference(trained) < CLOSE


def test_an_abandoned_update_leaves_nothing_behind(trained_on):
    trained = trained_on("qwen3-tied")
    oracle = Oracle(trained)
    trained.optimizer.zero_grad()
    for number in (1, 2):
        trained.backward(number)
        trained.optimizer.set_aside()
    assert float(trained.update(3).norm) == pytest.approx(oracle.update(3), rel=1e-6)


def test_one_part_costs_no_buffer_and_no_bit(trained_on):
    apart, plain = trained_on("qwen3-tied"), trained_on("qwen3-tied")
    apart.optimizer.zero_grad()
    apart.backward(1)
    apart.optimizer.set_aside()
    apart.finish(), plain.update(1)
    assert largest_state_difference(apart.state(), plain.state()) == 0.0
    assert apart.optimizer._aside is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_steps_have_equal_bits(trained_on, monkeypatch, dtype):
    """On the CPU both paths run torch's kernel, so only what the offloaded one moves about is tested."""
    changes = {"dtype": dtype, "buckets": ("decoder.layers.1.",)}
    plain = trained_on("qwen3-tied", **changes)
    monkeypatch.setattr(optimizer, "_offloads", lambda config: True)
    offloaded = trained_on("qwen3-tied", **changes)
    for step in (1, 2, 3):
        spoil = float("nan") if step == 2 else 0.0
        plain.update(step, spoil=spoil), offloaded.update(step, spoil=spoil)
    assert largest_state_difference(offloaded.state(), plain.state()) == 0.0
    for (_, one), (_, other) in zip(offloaded.named(), plain.named(), strict=True):
        assert torch.equal(one, other)
    assert offloaded.optimizer.megatron.state_dict() == plain.optimizer.megatron.state_dict()


def test_frozen_parameters_have_no_buffers_and_stay(trained_on):
    freeze = (EMBEDDING, "decoder.layers.0.")
    trained = trained_on("qwen3-tied", freeze=freeze)
    before = {name: parameter.detach().clone() for name, parameter in trained.named()}
    beside_torch(trained, Oracle(trained, freeze=freeze))
    for name, parameter in trained.named():
        assert torch.equal(before[name], parameter) == name.startswith(freeze)
    (buffer,) = trained.optimizer.ddp.buffers
    assert len(buffer.params) == sum(not name.startswith(freeze) for name in before)


def test_the_host_reads_nothing_of_the_device_in_a_step(trained_on, monkeypatch):
    """With the kernels that run on GPUs, interpreted here; what the interpreter reads inside a launch doesn't count."""
    interpreter.mend()
    for module in ("_adamw_triton", "_grad_norm_triton"):
        interpreter.load(f"drmas_kernels.{module}")
    trained = {dtype: trained_on("qwen3-tied", dtype=dtype) for dtype in ("float32", "bfloat16")}
    oracles = {dtype: Oracle(each) for dtype, each in trained.items()}
    launching, launch = [False], KernelSpec.launch

    def watched(spec: KernelSpec, *arguments: Any) -> None:
        launching[0] = True
        launch(spec, *arguments)
        launching[0] = False

    def refused(name: str):
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if launching[0]:
                return original(tensor, *arguments, **options)
            raise AssertionError(f"the host waits for the device in Tensor.{name}")

        return read

    for dtype, each in trained.items():
        each.optimizer.zero_grad()
        each.backward(1)
        each.optimizer.set_aside()
        each.backward(2)
        with each.groups.active(), use("triton"), monkeypatch.context() as patch:
            patch.setattr(KernelSpec, "launch", watched)
            for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
                patch.setattr(torch.Tensor, name, refused(name))
            with pytest.raises(AssertionError, match="the host waits"):
                bool(torch.ones(()))
            each.optimizer.set_aside()
            flags = each.optimizer.step()
        assert float(flags.norm) == pytest.approx(oracles[dtype].update(1, 2), rel=1e-6)
        assert oracles[dtype].main_difference(each) < CLOSE


@pytest.mark.parametrize("case", CASES)
def test_steps_on_two_ranks_are_those_of_torch(on_two_ranks, case):
    found = on_two_ranks["steps"][case]
    for rank in found["norms"]:
        for norm, expected in rank:
            assert norm == pytest.approx(expected, rel=1e-6)
    assert found["main"] < CLOSE
    assert found["buckets"] > 3 or "overlap" not in case
    if "bf16" not in case:
        assert found["weights"] < CLOSE


@pytest.mark.parametrize("case", ["dp2", "dp2-overlap", "tp2", "pp2-tied"])
def test_parts_on_two_ranks(on_two_ranks, case):
    found = on_two_ranks["parts"][case]
    for norm, expected in [*found["parts"], found["norm"]]:
        assert norm == pytest.approx(expected, rel=1e-6)
    assert found["weights"] < CLOSE


def test_one_rank_s_infinity_stops_all_of_them(on_two_ranks):
    assert on_two_ranks["spoilt"] == {"applied": [False, False], "changed": 0.0, "steps": [1, 1]}


def test_the_forward_pass_after_a_step_has_the_new_weights(on_two_ranks):
    """Gathered by the pass, the head's too, which no module reads."""
    assert on_two_ranks["overlapped_forward"] == {"qwen3-tied": 0.0, "qwen2-untied": 0.0}


def test_a_floor_above_the_rate_is_refused(trained_on):
    with pytest.raises(ConfigError, match=r"policies.main.lr_min is 0.1; it must not exceed lr, 0.01"):
        trained_on("llama-tied", lr_min=0.1)


def test_mixed_dtypes_are_refused(trained_on):
    trained = trained_on("llama-tied")
    trained.model.decoder.final_layernorm.bfloat16()
    with pytest.raises(ValueError, match=r"trainable parameters of 'main' are torch.bfloat16, torch.float32; expected one"):
        optimizer.PolicyOptimizer("main", trained.model, trained.config, trained.groups, total_steps=1)


def test_nothing_to_train_on_a_rank_is_no_step(trained_on):
    """As on a pipeline stage that is frozen whole."""
    trained = trained_on("llama-tied", freeze=(EMBEDDING, "decoder."))
    trained.optimizer.zero_grad()
    flags = trained.finish()
    assert (float(flags.norm), bool(flags.applied), trained.optimizer.steps) == (0.0, True, 1)
    assert trained.optimizer.megatron.state_dict()["optimizer"]["param_groups"][0]["step"] == 1
