"""Rotary position embedding (arXiv 2104.09864) of packed tokens: cosines and sines once per microbatch, applied in every layer.

Positions are explicit, because tokens of one pack may share a start and stand in any order. The halves of a head are rotated
against each other, as in the Llama family. Used by `drmas.policy.model` with our own layers; TransformerEngine's bring theirs.
"""

from __future__ import annotations

from typing import Any

import torch

from drmas.policy import host_platform
from drmas.policy.architecture import Architecture


class Rotary(torch.nn.Module):
    """Cosines and sines of the angles position x frequency."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        super().__init__()
        frequencies = architecture.inverse_frequencies
        if frequencies is None:
            steps = torch.arange(0, architecture.head_dim, 2).float() / architecture.head_dim
            frequencies = 1.0 / architecture.rope_theta**steps
        self.register_buffer("frequencies", frequencies.to(host_platform.device()), persistent=False)
        self.dtype = dtype

    @torch.no_grad()
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[1, T] int64 -> [2, T, 1, 1, d / 2]: cosines and sines, of angles in float32, in the dtype of the activations."""
        angles = positions[0, :, None, None, None].float() * self.frequencies
        return torch.stack((angles.cos(), angles.sin())).to(self.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, 1, heads, d] turned by the angles of `cos_sin` [2, T, 1, 1, d / 2]; contiguous. Backward keeps no activation."""
    return _Rotation.apply(x, cos_sin)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        ctx.cos_sin = cos_sin
        cos, sin = cos_sin
        return _turned(x, cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        cos, sin = ctx.cos_sin
        return _turned(grad, cos, sin, sign=-1), None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sign: int) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for the halves a and b of each head; the other way round for sign -1."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (a, b), (first, second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=second).addcmul_(a, sin, value=sign)
    return out
