"""The second moment of an agent's gradient under a rule, exactly: Dr. MAS, Lemma 4.2, on a bandit team.

A row of agent k has score z = onehot(action) - pi and advantage A; its gradient is g = A z. Over the rows Y_k of agent k (an
episode that calls it twice counts twice) the lemma says E|g|^2 = E|z|^2 (sigma_k^2 + (mu_k - m)^2) / s^2 + Delta_k, with the
rule's statistics m and s, the agent's own mu_k and sigma_k, and Delta_k = Cov(|z|^2, A^2). `population` has both sides, for
statistics of infinitely many episodes. `finite` has what a group of N episodes does instead, whose statistics are made of those
same episodes: it enumerates every group and gives all of them to `drmas_kernels.segment_advantage`, the product's own routine.

Everything is float64. Called by `drmas.reproduce.regimes`; `cell_advantages` also by `drmas.reproduce.bandit_training`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from drmas.core.advantages import AdvantageRule
from drmas.reproduce.bandit_team import BanditTeam, Episodes
from drmas_kernels.segment_advantage import segment_advantage

MOST_GROUPS = 20_000
"""`finite` enumerates at most so many groups."""


@dataclass(frozen=True, slots=True)
class Moments:
    """One agent under one rule with statistics of the whole population; `mean` and `std` are the rule's, 0 and 1 if absent."""

    calls: float
    """Expected calls per episode."""
    mean: float
    std: float
    own_mean: float
    own_std: float
    """mu_k and sigma_k: over the agent's rows, of the values that the rule compares."""
    score: float
    """E|z|^2."""
    factor: float
    """(own_std^2 + (own_mean - mean)^2) / std^2."""
    covariance: float
    """Delta_k."""
    second: float
    """E|g|^2, added up over all episodes without the lemma."""
    row_mean: float
    """E A = (own_mean - mean) / std; 0 under the agent's own mean."""
    gradient: float
    """|E g|: what is learnt from."""

    @property
    def rows_needed(self) -> float | None:
        """E|g|^2 / |E g|^2: the rows to average until noise is no larger than gradient; no scale of A changes it."""
        return self.second / self.gradient**2 if self.gradient**2 > 1e-20 * self.second else None

    @property
    def lemma(self) -> float:
        """E|g|^2 by Lemma 4.2."""
        return self.score * self.factor + self.covariance


@dataclass(frozen=True, slots=True)
class FiniteMoments:
    """One agent under one rule in groups of N episodes, expected over groups."""

    second: float
    """E|g|^2 per row: the expected sum over a group's rows by the expected number of rows."""
    deviation: float
    """The standard error of a sampled second moment by the root of the number of groups that it is sampled from."""
    row_sum: float
    """The expected sum of a group's advantages."""
    zero_share: float
    """Of the agent's rows, those with advantage 0: equal rewards, or no other row to be compared with."""
    largest: float
    """The largest A^2 of any group."""
    groups_needed: float | None
    """How many groups to average until the gradient's noise is as large as the gradient: the variance of a group's summed
    gradient by the square of its mean. Doesn't depend on scale. None where the expected gradient is 0."""


def population(team: BanditTeam, logits: np.ndarray, rule: AdvantageRule) -> dict[str, Moments]:
    """The moments of every agent that can be called. A std of 0 gives advantages of 0, and a factor of 0."""
    episodes = team.episodes
    p = episodes.probabilities(logits)
    value, mean, std = _population_statistics(episodes, p, rule)
    pi = episodes.policies(logits)
    squares = _squared_scores(pi)
    found = {}
    for k, agent in enumerate(team.agents):
        rows = p[:, None] * episodes.counts[:, k]
        if not (number := rows.sum()):
            continue
        inverse = 1.0 / std[k] if std[k] else 0.0
        advantage = (value[:, k] - mean[k]) * inverse

        def over_rows(table: np.ndarray, rows: np.ndarray = rows, number: float = number) -> float:
            """The mean over the agent's rows of something by (episode, action)."""
            return float((rows * table).sum() / number)

        own_mean = over_rows(value[:, k, None])
        own_variance = over_rows((value[:, k, None] - own_mean) ** 2)
        score, power = over_rows(squares[k]), over_rows(advantage[:, None] ** 2)
        found[agent] = Moments(
            calls=float(number),
            mean=float(mean[k]),
            std=float(std[k]),
            own_mean=own_mean,
            own_std=math.sqrt(own_variance),
            score=score,
            factor=float((own_variance + (own_mean - mean[k]) ** 2) * inverse**2),
            covariance=over_rows((squares[k] - score) * (advantage[:, None] ** 2 - power)),
            second=over_rows(advantage[:, None] ** 2 * squares[k]),
            row_mean=float((own_mean - mean[k]) * inverse),
            gradient=float(np.linalg.norm(advantage @ (rows - rows.sum(1, keepdims=True) * pi[k]))) / float(number),
        )
    return found


