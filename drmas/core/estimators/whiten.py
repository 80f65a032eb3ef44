"""Whitening: advantages brought to mean 0 and deviation 1 over the response tokens of a step.

    A <- (A - mean) / (std + eps), over the tokens of all agents ("pooled"), or of each agent apart ("agent")

(the batch normalisation of arXiv 2501.03262). `advantage.whiten` puts it after any preset; ppo, reinforce++ and
reinforce++-baseline have it built in. Excluded rows take no part (I3). Rows that their segment has nothing to compare with,
and that got 0 for that, keep exactly 0 and take no part (I6); implementations that let them in give them -mean / std, a push
without a reason. Tokens that are all alike get 0.

Penalties are taken off afterwards, whatever the preset would do with them; with penalty "inside" the preset deals with them in
its own way, and what comes out is whitened with them in it (I7).

Fails when the step is small, since mean and deviation are then those of a few long responses, and when most advantages are 0:
the deviation is small, and the few others are blown up. Pooled, agents whose advantages spread differently share one scale, the
fault that per-agent statistics mend; and a mean over tokens leaves a rest in every group where the good responses are longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from drmas.core.advantages import AdvantageRow, Advantages, TokenAdvantages, check_rows
from drmas.core.estimators.base import NOTHING, Estimator, Evidence, Penalty, Probe, without_penalties

Pool = Literal["pooled", "agent"]

_ROUNDING = 1e-9
"""A spread below this share of the largest is that of sums in float64, not of rewards."""


def whitened(
    rows: Sequence[AdvantageRow],
    raw: Sequence[Tensor | None],
    pool: Pool,
    *,
    center: bool = True,
    scale: bool = True,
    eps: float = 1e-6,
) -> list[Tensor | None]:
    """`raw`: per row one float64 per response token, or one for all of them ([1]), which counts once for each; None takes no
    part. The same shapes come back. The result doesn't depend on the order of rows, to the bit."""
    pools: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if raw[i] is not None:
            pools.setdefault(row.agent if pool == "agent" else "", []).append(i)
    result: list[Tensor | None] = [None] * len(rows)
    for members in pools.values():
        tokens = torch.cat([raw[i].expand(len(rows[i].response_ids)) for i in members]).sort().values  # sums of any order agree
        alike = not len(tokens) or float(tokens[-1] - tokens[0]) <= _ROUNDING * float(tokens.abs().max())
        mean = tokens.mean() if center else 0.0
        divisor = tokens.std(correction=1) + eps if scale and not alike else 1.0
        for i in members:
            result[i] = torch.zeros_like(raw[i]) if alike and center else (raw[i] - mean) / divisor
    return result


def as_lists(tokens: Sequence[Tensor | None], less: Sequence[float] | None = None) -> list[list[float] | None]:
    """Each row's numbers, after `less`, one per row, is taken off them."""
    off = [0.0] * len(tokens) if less is None else less
    return [None if each is None else (each - own).tolist() for each, own in zip(tokens, off, strict=True)]


@dataclass(frozen=True, slots=True)
class Whitened:
    """Another estimator's advantages, whitened. Its segments stay those of the rewards."""

    inner: Estimator
    whiten: Pool = "pooled"
    eps: float = 1e-6
    penalty: Penalty = "outside"

    @property
    def needs_critic(self) -> bool:
        return self.inner.needs_critic

    @property
    def probes(self) -> tuple[Probe, ...]:
        return self.inner.probes

    @property
    def equal_groups_teach(self) -> bool:
        return self.inner.equal_groups_teach

    def __call__(self, rows: Sequence[AdvantageRow], evidence: Evidence = NOTHING) -> Advantages:
        check_rows(rows)
        outside = self.penalty == "outside"
        found = self.inner(without_penalties(rows) if outside else rows, evidence)
        alone = {i for segment in found.segments if segment.constant or segment.singleton for i in segment.rows}
        idle = [i in alone and value == 0.0 for i, value in enumerate(found.values)]
        each = [found.of(i) for i in range(len(rows))]
        raw = [
            None if value is None or idle[i] else torch.tensor(value, dtype=torch.float64).reshape(-1)
            for i, value in enumerate(each)
        ]
        white = whitened(rows, raw, self.whiten, eps=self.eps)
        white = [torch.zeros(1, dtype=torch.float64) if idle[i] else part for i, part in enumerate(white)]
        parts = as_lists(white, less=[row.penalty for row in rows] if outside else None)
        if found.tokens is None:
            return Advantages([part and part[0] for part in parts], found.segments, anchors=found.anchors)
        tokens = TokenAdvantages(
            [part and part * (len(row.response_ids) // len(part)) for row, part in zip(rows, parts, strict=True)],
            found.tokens.returns,
            found.tokens.before,
        )
        return Advantages(tokens.row_means(), found.segments, tokens, found.anchors)

    def state(self) -> dict[str, Any]:
        return self.inner.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.inner.restore(state)

    def __str__(self) -> str:
        over = "all tokens" if self.whiten == "pooled" else "each agent's tokens"
        return f"{self.inner}, whitened over {over}" + (", penalties inside" if self.penalty == "inside" else "")
