"""What the probe episodes of a step come to: baselines for the estimator, and metrics.

A probe's reward is its episode's. Where the team rewards an agent by itself (`Outcome`), the agent's baseline is the reward
that it had in the probe, since its rows have such a reward, too. Called by the driver and by `drmas inspect`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from drmas.core.estimators.base import Probe, reward_of
from drmas.core.means import mean_of
from drmas.types import Episode

Baselines = dict[str, dict[str, list[float]]]


def baselines(episodes: Sequence[Episode], probes: Mapping[str, Probe]) -> Baselines:
    """Task -> probe -> the rewards of its finished episodes, as `Evidence.baselines` has them.

    A probe none of whose episodes finished has no entry (I3).
    """
    found: Baselines = {}
    finished = [episode for episode in episodes if episode.probe is not None and episode.failure is None]
    for episode in finished:
        reward = _reward(episode, probes[episode.probe])
        found.setdefault(episode.task.id, {}).setdefault(episode.probe, []).append(reward)
    whole = [episode for episode in finished if probes[episode.probe].without is None]
    for task, name, agent in sorted({(each.task.id, each.probe, agent) for each in whole for agent in each.agent_rewards}):
        mine = [each for each in whole if (each.task.id, each.probe) == (task, name)]
        found[task][reward_of(name, agent)] = [each.agent_rewards.get(agent, each.reward) for each in mine]
    return found


def probe_metrics(episodes: Sequence[Episode], probes: Mapping[str, Probe]) -> dict[str, float | None]:
    """How many episodes and generated tokens the probes took, their mean rewards, and how many failed, by kind; nothing where
    there are no probes.

    A reward's metric has the probe's name with what isn't a letter, a digit, a dot or a hyphen made an underscore.
    """
    if not probes:
        return {}
    mine = [episode for episode in episodes if episode.probe is not None]
    metrics: dict[str, float | None] = {"rollout/probe_episodes": len(mine), "rollout/probe_tokens": generated_tokens(mine)}
    for name, probe in probes.items():
        rewards = [_reward(episode, probe) for episode in mine if episode.probe == name and episode.failure is None]
        metrics[f"reward/probe/{re.sub(r'[^A-Za-z0-9.-]', '_', name)}"] = mean_of(rewards)
    kinds = [episode.status for episode in mine if episode.failure is not None]
    return metrics | {f"rollout/probe_failed/{kind}": kinds.count(kind) for kind in sorted(set(kinds))}


def generated_tokens(episodes: Sequence[Episode]) -> int:
    return sum(len(turn.response_ids) for episode in episodes for turn in episode.turns)


def _reward(episode: Episode, probe: Probe) -> float:
    return episode.agent_rewards.get(probe.without, episode.reward)
