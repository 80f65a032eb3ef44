"""Triton kernels on logits: one read for the statistics of each row, one read and one write for the gradient.

Contract
  Logits [T, v] in fp32 or bf16, columns next to each other, rows at any distance (also 0: expanded). With the factor c_t =
  1 / temperature_t, z = c logit, m = max z, u = z - m: `statistics` gives (m, s, q, z_y) per row in natural units, fp32,
      s = sum e^u,   q = sum e^u u,   z_y = z at the target's column, -inf where that is not one of these columns
  and `to_dlogits` the derivative of a loss whose derivatives by log-prob and entropy are slope and -bonus,
      dz_v = p_v (bonus (ln p_v + H) - slope) + slope [v = y],   p = e^(z - m) / s,   H = ln s - q / s,   dlogit = c dz
  with m, s, q, z_y merged over all shards of the vocabulary.

  A logit -inf has p = 0, adds nothing and has gradient 0. NaN gives NaN statistics, +inf statistics that are not finite. A row
  of slope and bonus 0 has gradient exactly 0, whatever its logits and statistics. No column: m = -1e30, s = q = 0.

  Inside, powers of 2: 2^(logit scale - reference) is one fused product and sum with scale = c log2 e. The reference is any
  number near the maximum, so rounding it costs nothing; the rest goes into s, q and the coefficients once per row. A thread
  holds 16 bytes of neighbouring logits and rescales its running sums once for them, not once for each.
  The target's gradient is formed in fp32 from z_y and stored last: out of a bf16 1 - p nothing can be rescued.

  Memory: the logits are read once by each kernel; `to_dlogits` may write over them. Deterministic, no atomics: a row's result
  depends on its values and on whether its rows are 16-byte aligned only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drmas_kernels.spec import ALIGNMENT, KernelSpec
from drmas_kernels.vocab_statistics import no_columns

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
DEEPEST = tl.constexpr(-1e4)
"""An exponent whose power is 0, and which times 0 is 0: stands in for -inf."""

_TILE = 4096
"""Columns that a program takes at a time."""
_TILES = 4
"""Tiles per program of the gradient: rows alone don't fill a GPU where there are few."""
_TARGETS = 128
"""Rows per program of the kernel that stores the targets' gradients."""


@triton.jit
def _accumulate(logit, largest, reference, total, moment, scale):
    """Take a tile [groups, GROUP] into the running sums of its groups, which are relative to 2^reference."""
    top = tl.max(logit, 1)
    largest = tl.maximum(largest, top)
    raised = tl.maximum(reference, top * scale)
    shift = reference - raised
    factor = tl.exp2(shift)
    exponent = tl.fma(logit, scale, -raised[:, None])
    power = tl.exp2(exponent)
    moment = factor * (moment + shift * total) + tl.sum(power * tl.maximum(exponent, DEEPEST), 1)
    total = factor * total + tl.sum(power, 1)
    return largest, raised, total, moment


