"""One AdamW step on a tensor, with the clip coefficient applied on the way.

Contract, with g = coefficient * grad and t = step + 1:
    p <- p (1 - lr weight_decay)
    m <- beta1 m + (1 - beta1) g               v <- beta2 v + (1 - beta2) g^2
    p <- p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    step <- t
  A negative coefficient (`grad_norm.SKIP`: the norm wasn't finite) changes nothing, `step` included.
  param, grad, exp_avg (m), exp_avg_sq (v): fp32, contiguous, of one shape, updated in place except grad; step: int64 scalar.
  `copy` (bf16, the same shape) receives the rounded parameters. Elementwise. Moves 28 n bytes, 30 n with the copy.

The formula is that of Loshchilov and Hutter 2019 as torch.optim.AdamW computes it. The work is done by torch's fused kernel,
which rounds a little differently on each device; it can scale gradients itself, but would write them back.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE = 2**19
"""Elements per pass: a tile of scaled gradients stays in the cache, and is all the memory that a step needs."""


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
    count, factor = step.float(), float(coefficient)
    flat = [tensor.view(-1) for tensor in (param, grad, exp_avg, exp_avg_sq)]
    tiles = zip(*(tensor.split(_TILE) for tensor in flat), strict=True) if factor != 1.0 else [flat]
    for p, g, m, v in tiles:
        torch._fused_adamw_(
            [p],
            [g if factor == 1.0 else g * factor],
            [m],
            [v],
            [],
            [count],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
    if copy is not None:
        copy.copy_(param)
