"""Two trainer ranks and a vLLM engine of two workers: torchrun starts it, each rank leaves what it found in a file.

    torchrun --nproc-per-node 2 shard_ranks.py SHARED layouts|faults

`layouts`: two models (a tied head; a head of its own, biases, and fewer key-value heads than workers), each under several
layouts of the ranks, trained and pushed twice by shards, then once more by broadcast. `faults`: what goes wrong in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from drmas.config.schema import EngineConfig, LossConfig, PolicyConfig
from drmas.errors import EngineError, SyncError
from drmas.policy import host_platform
from drmas.policy.batch import PolicyBatch
from drmas.policy.groups import Groups, destroy, init_distributed
from drmas.policy.shard_source import ShardSource
from drmas.policy.trainer import PolicyTrainer
from drmas.rollout.engine import Completion, Sampling
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import character_tokenizer
from drmas.types import Row
from drmas.weights import shards

VOCAB = 131
"""Odd, so that neither two trainer ranks nor two workers share it evenly."""
PROMPTS = [[5, 9, 11], list(range(4, 40)), [70, 6]]
LAYOUTS = {
    "tp2": ({"tensor_parallel": 2}, [0, 1]),
    "pp2": ({"pipeline_parallel": 2}, [0, 1]),
    "dp2": ({}, [0, 1]),
    "apart": ({}, [1]),
}
"""Settings of the policy, and its ranks."""


def write_model(folder: Path, *, tied: bool) -> Path:
    """A random model of 2 layers: Qwen3 with a tied head, or Qwen2 with biases and one key-value head."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config = (Qwen3Config if tied else Qwen2Config)(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2 if tied else 1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **({"head_dim": 32} if tied else {}),
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases that aren't zero, norms that aren't one
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder
