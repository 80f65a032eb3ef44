"""Weights there and back: exact, in one order, whole on every layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from drmas.errors import ModelError
from drmas.policy.export import write_hf_folder
from drmas.runtime.models import character_tokenizer

MODELS = [f"{family}-{tying}" for family in ("llama", "qwen2", "qwen3") for tying in ("tied", "untied")]


@pytest.mark.parametrize("name", MODELS)
def test_loaded_weights_are_the_folder_s_own(kit, trainer_of, models, name):
    trainer = trainer_of(name)
    expected = load_file(models / name / "model.safetensors")
    found = kit.weights(trainer)
    assert found.keys() == expected.keys()  # a tied head comes once, as the embedding
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_metadata_names_what_iteration_yields(trainer_of):
    source = trainer_of("qwen2-untied").weight_source()
    yielded = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert yielded == source.metadata()
    assert [name for name, _ in source] == [name for name, _, _ in source.metadata()]  # iterates again


def test_export_opens_in_transformers_with_equal_weights_and_tokenizer(kit, world, tmp_path):
    folder = kit.write_model(tmp_path / "model", "qwen3", True)
    character_tokenizer().save_pretrained(folder)
    trainer = kit.make_trainer(folder, world)
    kit.run_updates(trainer, 1)
    trainer.export(tmp_path / "exported")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto").state_dict()
    for name, tensor in trainer.weight_source():
        assert torch.equal(opened[name], tensor), name
    assert torch.equal(opened["lm_head.weight"], opened["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").encode("2+3=") == character_tokenizer().encode("2+3=")
    again = kit.make_trainer(tmp_path / "exported", world)
    assert kit.largest_difference(kit.weights(trainer), kit.weights(again)) == 0.0


def test_export_of_two_tensor_parallel_ranks_is_the_same_folder(two_ranks, models):
    exported = load_file(two_ranks["shared"] / "exported-by-tp2" / "model.safetensors")
    expected = load_file(models / "qwen3-tied" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


def test_large_exports_are_split_into_files_with_an_index(kit, trainer_of, models, world, tmp_path):
    trainer = trainer_of("llama-untied")
    write_hf_folder(trainer.weight_source(), model_path=models / "llama-untied", folder=tmp_path / "split", shard_bytes=20_000)
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    again = kit.make_trainer(tmp_path / "split", world)
    assert kit.largest_difference(kit.weights(trainer), kit.weights(again)) == 0.0


def test_a_bfloat16_export_says_so(kit, trainer_of, tmp_path):
    trainer_of("qwen3-tied", dtype="bfloat16").export(tmp_path / "half")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert opened.dtype == torch.bfloat16


def test_an_export_replaces_an_older_one(trainer_of, tmp_path):
    trainer = trainer_of("qwen3-tied")
    trainer.export(tmp_path / "out")
    (tmp_path / "out" / "stale").touch()
    trainer.export(tmp_path / "out")
    assert not (tmp_path / "out" / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"has no tensor 'model.norm.weight'; its config.json asks for one"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            r"'model.norm.weight' has shape \(3,\); config.json asks for \(32,\)",
        ),
    ],
    ids=["missing", "misshapen"],
)
def test_a_folder_whose_tensors_do_not_fit_is_refused(kit, world, tmp_path, damage, message):
    folder = kit.write_model(tmp_path / "model", "llama", True)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        kit.make_trainer(folder, world)


def test_a_folder_without_safetensors_is_refused(kit, world, tmp_path):
    folder = kit.write_model(tmp_path / "model", "llama", True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="only safetensors are read"):
        kit.make_trainer(folder, world)
