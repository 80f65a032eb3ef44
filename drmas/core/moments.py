"""The second moment of each agent's gradient, row by row: what the theory of the method is about, measured.

z_i is the gradient of the mean log-prob of row i's response tokens: its loss term with advantage 1. With advantage A_i its
gradient is A_i z_i, so that |z_i|^2, measured once, says what each comparison of rewards makes of the same rows:

    E|A z|^2 = E|z|^2 E[A^2] + Cov(A^2, |z|^2)

Under one pooled baseline E[A^2] of agent k's rows of a task is (sigma_k^2 + (mu_k - mu)^2) / sigma^2, and the last term is
Delta_k (Dr. MAS, Lemma 4.2); under the agent's own statistics E[A^2] is 1. Called by the controller, on every rank alike; the
norms are `PolicyTrainer.score_norms`'.

Example: chosen = spread(rows, trained, most=32); moments = second_moments(rows, dict(zip(chosen, squares)), advantages)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drmas.core.advantages import AdvantageRule, Advantages, advantages
from drmas.core.diagnostics import pooled_factors
from drmas.core.means import mean_of
from drmas.types import Row

POOLED = AdvantageRule(mean="task", std="task", weighting="episode", ddof=0, eps=0.0)
"""(R - mu) / sigma, population moments over the task's distinct episodes."""
PER_AGENT = AdvantageRule(mean="agent", std="agent", weighting="turn", ddof=0, eps=0.0)
"""(R - mu_k) / sigma_k, population moments over the agent's rows of the task."""

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class AgentMoments:
    """Of one agent's measured rows. All but the first two are relative to the mean |z|^2 of the rows that they are over: 1 is
    what advantages of 1 would give.

    `pooled`, `predicted`, `per_agent` and `covariance` are over the measured rows of tasks with sigma > 0, and None where there
    are none. Where these are all of the agent's rows of those tasks, pooled = predicted + covariance.
    """

    rows: int
    score: float
    """Mean of |z|^2 over all measured rows."""
    pooled: float | None
    """Of A z with the advantages of `POOLED`."""
    predicted: float | None
    """The lemma's factor of each row's task and agent, averaged: `pooled` if A and |z| were independent."""
    per_agent: float | None
    """Of A z with the advantages of `PER_AGENT`; rows that it compares with nothing have advantage 0."""
    own: float | None
    """Of A z with the advantages that the run trains with, over all measured rows. None where these differ from token to token
    of a row, as a critic's do: no number times z is the row's gradient then."""
    covariance: float | None
    """Cov(A^2, |z|^2) with the advantages of `POOLED`: the lemma's Delta_k."""


def spread(rows: Sequence[Row], trained: Sequence[int], most: int) -> list[int]:
    """Of the rows `trained`, at most `most` per agent, spread evenly over the agent's rows in their order.

    A function of the arguments alone. One row is taken from each of `most` stretches of about equal length, at a place that
    moves from stretch to stretch: with a fixed stride it would be the same turn of every episode.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for i in trained:
        members[rows[i].agent].append(i)
    chosen = []
    for own in members.values():
        count = min(most, len(own))
        for number in range(count):
            start, end = number * len(own) // count, (number + 1) * len(own) // count
            chosen.append(own[start + int(number * _GOLDEN % 1 * (end - start))])
    return sorted(chosen)


def second_moments(rows: Sequence[Row], squares: Mapping[int, float], values: Advantages) -> dict[str, AgentMoments]:
    """Per agent with measured rows. `squares` has |z_i|^2 of the rows that were measured, by index; `values` are the advantages
    that the run trains with, of which every measured row has one.

    Statistics are over all of `rows`; penalties are in none of the comparisons but the run's own. What isn't finite stays so.
    """
    factors = pooled_factors(rows)
    rewards = [replace(row, penalty=0.0) for row in rows]
    pooled, per_agent = (advantages(rewards, rule).values for rule in (POOLED, PER_AGENT))
    members: dict[str, list[int]] = defaultdict(list)
    for i in squares:
        members[rows[i].agent].append(i)
    found = {}
    for agent, own in members.items():
        compared = [i for i in own if (rows[i].task, agent) in factors]
        of_pooled, mean_square = _relative(pooled, compared, squares), mean_of([pooled[i] ** 2 for i in compared])
        found[agent] = AgentMoments(
            rows=len(own),
            score=mean_of([squares[i] for i in own]),
            pooled=of_pooled,
            predicted=mean_of([factors[rows[i].task, agent] for i in compared]),
            per_agent=_relative(per_agent, compared, squares),
            own=_relative(values.values, own, squares) if _is_of_rows(values, own) else None,
            covariance=None if of_pooled is None else of_pooled - mean_square,
        )
    return found


def _is_of_rows(values: Advantages, chosen: Sequence[int]) -> bool:
    return values.tokens is None or all(len(set(values.tokens.values[i])) == 1 for i in chosen)


def _relative(advantage: Sequence[float | None], chosen: Sequence[int], squares: Mapping[int, float]) -> float | None:
    """Mean of A^2 |z|^2 over the rows `chosen`, divided by their mean |z|^2; None where that is 0, or without rows."""
    whole = math.fsum(squares[i] for i in chosen)
    return math.fsum(advantage[i] ** 2 * squares[i] for i in chosen) / whole if whole else None
