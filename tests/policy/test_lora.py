"""Adapters on a frozen base: the same numbers as merged by hand, on every layout; a base that several policies share."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from drmas.config.schema import LoraConfig
from drmas.errors import ModelError
from drmas.policy import lora
from drmas.policy.convert import WeightSource
from drmas.policy.export import write_hf_folder

NAMES = ["llama-untied", "qwen2-tied", "qwen3-tied", "qwen3-one-kv-head"]
ON_TWO_RANKS = [
    f"{name}/{layout}" for name in ("qwen3-tied", "qwen2-untied", "qwen3-one-kv-head") for layout in ("tp2", "tp2-sp", "pp2")
]


@pytest.fixture(scope="session")
def hand() -> ModuleType:
    """lora_kit.py."""
    spec = importlib.util.spec_from_file_location("lora_kit", Path(__file__).with_name("lora_kit.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["lora_kit"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def adapters(hand, models, tmp_path_factory) -> Path:
    """A folder with adapters, drawn by hand, for each model."""
    root = tmp_path_factory.mktemp("adapters")
    for folder in models.iterdir():
        hand.write_adapters(root / folder.name, hand.draw_adapters(hand.read_architecture(folder)))
    return root


@pytest.fixture(scope="session")
def two(kit, models, adapters) -> dict:
    """What lora_ranks.py found on two ranks."""
    return kit.launch("lora_ranks.py", 2, models, adapters)


@pytest.fixture(scope="session")
def expected(hand, kit, models, adapters):
    """expected(name): the adapted and the base model by hand, and the norm of the adapters' gradient."""

    def compute(name: str) -> dict:
        found = hand.by_hand(models / name, hand.read_tensors(adapters / name), kit.make_rows())
        own = [value for key, value in found["gradients"].items() if not is_copy(key)]
        norm = torch.cat([value.flatten() for value in own]).double().norm().item()
        return found | {"base": hand.by_hand(models / name, {}, kit.make_rows())["hidden"], "norm": norm}

    return {name: compute(name) for name in {*NAMES, "qwen2-untied"}}.__getitem__


def is_copy(name: str) -> bool:
    """Whether it is one of the further names of an A that fused layers share."""
    return "lora_A" in name and name.split(".")[-3] in ("k_proj", "v_proj", "up_proj")


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= tolerance * max(tensor.abs().max().item(), 1e-3), name


@pytest.fixture
def policy_of(hand, world, models, adapters):
    """policy_of("qwen3-tied"): a policy on this process with the adapters drawn by hand; read=False leaves the first ones."""

    def make(name: str, *, read: bool = True, **settings):
        policy = hand.Policy(models / name, world, **settings)
        if read:
            policy.read(adapters / name)
        return policy

    return make


@pytest.mark.parametrize("name", NAMES)
def test_new_adapters_change_nothing(hand, kit, policy_of, name):
    plain, adapted = policy_of(name, read=False, config=None), policy_of(name, read=False)
    assert torch.equal(plain.run(kit.make_rows()), adapted.run(kit.make_rows()))
    initial = adapted.adapters()
    assert all(tensor.any() == ("lora_A" in key) for key, tensor in initial.items())
    bound = {key: tensor.shape[1] ** -0.5 for key, tensor in initial.items() if "lora_A" in key}
    assert all(0.8 * bound[key] < initial[key].abs().max() <= bound[key] for key in bound)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_equal_those_of_weights_merged_by_hand(kit, policy_of, expected, name, recompute):
    policy = policy_of(name, recompute=recompute)
    policy.train()
    hidden = policy.run(kit.make_rows())
    assert (hidden - expected(name)["hidden"]).abs().max() < 2e-5
    assert (hidden - expected(name)["base"]).abs().max() > 0.5  # the adapters matter
    close(policy.adapters(values=lambda parameter: parameter.main_grad), expected(name)["gradients"], 2e-5)
    assert policy.step() == pytest.approx(expected(name)["norm"], rel=1e-5)


