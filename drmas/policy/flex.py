"""The core attention of our own layers on torch's FlexAttention: one kernel over the whole pack, with a mask by blocks.

A file of its own, imported by `drmas.policy.model` where `drmas.core.stack` chose it, because it takes torch's compiler along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from drmas.policy.attention import CoreAttention
from drmas.policy.packing import Packing


class FlexAttention(CoreAttention):
    """Compiled on CUDA, where it skips the blocks that nobody sees. On a CPU it forms all pairs and no gradient, for tests."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> torch.Tensor:
        packing.prepared = mask = packing.prepared or block_mask(packing, query.shape[0])
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        attention = _compiled() if query.is_cuda else flex_attention
        out = attention(query, key, value, block_mask=mask, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1])
        return out.squeeze(0).transpose(0, 1).flatten(1).unsqueeze(1)


def block_mask(packing: Packing, queries: int) -> BlockMask:
    """Which of the whole pack's keys this rank's queries see, block by block."""
    end, places = packing.subtree_end, packing.places

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        place = query if places is None else places[query]
        return (key <= place) & (place < end[key])

    # Compiled, it is made block by block; else from all pairs at once.
    return create_block_mask(sees, None, None, queries, end.numel(), device=end.device, _compile=end.is_cuda)


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention, dynamic=True)  # packs differ in length
