from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from drmas.envs.search.encoder import PACKAGED, Encoder, encoder_folder
from drmas.errors import ModelError


@pytest.fixture
def copy(tmp_path):
    """The packaged encoder as a folder of this name, with these JSON files changed (None: removed)."""

    def make(name: str = "encoder", **files: dict | None):
        folder = tmp_path / name
        shutil.copytree(encoder_folder(PACKAGED), folder)
        for file, content in files.items():
            path = folder / {"prompts": "config_sentence_transformers.json", "pooling": "1_Pooling/config.json"}.get(file, file)
            path.unlink() if content is None else path.write_text(json.dumps(content))
        return folder

    return make


def test_the_packaged_encoder_has_no_prompts():
    encoder = Encoder()
    assert (encoder.query_prompt, encoder.passage_prompt, encoder.size) == ("", "", 384)


def test_equal_texts_get_equal_vectors_whatever_they_stand_beside():
    encoder = Encoder(batch_size=2)
    texts = ["Lima", "a much longer text about the capital of Peru on the Pacific coast", "Lima", "tungsten"]
    vectors = encoder.passages(texts)
    np.testing.assert_allclose(vectors, np.concatenate([encoder.passages([text]) for text in texts]), atol=1e-6)
    assert vectors.dtype == np.float32
    assert encoder.passages([]).shape == (0, 384)


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("e5-base-v2", {}, ("query: ", "passage: ")),
        ("multilingual_E5_small", {}, ("query: ", "passage: ")),
        ("one5", {}, ("", "")),
        ("e5", {"prompts": {"prompts": {"query": "ask: ", "document": "text: "}}}, ("ask: ", "text: ")),
        ("mine", {"prompts": {"prompts": {"query": "ask: ", "document": ""}}}, ("ask: ", "")),
        ("mine", {"prompts": None}, ("", "")),
    ],
)
def test_prompts_follow_the_folder(copy, name, files, expected):
    encoder = Encoder(str(copy(name, **files)))
    assert (encoder.query_prompt, encoder.passage_prompt) == expected
    plain = Encoder()
    np.testing.assert_allclose(encoder.queries(["Lima"]), plain.queries([expected[0] + "Lima"]), atol=1e-6)
    np.testing.assert_allclose(encoder.passages(["Lima"]), plain.passages([expected[1] + "Lima"]), atol=1e-6)


def test_the_first_token_is_taken_where_the_folder_says_so(copy):
    mean, first = Encoder(), Encoder(str(copy(pooling={"pooling_mode_cls_token": True})))
    assert np.abs(mean.queries(["Lima"]) - first.queries(["Lima"])).max() > 0.01
    assert mean.fingerprint() != first.fingerprint()


def test_a_folder_that_is_no_encoder_is_named(copy, tmp_path):
    with pytest.raises(ModelError, match=r"no config.json there; expected a Hugging Face folder"):
        Encoder(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="the packaged one is 'packaged:all-minilm-l6-v2'"):
        Encoder("packaged:e5")
    with pytest.raises(ModelError, match=r"no model.safetensors there"):
        Encoder(str(copy("pickled", **{"model.safetensors": None})))


def test_code_that_a_folder_brings_is_not_run(copy, tmp_path):
    folder = copy()
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="transformers can't read"):
        Encoder(str(folder))
    assert not (tmp_path / "ran").exists()
