"""What Megatron is told for each stack, with stand-ins for TransformerEngine and CUDA; a CPU never imports the former."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import gpt_layer_specs

from drmas.config.schema import LoraConfig, PolicyConfig
from drmas.core.stack import PACKAGES, choose_stack
from drmas.errors import ConfigError
from drmas.policy import host_platform
from drmas.policy import model as model_module
from drmas.policy.architecture import read_architecture
from drmas.policy.layers import RMSNorm
from drmas.policy.lora import add_adapters
from drmas.policy.megatron_config import ddp_config, policy_stack, transformer_config
from drmas.runtime import memory
from drmas.telemetry import environment
from drmas.telemetry.environment import installed

ALL = dict.fromkeys(PACKAGES, True)


def groups(**sizes: int) -> SimpleNamespace:
    """Groups of these sizes, 1 where unsaid, in a process that has no peers."""
    every = {"tp": 1, "pp": 1, "cp": 1, "dp": 1} | sizes
    dp_cp = every["dp"] * every["cp"]
    return SimpleNamespace(sizes=lambda: every, dp_cp=SimpleNamespace(size=lambda: dp_cp))


@pytest.fixture
def settings(models, monkeypatch):
    """settings(cuda=..., policy keys..., sizes={...}): (Megatron's settings, the stack), as if on that machine."""
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):  # asked for under apply_rope_fusion
        monkeypatch.setattr(rope_utils, name, object())

    def made(*, cuda: bool = False, sizes: dict[str, int] | None = None, **wishes):
        policy = PolicyConfig(model="", **wishes)
        stack = choose_stack("main", policy, cuda=cuda, packages=ALL)
        return transformer_config(read_architecture(models / "qwen3-tied"), policy, groups(**(sizes or {})), stack), stack

    return made


class Fused(LocalSpecProvider):
    """TransformerEngine's provider of layers, by the names of what it would give."""

    def __getattribute__(self, name: str):
        if name.startswith("__"):
            return super().__getattribute__(name)
        return lambda *_, **arguments: type(f"TE_{name}", (torch.nn.Module,), {"arguments": arguments})


@pytest.fixture
def transformer_engine(monkeypatch):
    """Stand-ins where Megatron's specs name TransformerEngine's classes."""
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", Fused, raising=False)
    monkeypatch.setattr(gpt_layer_specs, "TENorm", type("TENorm", (torch.nn.Module,), {}), raising=False)


@pytest.mark.parametrize(("stage", "first"), [(0, True), (1, False)])
def test_transformer_engine_gives_every_layer_of_the_stage(settings, transformer_engine, stage, first):
    config, stack = settings(cuda=True, dtype="bfloat16", sizes={"pp": 2})
    spec = model_module._block_spec(config, stack, stage)
    assert len(spec.layer_specs) == 1  # of two, on two stages
    attention = spec.layer_specs[0].submodules.self_attention.submodules
    assert attention.core_attention.__name__ == "TE_core_attention"
    assert attention.linear_qkv.__name__ == "TE_column_parallel_layer_norm_linear"
    assert attention.q_layernorm.arguments == {"for_qk": True}
    assert spec.layer_norm.__name__ == "TENorm"
    assert (config.apply_rope_fusion, config.bias_activation_fusion, config.bias_dropout_fusion) == (True, True, True)


@pytest.mark.parametrize("wishes", [{"dtype": "float32"}, {"dtype": "bfloat16", "attention": "flex"}])
def test_beside_transformer_engine_our_layers_stay_ours(settings, transformer_engine, wishes):
    config, stack = settings(cuda=True, **wishes)
    spec = model_module._block_spec(config, stack, 0)
    attention = spec.layer_specs[0].submodules.self_attention.submodules
    assert attention.core_attention.__module__.startswith("drmas.policy.")
    assert {spec.layer_norm, attention.q_layernorm, spec.layer_specs[0].submodules.input_layernorm} == {RMSNorm}
    assert (config.apply_rope_fusion, config.bias_activation_fusion) == (False, False)


def test_sizes_come_from_the_groups(settings):
    config, _ = settings(tensor_parallel=2, sequence_parallel=True, sizes={"tp": 2, "pp": 2, "cp": 3})
    parallel = (config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size)
    assert parallel == (2, 2, 3)
    assert config.sequence_parallel
    assert (config.variable_seq_lengths, config.pipeline_dtype) == (True, torch.float32)  # packs differ in length
    alone, _ = settings(sequence_parallel=True)
    assert (alone.sequence_parallel, alone.variable_seq_lengths) == (False, False)
    assert config.calculate_per_token_loss


def test_bfloat16_is_said_in_all_places(settings):
    config, _ = settings(dtype="bfloat16")
    assert (config.bf16, config.params_dtype, config.pipeline_dtype) == (True, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("cuda", "recompute", "expected"),
    [
        (False, "none", (None, None)),
        (False, "selective", ("selective", ["layernorm", "mlp"])),
        (True, "selective", ("selective", ["mlp"])),
        (True, "full", ("full", None)),
    ],
)
def test_recompute(settings, cuda, recompute, expected):
    config, _ = settings(cuda=cuda, dtype="bfloat16", recompute=recompute)
    modules = config.recompute_modules if recompute == "selective" else None
    assert (config.recompute_granularity, modules) == expected
    assert (config.recompute_method, config.recompute_num_layers) == (("uniform", 1) if recompute == "full" else (None, None))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
