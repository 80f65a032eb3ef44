"""Gradients of single rows, of which only the norm is kept: for the second moments of `drmas.core.moments`.

A row at a time goes through the passes of an update, so that every layout, adapter and frozen parameter counts as it does in
the gradient norm, and is dropped where an update would step. Called by the trainer inside `PolicyGroups.active`, on all of the
policy's ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drmas.policy.head import Head, TokenTargets
from drmas.policy.optimizer import PolicyOptimizer
from drmas.policy.packing import Packed
from drmas.policy.passes import EMPTY, Passes
from drmas.types import Row
from drmas_kernels.policy_loss import PolicyLossOptions

_SCORE = PolicyLossOptions()
"""With a ratio of 1 and advantage 1 the loss is minus the mean log-prob; the clips are far, the other terms off."""


def score_norms(
    rows: Sequence[Row], temperatures: Sequence[float], *, passes: Passes, head: Head, optimizer: PolicyOptimizer
) -> list[float]:
    """Of every row, the squared norm of the gradient of its response tokens' mean log-prob; the same on every rank.

    Replicas that don't hold the row add a stand-in of weight 0. The gradient buffers are zeros afterwards.
    """
    squares = []

    def score(hidden: torch.Tensor, packed: Packed, share: list[int]) -> tuple[torch.Tensor, None]:
        row, weight = (rows[share[0]], 1.0) if share else (EMPTY, 0.0)
        targets = TokenTargets(
            token_weight=packed.of_rows([weight / len(row.response_ids)]),
            advantage=packed.of_rows([1.0]),
            agent=packed.of_rows([0], torch.int64),
            old_logprob=None,
            ref_logprob=None,
            rollout_logprob=None,
        )
        temperature = temperatures[share[0]] if share else 1.0
        return head.loss(hidden, packed, targets, [temperature], num_agents=1, options=_SCORE).loss, None

    optimizer.zero_grad()
    for i in range(len(rows)):
        passes.backward(optimizer.ddp, rows, [i], score)
        squares.append(optimizer.set_aside())
        optimizer.zero_grad()  # drops what was set aside, before another pass makes room for it
    return torch.stack(squares).tolist()
