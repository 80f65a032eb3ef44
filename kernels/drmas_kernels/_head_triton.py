"""Statistics of the logits of an output head, from hidden states and weights, without logits in memory.

Contract
  Logits of token t are z_v = inverse_temperature_t (h_t . w_v) over the columns v < columns. Per token, [T, 4] fp32:
      m = max z,   s = sum e^(z - m),   q = sum e^(z - m) (z - m),   z_y = z at `column`
  from which logprob = (z_y - m) - log s and entropy = log s - q / s; `linear_logprob` merges and finishes them.
  z_y is -inf where `column` is outside 0..columns-1. It is taken from the accumulator that m and s come from, so z_y <= m and
  s >= 1 hold exactly and no log-prob is positive. No columns: m = -1e30, s = q = 0. No tokens: [0, 4].

  hidden [T, H] and weight [v, H]: bf16; products and statistics are fp32. Rows of weight at or past `columns` never enter,
  even if they are NaN. A NaN or +inf among a token's logits makes its s NaN, a -inf its q only; other tokens are untouched.
  |h . w| must stay below 1e30 and temperatures above 1e-7.

  Deterministic: no atomics. A split's column tiles are folded in order, then the splits; both follow from `columns` and from
  the table below, which goes by the device's generation. So the bits of a token depend on its hidden row, its temperature, the
  weight and `columns`: not on T, the other tokens, its place among them or its `column`.

Cost
  2 T H v FLOP. A program holds 128 tokens and goes through the column tiles of one split. The 128 programs of a group, 8 row
  tiles by 16 splits, run together: their hidden rows (8 MB at H = 4096) and the 16 panels of weight that they are at (2 MB
  each) stay in the L2 cache, so about 2 H v ceil(T / 1024) bytes come from memory: 40 GB at T = 32768, H = 4096, v = 151936,
  0.7 TB/s at 700 TFLOP/s. Partial statistics are 16 bytes per token and split, written and read once.

  sm_90, cycles per tile of 128 x 256 logits by the data sheet: products 16 H (65.5k at H = 4096). Then a lane folds 128 logits
  with some 8 instructions each, one an ex2 of 8 cycles per warp: with two warps per scheduler 2.1k for ex2 and 2.0k issue slots
  side by side. Filling the pipeline again is a load from the L2 cache and 460 instructions per warp, about 2k. That
  makes 6 % at H = 4096 and 22 % at H = 896 that are not products. `flatten=True` would load across tiles, but then ptxas
  makes every HGMMA wait for the one before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from drmas_kernels.spec import KernelSpec
from drmas_kernels.vocab_statistics import no_columns

_LOWEST = tl.constexpr(-1e30)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)

_SPLITS = 16
"""Column splits at most: with groups of 8 row tiles 128 programs, about one for each of the 132 multiprocessors of an H100."""
_MERGE_BLOCK = 128


@triton.jit
def _load_tile(source, row, rows, depth, width, stride, ROWS: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr):
    """source[row : row + ROWS, depth : depth + DEPTH] of a [rows, width] matrix, 0 outside."""
    if TMA:
        tile = source.load([row, depth])
    else:
        down = row + tl.arange(0, ROWS)
        right = depth + tl.arange(0, DEPTH)
        inside = (down < rows)[:, None] & (right < width)[None, :]
        tile = tl.load(source + down.to(tl.int64)[:, None] * stride + right[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _halve(tile, second, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS / 2]: per row the first half of the columns or the second. In registers only, as MMA tiles lie."""
    halves = tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    return tl.where(second[:, None], right, left)


@triton.jit
def _pick(picked, tile, start, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVE: tl.constexpr):
    """`picked` with the raw logit at `column`, for rows whose column is in the tile that begins at column `start`.

    HALVE: down to the aligned eight columns around it by the bits of `column`, [ROWS, 8] (0.7 instructions per logit on sm_90);
    else by comparing numbers of columns, [ROWS] (3 per logit, but on sm_100 halves don't lie in registers).
    """
    if HALVE:
        if COLUMNS > 64:
            tile = _halve(tile, (column & 64) != 0, ROWS, 128)
        if COLUMNS > 32:
            tile = _halve(tile, (column & 32) != 0, ROWS, 64)
        if COLUMNS > 16:
            tile = _halve(tile, (column & 16) != 0, ROWS, 32)
        tile = _halve(tile, (column & 8) != 0, ROWS, 16)
        here = (column >= start) & (column < start + COLUMNS)
        picked = tl.where(here[:, None], tile, picked)
    else:
        same = tl.arange(0, COLUMNS)[None, :] == (column - start)[:, None]
        picked = tl.maximum(picked, tl.max(tl.where(same, tile, _LOWEST), 1))
    return picked


