"""What a policy is updated with, what an update reports, and which rows it refuses.

Rows and their weights are decided above (drmas.core); here they are only checked. Called by the trainer.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from drmas.errors import DataError
from drmas.policy.gaps import Gap
from drmas.types import Row


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """One update's rows, the same list on every rank, with one number per row in each of the other lists.

    An advantage is one number for the row, or one per response token (a critic's). `token_weights` is the weight of each of a
    row's response tokens in the loss; a row of weight 0 is left out (I3, I4). `temperatures` are those that the rows were
    sampled at (I11). With `on_policy` the ratio is 1 with its gradient, whatever
    the rows' own log-probs say: advantage 1 then is supervised learning. A critic learns `returns`, where `values` are what it
    said before, one per response token.

    What the ratio of the loss is formed with depends on `loss.mismatch`. "none": the log-probs that the rows were sampled with.
    "truncate" and "mask" (the decoupled objective of arXiv 2110.00641): `old_logprobs`, one per response token, which are the
    trainer's own before the step's first update; each token's term is weighted with omega = exp(old - sampled), truncated or
    masked. None is for the first update: the weights are still those of before, and the ratio is exactly 1, with its gradient.

    Example: PolicyBatch(rows=rows, advantages=[0.5, -0.5], token_weights=[0.01, 0.01], temperatures=[1.0, 1.0])
    """

    rows: Sequence[Row]
    advantages: Sequence[float | Sequence[float]]
    token_weights: Sequence[float]
    temperatures: Sequence[float]
    on_policy: bool = False
    returns: Sequence[Sequence[float]] | None = None
    values: Sequence[Sequence[float]] | None = None
    old_logprobs: Sequence[Sequence[float]] | None = None

    def included(self) -> list[int]:
        """Indices of the rows that have a say."""
        return [i for i, weight in enumerate(self.token_weights) if weight != 0.0]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did, the same on every rank.

    `metrics`: loss, grad_norm (before clipping), lr, tokens (of the included rows, prompts too), computed_tokens (those that
    went through the model) and tokens_saved (those that sharing of prefixes left out), flops (of all ranks), skipped (1.0
    where no step was taken: the gradient wasn't finite, or no row had a weight); with a critic also what `Critic.update` says,
    as critic_loss and so on. `agents`: per agent that had rows, what `drmas_kernels.policy_loss.AgentMetrics.per_token` says,
    with kl_k1 and kl_k3 from the policy that sampled also where the ratio is another's, and grad_norm where it was measured.
    `gaps`: per agent that had rows which the weights before the update sampled, how far the engine's log-probs are.
    """

    metrics: dict[str, float]
    agents: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    """In the passes that `flops` counts and the optimiser's step; reference and critic are not in either."""
    gaps: dict[str, Gap] = field(default_factory=dict)

    @classmethod
    def idle(cls, lr: float) -> UpdateResult:
        """Of an update without rows."""
        names = ("loss", "grad_norm", "tokens", "computed_tokens", "tokens_saved", "flops")
        return cls({**dict.fromkeys(names, 0.0), "lr": lr, "skipped": 1.0})


def check_batch(batch: PolicyBatch, *, policy: str, version: int, agents: Sequence[str], vocab: int) -> None:
    """DataError if a list's length or a row that has a say doesn't fit; nothing is changed."""
    for name in ("advantages", "token_weights", "temperatures", "returns", "values", "old_logprobs"):
        values = getattr(batch, name)
        if values is not None and len(values) != len(batch.rows):
            raise DataError(f"policy {policy!r}: {len(values)} {name} for {len(batch.rows)} rows; expected one per row")
    for i in batch.included():
        row = batch.rows[i]
        _check_row(row, i, policy, vocab)
        if row.agent not in agents:
            raise DataError(f"{_where(row, i)}: policy {policy!r} serves {', '.join(agents)}; no agent of that name")
        _check_versions(row, i, version)
        tokens = len(row.response_ids)
        if not batch.on_policy and len(row.logprobs) != tokens:
            raise DataError(f"{_where(row, i)}: {len(row.logprobs)} log-probs for {tokens} response tokens")
        if batch.old_logprobs is not None and len(batch.old_logprobs[i]) != tokens:
            raise DataError(f"{_where(row, i)}: {len(batch.old_logprobs[i])} old log-probs for {tokens} response tokens")
        advantage = batch.advantages[i]
        if isinstance(advantage, Sequence) and len(advantage) != tokens:
            raise DataError(
                f"{_where(row, i)}: {len(advantage)} advantages for {tokens} response tokens; expected one or as many"
            )
        if not math.isfinite(batch.token_weights[i]):
            raise DataError(f"{_where(row, i)}: token weight {batch.token_weights[i]}; expected a finite number")
        if not 0 < batch.temperatures[i] < math.inf:
            raise DataError(f"{_where(row, i)}: temperature {batch.temperatures[i]}; expected a positive number")


def check_rows(rows: Sequence[Row], *, policy: str, vocab: int) -> None:
    """DataError for a row of another policy, without prompt or response, or with an id outside the vocabulary."""
    for i, row in enumerate(rows):
        _check_row(row, i, policy, vocab)


def _check_row(row: Row, i: int, policy: str, vocab: int) -> None:
    if row.policy != policy:
        raise DataError(f"{_where(row, i)}: the row is of policy {row.policy!r}; this is {policy!r}")
    if not row.prompt_ids or not row.response_ids:
        sizes = f"{len(row.prompt_ids)} prompt and {len(row.response_ids)} response tokens"
        raise DataError(f"{_where(row, i)}: {sizes}; expected at least one of each")
    for ids in (row.prompt_ids, row.response_ids):
        low, high = _extremes(ids)
        if low < 0 or high >= vocab:
            raise DataError(f"{_where(row, i)}: token id {low if low < 0 else high}; expected 0 to {vocab - 1}")


def _extremes(ids: list[int]) -> tuple[int, int]:
    """The least and the largest. By an array, since a step's ids may be many millions and every rank looks at all of them."""
    try:
        values = np.frombuffer(array("I", ids), dtype=np.uint32)
    except OverflowError:  # an id below 0, say
        return min(ids), max(ids)
    return int(values.min()), int(values.max())


def _check_versions(row: Row, i: int, version: int) -> None:
    if len(row.versions or ()) != len(row.response_ids):
        raise DataError(
            f"{_where(row, i)}: {len(row.versions or ())} versions for {len(row.response_ids)} response tokens; a token of "
            f"unknown version isn't trained on (I2)"
        )
    for found in set(row.versions):
        if not isinstance(found, int) or not 0 <= found <= version:
            raise DataError(f"{_where(row, i)}: token of version {found!r}; expected 0 to {version}, the policy's own (I2)")


def _where(row: Row, i: int) -> str:
    return f"row {i} (episode {row.episode!r}, agent {row.agent!r}, turn {row.turn})"
