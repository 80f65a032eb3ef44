"""One shipped configuration of a Triton kernel: what the host side launches, and what `offline` compiles without a GPU.

The `_*_triton` modules list theirs in `SPECS`. Kernels are launched through their spec only, so what runs is what was checked:
no autotuning, the same tiles on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

MODULES = (
    "_adamw_triton",
    "_grad_norm_triton",
    "_head_triton",
    "_logits_triton",
    "_policy_loss_triton",
    "_segment_advantage_triton",
)
"""The modules of this package that hold Triton kernels, each with its `SPECS`."""

ALIGNMENT = 16
"""Bytes of a pointer and multiples of an integer that Triton can rely on where an argument is listed in `aligned`."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """A kernel with everything that its compilation depends on."""

    name: str
    """Unique, a C identifier: `logits_statistics_bf16`."""
    kernel: Any
    """The `triton.jit` function. Its integer arguments outside `aligned` stand in `do_not_specialize`."""
    signature: Mapping[str, str]
    """The run-time arguments in order, in Triton's words: "*fp32", "i32", "fp32", "tensordesc<bf16[128,64]>"."""
    constants: Mapping[str, Any]
    """The `tl.constexpr` arguments."""
    num_warps: int
    num_stages: int = 2
    aligned: frozenset[str] = frozenset()
    """Arguments that are multiples of 16: byte addresses of pointers, values of integers. `launch` checks them."""
    archs: tuple[str, ...] = ("sm_80", "sm_90", "sm_100")
    elements: int = 0
    """Elements that one pass of a program's inner loop handles (all of them where there is no loop); 0: not counted."""
    expects: frozenset[str] = frozenset()
    """What the machine code must show: "hgmma", "tma", "wide" (every load and store of the inner loop is of 128 bits); and what
    it may hold: "fp64", "atomics"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further compile options of Triton."""

    def launch(self, grid: Sequence[int], *arguments: Any) -> None:
        """Run it on the current stream of the tensors' device, with the run-time arguments in the order of `signature`.

        ValueError: an argument listed in `aligned` is not, or tensors are on several devices. An empty grid is no launch.
        """
        for (name, kind), value in zip(self.signature.items(), arguments, strict=True):
            if name in self.aligned and kind[0] in "*i":
                number = value.data_ptr() if isinstance(value, torch.Tensor) else value
                if number is not None and number % ALIGNMENT:
                    raise ValueError(f"{self.name}: {name} is {number}; expected a multiple of {ALIGNMENT}")
        if not all(grid):
            return
        device, *others = (value.device for value in arguments if isinstance(value, torch.Tensor))
        if set(others) - {device}:
            raise ValueError(f"{self.name}: tensors are on {device} and {set(others) - {device}}; expected one device")
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[tuple(grid)](*arguments, **self.constants, **self.compile_options())

    def compile_options(self) -> dict[str, Any]:
        """What `triton.compile` takes. Fusing products and sums is asked for by name: Triton's default for it changes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **self.options}


def shipped() -> list[KernelSpec]:
    """Every kernel in every configuration."""
    return [spec for name in MODULES for spec in import_module(f"{__package__}.{name}").SPECS]
