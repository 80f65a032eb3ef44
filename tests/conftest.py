"""Fixtures that more than one part uses."""

from __future__ import annotations

import os

# The suite states exact numerics of the CPU, so a GPU is hidden from it and from every process that it starts, unless the
# kernels' tests are asked to run on one (DRMAS_TEST_DEVICE=cuda pytest tests/kernels). CUDA reads this once, at its first use.
# Triton decides at its import whether kernels can be interpreted; its variable is gone again before anything else is imported,
# so that no process inherits it. Hence all this stands before anything that imports torch.
if os.environ.get("DRMAS_TEST_DEVICE") != "cuda":
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"})

import triton.experimental.gluon

os.environ.pop("TRITON_INTERPRET", None)

import json
from hashlib import sha1
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if no_thinking %}<think></think>{% endif %}{% endif %}"
)


def _byte_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per UTF-8 byte, three special tokens, a chat template in the style of ChatML."""
    return _byte_tokenizer(CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """The same bytes without a chat template: prompts are what the team writes."""
    return _byte_tokenizer(None)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """hub_cache("models--a--b", commit, files, listed=names): a copy in a cache of the hub's own layout, to which refs/main
    points; its folder. `listed` are the names that the repository has, where the cache knows them. The hub is offline.
    """
    root = tmp_path / "hub_cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def made(repository: str, commit: str, files: dict[str, str | bytes], *, listed: list[str] | None = None) -> Path:
        place = root / repository
        copy = place / "snapshots" / commit
        for folder in (copy, place / "refs", place / "blobs", place / "trees"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            content = content.encode() if isinstance(content, str) else content
            blob = place / "blobs" / sha1(content).hexdigest()
            blob.write_bytes(content)
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).symlink_to(blob)
        (place / "refs" / "main").write_text(commit)
        if listed is not None:
            entries = {name: {"size": 1, "blob_id": "0" * 40} for name in listed}
            (place / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": entries}))
        return copy

    return made
