"""A Megatron GPTModel of a Hugging Face architecture, whose forward ends at the hidden states.

Logits are never formed here: `drmas.policy.head` takes log-probs and gradients from the hidden states. Layers are
TransformerEngine's or Megatron's own with `drmas.policy.layers`, by the rule of `drmas.core.layers`. Weights are random until
`convert.load_hf` fills them. Called by the trainer inside `PolicyGroups.active`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from drmas.config.schema import PolicyConfig
from drmas.core.layers import trainer_layers
from drmas.policy import host_platform
from drmas.policy.architecture import Architecture
from drmas.policy.groups import PolicyGroups
from drmas.policy.layers import PackedAttention, RMSNorm


class PolicyModel(GPTModel):
    """GPTModel that returns hidden states after the final norm: [T, 1, hidden], under sequence parallelism [T / tp, 1, hidden].

    The output layer stays a module, so that its initialisation, tying, checkpoint keys and conversion are Megatron's.
    """

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    @property
    def head_weight(self) -> torch.Tensor:
        """[padded vocabulary / tp, hidden]: the output layer's own weight, or the embedding's where they are tied."""
        return (
            self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        )


def takes_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether a model of this dtype is built from TransformerEngine's layers here."""
    cuda, package = not host_platform.is_host(), find_spec("transformer_engine") is not None
    return trainer_layers(str(dtype).removeprefix("torch."), cuda=cuda, transformer_engine=package) == "Transformer Engine"


def transformer_config(architecture: Architecture, config: PolicyConfig, *, tp: int) -> TransformerConfig:
    """Megatron's configuration. One per policy: Megatron writes its hooks into it."""
    dtype = getattr(torch, config.dtype)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    fused = takes_transformer_engine(dtype)
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
        tensor_model_parallel_size=tp,
        sequence_parallel=config.sequence_parallel and tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged (I5)
        **(recompute if config.recompute else {}),
    )


def _block_spec(config: TransformerConfig, pp_rank: int) -> TransformerBlockSubmodules:
    if takes_transformer_engine(config.params_dtype):  # read from Megatron's source; no machine with CUDA ran it yet
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, pp_rank=pp_rank)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, pp_rank=pp_rank), layer_norm=RMSNorm
    )


def build_model(architecture: Architecture, config: TransformerConfig, groups: PolicyGroups) -> PolicyModel:
    """This rank's shard of the model, with random weights, on `host_platform.device()`."""
    model = PolicyModel(
        config=config,
        transformer_layer_spec=_block_spec(config, groups.pp.rank()),
        vocab_size=architecture.padded_vocab(groups.tp.size()),
        max_sequence_length=architecture.max_positions,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        pg_collection=groups.collection,
    )
    if architecture.inverse_frequencies is not None:
        model.rotary_pos_emb.inv_freq = architecture.inverse_frequencies.to(host_platform.device())
    return model
