"""Gradient norms per group or slot over flat buffers, and the clip coefficient.

Contract
  `squared_norms`: for buffers g_b (1-d, fp32) of groups 0..G-1, squared[k] = sum over the buffers of group k of |g_b|^2.
  `slot_norms`: the same for stretches of flat buffers: squared[k] = sum over the spans of slot k of a `TileTable`, which counts
  replicated ones on tensor-parallel rank 0 only.
  Squares are fp32, and so are sums inside a tile; tiles are added in float64 in a fixed order: relative error under 1e-6
  against float64 (numerics.SQUARED_NORM), the same bits from run to run, and whatever order the spans were given in.
  Tiles are of 256 elements in torch and of 65536 in Triton: the backends agree within the error, not bit for bit.
  Squares of elements under 1e-19 lose digits, under 1e-23 they are 0. A NaN, an infinity or an overflow (one element over
  1.8e19 is enough) gives a non-finite sum, and the flag that says so. An empty buffer or slot counts 0. Reads 4 n bytes.
  `clip_coefficient`: min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; -1 where the norm isn't finite, which
  `adamw.adamw_step` takes as "leave everything as it is". Stays on the device: nothing here waits for it.

Squares of ranks add up: the caller sums them over the ranks that hold different parts before it takes the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from drmas_kernels._checks import check_device
from drmas_kernels.backend import choose
from drmas_kernels.tile_table import Span, TileTable

_TILE = 256
SKIP = -1.0
"""The coefficient that stands for a skipped update."""


class SlotNorms(NamedTuple):
    squared: Tensor
    """[slots] float64: of this rank."""
    finite: Tensor
    """[slots] bool."""


def _squared_norm(buffer: Tensor) -> Tensor:
    whole = buffer.shape[0] // _TILE * _TILE
    tiles = torch.linalg.vector_norm(buffer[:whole].view(-1, _TILE), dim=1).double().square().sum()
    return tiles + torch.linalg.vector_norm(buffer[whole:]).double().square()


def squared_norms_reference(buffers: Sequence[Tensor], spans: Tensor, num_slots: int, device: torch.device) -> Tensor:
    """The sums of a `TileTable`'s spans, in plain torch."""
    squared = torch.zeros(num_slots, dtype=torch.float64, device=device)
    for buffer, start, length, slot, counted in spans.tolist():
        if counted:
            squared[slot] += _squared_norm(buffers[buffer][start : start + length])
    return squared


@torch.library.custom_op("drmas::squared_norms", mutates_args=())
def _op(
    buffers: list[Tensor],
    spans: Tensor,
    buffer_tiles: list[int],
    offset: Tensor,
    length: Tensor,
    row: Tensor,
    slot_tiles: Tensor,
) -> Tensor:
    """[slots] float64; all but the first argument are a `TileTable`'s."""
    if choose("squared_norms", offset.device).name == "torch":
        return squared_norms_reference(buffers, spans, slot_tiles.shape[0] - 1, offset.device)
    from drmas_kernels import _grad_norm_triton

    return _grad_norm_triton.squared_norms(buffers, buffer_tiles, offset, length, row, slot_tiles)


@_op.register_fake
def _(buffers, spans, buffer_tiles, offset, length, row, slot_tiles) -> Tensor:
    return slot_tiles.new_empty(slot_tiles.shape[0] - 1, dtype=torch.float64)


def _squared(buffers: Sequence[Tensor], table: TileTable) -> Tensor:
    tiles = (table.offset, table.length, table.row, table.slot_tiles)
    return _op(list(buffers), table.spans, list(table.buffer_tiles), *tiles)


@torch.no_grad()
def slot_norms(buffers: Sequence[Tensor], table: TileTable) -> SlotNorms:
    """The squared norm of every slot over the flat `buffers` that `table` is for; on their device, which nothing waits for.

    ValueError: a buffer isn't a contiguous fp32 vector of the table's length on the table's device.
    """
    table.check("buffers", buffers)
    squared = _squared(buffers, table)
    return SlotNorms(squared, squared.isfinite())


@torch.no_grad()
def squared_norms(
    buffers: Sequence[Tensor], groups: Sequence[int], num_groups: int, *, device: torch.device | str | None = None
) -> Tensor:
    """[num_groups] float64, on the buffers' device, or on `device` (needed where a rank may have no buffers).

    ValueError: a buffer isn't a contiguous fp32 vector, they are on several devices, or a group is out of range.
    """
    if len(buffers) != len(groups):
        raise ValueError(f"{len(buffers)} buffers but {len(groups)} groups; expected one group per buffer")
    for buffer, group in zip(buffers, groups, strict=True):
        if buffer.ndim != 1 or buffer.dtype != torch.float32 or not buffer.is_contiguous():
            raise ValueError(f"a gradient buffer is {buffer.dtype} {list(buffer.shape)}; expected a contiguous float32 vector")
        if not 0 <= group < num_groups:
            raise ValueError(f"group is {group}; expected 0 to {num_groups - 1}")
        check_device("a gradient buffer", buffer, buffers[0], "the first one")
    if not buffers:
        return torch.zeros(num_groups, dtype=torch.float64, device=device or "cpu")
    where = buffers[0].device
    if choose("squared_norms", where).name == "torch":
        places = tuple((index, 0, buffer.shape[0]) for index, buffer in enumerate(buffers))
    else:
        buffers, places = _whole_storages(buffers)
    lengths = tuple(buffer.shape[0] for buffer in buffers)
    squared = _squared(buffers, _table_of(places, tuple(groups), lengths, num_groups, where))
    return squared if device is None else squared.to(device)


def _whole_storages(parts: Sequence[Tensor]) -> tuple[list[Tensor], tuple[tuple[int, int, int], ...]]:
    """(one vector per storage, (its index, start, length) of every part): parts of a flat buffer are one launch, not many."""
    wholes: dict[int, int] = {}
    buffers: list[Tensor] = []
    places = []
    for part in parts:
        storage = part.untyped_storage()
        index = wholes.setdefault(storage.data_ptr(), len(buffers))
        if index == len(buffers):
            buffers.append(part.as_strided((storage.nbytes() // part.element_size(),), (1,), 0))
        places.append((index, part.storage_offset(), part.shape[0]))
    return buffers, tuple(places)


@cache  # for good: a captured CUDA graph holds the table's addresses, not the table
def _table_of(
    places: tuple[tuple[int, int, int], ...],
    groups: tuple[int, ...],
    lengths: tuple[int, ...],
    num_groups: int,
    device: torch.device,
) -> TileTable:
    """An optimiser asks for the same table at every step."""
    spans = [Span(*place, group) for place, group in zip(places, groups, strict=True)]
    return TileTable.build(spans, lengths, num_groups, device=device, disjoint=False)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of norm `norm` (any shape, so one per slot too), in its dtype; `SKIP` where it isn't finite."""
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; expected a positive number (inf for no clipping)")
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), SKIP)
