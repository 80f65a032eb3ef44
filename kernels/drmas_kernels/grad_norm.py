"""Gradient norms per group over flat buffers, and the clip coefficient.

Contract
  `squared_norms`: for buffers g_b (1-d, fp32) of groups 0..G-1, squared[k] = sum over the buffers of group k of |g_b|^2.
  Tiles of 256 elements are summed in fp32, tiles in float64, buffers in their order: relative error under 1e-6 against float64
  (numerics.SQUARED_NORM), the same bits from run to run. A NaN, an infinity or an overflow of a tile gives a non-finite sum.
  An empty buffer counts 0. Reads 4 n bytes.
  `clip_coefficient`: min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; -1 where the norm isn't finite, which
  `adamw.adamw_step` takes as "leave everything as it is". Stays on the device: nothing here waits for it.

Squares of ranks add up: the caller sums them over the ranks that hold different parts before it takes the root.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_TILE = 256
SKIP = -1.0
"""The coefficient that stands for a skipped update."""


def squared_norms(
    buffers: Sequence[Tensor], groups: Sequence[int], num_groups: int, *, device: torch.device | str | None = None
) -> Tensor:
    """[num_groups] float64, on the buffers' device, or on `device` (needed where a rank may have no buffers).

    ValueError: a buffer isn't a contiguous fp32 vector, or a group is out of range.
    """
    if len(buffers) != len(groups):
        raise ValueError(f"{len(buffers)} buffers but {len(groups)} groups; expected one group per buffer")
    if device is None:
        device = buffers[0].device if buffers else "cpu"
    squared = torch.zeros(num_groups, dtype=torch.float64, device=device)
    for buffer, group in zip(buffers, groups, strict=True):
        if buffer.ndim != 1 or buffer.dtype != torch.float32 or not buffer.is_contiguous():
            raise ValueError(f"a gradient buffer is {buffer.dtype} {list(buffer.shape)}; expected a contiguous float32 vector")
        if not 0 <= group < num_groups:
            raise ValueError(f"group is {group}; expected 0 to {num_groups - 1}")
        squared[group] += _squared_norm(buffer)
    return squared


def _squared_norm(buffer: Tensor) -> Tensor:
    whole = buffer.shape[0] // _TILE * _TILE
    tiles = torch.linalg.vector_norm(buffer[:whole].view(-1, _TILE), dim=1).double().square().sum()
    return tiles + torch.linalg.vector_norm(buffer[whole:]).double().square()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of norm `norm` (any shape), in its dtype; `SKIP` where it isn't finite."""
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; expected a positive number (inf for no clipping)")
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), SKIP)
