"""One AdamW step on a tensor or on flat buffers, with the clip coefficient applied on the way.

Contract, with g = coefficient * grad and t = step + 1:
    p <- p (1 - lr weight_decay)
    m <- beta1 m + (1 - beta1) g               v <- beta2 v + (1 - beta2) g^2
    p <- p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    step <- t
  A coefficient that is negative (`grad_norm.SKIP`: the norm wasn't finite) or not finite changes nothing, `step` included.
  param, grad, exp_avg (m), exp_avg_sq (v): fp32, contiguous, of one shape, updated in place except grad; step: int64.
  `copy` (bf16, the same shape) receives the parameters rounded to nearest even. Elementwise. Moves 28 n bytes, 30 n with it.
  One step errs by at most 4 ulp of fp32 beside float64 on the same inputs, counted at the sum of the magnitudes that an
  assignment adds up (numerics.ADAMW_STEP): a difference of nearly equal terms keeps the error of its terms.
  The same bits from run to run. A gradient that isn't finite spoils its own element only.

`adamw_step` is for one tensor and one count. `adamw_slots` is for the flat buffers of a `TileTable`: every slot has its own
coefficient, count (`StepState`) and, where wanted, lr and weight decay. In Triton both are one pass in which the host waits for
nothing: coefficients and counts stay on the device, and a skipped slot's tiles end before they read a gradient.

The formula is that of Loshchilov and Hutter 2019 as torch.optim.AdamW computes it. In torch the work is done by its fused
kernel, which rounds a little differently on each device; it can scale gradients itself, but would write them back. There the
host reads the coefficients first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from drmas_kernels.backend import choose
from drmas_kernels.grad_norm import SKIP
from drmas_kernels.tile_table import Span, TileTable

_TILE = 2**19
"""Elements per pass of torch: a tile of scaled gradients stays in the cache, and is all the memory that a step needs."""

_FACTORS = (torch.float32, torch.float64)
"""What a coefficient may be."""


class StepState(NamedTuple):
    """What the slots count, on the device. The bias corrections follow from `step`, so it is all that a checkpoint needs."""

    step: Tensor
    """[slots] int64: the steps that were taken."""
    skipped: Tensor
    """[slots] int64: the steps that weren't, because the coefficient said so."""

    @classmethod
    def zeros(cls, num_slots: int, device: torch.device | str = "cpu") -> StepState:
        return cls(*(torch.zeros(num_slots, dtype=torch.int64, device=device) for _ in cls._fields))

    def advance(self, coefficient: Tensor) -> None:
        """Count a step with these coefficients, [slots]; nothing waits for them."""
        taken = coefficient >= 0
        self.step.add_(taken)
        self.skipped.add_(~taken)


class AdamBuffers(NamedTuple):
    """Flat buffers, as many of each as the table has; `copy` may be empty."""

    param: Sequence[Tensor]
    grad: Sequence[Tensor]
    exp_avg: Sequence[Tensor]
    exp_avg_sq: Sequence[Tensor]
    copy: Sequence[Tensor] = ()


def slot_constants(
    step: Tensor, coefficient: Tensor, lr: Tensor, weight_decay: Tensor, beta1: float, beta2: float, eps: float
) -> Tensor:
    """[slots, 4] fp32: coefficient, step size, eps and decay of the form that divides by sqrt(v) as it is.

    lr / (1 - beta1^t) m / (sqrt(v) / c + eps) = (lr c / (1 - beta1^t)) m / (sqrt(v) + eps c), with c = sqrt(1 - beta2^t).
    In float64: 1 - 0.9999^t of the first steps would lose most digits in fp32.
    """
    count = step.double()
    root = (1.0 - beta2**count).sqrt()
    size = lr * root / (1.0 - beta1**count)
    return torch.stack([coefficient.double(), size, eps * root, lr * weight_decay], dim=1).float()


def adamw_step_reference(
    buffers: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor],
    spans: Tensor,
    step: Tensor,
    coefficient: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    **settings: float,
) -> None:
    """Of flat buffers and the spans of a `TileTable`, in plain torch; the numbers per slot are read on the host."""
    factors, rates, decays = coefficient.tolist(), lr.tolist(), weight_decay.tolist()
    for buffer, start, length, slot, _ in spans.tolist():
        factor = factors[slot]
        if not factor >= 0:
            continue
        flat = [tensor[start : start + length] for tensor in buffers[buffer]]
        tiles = zip(*(tensor.split(_TILE) for tensor in flat), strict=True) if factor != 1.0 else [flat]
        for p, g, m, v in tiles:
            torch._fused_adamw_(
                [p],
                [g if factor == 1.0 else g * factor],
                [m],
                [v],
                [],
                [step[slot].float()],
                lr=rates[slot],
                weight_decay=decays[slot],
                amsgrad=False,
                maximize=False,
                **settings,
            )
        if copies:
            copies[buffer][start : start + length].copy_(flat[0])


