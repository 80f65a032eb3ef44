"""One AdamW step on a tensor, with the clip coefficient applied on the way.

Contract, with g = coefficient * grad and t = step + 1:
    p <- p (1 - lr weight_decay)
    m <- beta1 m + (1 - beta1) g               v <- beta2 v + (1 - beta2) g^2
    p <- p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    step <- t
  A negative coefficient (`grad_norm.SKIP`: the norm wasn't finite) changes nothing, `step` included.
  param, grad, exp_avg (m), exp_avg_sq (v): fp32, one shape, updated in place except grad; step: int64 scalar tensor, in place.
  `copy` (bf16, the same shape) receives the rounded parameters. Elementwise. Moves 28 n bytes, 30 n with the copy.

The formula is that of Loshchilov and Hutter 2019 as torch.optim.AdamW computes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
        if tensor.dtype != torch.float32 or tensor.shape != param.shape:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected float32 {list(param.shape)}")
    if copy is not None and copy.shape != param.shape:
        raise ValueError(f"copy has shape {list(copy.shape)}; expected {list(param.shape)}")
    if coefficient < 0:
        return
    step += 1
    t = int(step)
    clipped = grad * coefficient.to(grad.dtype)
    exp_avg.lerp_(clipped, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(clipped, clipped, value=1.0 - beta2)
    divisor = exp_avg_sq.sqrt().div_(math.sqrt(1.0 - beta2**t)).add_(eps)
    param.mul_(1.0 - lr * weight_decay).addcdiv_(exp_avg, divisor, value=-lr / (1.0 - beta1**t))
    if copy is not None:
        copy.copy_(param)
