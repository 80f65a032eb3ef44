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
