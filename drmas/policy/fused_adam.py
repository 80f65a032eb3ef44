"""AdamW with the contract of TransformerEngine's FusedAdam, on torch's own fused kernel.

Megatron-core's distributed optimiser can only be checkpointed with an Adam that counts `step` in its parameter group and keeps
nothing but `exp_avg` and `exp_avg_sq` per parameter. torch.optim.AdamW, its fallback, counts per parameter, and loading a
checkpoint fails. `install` hands Megatron this class where neither TransformerEngine nor APEX is present.

Called by drmas.policy.optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import megatron.core.optimizer as mcore_optimizer
import megatron.core.optimizer.distrib_optimizer as mcore_distributed
import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, bias-corrected; arXiv 1711.05101) over float32 tensors.

    The numbers of a step are those of torch.optim.AdamW(fused=True).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode is False; only decoupled weight decay is supported")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            states = [self._moments(param) for param in params]
            step = torch.full((), float(group["step"]), device=params[0].device)
            torch._fused_adamw_(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [step] * len(params),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _moments(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state


def install() -> None:
    """Let Megatron build `FusedAdam` where it found neither TransformerEngine nor APEX; idempotent."""
    if mcore_distributed.HAVE_APEX_OR_TE:
        return
    mcore_optimizer.Adam, mcore_optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    mcore_distributed.Adam, mcore_distributed.HAVE_APEX_OR_TE = FusedAdam, True
    mcore_distributed.USING_APEX_OPTIMIZER = True  # the branch that reads `step` from the parameter group
