"""What a step's rows say about each agent: the inflation factor that per-agent normalisation removes, and plain summaries.

Called by the controller for metrics. Excluded rows (status other than "ok") count nowhere (I3).
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence

from drmas.core.advantages import Advantages
from drmas.core.means import mean_of
from drmas.types import Row
from drmas_kernels.segment_advantage import ROUNDING_ULPS


def inflation_factors(rows: Sequence[Row]) -> dict[str, float | None]:
    """By how much one pooled baseline inflates the second moment of each agent's gradient (Dr. MAS, Lemma 4.2).

    `pooled_factors` averaged over the agent's included rows of tasks with sigma > 0; None where it has none. 1 means that the
    pooled baseline does no harm.
    """
    factors = pooled_factors(rows)
    found: dict[str, list[float]] = {row.agent: [] for row in rows}
    for row in rows:
        if row.status == "ok" and (row.task, row.agent) in factors:
            found[row.agent].append(factors[row.task, row.agent])
    return {agent: mean_of(own) for agent, own in found.items()}


def pooled_factors(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """(sigma_k^2 + (mu_k - mu)^2) / sigma^2 of every (task, agent k) in the tasks with sigma > 0; population moments.

    The reward of an episode is the mean of its rows' rewards, which differ where agents have rewards of their own: that is what
    the pooled rule `grpo` compares, and every row of an episode gets its comparison. mu, sigma are over the task's distinct
    episodes; mu_k, sigma_k over the rows of the agent, each with its episode's reward. So the factor is the mean square of the
    agent's advantages under that rule, but for its ddof and eps.
    """
    episodes: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    calls: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.status == "ok":
            episodes[row.task][row.episode].append(row.reward)
            calls[row.task, row.agent].append(row.episode)
    rewards = {task: {name: mean_of(each) for name, each in own.items()} for task, own in episodes.items()}
    pooled = {task: _moments(list(own.values())) for task, own in rewards.items()}
    factors = {}
    for (task, agent), names in calls.items():
        mean, variance = pooled[task]
        if variance > 0:
            own_mean, own_variance = _moments([rewards[task][name] for name in names])
            factors[task, agent] = (own_variance + (own_mean - mean) ** 2) / variance
    return factors


def _moments(values: list[float]) -> tuple[float, float]:
    """Mean and population variance; exactly 0 for values that are equal but for rounding, as the advantages have it."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    largest = max(abs(value) for value in values)
    return mean, variance if math.sqrt(variance) > ROUNDING_ULPS * sys.float_info.epsilon * largest else 0.0


def agent_summary(rows: Sequence[Row], advantages: Advantages) -> dict[str, dict[str, float | None]]:
    """Per agent that has rows: counts, means (None over no rows), and its segments' state.

    Over its included rows: rows, calls_per_episode (by all included episodes of the step), reward_mean, response_tokens_mean,
    without_baseline (how many of them have no advantage: the probe, or the critic, that theirs is taken from gave nothing).

    Over those with an advantage: advantage_mean, advantage_rms, row_sum (the sum of advantages: a pooled baseline leaves a push
    on the agent here), constant_share and singleton_share (rows in a segment without spread, or without company),
    uncompared_share (rows in either: where mean and std have segments of their own, a row may be in both).
    """
    constant = {row for segment in advantages.segments if segment.constant for row in segment.rows}
    singleton = {row for segment in advantages.segments if segment.singleton for row in segment.rows}
    num_episodes = len({(row.task, row.episode) for row in rows if row.status == "ok"})
    members: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        own = members[row.agent]
        if row.status == "ok":
            own.append(index)
    summaries: dict[str, dict[str, float | None]] = {}
    for agent, included in members.items():
        own = [index for index in included if advantages.values[index] is not None]
        values = [advantages.values[index] for index in own]
        squares = mean_of([value * value for value in values])
        summaries[agent] = {
            "rows": float(len(included)),
            "calls_per_episode": len(included) / num_episodes if num_episodes else None,
            "reward_mean": mean_of([rows[index].reward for index in included]),
            "without_baseline": float(len(included) - len(own)),
            "advantage_mean": mean_of(values),
            "advantage_rms": None if squares is None else math.sqrt(squares),
            "row_sum": math.fsum(values),
            "constant_share": mean_of([float(index in constant) for index in own]),
            "singleton_share": mean_of([float(index in singleton) for index in own]),
            "uncompared_share": mean_of([float(index in constant or index in singleton) for index in own]),
            "response_tokens_mean": mean_of([float(len(rows[index].response_ids)) for index in included]),
        }
    return summaries
