"""Self-attention of our own layers over a pack: which tokens see which is said by `Packing`, not by a mask of the whole pack.

`PackedSelfAttention` is Megatron's module with the rotary embedding of `drmas.policy.rotary`. Its core is `SdpaAttention` here,
torch's scaled_dot_product_attention call by call as `Packing.calls` lists them, or the one of `drmas.policy.flex`. Under
context parallelism each rank has the queries of its own tokens and gathers the keys and values of all. Plugged through the
layer spec by `drmas.policy.model`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from drmas.policy.layers import can_remake
from drmas.policy.packing import AttentionCall, Packing
from drmas.policy.rotary import rotate


class PackedSelfAttention(SelfAttention):
    """Query-key-value projection, rotary embedding, core attention, output projection. T tokens here, under sequence
    parallelism T / tp of them in `hidden_states`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: Packing,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T (/ tp), 1, hidden] -> the same shape; `rotary_pos_emb` is what `Rotary` gave."""
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        query, key = rotate(query, rotary_pos_emb), rotate(key, rotary_pos_emb)
        # Contiguous, because a view would keep the whole projection, of which nothing else is needed any more.
        return self.linear_proj(self.core_attention(query, key, value.contiguous(), packed_seq_params))


class CoreAttention(MegatronModule):
    """Attention without weights, in the way of a subclass.

    query [T, 1, heads, d], key and value [T, 1, kv_heads, d] -> [T, 1, heads * d].
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.tp_group = pg_collection.tp  # asked for when the module is checkpointed
        self.cp_group = pg_collection.cp

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> torch.Tensor:
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        if packing.order is not None:
            both = gather_from_sequence_parallel_region(
                torch.cat((key, value), dim=-1), tensor_parallel_output_grad=True, group=self.cp_group
            )
            key, value = both.index_select(0, packing.order).chunk(2, dim=-1)
        return self.attend(query, key, value, packing)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> torch.Tensor:
        """query [T, heads, d], key and value [W, kv_heads, d] in the order of the whole pack -> [T, 1, heads * d]."""
        raise NotImplementedError


class SdpaAttention(CoreAttention):
    """By scaled_dot_product_attention, on any device. Calls of one shape are one batch; a call whose keys are its own tokens
    needs no mask, and others share a small one per shape."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> torch.Tensor:
        packing.prepared = plan = packing.prepared or _plan_calls(packing, key.shape[0], key.device)
        queries, keys, values = query.split(plan.queries), key.split(plan.pieces), value.split(plan.pieces)
        outputs: list[torch.Tensor] = [query] * len(queries)
        for batch in plan.batches:
            out = F.scaled_dot_product_attention(
                _stacked([queries[i] for i in batch.calls]).transpose(1, 2),
                _stacked([_joined([keys[j] for j in pieces]) for pieces in batch.keys]).transpose(1, 2),
                _stacked([_joined([values[j] for j in pieces]) for pieces in batch.keys]).transpose(1, 2),
                attn_mask=batch.mask,
                is_causal=batch.mask is None,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            for i, each in zip(batch.calls, out.transpose(1, 2).flatten(2), strict=True):
                outputs[i] = each.unsqueeze(1)
        if len(outputs) == 1:
            return outputs[0]
        # torch keeps each call's output for its backward pass, which is enough.
        return can_remake(torch.cat(outputs), torch.cat, [each.detach() for each in outputs])


class _Batch(NamedTuple):
    """Calls of one shape. `keys`: for each call the numbers of the pieces that it sees. `mask` [queries, keys], True where
    visible; None where the keys are the queries' own tokens, so that torch's causal mask is the right one."""

    calls: list[int]
    keys: list[list[int]]
    mask: torch.Tensor | None


class _Plan(NamedTuple):
    """`queries`: lengths of the calls' queries, in order. `pieces`: lengths that the whole pack is cut into, so that every
    range of keys is a sequence of pieces."""

    queries: list[int]
    pieces: list[int]
    batches: list[_Batch]


def _plan_calls(packing: Packing, whole: int, device: torch.device) -> _Plan:
    """`packing.calls` of a pack of `whole` tokens as batches of equal shape."""
    ranges = [each for call in packing.calls for each in call.keys]
    cuts = sorted({0, whole}.union(*ranges))
    number = {start: i for i, start in enumerate(cuts)}
    shapes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, call in enumerate(packing.calls):
        shapes[_shape(call)].append(i)
    batches = []
    for (queries, keys), calls in shapes.items():
        pieces = [[j for start, end in packing.calls[i].keys for j in range(number[start], number[end])] for i in calls]
        mask = None
        if queries != keys:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        batches.append(_Batch(calls, pieces, mask))
    lengths = [end - start for (start, end), _ in packing.calls]
    return _Plan(lengths, [end - start for start, end in pairwise(cuts)], batches)


def _shape(call: AttentionCall) -> tuple[int, int]:
    """(queries, keys)"""
    return call.query[1] - call.query[0], sum(end - start for start, end in call.keys)


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