@triton.jit
def _fold(top, total, moment, tile, scale):
    """A tile of raw logits into the running statistics of its rows.

    `top` is a raw logit; with u = (logit - top) scale, total = sum 2^u and moment = sum 2^u u. The difference comes before
    the product: it is exact near the top, where `logit * scale` is rounded as coarsely as logits are large.
    """
    higher = tl.maximum(top, tl.max(tile, 1))
    shifted = (tile - higher[:, None]) * scale[:, None]
    powers = tl.exp2(shifted)
    down = (top - higher) * scale
    factor = tl.exp2(down)
    moment = factor * (moment + down * total) + tl.sum(powers * shifted, 1)
    total = factor * total + tl.sum(powers, 1)
    return higher, total, moment


@triton.jit
def _mask(tile, start, columns, COLUMNS: tl.constexpr):
    """Columns at or past `columns` far below every logit, by a select: what stood there doesn't matter."""
    return tl.where((start + tl.arange(0, COLUMNS))[None, :] < columns, tile, _LOWEST)


@triton.jit(
    do_not_specialize=[
        "tokens",
        "width_by_8",
        "hidden_stride_by_8",
        "weight_stride_by_8",
        "columns",
        "tiles_per_split",
        "splits",
    ]
)
def _statistics(
    hidden,
    weight,
    column_ptr,
    inverse_ptr,
    partial,
    tokens,
    width_by_8,
    hidden_stride_by_8,
    weight_stride_by_8,
    columns,
    tiles_per_split,
    splits,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    HALVE: tl.constexpr,
):
    """partial [splits, 4, tokens] = (top, total, moment, picked) of `_fold` and `_pick`, for 128 tokens and one split.

    Two tiles of BLOCK_V columns share a tile of hidden. The last pair alone is masked. Widths and strides are given in eighths:
    the compiler then knows that 8 elements lie together on one side of each bound.
    """
    program = tl.program_id(0)
    first = program // (GROUP * splits) * GROUP
    group = tl.minimum(tl.cdiv(tokens, BLOCK_T) - first, GROUP)
    place = program - first * splits
    row = (first + place % group) * BLOCK_T
    split = place // group

    rows = row + tl.arange(0, BLOCK_T)
    exists = rows < tokens
    column = tl.load(column_ptr + rows, mask=exists, other=-1)
    column = tl.where((column >= 0) & (column < columns), column, -1).to(tl.int32)
    scale = tl.load(inverse_ptr + rows, mask=exists, other=0.0) * _LOG2E
    width = width_by_8 * 8
    hidden_stride, weight_stride = hidden_stride_by_8.to(tl.int64) * 8, weight_stride_by_8.to(tl.int64) * 8

    top = tl.full((BLOCK_T,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    moment = tl.zeros((BLOCK_T,), tl.float32)
    picked = tl.full((BLOCK_T, 8) if HALVE else (BLOCK_T,), _LOWEST, tl.float32)
    begin = split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, tl.cdiv(columns, 2 * BLOCK_V))
    for pair in range(begin, end):
        start = pair * (2 * BLOCK_V)
        middle = start + BLOCK_V
        left = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        right = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for depth in range(0, width, BLOCK_H):
            states = _load_tile(hidden, row, tokens, depth, width, hidden_stride, BLOCK_T, BLOCK_H, TMA)
            panel = _load_tile(weight, start, columns, depth, width, weight_stride, BLOCK_V, BLOCK_H, TMA)
            left = tl.dot(states, panel.T, left)
            panel = _load_tile(weight, middle, columns, depth, width, weight_stride, BLOCK_V, BLOCK_H, TMA)
            right = tl.dot(states, panel.T, right)
        if middle + BLOCK_V <= columns:
            picked = _pick(picked, left, start, column, BLOCK_T, BLOCK_V, HALVE)
            top, total, moment = _fold(top, total, moment, left, scale)
            picked = _pick(picked, right, middle, column, BLOCK_T, BLOCK_V, HALVE)
            top, total, moment = _fold(top, total, moment, right, scale)
        else:
            left = _mask(left, start, columns, BLOCK_V)
            picked = _pick(picked, left, start, column, BLOCK_T, BLOCK_V, HALVE)
            top, total, moment = _fold(top, total, moment, left, scale)
            right = _mask(right, middle, columns, BLOCK_V)
            picked = _pick(picked, right, middle, column, BLOCK_T, BLOCK_V, HALVE)
            top, total, moment = _fold(top, total, moment, right, scale)
    if HALVE:
        picked = tl.max(tl.where(tl.arange(0, 8)[None, :] == (column & 7)[:, None], picked, _LOWEST), 1)
    to = partial + split.to(tl.int64) * 4 * tokens + rows
    tl.store(to, top, mask=exists)
    tl.store(to + tokens, total, mask=exists)
    tl.store(to + 2 * tokens, moment, mask=exists)
    tl.store(to + 3 * tokens, picked, mask=exists)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _merge(partial, inverse_ptr, out, tokens, splits, BLOCK: tl.constexpr):
    """out [tokens, 4] = the statistics in natural units; splits are merged in order."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = rows < tokens
    inverse = tl.load(inverse_ptr + rows, mask=exists, other=0.0)
    scale = inverse * _LOG2E
    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    picked = tl.full((BLOCK,), _LOWEST, tl.float32)
    for split in range(0, splits):
        at = partial + tl.cast(split, tl.int64) * 4 * tokens + rows
        next_top = tl.load(at, mask=exists, other=0.0)
        next_total = tl.load(at + tokens, mask=exists, other=0.0)
        next_moment = tl.load(at + 2 * tokens, mask=exists, other=0.0)
        picked = tl.maximum(picked, tl.load(at + 3 * tokens, mask=exists, other=0.0))
        higher = tl.maximum(top, next_top)
        down, next_down = (top - higher) * scale, (next_top - higher) * scale
        factor, next_factor = tl.exp2(down), tl.exp2(next_down)
        moment = factor * (moment + down * total) + next_factor * (next_moment + next_down * next_total)
        total = factor * total + next_factor * next_total
        top = higher
    to = out + rows.to(tl.int64) * 4
    tl.store(to, top * inverse, mask=exists)
    tl.store(to + 1, total, mask=exists)
    tl.store(to + 2, moment * _LN2, mask=exists)
    tl.store(to + 3, tl.where(picked > _LOWEST, picked * inverse, float("-inf")), mask=exists)


def statistics_spec(
    name: str, arch: str, tile: tuple[int, int, int], *, num_warps: int, num_stages: int, tma: bool, halve: bool
) -> KernelSpec:
    """`_statistics` with tiles of (tokens, columns of one half, depth)."""
    tokens, columns, depth = tile
    return KernelSpec(
        name=name,
        kernel=_statistics,
        signature={
            "hidden": f"tensordesc<bf16[{tokens},{depth}]>" if tma else "*bf16",
            "weight": f"tensordesc<bf16[{columns},{depth}]>" if tma else "*bf16",
            "column_ptr": "*i64",
            "inverse_ptr": "*fp32",
            "partial": "*fp32",
            "tokens": "i32",
            "width_by_8": "i32",
            "hidden_stride_by_8": "i32",
            "weight_stride_by_8": "i32",
            "columns": "i32",
            "tiles_per_split": "i32",
            "splits": "i32",
        },
        constants={
            "BLOCK_T": tokens,
            "BLOCK_V": columns,
            "BLOCK_H": depth,
            "GROUP": 8,
            "TMA": tma,
            "HALVE": halve,
        },
        num_warps=num_warps,
        num_stages=num_stages,
        aligned=frozenset({"column_ptr", "inverse_ptr", "partial"} | (set() if tma else {"hidden", "weight"})),
        archs=(arch,),
        elements=2 * tokens * columns,
        expects=frozenset({"hgmma", "tma"} if arch == "sm_90" else {"tma"} if tma else ()),
    )


_SM80 = statistics_spec("head_sm80", "sm_80", (128, 64, 64), num_warps=8, num_stages=3, tma=False, halve=True)
_SM90 = statistics_spec("head_sm90", "sm_90", (128, 128, 64), num_warps=8, num_stages=4, tma=True, halve=True)
_SM100 = statistics_spec("head_sm100", "sm_100", (128, 64, 64), num_warps=8, num_stages=4, tma=True, halve=False)
_MERGE = KernelSpec(
    name="head_merge",
    kernel=_merge,
    signature={"partial": "*fp32", "inverse_ptr": "*fp32", "out": "*fp32", "tokens": "i32", "splits": "i32"},
    constants={"BLOCK": _MERGE_BLOCK},
    num_warps=4,
    aligned=frozenset({"partial", "inverse_ptr", "out"}),
    elements=_MERGE_BLOCK,
)
SPECS: tuple[KernelSpec, ...] = (_SM80, _SM90, _SM100, _MERGE)


def _spec_for(device: torch.device) -> KernelSpec:
    """By generation; the interpreter takes that of sm_90. Others than Hopper and data-centre Blackwell load by pointers."""
    if device.type != "cuda":
        return _SM90
    return {9: _SM90, 10: _SM100}.get(torch.cuda.get_device_capability(device)[0], _SM80)


def splits_of(columns: int, spec: KernelSpec) -> tuple[int, int]:
    """(splits, tiles per split) of so many columns: none is empty, and the number of tokens has no say."""
    tiles = triton.cdiv(columns, 2 * spec.constants["BLOCK_V"])
    tiles_per_split = triton.cdiv(tiles, _SPLITS)
    return triton.cdiv(tiles, max(tiles_per_split, 1)), tiles_per_split


def unsupported(hidden: Tensor, weight: Tensor) -> str | None:
    """Why the kernel can't read these matrices, None if it can: by dtypes and strides, so that ranks agree."""
    for name, matrix in (("hidden", hidden), ("weight", weight)):
        if matrix.dtype != torch.bfloat16:
            return f"{name} is {matrix.dtype}; the kernel multiplies bfloat16"
        if matrix.shape[1] == 0 or matrix.stride(1) != 1:
            return f"{name} {list(matrix.shape)} has strides {list(matrix.stride())}; expected rows of adjacent elements"
        if matrix.shape[1] % 8 or matrix.stride(0) % 8:
            return f"{name}'s rows of {matrix.shape[1]} elements don't all begin at multiples of 16 bytes"
    return None


def head_statistics(
    hidden: Tensor,
    weight: Tensor,
    column: Tensor,
    inverse_temperature: float | Tensor | None = None,
    columns: int | None = None,
    *,
    spec: KernelSpec | None = None,
) -> Tensor:
    """[T, 4] fp32 of (m, s, q, z_y) over the first `columns` (default: all) rows of weight; the contract is on top.

    `column` [T] int32 or int64 is local to this weight. `inverse_temperature` is positive: a number, fp32 [T], or None for 1.
    `spec` is for tests. ValueError names the argument that is wrong; what `unsupported` refuses is refused.
    """
    columns = weight.shape[0] if columns is None else columns
    _check(hidden, weight, column, inverse_temperature, columns)
    tokens, width = hidden.shape
    out = torch.empty(tokens, 4, dtype=torch.float32, device=hidden.device)
    if tokens == 0:
        return out
    if columns == 0:
        return no_columns(out)
    spec = spec or _spec_for(hidden.device)
    hidden, weight = (matrix.clone() if matrix.data_ptr() % 16 else matrix for matrix in (hidden, weight))
    rows, panel, depth = (spec.constants[name] for name in ("BLOCK_T", "BLOCK_V", "BLOCK_H"))
    splits, tiles_per_split = splits_of(columns, spec)
    inverse = _per_token(inverse_temperature, hidden)
    column = _aligned(column.to(torch.int64))
    partial = torch.empty(splits, 4, tokens, dtype=torch.float32, device=hidden.device)
    sources = (hidden, weight)
    if spec.constants["TMA"]:
        sources = tuple(TensorDescriptor.from_tensor(m, [r, depth]) for m, r in ((hidden, rows), (weight, panel)))
    sizes = (tokens, width // 8, hidden.stride(0) // 8, weight.stride(0) // 8, columns, tiles_per_split, splits)
    spec.launch((triton.cdiv(tokens, rows) * splits,), *sources, column, inverse, partial, *sizes)
    _MERGE.launch((triton.cdiv(tokens, _MERGE_BLOCK),), partial, inverse, out, tokens, splits)
    return out


def _check(hidden: Tensor, weight: Tensor, column: Tensor, inverse: float | Tensor | None, columns: int) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, H] and [v, H]")
    if column.shape != hidden.shape[:1] or column.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"column is {column.dtype} {list(column.shape)}; expected int32 or int64 [{hidden.shape[0]}]")
    if not 0 <= columns <= weight.shape[0]:
        raise ValueError(f"columns is {columns}; expected 0 to {weight.shape[0]}, the rows of weight")
    others = {"weight": weight, "column": column}
    if isinstance(inverse, Tensor):
        others["inverse_temperature"] = inverse
        if inverse.shape != hidden.shape[:1] or inverse.dtype != torch.float32:
            found = f"{inverse.dtype} {list(inverse.shape)}"
            raise ValueError(f"inverse_temperature is {found}; expected a number or float32 [{hidden.shape[0]}]")
    elif inverse is not None and not 0 < inverse < torch.inf:
        raise ValueError(f"inverse_temperature is {inverse}; expected a positive number")
    for name, tensor in others.items():
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}; expected {hidden.device}, where hidden is")
    reason = unsupported(hidden, weight)
    if reason is not None:
        raise ValueError(reason)


def _per_token(inverse: float | Tensor | None, hidden: Tensor) -> Tensor:
    if isinstance(inverse, Tensor):
        return _aligned(inverse)
    return hidden.new_full(hidden.shape[:1], 1.0 if inverse is None else inverse, dtype=torch.float32)


def _aligned(vector: Tensor) -> Tensor:
    """Itself, or a copy where it is a slice that begins between multiples of 16 bytes or skips elements."""
    if vector.stride(0) == 1 and vector.data_ptr() % 16 == 0:
        return vector
    return vector.clone(memory_format=torch.contiguous_format)