@torch.library.custom_op("drmas::adamw_step", mutates_args={"param", "exp_avg", "exp_avg_sq", "copy", "step", "skipped"})
def _op(
    param: list[Tensor],
    grad: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    copy: list[Tensor],
    step: Tensor,
    skipped: Tensor,
    coefficient: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    spans: Tensor,
    buffer_tiles: list[int],
    offset: Tensor,
    length: Tensor,
    slot: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """`AdamBuffers`, `StepState`, [slots] float64 of coefficient, lr and weight decay, a `TileTable`, numbers."""
    StepState(step, skipped).advance(coefficient)
    buffers = list(zip(param, grad, exp_avg, exp_avg_sq, strict=True))
    if choose("adamw_step", offset.device).name == "torch":
        adamw_step_reference(buffers, copy, spans, step, coefficient, lr, weight_decay, beta1=beta1, beta2=beta2, eps=eps)
        return
    from drmas_kernels import _adamw_triton

    constants = slot_constants(step, coefficient, lr, weight_decay, beta1, beta2, eps)
    _adamw_triton.adamw_step(buffers, copy, buffer_tiles, offset, length, slot, constants, beta1, beta2)


@_op.register_fake
def _(*arguments) -> None:
    return None


@torch.no_grad()
def adamw_slots(
    buffers: AdamBuffers,
    state: StepState,
    table: TileTable,
    *,
    coefficient: Tensor,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.01,
) -> None:
    """Update in place the spans of `table` in all `buffers`, replicated ones too, and count the step in `state`.

    `coefficient`: [slots], fp32 or float64. `lr` and `weight_decay`: one number, or [slots] float64 on the device, unchecked.
    ValueError: shapes, dtypes or devices differ from the contract, or a number is out of its range.
    """
    for name, tensors in zip(AdamBuffers._fields, buffers, strict=True):
        if tensors or name != "copy":
            table.check(name, tensors, torch.bfloat16 if name == "copy" else torch.float32)
    for name, count in zip(StepState._fields, state, strict=True):
        _check_slots(f"state.{name}", count, table, (torch.int64,))
    _check_slots("coefficient", coefficient, table, _FACTORS)
    _check_numbers(lr=lr, eps=eps, weight_decay=weight_decay, beta1=beta1, beta2=beta2)
    per_slot = []
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not isinstance(value, Tensor):
            value = torch.full((table.num_slots,), value, dtype=torch.float64, device=table.device)
        _check_slots(name, value, table, (torch.float64,))
        per_slot.append(value)
    tiles = (table.spans, list(table.buffer_tiles), table.offset, table.length, table.slot)
    finite = coefficient.double().nan_to_num(nan=SKIP, posinf=SKIP, neginf=SKIP)
    _op(*map(list, buffers), *state, finite, *per_slot, *tiles, beta1, beta2, eps)


@torch.no_grad()
def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    coefficient: Tensor,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    copy: Tensor | None = None,
) -> None:
    """Update `param` and its state in place; `step` and `coefficient` are scalars on its device.

    ValueError: shapes, dtypes or devices differ from the contract, or a number is out of its range.
    """
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in (tensors if copy is None else tensors | {"copy": copy}).items():
        dtype = torch.bfloat16 if name == "copy" else torch.float32
        if tensor.dtype != dtype or tensor.shape != param.shape or not tensor.is_contiguous() or tensor.device != param.device:
            raise ValueError(
                f"{name} is {_words(tensor)}; expected a contiguous {dtype} {list(param.shape)} on {param.device}, as param"
            )
    for name, scalar, dtypes in (("step", step, (torch.int64,)), ("coefficient", coefficient, _FACTORS)):
        if scalar.numel() != 1 or scalar.dtype not in dtypes or scalar.device != param.device:
            kinds = " or ".join(map(str, dtypes))
            raise ValueError(f"{name} is {_words(scalar)}; expected one number, {kinds}, on {param.device}, as param")
    flat = AdamBuffers(*([tensor.view(-1)] for tensor in tensors.values()), copy=[] if copy is None else [copy.view(-1)])
    settings = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    state = StepState(step.view(1), torch.zeros_like(step).view(1))
    adamw_slots(flat, state, _whole(param.numel(), param.device), coefficient=coefficient.view(1), **settings)


@cache  # for good: a captured CUDA graph holds the table's addresses, not the table
def _whole(length: int, device: torch.device) -> TileTable:
    """Of one tensor; an optimiser asks for the same ones at every step."""
    return TileTable.build([Span(0, 0, length, 0)], [length], 1, device=device)


def _check_slots(name: str, tensor: Tensor, table: TileTable, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes or tensor.shape != (table.num_slots,) or tensor.device != table.device:
        kinds = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} is {_words(tensor)}; expected {kinds} [{table.num_slots}] on {table.device}: one per slot")


def _check_numbers(*, beta1: float, beta2: float, **at_least_zero: float | Tensor) -> None:
    for name, value in at_least_zero.items():
        if not isinstance(value, Tensor) and not 0 <= value < torch.inf:
            raise ValueError(f"{name} is {value}; expected a finite number, 0 or more")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} is {beta}; expected a number in [0, 1)")


def _words(tensor: Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" of stride {list(tensor.stride())}"
    return f"{tensor.dtype} {list(tensor.shape)}{strides} on {tensor.device}"
