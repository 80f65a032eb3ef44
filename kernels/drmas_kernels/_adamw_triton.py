"""The Triton kernel of `adamw`: a program per tile reads gradient, parameter and both moments once and writes the last three.

What is the same for a whole slot was computed in float64 and rounded once: its row of `constants` holds the clip coefficient,
the step size, eps and the decay (`adamw.slot_constants`). A negative coefficient ends the program before it has read anything
else.

Per element, with w = 1 - beta; products and sums of one term are fused:
    g = coefficient grad
    m = w1 g + (m - w1 m)         w, not beta, is rounded: fp32(0.999) is off by 3e-5 of w, and so would v be after many steps
    v = (w2 g) g + (v - w2 v)
    p = p - (decay p + size m / (sqrt v + eps))
Root and quotient are the GPU's fast ones (2^-23 and 2 ulp; a v under 2^-126 counts as 0 in the root): exact ones branch to
rare paths and take more registers for 2 ulp of the last term. Full blocks move 128 bits at a time, which needs
offsets that the compiler knows to be aligned (see `_grad_norm_triton`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import triton
import triton.language as tl
from torch import Tensor

from drmas_kernels.spec import KernelSpec

THREADS = 256
_BUFFERS = ("param", "grad", "exp_avg", "exp_avg_sq")
_TABLES = frozenset(("offset_of", "length_of", "slot_of", "constants"))


@triton.jit
def _update(param, grad, exp_avg, exp_avg_sq, copy, mask, coefficient, size, eps, decay, weight1, weight2, COPY: tl.constexpr):
    """One block; the pointers are those of its elements."""
    g = tl.load(grad, mask=mask) * coefficient
    p = tl.load(param, mask=mask)
    m = tl.load(exp_avg, mask=mask)
    v = tl.load(exp_avg_sq, mask=mask)
    m = tl.fma(g, weight1, tl.fma(m, -weight1, m))
    v = tl.fma(g * weight2, g, tl.fma(v, -weight2, v))
    p -= tl.fma(p, decay, m * size / (tl.sqrt(v) + eps))
    tl.store(param, p, mask=mask)
    tl.store(exp_avg, m, mask=mask)
    tl.store(exp_avg_sq, v, mask=mask)
    if COPY:
        tl.store(copy, p.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["first_tile"])
def _adamw(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    offset_of,
    length_of,
    slot_of,
    constants,
    first_tile,
    weight1,
    weight2,
    copy,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile = first_tile + tl.program_id(0)
    row = constants + tl.load(slot_of + tile) * 4
    coefficient = tl.load(row)
    if coefficient >= 0:
        size = tl.load(row + 1)
        eps = tl.load(row + 2)
        decay = tl.load(row + 3)
        offset = tl.load(offset_of + tile)
        length = tl.load(length_of + tile)
        whole = length // BLOCK * BLOCK
        lane = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        # A tile with a full block starts at a multiple of 16, so this changes nothing.
        aligned = tl.multiple_of(offset // 16 * 16, 16)
        for start in range(0, whole, BLOCK):
            at = aligned + start + lane
            _update(
                param + at,
                grad + at,
                exp_avg + at,
                exp_avg_sq + at,
                copy + at if COPY else None,
                None,
                coefficient,
                size,
                eps,
                decay,
                weight1,
                weight2,
                COPY,
            )
        if whole < length:
            at = offset + whole + lane
            _update(
                param + at,
                grad + at,
                exp_avg + at,
                exp_avg_sq + at,
                copy + at if COPY else None,
                lane < length - whole,
                coefficient,
                size,
                eps,
                decay,
                weight1,
                weight2,
                COPY,
            )


_adamw_anywhere = triton.jit(_adamw.fn, do_not_specialize=["first_tile"], do_not_specialize_on_alignment=[*_BUFFERS, "copy"])


def _spec(name: str, *, copy: bool, aligned: bool) -> KernelSpec:
    buffers = (*_BUFFERS, "copy") if copy else _BUFFERS
    group = 8 if copy else 4  # neighbours in a thread: 16 bytes of the narrowest buffer
    return KernelSpec(
        name=name,
        kernel=_adamw if aligned else _adamw_anywhere,
        signature={
            **dict.fromkeys(_BUFFERS, "*fp32"),
            "offset_of": "*i64",
            "length_of": "*i32",
            "slot_of": "*i32",
            "constants": "*fp32",
            "first_tile": "i32",
            "weight1": "fp32",
            "weight2": "fp32",
            **({"copy": "*bf16"} if copy else {}),
        },
        constants={"COPY": copy, "BLOCK": THREADS * group, "GROUP": group} | ({} if copy else {"copy": None}),
        num_warps=THREADS // 32,
        aligned=_TABLES | set(buffers) if aligned else _TABLES,
        elements=THREADS * group,
        expects=frozenset(("wide",)) if aligned else frozenset(),
    )


_BY_LAYOUT = {
    (copy, aligned): _spec(f"adamw{'_copy' if copy else ''}{'' if aligned else '_anywhere'}", copy=copy, aligned=aligned)
    for copy in (False, True)
    for aligned in (True, False)
}
SPECS = tuple(_BY_LAYOUT.values())


def adamw_step(
    buffers: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor],
    buffer_tiles: Sequence[int],
    offset: Tensor,
    length: Tensor,
    slot: Tensor,
    constants: Tensor,
    beta1: float,
    beta2: float,
) -> None:
    """`buffers`: (param, grad, exp_avg, exp_avg_sq) of every buffer; `copies`: as many, or none; the rest: a `TileTable`'s."""
    for index, (first, end) in enumerate(pairwise(buffer_tiles)):
        copy = copies[index : index + 1]
        aligned = not any(tensor.data_ptr() % 16 for tensor in (*buffers[index], *copy))
        spec = _BY_LAYOUT[bool(copy), aligned]
        weights = (1.0 - beta1, 1.0 - beta2)
        spec.launch((end - first,), *buffers[index], offset, length, slot, constants, first, *weights, *copy)
