"""Triton kernel of `segment_advantage` and the plan that its launch needs; the contract stands there. Called by its op only.

A cell is a pair (mean segment, std segment) that occurs; every included row is in exactly one. One program handles one cell: it
computes the statistics of both segments, writes the advantages of its rows and, where it owns a segment, that segment's
statistics. Cells that share a segment compute the same bits, so programs never wait for each other and one launch is all.
Programs at the end of the grid write what belongs to no cell: 0 for excluded rows, NaN for segments without rows.

Sums are fixed point. With c rows in a segment and all |score| < 2^top, a score is the int64 X = score 2^(width - top), cut off
at the point, with width = 61 - floor(log2 c), so that c < 2^(62 - width) and |X| < 2^width:
  - a sum over rows is below c 2^width < 2^62, and a unit's mean, its sum by its rows cut off again, below 2^width;
  - n X - sum, n times the deviation from the mean of n <= c units, is below n 2^(width + 1) < 2^63, and exact;
  - a deviation scaled by the largest one's power of two is at most 2, its fp32 square at most 4; squares are added as two
    integers, the part above 2^(2 - width) and 30 bits below it: the first sum is at most c 4 2^(width - 2) < 2^62, the second
    below c 2^30.
Integer addition is associative, so neither the order of rows nor the block size changes a bit, and with `MOST_ROWS` rows the
resolution is still 2^-39 of the largest score.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from drmas_kernels.segment_advantage import ROUNDING_ULPS, numbered, pair_key
from drmas_kernels.spec import KernelSpec

MOST_ROWS = 2**22
"""Of one call: int32 offsets and the headroom above are meant for it."""

WIDE_FROM = 256
"""Rows per segment, on average, from which on the wide configuration is used. Both give the same bits."""

_ROUNDING = tl.constexpr(ROUNDING_ULPS * torch.finfo(torch.float32).eps)

_POINTERS = {
    "reward": "*fp32",
    "penalty": "*fp32",
    "included": "*u8",
    "advantage": "*fp32",
    "statistics": "*fp32",
    "cell_row": "*i32",
    "cell_offset": "*i32",
    "unit_of_row": "*i32",
    "mean_segment": "*i64",
    "mean_order": "*i32",
    "mean_unit": "*i32",
    "mean_offset": "*i32",
    "std_segment": "*i64",
    "std_order": "*i32",
    "std_unit": "*i32",
    "std_offset": "*i32",
}
_SCALARS = {
    "rows": "i32",
    "cells": "i32",
    "num_mean": "i32",
    "num_std": "i32",
    "ddof": "i32",
    "raw": "i32",
    "leave_one_out": "i32",
    "inside": "fp32",
    "eps": "fp32",
    "min_std": "fp32",
}


@triton.jit
def _power(exponent):
    """2^exponent for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(value, exponent):
    """value 2^exponent in two steps, because the factor may be outside fp32's range."""
    half = exponent >> 1
    return value * _power(half) * _power(exponent - half)


@triton.jit
def _score(row, mask, reward, penalty, inside):
    return tl.load(reward + row, mask, 0.0) - inside * tl.load(penalty + row, mask, 0.0)


@triton.jit
def _values(position, mask, order, unit, reward, penalty, inside, exponent, EPISODE: tl.constexpr):
    """The units at these positions of the segmentation, in fixed point; 0 where masked."""
    if EPISODE:
        first = tl.load(unit + position, mask, 0)
        length = tl.load(unit + position + 1, mask, 0) - first
        total = tl.zeros_like(first).to(tl.int64)
        for turn in range(0, tl.max(length, axis=0)):
            here = turn < length
            row = tl.load(order + first + turn, here, 0)
            total += _scaled(_score(row, here, reward, penalty, inside), exponent).to(tl.int64)
        return total // tl.maximum(length, 1)
    row = tl.load(order + position, mask, 0)
    return _scaled(_score(row, mask, reward, penalty, inside), exponent).to(tl.int64)