def test_inputs_that_can_be_made_again_are_not_kept_for_the_adapters(kit, policy_of):
    policy = policy_of("qwen3-tied")
    policy.train()
    kept = []
    layer = policy.model.decoder.layers[0]
    for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1, layer.mlp.linear_fc2):
        linear.register_forward_hook(lambda _module, inputs, _output: kept.append(inputs[0].untyped_storage().nbytes()))
    policy.run(kit.make_rows())
    assert kept == [0, 0, 0]


@pytest.mark.parametrize("case", ON_TWO_RANKS)
def test_two_ranks_find_the_same_numbers(two, expected, case):
    name, found = case.split("/")[0], two[case]
    assert (found["base"] - expected(name)["base"]).abs().max() < 2e-5
    assert (found["hidden"] - expected(name)["hidden"]).abs().max() < 2e-5
    assert (found["under"] - expected(name)["base"]).abs().max() < 2e-5
    close(found["gradients"], expected(name)["gradients"], 2e-5)
    assert found["norm"] == pytest.approx(expected(name)["norm"], rel=1e-5)  # each factor counted once, also on two ranks


@pytest.mark.parametrize("case", ON_TWO_RANKS)
def test_every_layout_starts_from_the_same_adapters(two, policy_of, case):
    one = policy_of(case.split("/")[0], read=False).adapters()
    assert one.keys() == two[case]["first"].keys()
    assert all(torch.equal(one[name], tensor) for name, tensor in two[case]["first"].items())


def test_seeds_layers_and_targets_draw_apart(policy_of):
    one, other = policy_of("qwen3-tied", read=False), policy_of("qwen3-tied", read=False, seed=2)
    drawn = [tensor.flatten() for each in (one, other) for name, tensor in each.adapters().items() if "lora_A" in name]
    starts = {tuple(tensor[:3].tolist()) for tensor in drawn}
    assert len(starts) == 2 * 2 * 4  # seeds, layers, targets


@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "pp2"])
def test_checkpoints_of_adapters_open_on_another_layout(two, hand, policy_of, adapters, layout):
    assert two["folders"][layout]  # on two ranks
    policy = policy_of("qwen3-tied", read=False)
    policy.load(adapters / f"saved-by-{layout}")
    close(policy.adapters(), hand.read_tensors(adapters / "qwen3-tied"), 0.0)


def test_the_base_under_the_adapters_is_the_reference(kit, policy_of, expected):
    policy = policy_of("qwen3-tied")
    base = policy_of("qwen3-tied", read=False, config=None).run(kit.make_rows())
    with lora.without_adapters(policy.model):
        assert torch.equal(policy.run(kit.make_rows()), base)
    with pytest.raises(KeyError), lora.without_adapters(policy.model):
        raise KeyError
    assert (policy.run(kit.make_rows()) - expected("qwen3-tied")["hidden"]).abs().max() < 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_merged_export_computes_what_the_adapters_do(hand, kit, policy_of, models, expected, tmp_path, name):
    policy = policy_of(name)
    before = {key: value.clone() for key, value in policy.model.named_parameters()}
    source = WeightSource(policy.model, policy.architecture, policy.groups, values=lora.merged(policy.model))
    with policy.active():
        write_hf_folder(source, model_path=models / name, folder=tmp_path / "merged")
    found = hand.by_hand(tmp_path / "merged", {}, kit.make_rows())["hidden"]
    assert (found - expected(name)["hidden"]).abs().max() < 2e-5
    assert all(torch.equal(before[key], value) for key, value in policy.model.named_parameters())


def test_a_bfloat16_merge_is_rounded_once(policy_of):
    policy = policy_of("qwen3-tied", dtype="bfloat16")
    linear = policy.model.decoder.layers[0].mlp.linear_fc1
    exact = linear.weight.double() + 1.5 * linear.lora_b.double() @ linear.lora_a.double()
    found = lora.merged(policy.model)(linear.weight)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.to(torch.bfloat16))