def test_recomputed_activations_give_the_same_update(kit, trainer_of, name, recompute):
    plain, recomputed = trainer_of(name), trainer_of(name, recompute=recompute)
    assert kit.run_updates(plain, 2) == kit.run_updates(recomputed, 2)
    assert kit.largest_difference(kit.weights(plain), kit.weights(recomputed)) == 0.0


@pytest.mark.parametrize(("wish", "recipe"), [("hybrid", "tensorwise"), ("e4m3", "blockwise")])
def test_fp8_reaches_megatron(settings, wish, recipe):
    config, stack = settings(cuda=True, dtype="bfloat16", fp8=wish, recompute="selective")
    assert (config.fp8, config.fp8_recipe, stack.token_multiple) == (wish, recipe, 128)
    assert settings(cuda=True, dtype="bfloat16")[0].fp8 is None


def test_buffers_overlap_and_are_padded_for_many_replicas_on_gpus_only(monkeypatch):
    def found(dp: int, overlap: bool):
        made = ddp_config(groups(dp=dp), overlap=overlap)
        assert made.use_distributed_optimizer
        assert made.grad_reduce_in_fp32
        assert (made.average_in_collective, made.check_for_nan_in_grad) == (False, False)
        return made.overlap_grad_reduce, made.overlap_param_gather, made.pad_buckets_for_high_nccl_busbw

    assert found(4, False) == (False, False, False)
    assert found(512, True) == (True, True, False)  # gloo
    monkeypatch.setattr(host_platform, "is_host", lambda: False)
    assert (found(4, True), found(512, True)) == ((True, True, False), (True, True, True))


def test_this_machine_is_looked_at_without_importing_anything(monkeypatch):
    """`installed` finds by specification; what is found on a CPU isn't taken."""
    looked = []
    monkeypatch.setattr(environment, "find_spec", lambda name: looked.append(name) or object())
    policy = PolicyConfig(model="", dtype="bfloat16")
    assert policy_stack("main", policy, replicas=4).attention == "sdpa"
    assert looked == list(PACKAGES)
    monkeypatch.setattr(host_platform, "is_host", lambda: False)
    taken = policy_stack("main", policy, replicas=4)
    assert (taken.layers, taken.attention, taken.overlap) == ("Transformer Engine", "transformer-engine", True)
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    assert policy_stack("main", policy, replicas=1).attention == "sdpa"
    with pytest.raises(ConfigError, match=r"policies.main.fp8 is 'hybrid'"):
        policy_stack("main", policy.model_copy(update={"fp8": "hybrid"}), replicas=1)


def test_a_module_that_was_ruled_out_is_not_found():
    assert installed("json", "no_such_module") == {"json": True, "no_such_module": False}
    assert sys.modules["transformer_engine"] is None
    assert installed("transformer_engine") == {"transformer_engine": False}


@pytest.mark.parametrize("name", ["llama-untied", "qwen2-tied", "qwen3-untied"])
def test_the_memory_estimate_counts_what_is_built(world, models, name):
    """The policy's parameters, its adapters', and a critic's without the output layer."""
    policy, layout = PolicyConfig(model="", lora=LoraConfig(rank=3)), world.layout()
    architecture, stack = read_architecture(models / name), policy_stack("main", policy, replicas=1)
    share = memory.Share(policy, (0,), 0)
    with layout.active():
        model = model_module.build_model(architecture, transformer_config(architecture, policy, layout, stack), layout, stack)
        assert memory.rank_parameters(architecture, share) == sum(parameter.numel() for parameter in model.parameters())
        headless = [parameter.numel() for key, parameter in model.named_parameters() if key != "output_layer.weight"]
        assert memory.rank_parameters(architecture, share, head=False) == sum(headless)
        add_adapters(model, policy.lora, layout, seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert memory.adapter_parameters(architecture, policy.lora, share) == trained


PROGRAM = """
import sys
from pathlib import Path
from drmas.config.schema import PolicyConfig
from drmas.policy.groups import Groups, init_distributed
from drmas.policy.architecture import read_architecture
from drmas.policy.megatron_config import policy_stack, transformer_config
from drmas.policy.model import build_model
from drmas.policy.rng import PolicyRng

init_distributed()
architecture, policy, layout = read_architecture(Path(sys.argv[1])), PolicyConfig(model=""), Groups().layout()
stack = policy_stack("main", policy, replicas=1)
with layout.active(), PolicyRng(0, tp_rank=0).lent():
    model = build_model(architecture, transformer_config(architecture, policy, layout, stack), layout, stack)
print(stack.attention, sum(parameter.numel() for parameter in model.parameters()) > 0)
print([name for name in sys.modules if name.partition(".")[0] in ("transformer_engine", "flash_attn") and sys.modules[name]])
"""


def test_a_cpu_never_imports_the_gpu_packages(models, tmp_path):
    """They are found on the path here, and would end the process, as they do where no CUDA library is."""
    for name in ("transformer_engine", "flash_attn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import os\nos._exit(17)\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(models / "qwen3-tied")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["sdpa True", "[]"]
