"""The Triton kernels of `grad_norm`: tiles to partial sums, then every slot's partial sums to one.

`tile_squares`: a program per tile, fp32. Lane i of 8192 adds the squares of the elements i, i + 8192, ... of its tile, 8 of
them at most; then the lanes are added in a fixed tree. Full blocks are read 128 bits at a time without a mask, which needs
offsets that the compiler knows to be aligned: numbers from memory don't show it, so what the table promises is said again.
`slot_squares`: a program per slot adds its partial sums in float64, in the same order always. The only double precision here:
as many additions as there are tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from drmas_kernels.spec import KernelSpec

BLOCK = 8192
_TABLES = frozenset(("offset_of", "length_of", "row_of", "partial"))


@triton.jit(do_not_specialize=["first_tile"])
def _tile_squares(buffer, offset_of, length_of, row_of, partial, first_tile, BLOCK: tl.constexpr):
    tile = first_tile + tl.program_id(0)
    row = tl.load(row_of + tile)
    if row >= 0:
        offset = tl.load(offset_of + tile)
        length = tl.load(length_of + tile)
        whole = length // BLOCK * BLOCK
        lane = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        # A tile with a full block starts at a multiple of 16, so this changes nothing.
        aligned = buffer + tl.multiple_of(offset // 16 * 16, 16)
        for start in range(0, whole, BLOCK):
            x = tl.load(aligned + start + lane)
            total = tl.fma(x, x, total)
        if whole < length:
            x = tl.load(buffer + offset + whole + lane, mask=lane < length - whole, other=0.0)
            total = tl.fma(x, x, total)
        tl.store(partial + row, tl.sum(total))


@triton.jit
def _slot_squares(partial, slot_tiles, squared, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    end = tl.load(slot_tiles + slot + 1)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(tl.load(slot_tiles + slot), end, BLOCK):
        total += tl.load(partial + start + lane, mask=lane < end - start, other=0.0).to(tl.float64)
    tl.store(squared + slot, tl.sum(total))


_tile_squares_anywhere = triton.jit(
    _tile_squares.fn, do_not_specialize=["first_tile"], do_not_specialize_on_alignment=["buffer"]
)


def _tiles_spec(name: str, *, aligned: bool) -> KernelSpec:
    return KernelSpec(
        name=name,
        kernel=_tile_squares if aligned else _tile_squares_anywhere,
        signature={
            "buffer": "*fp32",
            "offset_of": "*i64",
            "length_of": "*i32",
            "row_of": "*i32",
            "partial": "*fp32",
            "first_tile": "i32",
        },
        constants={"BLOCK": BLOCK},
        num_warps=8,
        aligned=_TABLES | {"buffer"} if aligned else _TABLES,
        elements=BLOCK,
        expects=frozenset(("wide",)) if aligned else frozenset(),
    )


TILES = _tiles_spec("tile_squares", aligned=True)
TILES_ANYWHERE = _tiles_spec("tile_squares_anywhere", aligned=False)
"""For a buffer that is not at a multiple of 16 bytes."""
SLOTS = KernelSpec(
    name="slot_squares",
    kernel=_slot_squares,
    signature={"partial": "*fp32", "slot_tiles": "*i32", "squared": "*fp64"},
    constants={"BLOCK": 1024},
    num_warps=4,
    aligned=frozenset(("partial", "slot_tiles", "squared")),
    elements=1024,
    expects=frozenset(("fp64",)),
)
SPECS = (TILES, TILES_ANYWHERE, SLOTS)


def squared_norms(
    buffers: Sequence[Tensor],
    buffer_tiles: Sequence[int],
    offset: Tensor,
    length: Tensor,
    row: Tensor,
    slot_tiles: Tensor,
) -> Tensor:
    """[slots] float64; the arguments are a `TileTable`'s."""
    partial = torch.empty(offset.shape[0], dtype=torch.float32, device=offset.device)
    for buffer, (first, end) in zip(buffers, pairwise(buffer_tiles), strict=True):
        spec = TILES_ANYWHERE if buffer.data_ptr() % 16 else TILES
        spec.launch((end - first,), buffer, offset, length, row, partial, first)
    squared = torch.empty(slot_tiles.shape[0] - 1, dtype=torch.float64, device=offset.device)
    SLOTS.launch((squared.shape[0],), partial, slot_tiles, squared)
    return squared
