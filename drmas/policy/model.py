"""A Megatron GPTModel of a Hugging Face architecture, whose forward ends at the hidden states.

Logits are never formed here: `drmas.policy.head` takes log-probs and gradients from the hidden states. Layers are
TransformerEngine's, or Megatron's with the parts of `layers`, `attention` and `rotary` beside this file, as `drmas.core.stack`
decided. Weights are random until `convert.load_hf` fills them. Called by the trainer inside `PolicyGroups.active`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from drmas.core.stack import Stack
from drmas.policy import host_platform
from drmas.policy.architecture import Architecture
from drmas.policy.attention import CoreAttention, PackedSelfAttention, SdpaAttention
from drmas.policy.groups import PolicyGroups
from drmas.policy.layers import ColumnLinear, RMSNorm, RowLinear, SwiGLU, TokenEmbedding
from drmas.policy.rotary import Rotary


class PolicyModel(GPTModel):
    """GPTModel that returns hidden states: [T, 1, hidden], under sequence parallelism [T / tp, 1, hidden].

    On the pipeline's last stage they are behind the final norm. The output layer stays a module, so that its initialisation,
    tying, checkpoint keys and conversion are Megatron's. `rotary` turns position ids into what the layers rotate by; None where
    TransformerEngine does that.
    """

    def __init__(self, *, rotary: Rotary | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rotary = rotary

    def _preprocess(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> tuple[Any, ...]:
        embedded, rotary, *rest = super()._preprocess(input_ids, position_ids, **options)
        return embedded, rotary if self.rotary is None else self.rotary(position_ids), *rest

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    @property
    def head_weight(self) -> torch.Tensor:
        """[padded vocabulary / tp, hidden], on the last stage: the output layer's own weight, or the embedding's where they are
        tied. The last of several stages holds a copy of a tied embedding."""
        return (
            self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        )


def _block_spec(config: TransformerConfig, stack: Stack, pp_rank: int) -> TransformerBlockSubmodules:
    if stack.layers == "Transformer Engine":  # read from Megatron's source; no machine with CUDA ran it yet
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, pp_rank=pp_rank)
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnLinear,
        core_attention=_core_attention(stack),
        linear_proj=RowLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(PackedSelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnLinear, activation_func=SwiGLU, linear_fc2=RowLinear)),
        mlp_bda=get_bias_dropout_add,
        # Checkpoints have TransformerEngine's names, so that either kind of layers opens them.
        sharded_state_dict_keys_map={
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        },
    )
    return TransformerBlockSubmodules(
        layer_specs=[ModuleSpec(TransformerLayer, submodules=layer)] * get_num_layers_to_build(config, pp_rank=pp_rank),
        layer_norm=RMSNorm,
    )


def _core_attention(stack: Stack) -> type[CoreAttention]:
    if stack.attention == "sdpa":
        return SdpaAttention
    from drmas.policy.flex import FlexAttention

    return FlexAttention


def build_model(architecture: Architecture, config: TransformerConfig, groups: PolicyGroups, stack: Stack) -> PolicyModel:
    """This rank's shard of the model, with random weights, on `host_platform.device()`."""
    fused = stack.layers == "Transformer Engine"
    model = PolicyModel(
        rotary=None if fused else Rotary(architecture, config.params_dtype),
        config=config,
        transformer_layer_spec=_block_spec(config, stack, groups.pp.rank()),
        vocab_size=architecture.padded_vocab(groups.tp.size()),
        max_sequence_length=architecture.max_positions,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope" if fused else "none",
        rotary_base=architecture.rope_theta,
        pg_collection=groups.collection,
    )
    if not fused and groups.is_first_stage:
        _adopt_embedding(model)
    if fused and architecture.inverse_frequencies is not None:
        model.rotary_pos_emb.inv_freq = architecture.inverse_frequencies.to(host_platform.device())
    return model


def _adopt_embedding(model: PolicyModel) -> None:
    """Make the token embedding ours, which the layer spec has no place for.

    Megatron wants zeros for the gradient that a tied head put into main_grad by itself, because the embedding's is added to
    them. Ours goes into main_grad too, and the head's stand-in serves both.
    """
    embedding = model.embedding.word_embeddings
    embedding.__class__ = TokenEmbedding
    embedding.weight.head_stands_in = getattr(embedding.weight, "zero_out_wgrad", False)
    embedding.weight.zero_out_wgrad = False
