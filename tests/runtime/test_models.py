from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from drmas.errors import ModelError
from drmas.runtime.models import CHARACTERS, TINY, character_tokenizer, resolve_model
from drmas.runtime.placement import parameters


def test_a_tiny_model_is_the_same_for_a_seed_and_another_for_another(tmp_path: Path) -> None:
    first, again = resolve_model(TINY, tmp_path / "a"), resolve_model(TINY, tmp_path / "b")
    other = resolve_model(TINY, tmp_path / "a", seed=1)
    weights = [load_file(folder / "model.safetensors")["model.embed_tokens.weight"] for folder in (first, again, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
    assert parameters(first) == sum(tensor.numel() for tensor in load_file(first / "model.safetensors").values())
    assert not list((tmp_path / "a").glob("*.*"))  # no half-made folder stays


def test_a_made_model_is_used_again(tmp_path: Path) -> None:
    folder = resolve_model(TINY, tmp_path)
    (folder / "mark").write_text("mine")
    assert (resolve_model(TINY, tmp_path) / "mark").read_text() == "mine"


def test_every_character_is_one_token_and_comes_back(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(TINY, tmp_path))
    ids = tokenizer(CHARACTERS, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert character_tokenizer().decode(tokenizer("é1", add_special_tokens=False)["input_ids"]) == "?1"


@pytest.mark.parametrize(
    ("spec", "message"),
    [("no/such/folder", "is no folder"), ("packaged:gpt", "isn't known; drmas can make"), ("tiny:llama", "isn't known")],
)
def test_what_is_no_model_is_named(tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(spec, tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path), tmp_path)
