"""The Megatron model against transformers, logits and gradients: weights, packing, rotary positions, attention, layouts."""

from __future__ import annotations

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

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


@pytest.fixture(scope="session")
def bare() -> ModuleType:
    """model_kit.py, imported from its file, since test modules can't import each other."""
    spec = spec_from_file_location("model_kit", Path(__file__).with_name("model_kit.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def references(bare, models):
    """(loss per row, gradients) of transformers, by model."""
    return cache(lambda name: bare.reference(models / name, bare.tree_rows()))


@pytest.fixture(scope="session")
def on_two_ranks(world, models, tmp_path_factory, kit):
    return kit.launch("attention_ranks.py", 2, models, tmp_path_factory.mktemp("attention"))


def assert_equal(found, expected, *, rounding: float = 3e-5) -> None:
    """Losses, and each gradient relative to its own largest element."""
    torch.testing.assert_close(found[0], expected[0], atol=rounding, rtol=0)
    assert found[1].keys() == expected[1].keys()
    for name, wanted in expected[1].items():
        assert (found[1][name] - wanted).abs().max() < rounding * wanted.abs().max(), name


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_transformers(bare, references, world, models, name, sharing):
    built = bare.Built(models / name, world)
    losses = built.run(bare.tree_rows(), share_prefixes=sharing)
    assert_equal((losses, built.gradients()), references(name))


def test_microbatches_add_up(bare, references, world, models):
    built = bare.Built(models / "qwen2-tied", world)
    losses = built.run(bare.tree_rows(), passes=3)
    loss, gradients = references("qwen2-tied")
    assert_equal((losses, {name: value / 3 for name, value in built.gradients().items()}), (loss, gradients))


@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "tp2-sp full", "tp2-sp selective", "cp2"])
@pytest.mark.parametrize("name", ["qwen2-untied", "qwen3-tied"])
def test_gradients_equal_transformers_on_two_ranks(references, on_two_ranks, name, layout):
    assert_equal(on_two_ranks[f"{name}/{layout}"], references(name))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_bits(bare, world, models, recompute):
    found = []
    for each in ("none", recompute):
        built = bare.Built(models / "qwen3-tied", world, recompute=each)
        found.append((built.run(bare.tree_rows()), built.gradients()))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


def test_bfloat16_is_as_close_to_float32_as_transformers(bare, references, world, models):
    exact, gradients = references("qwen3-untied")
    built = bare.Built(models / "qwen3-untied", world, dtype="bfloat16")
    losses = built.run(bare.tree_rows())
    their_losses, theirs = bare.reference(models / "qwen3-untied", bare.tree_rows(), torch.bfloat16)
    assert (losses - exact).abs().max() < 2 * (their_losses - exact).abs().max()
    ours = built.gradients()
    for name, wanted in gradients.items():
        error, their_error = ((each[name].float() - wanted).norm() for each in (ours, theirs))
        assert error < 1.5 * their_error, name


def test_what_is_kept_between_the_passes(bare, world, models):
    """Per token of a layer: the two norms' inputs, the rotated query and key, the value, the attention's output and its
    log-sum-exp, gate and up, and two numbers of the norms. Not what the linear layers read."""
    built, rows = bare.Built(models / "llama-untied", world), bare.tree_rows()
    packed = bare.pack([rows[number] for number in (0, 1, 2, 3, 5)], device=torch.device("cpu"))  # no two of one length
    tokens, kept = packed.ids.shape[1], {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with built.groups.active(), built.rng.lent(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        built.model(packed.ids, packed.positions, None, packed_seq_params=packed.params)
    masks = [batch.mask for batch in packed.params.prepared.batches if batch.mask is not None]  # the same in all layers
    for known in (*built.model.parameters(), *masks):
        kept.pop(known.untyped_storage()._cdata, None)
    hidden, heads, kv_heads, dim, ffn, layers = 32, 4, 2, 8, 64, 2
    layer = 2 * hidden + (2 * heads + 2 * kv_heads) * dim + heads + 2 * ffn + 2
    last = hidden + 1 + 2  # the final norm, and the ids, which are int64
    more = sum(storage.nbytes() for storage in kept.values()) - 4 * tokens * (layers * layer + last)
    assert 0 <= more <= layers * 1024  # the room behind gate and up