def _statistics(
    logits, column, inverse_temperature, out, columns, units, UNIT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """One row. Its distance to the next is `units` * UNIT elements, so that the compiler knows what divides it."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * units * UNIT
    factor = tl.load(inverse_temperature + row)
    scale = factor * LOG2E
    first = tl.arange(0, GROUPS) * GROUP
    lane = first[:, None] + tl.arange(0, GROUP)[None, :]
    largest = tl.full([GROUPS], LOWEST, tl.float32)
    reference = largest * scale
    total = tl.zeros([GROUPS], tl.float32)
    moment = tl.zeros([GROUPS], tl.float32)
    whole = columns // (GROUPS * GROUP) * (GROUPS * GROUP)
    for offset in range(0, whole, GROUPS * GROUP):
        logit = tl.load(start + offset + lane).to(tl.float32)
        largest, reference, total, moment = _accumulate(logit, largest, reference, total, moment, scale)
    if whole < columns:
        if columns % GROUP == 0:
            logit = tl.load(start + whole + lane, mask=(whole + first < columns)[:, None], other=-float("inf")).to(tl.float32)
        else:
            logit = tl.load(start + whole + lane, mask=whole + lane < columns, other=-float("inf")).to(tl.float32)
        largest, reference, total, moment = _accumulate(logit, largest, reference, total, moment, scale)

    top = tl.max(largest, 0)
    highest = tl.max(reference, 0)
    shift = reference - highest
    power = tl.exp2(shift)
    sum_all = tl.sum(power * total, 0)
    moment_all = tl.sum(power * (moment + shift * total), 0)
    # From 2^highest to the exact maximum, of which highest is a rounding.
    rest = tl.fma(top, scale, -highest)
    back = tl.where(top > LOWEST, tl.exp2(-rest), 0.0)  # a row of -inf: what LOWEST rounds to is no remainder
    chosen = tl.load(column + row)
    inside = (chosen >= 0) & (chosen < columns)
    target = tl.load(start + chosen, mask=inside, other=-float("inf")).to(tl.float32)
    out += row * 4
    tl.store(out, top * factor)
    tl.store(out + 1, back * sum_all)
    tl.store(out + 2, back * (moment_all - rest * sum_all) * LN2)
    tl.store(out + 3, target * factor)


@triton.jit
def _derivative(logit, scale, reference, constant, linear, BONUS: tl.constexpr, FINITE: tl.constexpr):
    exponent = tl.fma(logit, scale, -reference)
    power = tl.exp2(exponent)
    if not BONUS:
        return power * constant
    if not FINITE:
        exponent = tl.maximum(exponent, DEEPEST)
    return power * tl.fma(exponent, linear, constant)


def _dlogits(
    logits, merged, slope, bonus, inverse_temperature, out, blocks, columns, units, out_units,
    UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, BONUS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    TILES: tl.constexpr, SAME: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one row: 2^u (constant + linear u), the target's column included."""
    TILE: tl.constexpr = GROUPS * GROUP
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    begin = program % blocks * (TILES * TILE)
    end = tl.minimum(columns - begin, TILES * TILE)
    whole = end // TILE * TILE
    first = tl.arange(0, GROUPS) * GROUP
    lane = first[:, None] + tl.arange(0, GROUP)[None, :]
    source = logits + row * units * UNIT + begin
    goal = out + row * out_units * OUT_UNIT + begin
    across = lane
    if SAME:  # one layout for loads and stores: the lanes' addresses are computed once
        source, goal, across = source + lane, goal + lane, 0
    dtype = out.dtype.element_ty
    by_logprob = tl.load(slope + row)
    live = tl.abs(by_logprob)
    by_entropy = 0.0
    if BONUS:
        by_entropy = tl.load(bonus + row)
        live += tl.abs(by_entropy)
    if live == 0:
        for offset in range(0, end, TILE):
            tl.store(goal + offset + across, tl.zeros([GROUPS, GROUP], dtype), mask=offset + lane < end)
    else:
        factor = tl.load(inverse_temperature + row)
        largest = tl.load(merged + row * 4)
        total = tl.load(merged + row * 4 + 1)
        moment = tl.load(merged + row * 4 + 2)
        scale = factor * LOG2E
        reference = tl.floor(largest * LOG2E)
        rest = tl.fma(largest, LOG2E, -reference)
        weight = tl.exp2(-rest) / total * factor
        constant = -weight * (by_logprob + by_entropy * (moment / total + LN2 * rest))
        linear = weight * by_entropy * LN2
        for offset in range(0, whole, TILE):
            logit = tl.load(source + offset + across).to(tl.float32)
            gradient = _derivative(logit, scale, reference, constant, linear, BONUS, FINITE)
            tl.store(goal + offset + across, gradient.to(dtype))
        if whole < end:
            if columns % GROUP == 0:
                groups = (whole + first < end)[:, None]
                logit = tl.load(source + whole + across, mask=groups, other=-float("inf")).to(tl.float32)
                gradient = _derivative(logit, scale, reference, constant, linear, BONUS, False)
                tl.store(goal + whole + across, gradient.to(dtype), mask=groups)
            else:
                inside = whole + lane < end
                logit = tl.load(source + whole + across, mask=inside, other=-float("inf")).to(tl.float32)
                gradient = _derivative(logit, scale, reference, constant, linear, BONUS, False)
                tl.store(goal + whole + across, gradient.to(dtype), mask=inside)


@triton.jit
def _log(x):
    """ln x to an ulp of itself also next to 1, where the logarithm of the hardware is exact to 2^-22 of 1 only."""
    t = (x - 1.0) / (x + 1.0)
    square = t * t
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9 + square * (1.0 / 11)))))
    return tl.where(tl.abs(x - 1.0) < 0.5, 2.0 * t * series, tl.log2(x) * LN2)


@triton.jit
def _one_minus_exp(x):
    """1 - e^x for x <= 0 without cancellation: the series of expm1 next to 0."""
    series = 1.0 + x / 8 * (1.0 + x / 9)
    series = 1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7 * series))
    series = 1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * series))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp2(x * LOG2E))


