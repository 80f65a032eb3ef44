"""Which stretches of flat buffers belong to which slot, cut into tiles: what `grad_norm` and `adamw` run over.

A slot is what has one norm, one clip coefficient, one step count: a parameter group of a policy. Built once, on the host; the
tiles then lie on the device. Equal spans in any order make equal tables, so results don't depend on the order that they are
given in.

Offsets are int64: a buffer may have more than 2^32 elements. A tile of `ALIGNMENT` elements or more starts at a multiple of
`ALIGNMENT`, so that kernels can move 128 bits at a time: what stands before the first such place of a span is its own tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from drmas_kernels._checks import check_device

TILE = 2**16
"""Elements: long enough that the partial sums are few and short enough that the tiles of 10^7 elements fill a GPU."""
ALIGNMENT = 16
"""Elements."""


class Span(NamedTuple):
    """`length` elements of a buffer, from `start` on, that belong to `slot`."""

    buffer: int
    start: int
    length: int
    slot: int
    replicated: bool = False
    """Tensor-parallel ranks hold it alike: norms count it on rank 0 only; all of them update it."""


@dataclass(frozen=True, eq=False, slots=True)
class TileTable:
    """Spans of buffers and the tiles that they are cut into, in the order of buffer and start."""

    lengths: tuple[int, ...]
    """Elements of each buffer."""
    num_slots: int
    spans: Tensor
    """[S, 5] int64 on the CPU: buffer, start, length, slot, 1 if norms count it. Empty spans are left out."""
    buffer_tiles: tuple[int, ...]
    """The tiles of buffer b are buffer_tiles[b] to buffer_tiles[b + 1]."""
    offset: Tensor
    """[tiles] int64 on the device: the first element, in its buffer."""
    length: Tensor
    """[tiles] int32: 1 to the tile size."""
    slot: Tensor
    """[tiles] int32."""
    row: Tensor
    """[tiles] int32: the place among all tiles that are counted, in the order of slot, buffer and start; -1: not counted."""
    slot_tiles: Tensor
    """[slots + 1] int32: the places of slot k are slot_tiles[k] to slot_tiles[k + 1]."""

    @classmethod
    def build(
        cls,
        spans: Sequence[Span],
        lengths: Sequence[int],
        num_slots: int,
        *,
        tp_rank: int = 0,
        tile: int = TILE,
        device: torch.device | str = "cpu",
        disjoint: bool = True,
    ) -> TileTable:
        """For buffers of `lengths` elements. Elements of no span are neither counted nor updated.

        ValueError: a span leaves its buffer, overlaps another (allowed without `disjoint`: a table for norms alone) or names a
        slot that doesn't exist; each is named.

        Example: TileTable.build([Span(0, 0, 100, 0), Span(0, 100, 28, 1)], [128], 2)
        """
        if num_slots < 0 or tp_rank < 0:
            raise ValueError(f"num_slots is {num_slots}, tp_rank is {tp_rank}; expected 0 or more")
        if tile <= 0 or tile % ALIGNMENT or tile > 2**30:
            raise ValueError(f"tile is {tile}; expected a positive multiple of {ALIGNMENT}, at most 2**30")
        for span in spans:
            _check(span, lengths, num_slots)
        ordered = sorted((Span(*span) for span in spans if span.length), key=lambda span: (span.buffer, span.start))
        for one, next_one in pairwise(ordered):
            if disjoint and one.buffer == next_one.buffer and one.start + one.length > next_one.start:
                raise ValueError(f"{next_one} overlaps {one}; expected every element in one span at most")
        return cls._cut(ordered, tuple(lengths), num_slots, tp_rank, tile, device)

    @classmethod
    def _cut(cls, ordered, lengths, num_slots, tp_rank, tile, device) -> TileTable:
        rows = [(s.buffer, s.start, s.length, s.slot, int(tp_rank == 0 or not s.replicated)) for s in ordered]
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 5)
        offset, length, span = _tiles(table, tile)
        buffer, slot, counted = table[span, 0], table[span, 3], table[span, 4].bool()
        tiles = torch.searchsorted(buffer, torch.arange(len(lengths) + 1))
        # Stable: within a slot the order of buffer and start stays.
        places = torch.argsort(slot[counted], stable=True)
        row = torch.full_like(slot, -1)
        row[counted.nonzero().squeeze(1)[places]] = torch.arange(len(places))
        slot_tiles = torch.searchsorted(slot[counted][places], torch.arange(num_slots + 1))
        return cls(
            lengths=lengths,
            num_slots=num_slots,
            spans=table,
            buffer_tiles=tuple(tiles.tolist()),
            offset=offset.to(device),
            length=length.to(device, torch.int32),
            slot=slot.to(device, torch.int32),
            row=row.to(device, torch.int32),
            slot_tiles=slot_tiles.to(device, torch.int32),
        )

    @property
    def device(self) -> torch.device:
        return self.offset.device

    def check(self, name: str, buffers: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
        """ValueError: they aren't the buffers that this table is for; the message names the first that differs."""
        if len(buffers) != len(self.lengths):
            raise ValueError(f"{name} has {len(buffers)} buffers; the table is for {len(self.lengths)}")
        for index, (buffer, length) in enumerate(zip(buffers, self.lengths, strict=True)):
            if buffer.dtype != dtype or buffer.shape != (length,) or not buffer.is_contiguous():
                found = f"{buffer.dtype} {list(buffer.shape)} of stride {list(buffer.stride())}"
                raise ValueError(f"{name}[{index}] is {found}; expected a contiguous {dtype} [{length}], as the table says")
            check_device(f"{name}[{index}]", buffer, self.offset, "the table")


def _check(span: Span, lengths: Sequence[int], num_slots: int) -> None:
    if not 0 <= span.buffer < len(lengths):
        raise ValueError(f"{span}: buffer is {span.buffer}; expected 0 to {len(lengths) - 1}")
    if span.start < 0 or span.length < 0 or span.start + span.length > lengths[span.buffer]:
        raise ValueError(f"{span} leaves its buffer; expected 0 <= start <= start + length <= {lengths[span.buffer]}")
    if not 0 <= span.slot < num_slots:
        raise ValueError(f"{span}: slot is {span.slot}; expected 0 to {num_slots - 1}")


def _tiles(table: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """(offset, length, index of the span) of every tile: the unaligned head of a span, then tiles from an aligned place on."""
    start, length = table[:, 1], table[:, 2]
    head = torch.minimum(-start % ALIGNMENT, length)
    number = (length - head + tile - 1) // tile
    tiles = number + (head > 0)
    span = torch.repeat_interleave(torch.arange(len(table)), tiles)
    index = torch.arange(len(span)) - (tiles.cumsum(0) - tiles)[span]
    index = index - (head > 0).long()[span]  # -1: the head
    begin = torch.where(index < 0, 0, head[span] + index * tile)
    end = torch.where(index < 0, head[span], torch.minimum(begin + tile, length[span]))
    return start[span] + begin, end - begin, span
