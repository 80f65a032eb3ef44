"""Megatron's settings for a policy: what its TransformerConfig and its data-parallel buffers say, and the stack behind them.

Called where a model or an optimiser is built: by the trainer, the reference, the critic and `drmas.policy.optimizer`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from drmas.config.schema import PolicyConfig
from drmas.core.stack import FP8_RECIPES, PACKAGES, Stack, choose_stack
from drmas.policy import host_platform
from drmas.policy.architecture import Architecture
from drmas.policy.groups import PolicyGroups
from drmas.policy.timers import SpanTimers
from drmas.telemetry.environment import installed

_MANY_REPLICAS = 64
"""From here on NCCL's messages, a bucket divided by the replicas, are short enough for their alignment to matter."""


def policy_stack(name: str, config: PolicyConfig, *, replicas: int) -> Stack:
    """`choose_stack` on this machine. `replicas` as there. ConfigError: what it refuses."""
    return choose_stack(name, config, cuda=not host_platform.is_host(), packages=installed(*PACKAGES), replicas=replicas)


def transformer_config(
    architecture: Architecture, config: PolicyConfig, groups: PolicyGroups, stack: Stack
) -> TransformerConfig:
    """Megatron's configuration. One per model: Megatron writes its hooks into it."""
    dtype = getattr(torch, config.dtype)
    fused = stack.layers == "Transformer Engine"
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=not fused,  # Megatron's name for taking the activation's module from the layer spec
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,  # the output layer would demand APEX; the head accumulates by itself
        persist_layer_norm=False,
        perform_initialization=False,  # weights are loaded next, and drawing SmolLM2's first takes a second
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        timers=SpanTimers(),
        calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged (I5)
        **_parallel(config, groups, dtype),
        **_recompute(config, fused=fused),
        **({"fp8": stack.fp8, "fp8_recipe": FP8_RECIPES[stack.fp8]} if stack.fp8 else {}),
    )


def _parallel(config: PolicyConfig, groups: PolicyGroups, dtype: torch.dtype) -> dict[str, Any]:
    sizes = groups.sizes()
    return {
        "tensor_model_parallel_size": sizes["tp"],
        "pipeline_model_parallel_size": sizes["pp"],
        "context_parallel_size": sizes["cp"],
        "sequence_parallel": config.sequence_parallel and sizes["tp"] > 1,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": sizes["pp"] > 1,  # packs differ in length, so stages tell each other the shape first
        "moe_token_dispatcher_type": "alltoall",  # the default forbids variable lengths, of dense models too
        "deallocate_pipeline_outputs": True,
    }


def _recompute(config: PolicyConfig, *, fused: bool) -> dict[str, Any]:
    """What the backward pass computes again. TransformerEngine's norms are inside its linear layers, which see to it."""
    if config.recompute == "none":
        return {}
    if config.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": ["mlp"] if fused else ["layernorm", "mlp"]}


def ddp_config(groups: PolicyGroups, *, overlap: bool) -> DistributedDataParallelConfig:
    """The gradient and parameter buffers' configuration. One per model: Megatron writes the bucket size into it.

    Buckets are Megatron's own where `overlap` is on (at least 40 M parameters, more with many replicas), and one without.
    Non-finite gradients are found in the norm, without a synchronisation per bucket.
    """
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        check_for_nan_in_grad=False,
        pad_buckets_for_high_nccl_busbw=overlap and not host_platform.is_host() and groups.dp_cp.size() >= _MANY_REPLICAS,
    )
