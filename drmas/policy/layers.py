"""The two layer pieces that Megatron lacks without TransformerEngine: an RMSNorm and an attention over packed rows.

Used by `drmas.policy.model` where `drmas.core.layers` doesn't choose TransformerEngine. Context parallelism is not supported
here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from drmas.policy import host_platform


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) that may run under sequence parallelism, which Megatron's own refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=host_platform.device()))
        # Each rank sees its part of the sequence only; Megatron sums the gradients of parameters marked so.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal attention of packed rows on torch's scaled_dot_product_attention: no row sees another, none is padded."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.tp_group = pg_collection.tp  # asked for when the module is checkpointed

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query [T, heads, d], key and value [T, kv_heads, d] of rows laid end to end -> [T, heads, d]."""
        starts = packed_seq_params.cu_seqlens_q
        lengths = (starts[1:] - starts[:-1]).tolist()
        if len(set(lengths)) == 1:  # one call for all rows
            return self._attend(*(x.view(len(lengths), lengths[0], *x.shape[1:]) for x in (query, key, value))).flatten(0, 1)
        rows = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(*(x.unsqueeze(0) for x in row)).squeeze(0) for row in rows])

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[rows, length, heads, d] -> the same shape."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2)
