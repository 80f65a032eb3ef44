"""A step's flat metrics as Prometheus names them: agents, policies, GPUs and phases are labels, the rest is the name.

    named("rollout/solver/reward_mean")   Sample("drmas_rollout_agent_reward_mean", {"agent": "solver"})
    named("time/sync_seconds")            Sample("drmas_time_seconds", {"phase": "sync"})

A name says by its words (`agent`, `policy`) what it is split by, so that a total and its parts are never summed together. The
names on the left are the README's; `prometheus` serves those on the right, and launchers/grafana draws them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SHAPES = (
    ("rollout/failed/{kind}", "rollout_failed"),
    ("rollout/probe_failed/{kind}", "rollout_probe_failed"),
    ("reward/probe/{probe}", "reward_probe"),
    ("time/{phase}_seconds", "time_seconds"),
    ("alarms/count", "alarms_active"),  # a name in _count is a histogram's
    ("nonfinite", "nonfinite"),
    ("train/{policy}/{agent}/{name}", "train_agent"),
    ("train/{policy}/{name}", "train_policy"),
    ("sync/{policy}/{name}", "sync_policy"),
    ("engine/{policy}/{name}", "engine"),
    ("rollout/{agent}/{name}", "rollout_agent"),
    ("advantage/{agent}/{name}", "advantage"),
    ("moments/{agent}/{name}", "moments"),
    ("gpu/{gpu}/{name}", "gpu"),
    ("data/{source}/{name}", "data"),
    ("{section}/{name}", ""),
)
"""The first that fits. {name} ends the served name, {section} begins it, all else in braces is a label."""
_PATTERNS = [
    (re.compile(re.sub(r"\{(\w+)\}", lambda word: rf"(?P<{word[1]}>[^/]+)", shape)), prefix) for shape, prefix in _SHAPES
]


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]


def named(key: str) -> Sample | None:
    """What a metric is served as; None for one of a shape that no part of drmas writes."""
    for pattern, prefix in _PATTERNS:
        if found := pattern.fullmatch(key):
            labels = found.groupdict()
            words = ["drmas", labels.pop("section", ""), prefix, labels.pop("name", "")]
            if key.startswith("data/"):
                labels.setdefault("source", "")  # of a run with one source, which has no name
            return Sample(re.sub(r"\W", "_", "_".join(filter(None, words))), labels)
    return None