def binary_factor(success: float, own: float, size: int) -> float:
    """E[A^2] over the rows of an agent whose rewards have mean `own`, under grpo in groups of `size` episodes of 0/1 rewards.

    Closed form: with s successes in the group a success has A^2 = (N - 1) (N - s) / (N s) and a failure the inverse ratio, at
    most (N - 1)^2 / N; of the other N - 1 episodes a binomial number succeeds. Grows to Lemma 4.2's factor as N does.
    """
    others = size - 1
    total = 0.0
    for s in range(size):
        chance = math.comb(others, s) * success**s * (1 - success) ** (others - s)
        if s + 1 < size:
            total += chance * own * others * (size - s - 1) / (size * (s + 1))
        total += chance * (1 - own) * others * s / (size * (size - s))
    return total


def finite(team: BanditTeam, logits: np.ndarray, rule: AdvantageRule, size: int) -> dict[str, FiniteMoments] | None:
    """The moments in groups of `size` episodes by enumeration of all groups; None if there are more than `MOST_GROUPS`."""
    episodes = team.episodes
    p = episodes.probabilities(logits)
    kinds, kind = np.unique(np.concatenate([episodes.calls, episodes.rewards], 1), axis=0, return_inverse=True)
    if math.comb(size + len(kinds) - 1, size) > MOST_GROUPS:
        return None
    calls, rewards = np.split(kinds, 2, axis=1)
    share = np.bincount(kind, p, len(kinds))
    members, chance = _all_groups(share, size)
    advantage = cell_advantages(rule, calls.astype(np.int64)[members], rewards[members])
    pi = episodes.policies(logits)
    scores = episodes.counts - episodes.calls[..., None] * pi  # [M, K, A]: the sum of z over the episode's rows
    row_squares = (episodes.counts * _squared_scores(pi)).sum(-1)

    def by_kind(table: np.ndarray) -> np.ndarray:
        """Expectation given the kind of episode: [M, ...] -> [kinds, ...]."""
        total = np.zeros((len(kinds), *table.shape[1:]))
        np.add.at(total, kind, table * p.reshape(-1, *[1] * (table.ndim - 1)))
        return total / share.reshape(-1, *[1] * (table.ndim - 1))

    of_rows, of_rows_squared = by_kind(row_squares), by_kind(row_squares**2)
    drift, spread = by_kind(scores), by_kind((scores**2).sum(-1))
    found = {}
    for k, agent in enumerate(team.agents):
        expected_rows = size * float(share @ calls[:, k])
        if not expected_rows:
            continue
        a, n, m = advantage[:, :, k], calls[members][:, :, k], members
        mean = (a[..., None] * drift[m, k]).sum(1)  # [groups, A]: the expected gradient given the kinds
        variance = (a**2 * (spread[m, k] - (drift[m, k] ** 2).sum(-1))).sum(1)
        gradient = chance @ mean
        signal = float((gradient**2).sum())
        power = float(chance @ ((mean**2).sum(-1) + variance))
        sums = (a**2 * of_rows[m, k]).sum(1)
        second = float(chance @ sums) / expected_rows
        scatter = (sums - second * n.sum(1)) ** 2 + (a**4 * (of_rows_squared - of_rows**2)[m, k]).sum(1)
        found[agent] = FiniteMoments(
            second=second,
            deviation=math.sqrt(float(chance @ scatter)) / expected_rows,
            row_sum=float(chance @ (a * n).sum(1)),
            zero_share=float(chance @ ((a == 0) * n).sum(1)) / expected_rows,
            largest=float((a[chance > 0] ** 2).max()),
            groups_needed=(power - signal) / signal if signal > 1e-20 * power else None,
        )
    return found


