"""One AdamW step on a tensor, with the clip coefficient applied on the way.

Contract, with g = coefficient * grad and t = step + 1:
    p <- p (1 - lr weight_decay)
    m <- beta1 m + (1 - beta1) g               v <- beta2 v + (1 - beta2) g^2
    p <- p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    step <- t
  A negative coefficient (`grad_norm.SKIP`: the norm wasn't finite) changes nothing, `step` included.
  param, grad, exp_avg (m), exp_avg_sq (v): fp32, contiguous, of one shape, updated in place except grad; step: int64 scalar.
  `copy` (bf16, the same shape) receives the rounded parameters. Elementwise. Moves 28 n bytes, 30 n with the copy.

The formula is that of Loshchilov and Hutter 2019 as torch.optim.AdamW computes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TILE = 2**17
"""Elements per pass: four tensors of a tile stay in the cache over the operations, and temporaries stay small."""


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
    """Update `param` and its state in place. ValueError: shapes or dtypes differ from the contract."""
    for name, tensor in (("param", param), ("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if tensor.dtype != torch.float32 or tensor.shape != param.shape or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected contiguous float32 {list(param.shape)}")
    if copy is not None and copy.shape != param.shape:
        raise ValueError(f"copy has shape {list(copy.shape)}; expected {list(param.shape)}")
    if coefficient < 0:
        return
    step += 1
    t = int(step)
    factor, root, rate = float(coefficient), math.sqrt(1.0 - beta2**t), lr / (1.0 - beta1**t)
    for p, g, m, v in zip(*(tensor.view(-1).split(_TILE) for tensor in (param, grad, exp_avg, exp_avg_sq)), strict=True):
        clipped = g * factor
        m.lerp_(clipped, 1.0 - beta1)
        v.mul_(beta2).addcmul_(clipped, clipped, value=1.0 - beta2)
        divisor = v.sqrt().div_(root).add_(eps)
        p.mul_(1.0 - lr * weight_decay).addcdiv_(m, divisor, value=-rate)
    if copy is not None:
        copy.copy_(param)
