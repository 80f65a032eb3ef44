"""Small kernels with specs of the shipped kind, for the tests of `offline`; imported in processes of their own only."""

import triton
import triton.language as tl

from drmas_kernels.spec import KernelSpec


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["total"])
def sum_rows(values, total, count: tl.int64, stride, BLOCK: tl.constexpr):
    """Two fp32 accesses of 128 bits per thread and pass: short enough for ptxas to unroll."""
    values += tl.program_id(0).to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count // BLOCK * BLOCK, BLOCK):
        found += tl.load(values + start + lane)
    tl.store(total + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "goal"])
def scale(source, goal, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(goal + at, tl.load(source + at, mask=at < count) * factor, mask=at < count)


@triton.jit(do_not_specialize=["width"])
def product(left, right, out, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, WIDTH):
        found = tl.dot(left.load([row, start]), right.load([column, start]).T, found)
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    tl.store(out + rows.to(tl.int64)[:, None] * stride + columns[None, :], found.to(tl.bfloat16))


@triton.jit
def careless(source, goal, count, step):
    """Everything that a spec can do wrong."""
    at = tl.arange(0, 128)
    value = tl.load(source + at * step, mask=at < count).to(tl.float64)
    tl.atomic_add(goal, tl.sum(value * value, 0))


MATRIX = "tensordesc<bf16[128,64]>"
SUM_ROWS = KernelSpec(
    name="sum_rows",
    kernel=sum_rows,
    signature={"values": "*fp32", "total": "*fp32", "count": "i64", "stride": "i32"},
    constants={"BLOCK": 1024},
    num_warps=4,
    aligned=frozenset(("values", "stride")),
    archs=("sm_90",),
    elements=1024,
    expects=frozenset(("wide",)),
)
SCALE = KernelSpec(
    name="scale",
    kernel=scale,
    signature={"source": "*bf16", "goal": "*fp32", "count": "i32", "factor": "fp32"},
    constants={"BLOCK": 1024},
    num_warps=4,
    archs=("sm_90",),
    elements=1024,
)
PRODUCT = KernelSpec(
    name="product",
    kernel=product,
    signature={"left": MATRIX, "right": MATRIX, "out": "*bf16", "width": "i32", "stride": "i32"},
    constants={"ROWS": 128, "COLUMNS": 128, "WIDTH": 64},
    num_warps=8,
    num_stages=3,
    aligned=frozenset(("out", "stride")),
    archs=("sm_80", "sm_90"),
    expects=frozenset(("hgmma", "tma")),
)
CARELESS = KernelSpec(
    name="careless",
    kernel=careless,
    signature={"source": "*fp32", "goal": "*fp64", "count": "i64", "step": "i32"},
    constants={},
    num_warps=4,
    aligned=frozenset(("goal", "gaol")),
    archs=("sm_90",),
    expects=frozenset(("hgmma", "tma", "wide", "fast")),
)
SPECS = (SUM_ROWS, SCALE, PRODUCT)