def cell_advantages(rule: AdvantageRule, calls: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Advantages [G, N, K] in G groups of N episodes with K agents, those of all rows of a cell; 0 where it has none.

    calls [G, N, K] int64, rewards [G, N, K] float64. The same numbers as `drmas.core.advantages.advantages` over those rows.
    """
    _, size, agents = calls.shape
    cell = np.repeat(np.arange(calls.size), calls.ravel())
    task, agent = cell // (size * agents), cell % agents
    scopes = {"agent": torch.from_numpy(task * agents + agent), "task": torch.from_numpy(task), "none": None}
    reward = torch.from_numpy(rewards.ravel()[cell])
    result = segment_advantage(
        reward,
        torch.zeros_like(reward),
        mean_segment=scopes[rule.mean],
        std_segment=scopes[rule.std],
        episode=torch.from_numpy(cell // agents),
        included=torch.ones(len(cell), dtype=torch.bool),
        weighting=rule.weighting,
        ddof=rule.ddof,
        eps=rule.eps,
        min_std=rule.min_std,
        singleton=rule.singleton,
        leave_one_out=rule.leave_one_out,
    )
    values = np.zeros(calls.size)
    values[cell] = result.advantage.numpy()
    return values.reshape(calls.shape)


def _squared_scores(pi: np.ndarray) -> np.ndarray:
    """|onehot(action) - pi|^2 by (agent, action): [K, A]."""
    return 1.0 - 2.0 * pi + (pi**2).sum(-1, keepdims=True)


def _episode_mean(episodes: Episodes) -> np.ndarray:
    """[M]: the mean reward of the episode's rows."""
    return (episodes.rewards * episodes.calls).sum(1) / np.maximum(episodes.calls.sum(1), 1)


def _weighted(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Mean and population std; a std of rounding alone is 0."""
    if not (total := weights.sum()):
        return 0.0, 0.0
    mean = float((values * weights).sum() / total)
    std = math.sqrt(float((weights * (values - mean) ** 2).sum() / total))
    return mean, std if std > 1e-14 * abs(values).max() else 0.0


def _population_statistics(episodes: Episodes, p: np.ndarray, rule: AdvantageRule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a row is compared as [M, K], and the rule's mean and std for every agent [K]."""
    agents = range(episodes.calls.shape[1])
    rows = p[:, None] * episodes.calls
    shared = np.broadcast_to(_episode_mean(episodes)[:, None], rows.shape)
    statistics = {"none": [(0.0, 1.0)] * len(agents)}
    if rule.weighting == "episode":
        pooled = _weighted(shared[:, 0], p * (episodes.calls.sum(1) > 0))
        statistics["agent"] = [_weighted(episodes.rewards[:, k], p * (episodes.calls[:, k] > 0)) for k in agents]
    else:
        pooled = _weighted(episodes.rewards, rows)
        statistics["agent"] = [_weighted(episodes.rewards[:, k], rows[:, k]) for k in agents]
    statistics["task"] = [pooled] * len(agents)
    scope = rule.std if rule.mean == "none" else rule.mean
    value = shared if rule.weighting == "episode" and scope == "task" else episodes.rewards
    mean, std = (np.array([each[i] for each in statistics[source]]) for i, source in enumerate((rule.mean, rule.std)))
    return value, mean, std


def _all_groups(share: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every multiset of `size` episodes: their kinds [groups, size] and the probability of each [groups]."""
    kinds = len(share)
    bars = np.array(list(combinations(range(size + kinds - 1), kinds - 1)), dtype=np.int64).reshape(-1, kinds - 1)
    edges = np.concatenate([np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), size + kinds - 1)], 1)
    numbers = np.diff(edges) - 1  # [groups, kinds]
    factorials = np.array([math.lgamma(n + 1) for n in range(size + 1)])
    chance = np.exp(factorials[size] - factorials[numbers].sum(1) + (numbers * np.log(share)).sum(1))
    members = np.repeat(np.tile(np.arange(kinds), len(numbers)), numbers.ravel()).reshape(-1, size)
    return members, chance