def _dtarget(
    merged, column, slope, bonus, inverse_temperature, out, rows, columns, out_stride,
    BONUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite the gradient at the targets of BLOCK rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    chosen = tl.load(column + row, mask=mask, other=-1)
    mask = mask & (chosen >= 0) & (chosen < columns)
    by_logprob = tl.load(slope + row, mask=mask, other=0.0)
    factor = tl.load(inverse_temperature + row, mask=mask, other=1.0)
    largest = tl.load(merged + row * 4, mask=mask, other=0.0)
    total = tl.load(merged + row * 4 + 1, mask=mask, other=1.0)
    log_total = _log(total)
    logprob = tl.load(merged + row * 4 + 3, mask=mask, other=0.0) - largest - log_total
    gradient = by_logprob * _one_minus_exp(logprob)
    live = by_logprob != 0
    if BONUS:
        by_entropy = tl.load(bonus + row, mask=mask, other=0.0)
        entropy = log_total - tl.load(merged + row * 4 + 2, mask=mask, other=0.0) / total
        gradient += by_entropy * tl.exp2(logprob * LOG2E) * (tl.maximum(logprob, DEEPEST) + entropy)
        live = live | (by_entropy != 0)
    gradient = tl.where(live, gradient * factor, 0.0)
    tl.store(out + row * out_stride + chosen, gradient.to(out.dtype.element_ty), mask=mask)


def _compiled(kernel, integers: str, vectors: str):
    """Specialised on nothing but the alignment of the pointers that `vectors` leaves out."""
    return triton.jit(kernel, do_not_specialize=integers.split(), do_not_specialize_on_alignment=vectors.split())


_SMALL = "merged slope bonus inverse_temperature"
_STATISTICS = {
    aligned: _compiled(_statistics, "columns units", "column inverse_temperature out" + ("" if aligned else " logits"))
    for aligned in (True, False)
}
_DLOGITS = {
    aligned: _compiled(_dlogits, "blocks columns units out_units", _SMALL + ("" if aligned else " logits out"))
    for aligned in (True, False)
}
_DTARGET = _compiled(_dtarget, "rows columns out_stride", _SMALL + " column out")

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def _group(dtype: torch.dtype) -> int:
    """Elements in 16 bytes."""
    return ALIGNMENT // dtype.itemsize


def _statistics_spec(dtype: torch.dtype, aligned: bool) -> KernelSpec:
    kind, group = _NAMES[dtype], _group(dtype)
    return KernelSpec(
        name=f"logits_statistics_{kind}" + ("" if aligned else "_unaligned"),
        kernel=_STATISTICS[aligned],
        signature={
            "logits": f"*{kind}", "column": "*i64", "inverse_temperature": "*fp32", "out": "*fp32",
            "columns": "i32", "units": "i32",
        },
        constants={"UNIT": group if aligned else 1, "GROUP": group, "GROUPS": _TILE // group},
        num_warps=4,
        aligned=frozenset({"logits"} if aligned else ()),
        elements=_TILE,
        expects=frozenset({"wide"} if aligned else ()),
    )  # fmt: skip


def _dlogits_spec(dtype: torch.dtype, out_dtype: torch.dtype, bonus: bool, aligned: bool, finite: bool) -> KernelSpec:
    kind, out_kind = _NAMES[dtype], _NAMES[out_dtype]
    group = _group(out_dtype)
    words = [word for word, said in (("bonus", bonus), ("finite", finite), ("unaligned", not aligned)) if said]
    return KernelSpec(
        name="_".join(["logits_gradient", kind, out_kind, *words]),
        kernel=_DLOGITS[aligned],
        signature={
            "logits": f"*{kind}", "merged": "*fp32", "slope": "*fp32", "bonus": "*fp32", "inverse_temperature": "*fp32",
            "out": f"*{out_kind}", "blocks": "i32", "columns": "i32", "units": "i32", "out_units": "i32",
        },
        constants={
            "UNIT": _group(dtype) if aligned else 1, "OUT_UNIT": group if aligned else 1, "BONUS": bonus, "GROUP": group,
            "GROUPS": _TILE // group, "TILES": _TILES, "SAME": kind == out_kind, "FINITE": finite,
        },
        num_warps=4,
        aligned=frozenset({"logits", "out"} if aligned else ()),
        elements=_TILE,
        expects=frozenset({"wide"} if aligned else ()),
    )  # fmt: skip


def _dtarget_spec(out_dtype: torch.dtype, bonus: bool) -> KernelSpec:
    kind = _NAMES[out_dtype]
    return KernelSpec(
        name=f"logits_gradient_target_{kind}" + ("_bonus" if bonus else ""),
        kernel=_DTARGET,
        signature={
            "merged": "*fp32", "column": "*i64", "slope": "*fp32", "bonus": "*fp32", "inverse_temperature": "*fp32",
            "out": f"*{kind}", "rows": "i32", "columns": "i32", "out_stride": "i32",
        },
        constants={"BONUS": bonus, "BLOCK": _TARGETS},
        num_warps=4,
    )  # fmt: skip


_FLAGS = (False, True)
_PAIRS = ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16))
_STATISTICS_SPECS = {(dtype, aligned): _statistics_spec(dtype, aligned) for dtype in _NAMES for aligned in _FLAGS}
_DLOGITS_SPECS = {
    (*pair, bonus, aligned, finite): _dlogits_spec(*pair, bonus, aligned, finite)
    for pair in _PAIRS
    for bonus in _FLAGS
    for aligned in _FLAGS
    for finite in _FLAGS[: 1 + (bonus and pair[0] == torch.float32)]
}
_DTARGET_SPECS = {(dtype, bonus): _dtarget_spec(dtype, bonus) for dtype in _NAMES for bonus in _FLAGS}
SPECS: tuple[KernelSpec, ...] = (*_STATISTICS_SPECS.values(), *_DLOGITS_SPECS.values(), *_DTARGET_SPECS.values())


def _units(matrix: Tensor) -> int | None:
    """The distance between rows in 16-byte pieces; None where rows don't start at multiples of 16 bytes."""
    stride = matrix.stride(0) if matrix.shape[0] > 1 else 0
    aligned = matrix.data_ptr() % ALIGNMENT == 0 and stride % _group(matrix.dtype) == 0
    return stride // _group(matrix.dtype) if aligned else None


def _vector(value: float | Tensor | None, default: float, like: Tensor) -> Tensor:
    """One fp32 number per row of `like`."""
    if isinstance(value, Tensor):
        return value.float().contiguous()
    return torch.full(like.shape[:1], default if value is None else value, dtype=torch.float32, device=like.device)


def _check(name: str, matrix: Tensor, column: Tensor) -> None:
    if matrix.ndim != 2 or matrix.dtype not in _NAMES or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise ValueError(
            f"{name} is {matrix.dtype} {list(matrix.shape)} with strides {matrix.stride()}; "
            "expected float32 or bfloat16 [T, v] with column stride 1"
        )
    if column.shape != matrix.shape[:1]:
        raise ValueError(f"column has shape {list(column.shape)}; expected [{matrix.shape[0]}]")


def statistics(logits: Tensor, column: Tensor, inverse_temperature: float | Tensor | None) -> Tensor:
    """(m, s, q, z_y) of every row, [T, 4] fp32: the contract is on top of this file. `column` [T] int32 or int64."""
    _check("logits", logits, column)
    rows, columns = logits.shape
    out = torch.empty(rows, 4, dtype=torch.float32, device=logits.device)
    if columns == 0:
        return no_columns(out)
    units = _units(logits)
    spec = _STATISTICS_SPECS[logits.dtype, units is not None]
    factor = _vector(inverse_temperature, 1.0, logits)
    distance = logits.stride(0) if units is None else units
    spec.launch((rows,), logits, column.long().contiguous(), factor, out, columns, distance)
    return out


def to_dlogits(
    logits: Tensor,
    merged: Tensor,
    column: Tensor,
    slope: Tensor,
    bonus: float | Tensor | None,
    inverse_temperature: float | Tensor | None,
    out: Tensor,
    *,
    finite: bool = False,
) -> Tensor:
    """Write the loss's derivative by the logits to `out` [T, v], which may be `logits`, and return it.

    `merged` holds the statistics of the whole vocabulary, `slope` the loss's derivative by the log-prob, `bonus` minus that by
    the entropy. `finite`: no logit is meant to be -inf, so that one with a bonus may give NaN, which is cheaper.
    """
    _check("logits", logits, column)
    _check("out", out, column)
    pair = (logits.dtype, out.dtype)
    if pair not in _PAIRS or out.shape != logits.shape:
        raise ValueError(f"out is {out.dtype} {list(out.shape)} for logits {logits.dtype} {list(logits.shape)}")
    rows, columns = logits.shape
    if columns == 0:
        return out
    has_bonus = bonus is not None
    units, out_units = _units(logits), _units(out)
    aligned = units is not None and out_units is not None
    spec = _DLOGITS_SPECS[*pair, has_bonus, aligned, finite and has_bonus and logits.dtype == torch.float32]
    slope = _vector(slope, 0.0, logits)
    bonus = _vector(bonus, 0.0, logits) if has_bonus else slope
    factor = _vector(inverse_temperature, 1.0, logits)
    merged, column = merged.contiguous(), column.long().contiguous()
    blocks = triton.cdiv(columns, _TILE * _TILES)
    if not aligned:
        units, out_units = logits.stride(0), out.stride(0)
    small = (slope, bonus, factor, out)
    spec.launch((rows * blocks,), logits, merged, *small, blocks, columns, units, out_units)
    _DTARGET_SPECS[out.dtype, has_bonus].launch(
        (triton.cdiv(rows, _TARGETS),), merged, column, *small, rows, columns, out.stride(0)
    )
    return out
