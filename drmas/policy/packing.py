"""Rows laid end to end: one microbatch without padding between them.

A row's last response token predicts nothing that is trained, so the model reads the row without it. Nothing here knows weights
or losses. Called by the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from drmas.types import Row

_LENGTH_STEP = 128


@dataclass(frozen=True, slots=True)
class Packed:
    """One microbatch on `device`. T tokens read, R response tokens predicted.

    `ids`, `positions` [1, T] int64; `params` Megatron's row boundaries; `source` [R] int64, the place in [0, T) whose hidden
    state predicts each response token; `target` [R] int64, that token; `row` [R] int64, its row's number within the microbatch.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    params: PackedSeqParams
    source: torch.Tensor
    target: torch.Tensor
    row: torch.Tensor


def pack(rows: Sequence[Row], *, multiple: int, device: torch.device) -> Packed:
    """Pack `rows`; a tail of its own, which predicts nothing, makes T divisible by `multiple` (the sequence-parallel size)."""
    inputs = [[*row.prompt_ids, *row.response_ids[:-1]] for row in rows]
    source, start = [], 0
    for row, ids in zip(rows, inputs, strict=True):
        source += range(start + len(row.prompt_ids) - 1, start + len(ids))
        start += len(ids)
    if tail := -start % multiple:
        inputs.append([0] * tail)
    lengths = [len(ids) for ids in inputs]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Packed(
        ids=tensor([token for ids in inputs for token in ids])[None],
        positions=tensor([place for length in lengths for place in range(length)])[None],
        params=_row_boundaries(lengths, device),
        source=tensor(source),
        target=tensor([token for row in rows for token in row.response_ids]),
        row=tensor([i for i, row in enumerate(rows) for _ in row.response_ids]),
    )


def _row_boundaries(lengths: list[int], device: torch.device) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    # Rotary tables are cached by this number, so it grows in steps; equal to the token count it would mean absolute positions.
    longest = -(-max(lengths) // _LENGTH_STEP) * _LENGTH_STEP
    longest += _LENGTH_STEP if longest == sum(lengths) else 0
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)
