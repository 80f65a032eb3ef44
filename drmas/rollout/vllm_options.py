"""Which engine arguments of vLLM a user may set: `engine.options`, checked before a process is started.

An allow-list, because most of vLLM's arguments either change what is sampled (quantisation, overrides of the model's
configuration, a cache of lower precision), which the trainer would not mirror (I11), or name code to import (logits processors,
schedulers, `compilation_config`), or keep weights where an update can't follow (LoRA, offloading). Called by `vllm_engine`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from drmas.core.names import expected_names
from drmas.errors import EngineStartError

ALLOWED = frozenset(
    {
        # capacity and scheduling
        "block_size",
        "enable_chunked_prefill",
        "max_num_batched_tokens",
        "num_gpu_blocks_override",
        "scheduler_reserve_full_isl",
        "watermark",
        # how the same computation is executed
        "attention_backend",
        "cudagraph_capture_sizes",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "enable_flashinfer_autotune",
        "enforce_eager",
        "max_cudagraph_capture_size",
        "optimization_level",
        # start and patience
        "cpu_distributed_timeout_seconds",
        "distributed_timeout_seconds",
        "safetensors_load_strategy",
    }
)

OWN_KEYS = {
    "dtype": "dtype",
    "gpu_memory_utilization": "gpu_memory_fraction",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "max_model_len": "max_model_tokens",
    "max_num_seqs": "max_concurrent",
    "tensor_parallel_size": "tensor_parallel",
}
"""vLLM's name -> the key of an engine's configuration that sets it."""

DEFAULTS = frozenset({"max_num_batched_tokens"})
"""What drmas sets, but an option may set otherwise."""


def check_options(policy: str, options: Mapping[str, Any], fixed: Collection[str]) -> None:
    """Refuse an option of `policy`'s engine that isn't the user's to set. EngineStartError: which, and what to write instead.

    `fixed`: the arguments that drmas sets for this engine. Values are left to vLLM.
    """
    for name in options:
        where = f"policies.{policy}.engine.options.{name}"
        if name in OWN_KEYS:
            raise EngineStartError(f"{where} is set by drmas; use policies.{policy}.engine.{OWN_KEYS[name]}")
        if name in fixed and name not in DEFAULTS:
            raise EngineStartError(f"{where} is set by drmas for this device; leave it out")
        if name not in ALLOWED:
            raise EngineStartError(
                f"{where} can't be passed on: only arguments of capacity and scheduling are, because the trainer can't mirror "
                f"one that changes what is sampled (I11) or loads code; {expected_names(name, ALLOWED)}"
            )