def test_policies_on_one_base_train_apart_and_hold_it_once(hand, kit, policy_of):
    first, second = policy_of("qwen3-tied", read=False, seed=5), policy_of("qwen3-tied", read=False, seed=6)
    other = policy_of("qwen3-untied", read=False)
    for policy in (first, second, other):
        lora.share_base(policy.model, policy.options.model)
    mine, its, others = (dict(each.model.named_parameters()) for each in (first, second, other))
    assert mine.keys() == its.keys()
    for name in mine:
        assert (mine[name].data_ptr() == its[name].data_ptr()) == ("lora" not in name), name
        assert mine[name].data_ptr() != others[name].data_ptr(), name
    before = hand.base_weights(first)
    rows = kit.make_rows()
    start = second.run(rows)
    first.train()
    second.train()
    for _ in range(2):
        first.run(rows)
        first.step()
    assert torch.equal(second.run(rows), start)  # the first's adapters are the first's
    assert (first.run(rows) - start).abs().max() > 1e-3
    second.step()
    assert (second.run(rows) - start).abs().max() > 1e-3
    after = hand.base_weights(second)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(value.grad is None and not hasattr(value, "main_grad") for value in mine.values() if not value.requires_grad)


def test_a_shared_base_goes_with_its_last_user(hand, policy_of):
    key = ("some base",)
    first, second = policy_of("qwen3-tied", read=False), policy_of("qwen3-tied", read=False)
    lora.share_base(first.model, key)
    embedding = weakref.ref(first.model.embedding.word_embeddings.weight)
    lora.share_base(second.model, key)
    del first
    gc.collect()
    third = policy_of("qwen3-tied", read=False)
    lora.share_base(third.model, key)  # the second still holds it
    assert third.model.embedding.word_embeddings.weight is embedding()
    del second, third
    gc.collect()
    assert embedding() is None
    lora.share_base(policy_of("qwen3-one-kv-head", read=False).model, key)  # and the key is free again


def test_a_frozen_model_shares_with_a_base(policy_of):
    frozen, adapted = policy_of("qwen3-tied", read=False, config=None), policy_of("qwen3-tied")
    frozen.model.requires_grad_(False)
    lora.share_base(frozen.model, "key")
    lora.share_base(adapted.model, "key")
    assert adapted.model.decoder.layers[1].mlp.linear_fc1.weight is frozen.model.decoder.layers[1].mlp.linear_fc1.weight


def test_another_shape_under_one_key_is_refused(policy_of):
    one, other = policy_of("qwen3-tied", read=False), policy_of("qwen3-one-kv-head", read=False)
    lora.share_base(one.model, "key")
    with pytest.raises(ModelError, match=r"linear_qkv.weight is \(\(96, 32\), .*\) in a policy and \(\(128, 32\)"):
        lora.share_base(other.model, "key")


def test_targets_pick_the_layers(kit, hand, models, world, tmp_path):
    config = LoraConfig(rank=4, alpha=6.0, targets=["fc1", "proj", "fc1"])
    policy = hand.Policy(models / "qwen3-tied", world, config=config)
    tensors = hand.draw_adapters(policy.architecture, layers=("o_proj", "gate_proj", "up_proj"))
    assert policy.adapters().keys() == tensors.keys()
    hand.write_adapters(tmp_path / "some", tensors)
    with pytest.raises(ModelError, match=r"target_modules is .*set policies.NAME.lora.targets to fit"):
        policy.read(tmp_path / "some")
    with policy.active():
        hand.peft.read_peft_folder(policy.model, policy.architecture, policy.groups, config, tmp_path / "some")
    expected = hand.by_hand(models / "qwen3-tied", tensors, kit.make_rows())["hidden"]
    assert (policy.run(kit.make_rows()) - expected).abs().max() < 2e-5


class NormedLinear(ColumnParallelLinear):
    """As TransformerEngine's fused layer: it takes what comes before the norm."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.config.layernorm_epsilon))


def test_layers_with_a_fused_norm_keep_their_attributes_and_adapt_the_normed_input(
    hand, kit, world, models, adapters, expected
):
    policy = hand.Policy(models / "qwen3-tied", world, config=None)
    for layer in policy.model.decoder.layers:
        for linear, owner in (
            (layer.self_attention.linear_qkv, "input_layernorm"),
            (layer.mlp.linear_fc1, "pre_mlp_layernorm"),
        ):
            linear.__class__ = NormedLinear
            linear.layer_norm_weight = getattr(layer, owner).weight
            setattr(layer, owner, torch.nn.Identity())
    with policy.active():
        lora.add_adapters(policy.model, hand.LORA, policy.groups, seed=1)
    policy.read(adapters / "qwen3-tied")
    assert (policy.run(kit.make_rows()) - expected("qwen3-tied")["hidden"]).abs().max() < 2e-5
    assert isinstance(policy.model.decoder.layers[0].mlp.linear_fc1, NormedLinear)


@pytest.mark.parametrize("layout", ["one", "tp2", "tp2-sp", "pp2"])
def test_a_written_folder_holds_what_was_read(hand, policy_of, adapters, models, tmp_path, request, layout):
    if layout == "one":
        policy_of("qwen3-tied").write(tmp_path / "written")
        folder = tmp_path / "written"
    else:
        request.getfixturevalue("two")
        folder = adapters / f"written-by-{layout}"
    close(hand.read_tensors(folder), hand.read_tensors(adapters / "qwen3-tied"), 0.0)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "CAUSAL_LM", 4, 6.0)
    assert config["base_model_name_or_path"] == str(models / "qwen3-tied")
    projections = ("q", "k", "v", "o", "gate", "up", "down")
    assert set(config["target_modules"]) == {f"{each}_proj" for each in projections}


LAYER = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("damage", "changes", "message"),
    [
        (lambda tensors: None, {"r": 8}, r"r is 8; expected 4; set policies.NAME.lora.rank to fit"),
        (lambda tensors: None, {"lora_alpha": 8}, r"lora_alpha is 8; expected 6.0; set policies.NAME.lora.alpha to fit"),
        (lambda tensors: None, {"use_dora": True}, r"use_dora is True; expected False"),
        (lambda tensors: tensors.pop(f"{LAYER}.mlp.up_proj.lora_B.weight"), {}, r"has no .*up_proj.lora_B.weight'"),
        (lambda tensors: tensors.update(strange=torch.zeros(1)), {}, r"has 'strange', for which policies.NAME.lora.targets"),
        (lambda tensors: tensors[f"{LAYER}.self_attn.k_proj.lora_A.weight"].mul_(2), {}, r"k_proj.* differs from .*q_proj"),
        (
            lambda tensors: tensors.update({f"{LAYER}.self_attn.o_proj.lora_A.weight": torch.zeros(4, 3)}),
            {},
            r"o_proj.lora_A.weight' has shape \(4, 3\); expected \(4, 64\)",
        ),
    ],
    ids=["rank", "alpha", "dora", "missing", "strange", "own A", "shape"],
)
def test_a_folder_that_does_not_fit_is_refused_and_changes_nothing(hand, policy_of, tmp_path, damage, changes, message):
    policy = policy_of("qwen3-tied")
    before = policy.adapters()
    tensors = hand.draw_adapters(policy.architecture, seed=4)
    damage(tensors)
    hand.write_adapters(tmp_path / "bad", tensors, **changes)
    with pytest.raises(ModelError, match=message):
        policy.read(tmp_path / "bad")
    close(policy.adapters(), before, 0.0)


def test_a_missing_folder_is_refused(policy_of, tmp_path):
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        policy_of("qwen3-tied").read(tmp_path)
