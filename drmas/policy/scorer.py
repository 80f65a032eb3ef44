"""Log-probs of rows under a model as it is: a policy between its updates, or the reference that KL measures from.

Called by the trainer, on all of the policy's ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drmas.policy.head import Head
from drmas.policy.packing import Packed
from drmas.policy.passes import Passes
from drmas.types import Row


class Scorer:
    """Scores rows with `passes.model` as it is at the moment."""

    def __init__(self, passes: Passes, head: Head) -> None:
        self.passes, self.head = passes, head

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[list[float]]:
        """The log-prob of every response token of every row, in order, at the rows' temperatures; the same on every rank."""

        def score(hidden: torch.Tensor, packed: Packed, share: list[int]) -> torch.Tensor:
            return self.head.logprobs(hidden, packed, [temperatures[i] for i in share] or [1.0])

        return self.passes.per_token(rows, score)
