"""What one step measured, gathered by the controller on every rank and turned into metrics by rank 0.

Names are listed in the README; every metric that can be split by agent is (I8).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from drmas.core.advantages import Advantages
from drmas.core.diagnostics import agent_summary, inflation_factors
from drmas.policy.host_platform import peak_memory_bytes
from drmas.policy.trainer import UpdateResult
from drmas.types import Episode, Row, rows_of
from drmas.weights.sync import SyncResult

Metrics = dict[str, float | None]

_ADVANTAGE_KEYS = ("row_sum", "constant_share", "singleton_share")


@dataclass
class Gap:
    """Distance of the trainer's log-prob to the engine's on the sampled tokens, for one agent."""

    tokens: float = 0.0
    total: float = 0.0
    largest: float = 0.0

    def add(self, tokens: float, mean: float, largest: float) -> None:
        self.tokens, self.total, self.largest = self.tokens + tokens, self.total + tokens * mean, max(self.largest, largest)


@dataclass
class StepRecord:
    """The measurements of one step, as this rank took them."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    updates: dict[str, list[UpdateResult]] = field(default_factory=lambda: defaultdict(list))
    syncs: list[SyncResult] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    gaps: dict[str, Gap] = field(default_factory=lambda: defaultdict(Gap))
    measured: set[str] = field(default_factory=set)

    def add_seconds(self, names: Sequence[str], seconds: float) -> None:
        """To the phase `names[0]` and, where given, to its part `names[0]/names[1]`."""
        for end in range(1, len(names) + 1):
            self.seconds["/".join(names[:end])] += seconds

    def sync(self, result: SyncResult) -> None:
        self.syncs.append(result)

    def update(self, policy: str, result: UpdateResult) -> None:
        self.updates[policy].append(result)
        for agent, values in result.agents.items():
            if agent not in self.measured:
                self.gaps[agent].add(values["tokens"], values["logprob_gap_mean"], values["logprob_gap_max"])

    def logprob_gap(self, rows: Sequence[Row], logprobs: Sequence[Sequence[float]]) -> None:
        """The gap from a pass of its own: before the first of several updates, which later ones would blur, or without any."""
        self.measured |= {row.agent for row in rows}
        for row, ours in zip(rows, logprobs, strict=True):
            distances = [abs(a - b) for a, b in zip(ours, row.logprobs, strict=True)]
            self.gaps[row.agent].add(len(distances), sum(distances) / len(distances), max(distances))

    def metrics(self, episodes: Sequence[Episode], values: Advantages, *, agents: Sequence[str], retried: int) -> Metrics:
        """The step's flat metrics, in the order in which a person reads them."""
        rows = rows_of(list(episodes))
        finished = [episode for episode in episodes if episode.failure is None]
        metrics: Metrics = {"reward/mean": _mean([episode.reward for episode in finished])}
        metrics |= self._rollout(episodes, retried)
        metrics |= {f"rollout/{agent}/rows": 0.0 for agent in agents}
        metrics |= self._agents(episodes, rows, values)
        metrics |= self._training()
        metrics["sync/seconds"] = math.fsum(result.seconds for result in self.syncs)
        metrics["sync/bytes"] = sum(result.bytes for result in self.syncs)
        metrics |= {f"sync/{policy}/version": version for policy, version in self.versions.items()}
        metrics |= {f"time/{phase}_seconds": self.seconds[phase] for phase in ("rollout", "train", "sync", "step")}
        return metrics

    def _rollout(self, episodes: Sequence[Episode], retried: int) -> Metrics:
        generated = sum(len(turn.response_ids) for episode in episodes for turn in episode.turns)
        gaps = list(self.gaps.values())
        tokens = sum(gap.tokens for gap in gaps)
        metrics: Metrics = {
            "rollout/episodes": len(episodes),
            "rollout/tokens": generated,
            "rollout/tokens_per_second": _ratio(generated, self.seconds["rollout"]),
            "rollout/logprob_gap_mean": _ratio(sum(gap.total for gap in gaps), tokens),
            "rollout/logprob_gap_max": max((gap.largest for gap in gaps), default=None),
            "rollout/retried": retried,
        }
        kinds = [episode.status for episode in episodes if episode.failure is not None]
        return metrics | {f"rollout/failed/{kind}": kinds.count(kind) for kind in sorted(set(kinds))}

    def _agents(self, episodes: Sequence[Episode], rows: list[Row], values: Advantages) -> Metrics:
        metrics: Metrics = {}
        factors = inflation_factors(rows)
        for agent, summary in agent_summary(rows, values).items():
            turns = [turn for episode in episodes if not episode.failure for turn in episode.turns if turn.agent == agent]
            metrics |= {f"rollout/{agent}/{name}": value for name, value in summary.items() if name not in _ADVANTAGE_KEYS}
            metrics[f"rollout/{agent}/truncated_share"] = _mean([turn.finish_reason == "length" for turn in turns])
            metrics[f"rollout/{agent}/valid_share"] = _mean([turn.valid for turn in turns])
            if agent in self.gaps:
                gap = self.gaps[agent]
                metrics[f"rollout/{agent}/logprob_gap_mean"] = _ratio(gap.total, gap.tokens)
                metrics[f"rollout/{agent}/logprob_gap_max"] = gap.largest
            metrics[f"advantage/{agent}/inflation_factor"] = factors.get(agent)
            metrics |= {f"advantage/{agent}/{name}": summary[name] for name in _ADVANTAGE_KEYS}
        return metrics

    def _training(self) -> Metrics:
        metrics: Metrics = {"train/peak_memory_bytes": peak_memory_bytes()}
        for policy, results in self.updates.items():
            merged = _merge([result.metrics for result in results])
            merged["tokens_per_second"] = _ratio(merged["tokens"], self.seconds[f"train/{policy}"])
            metrics |= {f"train/{policy}/{name}": value for name, value in merged.items()}
            for agent in dict.fromkeys(agent for result in results for agent in result.agents):
                merged = _merge([result.agents[agent] for result in results if agent in result.agents])
                gap = ("logprob_gap_mean", "logprob_gap_max")
                metrics |= {f"train/{policy}/{agent}/{name}": value for name, value in merged.items() if name not in gap}
        return metrics


def _merge(parts: Sequence[dict[str, float]]) -> Metrics:
    """One value per name over the step's updates.

    Counts add up; extremes stay extreme, and not finite if one part is; the rest is averaged by tokens.
    """
    merged: Metrics = {}
    tokens = [part["tokens"] for part in parts]
    for name in parts[0]:
        column = [part[name] for part in parts]
        if name in ("tokens", "skipped"):
            merged[name] = math.fsum(column)
        elif broken := [value for value in column if not math.isfinite(value)]:
            merged[name] = broken[0]
        elif name == "grad_norm" or name.endswith("_max"):
            merged[name] = max(column)
        elif name.endswith("_min"):
            merged[name] = min(column)
        else:
            weighted = math.fsum(value * count for value, count in zip(column, tokens, strict=True))
            merged[name] = weighted / math.fsum(tokens) if any(tokens) else _mean(column)
    return merged


def _mean(values: Sequence[float | None]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