@triton.jit
def _statistics(segment, order, unit, offset, reward, penalty, inside, ddof, EPISODE: tl.constexpr, BLOCK: tl.constexpr):
    """(units, rows, sum in fixed point, exponent that scores are scaled by, mean, std, lowest, highest) of one segment."""
    lane = tl.arange(0, BLOCK)
    first, last = tl.load(offset + segment), tl.load(offset + segment + 1)
    first_row, last_row = first, last
    if EPISODE:
        first_row, last_row = tl.load(unit + first), tl.load(unit + last)
    units, rows = last - first, last_row - first_row

    magnitude = tl.zeros([BLOCK], tl.int32)
    for start in range(first_row, last_row, BLOCK):
        mask = start + lane < last_row
        score = _score(tl.load(order + start + lane, mask, 0), mask, reward, penalty, inside)
        magnitude = tl.maximum(magnitude, score.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = tl.maximum(tl.max(magnitude, axis=0) >> 23, 1) - 126
    width = 61 + 127 - (rows.to(tl.float32).to(tl.int32, bitcast=True) >> 23)
    exponent = width - top

    sums = tl.zeros([BLOCK], tl.int64)
    lows = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
    highs = -lows
    for start in range(first, last, BLOCK):
        mask = start + lane < last
        value = _values(start + lane, mask, order, unit, reward, penalty, inside, exponent, EPISODE)
        sums += value
        lows = tl.minimum(lows, tl.where(mask, value, 0x7FFFFFFFFFFFFFFF))
        highs = tl.maximum(highs, tl.where(mask, value, -0x7FFFFFFFFFFFFFFF))
    total, low, high = tl.sum(sums, axis=0), tl.min(lows, axis=0), tl.max(highs, axis=0)

    widest = tl.maximum(units * high - total, total - units * low).to(tl.float32)
    largest = tl.maximum((widest.to(tl.int32, bitcast=True) >> 23) - 127, 0)
    above, below = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(first, last, BLOCK):
        mask = start + lane < last
        value = _values(start + lane, mask, order, unit, reward, penalty, inside, exponent, EPISODE)
        deviation = tl.where(mask, units * value - total, 0).to(tl.float32) * _power(-largest)
        square = deviation * deviation * _power(width - 2)
        whole = square.to(tl.int64)
        above += whole
        below += ((square - whole.to(tl.float32)) * 1073741824.0).to(tl.int64)
    squares = tl.sum(above, axis=0).to(tl.float32) + tl.sum(below, axis=0).to(tl.float32) * 9.313225746154785e-10
    variance = tl.div_rn(squares * _power(2 - width), tl.maximum(units - ddof, 1).to(tl.float32))

    lowest, highest = _scaled(low.to(tl.float32), -exponent), _scaled(high.to(tl.float32), -exponent)
    mean = _scaled(tl.div_rn(total.to(tl.float32), units.to(tl.float32)), -exponent)
    mean = tl.where(low == high, lowest, mean)
    std = _scaled(tl.div_rn(tl.sqrt_rn(variance), units.to(tl.float32)), largest - exponent)
    std = tl.where(std <= _ROUNDING * tl.maximum(tl.abs(lowest), tl.abs(highest)), 0.0, std)
    return units, rows, total, exponent, mean, std, lowest, highest


@triton.jit
def _gives_zero(units, std, min_std, raw):
    """1 where the advantages of a segment are 0: no spread worth the name, or a lone unit that doesn't keep its score."""
    constant = (units > 1) & ((std == 0.0) | (std < min_std))
    return (constant | ((units == 1) & (raw == 0))).to(tl.int32)


@triton.jit
def _write(statistics, segments, units, rows, mean, std, lowest, highest, mask):
    """One column, or several, of a [6, segments] table."""
    stride = segments.to(tl.int64)
    tl.store(statistics, mean, mask)
    tl.store(statistics + stride, std, mask)
    tl.store(statistics + 2 * stride, units, mask)
    tl.store(statistics + 3 * stride, rows, mask)
    tl.store(statistics + 4 * stride, lowest, mask)
    tl.store(statistics + 5 * stride, highest, mask)


@triton.jit
def _first_row(segment, order, unit, offset, EPISODE: tl.constexpr):
    position = tl.load(offset + segment)
    if EPISODE:
        position = tl.load(unit + position)
    return tl.load(order + position)


@triton.jit
def _without_cell(
    lane, reward, penalty, included, advantage, statistics, mean_offset, std_offset, rows, num_mean, num_std, inside,
    HAS_MEAN: tl.constexpr, HAS_STD: tl.constexpr,
):  # fmt: skip
    mask = lane < rows
    taken = tl.load(included + lane, mask, 0) != 0
    if HAS_MEAN or HAS_STD:
        tl.store(advantage + lane, 0.0, mask & (taken == 0))
    else:
        tl.store(advantage + lane, tl.where(taken, _score(lane, mask & taken, reward, penalty, 1.0), 0.0), mask)
    segments = num_mean + num_std
    nan = float("nan")
    if HAS_MEAN:
        mask = lane < num_mean
        empty = mask & (tl.load(mean_offset + lane, mask, 0) == tl.load(mean_offset + lane + 1, mask, 0))
        _write(statistics + lane, segments, 0.0, 0.0, nan, nan, nan, nan, empty)
    if HAS_STD:
        mask = lane < num_std
        empty = mask & (tl.load(std_offset + lane, mask, 0) == tl.load(std_offset + lane + 1, mask, 0))
        _write(statistics + num_mean + lane, segments, 0.0, 0.0, nan, nan, nan, nan, empty)


@triton.jit(do_not_specialize=list(_SCALARS), do_not_specialize_on_alignment=list(_POINTERS))
def _segment_advantage(
    reward, penalty, included, advantage, statistics, cell_row, cell_offset, unit_of_row,
    mean_segment, mean_order, mean_unit, mean_offset, std_segment, std_order, std_unit, std_offset,
    rows, cells, num_mean, num_std, ddof, raw, leave_one_out, inside, eps, min_std,
    HAS_MEAN: tl.constexpr, HAS_STD: tl.constexpr, SHARED: tl.constexpr, EPISODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """HAS_MEAN and HAS_STD say which segmentations there are, SHARED that they are one, whose arrays then stand for both."""
    cell = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if cell >= cells:
        _without_cell(
            (cell - cells) * BLOCK + lane, reward, penalty, included, advantage, statistics, mean_offset, std_offset,
            rows, num_mean, num_std, inside, HAS_MEAN, HAS_STD,
        )  # fmt: skip
        return
    first, last = tl.load(cell_offset + cell), tl.load(cell_offset + cell + 1)
    if first == last:
        return
    one = tl.load(cell_row + first)
    divisor, zero, exponent = 1.0, 0, 0
    times, shift, others = 1, tl.full([], 0, tl.int64), 1.0
    if HAS_STD:
        segment = tl.load(std_segment + one)
        units, members, total, exponent, mean, std, lowest, highest = _statistics(
            segment, std_order, std_unit, std_offset, reward, penalty, inside, ddof, EPISODE, BLOCK
        )
        column = statistics + num_mean + segment
        owner = True
        if HAS_MEAN and not SHARED:
            other = _first_row(segment, std_order, std_unit, std_offset, EPISODE)
            owner = tl.load(mean_segment + other) == tl.load(mean_segment + one)
        _write(column, num_mean + num_std, units, members, mean, std, lowest, highest, owner)
        divisor = tl.where(units == 1, 1.0, std + eps)
        zero = _gives_zero(units, std, min_std, raw)
    if HAS_MEAN:
        segment = tl.load(mean_segment + one)
        owner = True
        if not SHARED:
            units, members, total, exponent, mean, std, lowest, highest = _statistics(
                segment, mean_order, mean_unit, mean_offset, reward, penalty, inside, ddof, EPISODE, BLOCK
            )
            if HAS_STD:
                other = _first_row(segment, mean_order, mean_unit, mean_offset, EPISODE)
                owner = tl.load(std_segment + other) == tl.load(std_segment + one)
        _write(statistics + segment, num_mean + num_std, units, members, mean, std, lowest, highest, owner)
        zero |= _gives_zero(units, std, min_std, raw)
        times, shift = units, tl.where(units == 1, 0, total)
        others = tl.maximum(units - leave_one_out, 1).to(tl.float32)
    if zero > 0:
        times, shift, divisor = 0, tl.full([], 0, tl.int64), 1.0
    for start in range(first, last, BLOCK):
        mask = start + lane < last
        row = tl.load(cell_row + start + lane, mask, 0)
        if EPISODE:
            position = tl.load(unit_of_row + row, mask, 0)
            value = _values(position, mask, mean_order, mean_unit, reward, penalty, inside, exponent, EPISODE)
        else:
            value = _scaled(_score(row, mask, reward, penalty, inside), exponent).to(tl.int64)
        deviation = tl.div_rn((times * value - shift).to(tl.float32), others + tl.zeros([BLOCK], tl.float32))
        normalised = tl.div_rn(_scaled(deviation, -exponent), divisor + tl.zeros([BLOCK], tl.float32))
        tl.store(advantage + row, normalised - (1.0 - inside) * tl.load(penalty + row, mask, 0.0), mask)


def _specs() -> dict[tuple[str, bool, bool], KernelSpec]:
    segmentations = {
        "none": (False, False, False),
        "mean": (True, False, False),
        "std": (False, True, False),
        "shared": (True, True, True),
        "both": (True, True, False),
    }
    specs = {}
    for which, (has_mean, has_std, shared) in segmentations.items():
        for episode in (False, True)[: 1 if which == "none" else 2]:
            for wide in (False, True)[: 1 if which == "none" else 2]:
                specs[which, episode, wide] = KernelSpec(
                    name=f"segment_advantage_{which}_{'episode' if episode else 'turn'}_{'wide' if wide else 'narrow'}",
                    kernel=_segment_advantage,
                    signature=_POINTERS | _SCALARS,
                    constants={
                        "HAS_MEAN": has_mean,
                        "HAS_STD": has_std,
                        "SHARED": shared,
                        "EPISODE": episode,
                        "BLOCK": 512 if wide else 64,
                    },
                    num_warps=4 if wide else 1,
                )
    return specs


_TABLE = _specs()
SPECS = tuple(_TABLE.values())


class Grouping(NamedTuple):
    """A segmentation's included rows, sorted by (segment, unit); int32."""

    order: Tensor
    """[N] rows; the excluded ones stand at the end."""
    unit: Tensor
    """[N + 1] where in `order` each unit begins; meaningless where every row is a unit."""
    offset: Tensor
    """[S + 1] the first unit of each segment: an index into `unit`, or into `order` where every row is a unit."""
    unit_of_row: Tensor
    """[N] meaningless where every row is a unit."""
    edge: Tensor
    """[S + 1] where in `order` each segment begins."""


def group(segment: Tensor, num_segments: int, episode: Tensor | None, included: Tensor) -> Grouping:
    """`episode` None: every row is a unit."""
    segment = torch.where(included, segment, num_segments)
    key = segment if episode is None else pair_key(segment, num_segments + 1, episode)
    key, order = key.sort(stable=True)
    edge = torch.searchsorted(segment[order], torch.arange(num_segments + 1, device=segment.device))
    if episode is None:
        return Grouping(*(t.int() for t in (order, order, edge, order, edge)))
    number = numbered(key)
    unit = torch.searchsorted(number, torch.arange(len(key) + 1, device=key.device))
    unit_of_row = torch.empty_like(number).index_copy_(0, order, number)
    offset = torch.searchsorted(unit, edge)
    return Grouping(*(t.int() for t in (order, unit, offset, unit_of_row, edge)))


def _cells(mean_segment: Tensor, std_segment: Tensor, num_std: int, mean: Grouping, included: Tensor) -> tuple[Tensor, Tensor]:
    """Rows sorted by cell and [N + 1] where each cell begins; past the last cell, the number of included rows."""
    key, row = torch.where(included, mean_segment * num_std + std_segment, torch.iinfo(torch.int64).max).sort(stable=True)
    offset = torch.searchsorted(numbered(key), torch.arange(len(key) + 1, device=key.device))
    return row.int(), torch.minimum(offset, mean.edge[-1]).int()


class Plan(NamedTuple):
    which: str
    """"mean" or "std" where only that segmentation is there, "shared" where they are one, "both", "none"."""
    cells: int
    """Programs that look for a cell."""
    cell_row: Tensor
    """Rows sorted by cell."""
    cell_offset: Tensor
    """[cells + 1] where in `cell_row` each cell begins; cells may be empty."""
    mean: Grouping
    std: Grouping
    """Where there is one segmentation, both are it."""


def plan(
    mean_segment: Tensor | None,
    std_segment: Tensor | None,
    episode: Tensor | None,
    included: Tensor,
    num_mean: int,
    num_std: int,
) -> Plan:
    """What the kernel reads besides rewards and penalties: integers only. `episode` None: every row is a unit."""
    if mean_segment is None and std_segment is None:
        nothing = Grouping(*[torch.zeros(1, dtype=torch.int32, device=included.device)] * 5)
        return Plan("none", 0, nothing.order, nothing.edge, nothing, nothing)
    if std_segment is None:
        which, one = "mean", group(mean_segment, num_mean, episode, included)
    elif mean_segment is None:
        which, one = "std", group(std_segment, num_std, episode, included)
    elif num_mean == num_std and torch.equal(mean_segment, std_segment):
        which, one = "shared", group(mean_segment, num_mean, episode, included)
    else:
        mean, std = group(mean_segment, num_mean, episode, included), group(std_segment, num_std, episode, included)
        cell_row, cell_offset = _cells(mean_segment, std_segment, num_std, mean, included)
        return Plan("both", min(len(included), num_mean * num_std), cell_row, cell_offset, mean, std)
    return Plan(which, len(one.edge) - 1, one.order, one.edge, one, one)


def segment_advantage_triton(
    reward: Tensor,
    penalty: Tensor,
    *,
    mean_segment: Tensor | None,
    std_segment: Tensor | None,
    episode: Tensor,
    included: Tensor,
    num_mean: int,
    num_std: int,
    weighting: str,
    ddof: int,
    eps: float,
    min_std: float,
    singleton: str,
    penalty_inside: bool,
    leave_one_out: bool,
    wide: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantage [N], statistics [6, num_mean + num_std] in the order of `SegmentStats`), fp32; arguments are already checked.

    `wide` None: chosen by the average number of rows in a cell. ValueError: more than `MOST_ROWS` rows.
    """
    rows = len(reward)
    if rows > MOST_ROWS:
        raise ValueError(f"reward has {rows} rows; expected at most {MOST_ROWS}, or the torch backend")
    episodes = episode if weighting == "episode" else None
    layout = plan(mean_segment, std_segment, episodes, included, num_mean, num_std)
    if wide is None:
        wide = rows >= WIDE_FROM * max(layout.cells, 1)
    spec = _TABLE[layout.which, weighting == "episode" and layout.cells > 0, wide and layout.cells > 0]
    advantage = torch.empty_like(reward)
    statistics = reward.new_empty((6, num_mean + num_std))
    others = triton.cdiv(max(rows, num_mean, num_std), spec.constants["BLOCK"])
    first, second = mean_segment, std_segment
    spec.launch(
        (layout.cells + others,),
        reward.contiguous(),
        penalty.contiguous(),
        included.contiguous().view(torch.uint8),
        advantage,
        statistics,
        layout.cell_row,
        layout.cell_offset,
        layout.mean.unit_of_row,
        episode if first is None else first.contiguous(),
        *layout.mean[:3],
        episode if second is None else second.contiguous(),
        *layout.std[:3],
        rows,
        layout.cells,
        num_mean,
        num_std,
        ddof,
        int(singleton == "raw"),
        int(leave_one_out),
        float(penalty_inside),
        float(eps),
        float(min_std),
    )
    return advantage, statistics
