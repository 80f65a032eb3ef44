"""What the probe episodes of a step come to: baselines for the estimator, and metrics.

A probe's reward is its episode's. Without an agent that the team rewards by itself (`Outcome`) it is that agent's, because its
rows, whose reward that is, are what it is taken off. A greedy episode is one baseline for all agents. Called by the driver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from drmas.core.estimators.base import Probe
from drmas.types import Episode

Baselines = dict[str, dict[str, list[float]]]


def baselines(episodes: Sequence[Episode], probes: Mapping[str, Probe]) -> Baselines:
    """Task -> probe -> the rewards of its finished episodes. A probe none of whose episodes finished has no entry (I3)."""
    found: Baselines = {}
    for episode in episodes:
        if episode.probe is not None and episode.failure is None:
            reward = _reward(episode, probes[episode.probe])
            found.setdefault(episode.task.id, {}).setdefault(episode.probe, []).append(reward)
    return found


def probe_metrics(episodes: Sequence[Episode], probes: Mapping[str, Probe]) -> dict[str, float | None]:
    """How many episodes the probes took, their mean rewards, and how many failed, by kind; nothing where there are no probes.

    A reward's metric has the probe's name with what isn't a letter, a digit, a dot or a hyphen made an underscore.
    """
    if not probes:
        return {}
    mine = [episode for episode in episodes if episode.probe is not None]
    metrics: dict[str, float | None] = {"rollout/probe_episodes": len(mine)}
    for name, probe in probes.items():
        rewards = [_reward(episode, probe) for episode in mine if episode.probe == name and episode.failure is None]
        metrics[f"reward/probe/{re.sub(r'[^A-Za-z0-9.-]', '_', name)}"] = math.fsum(rewards) / len(rewards) if rewards else None
    kinds = [episode.status for episode in mine if episode.failure is not None]
    return metrics | {f"rollout/probe_failed/{kind}": kinds.count(kind) for kind in sorted(set(kinds))}


def _reward(episode: Episode, probe: Probe) -> float:
    return episode.agent_rewards.get(probe.without, episode.reward)
