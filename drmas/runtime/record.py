"""What one step measured, gathered by the controller on every rank and turned into metrics by rank 0.

Names are listed in the README; every metric that can be split by agent is (I8).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from drmas.core.advantages import Advantages
from drmas.core.diagnostics import agent_summary, inflation_factors
from drmas.policy.batch import UpdateResult
from drmas.types import Episode, Row, rows_of
from drmas.weights.sync import SyncResult

Metrics = dict[str, float | None]

_ADVANTAGE_KEYS = ("row_sum", "constant_share", "singleton_share")
_GAP_KEYS = ("logprob_gap_mean", "logprob_gap_max")
_COUNTS = ("tokens", "computed_tokens", "tokens_saved", "flops", "skipped", "critic_skipped")


@dataclass
class Gap:
    """Distance of the trainer's log-prob to the engine's on the sampled tokens, for one agent."""

    tokens: float = 0.0
    total: float = 0.0
    largest: float = 0.0

    def add(self, tokens: float, mean: float, largest: float) -> None:
        self.tokens, self.total, self.largest = self.tokens + tokens, self.total + tokens * mean, max(self.largest, largest)


@dataclass
class PolicyReport:
    """What one policy did in a step, the same on all of its ranks; its leader's goes to every rank, as JSON."""

    version: int
    trainable: bool = True
    rows: int = 0
    """Those that had a say."""
    updates: list[UpdateResult] = field(default_factory=list)
    gaps: dict[str, Gap] = field(default_factory=dict)
    peak_memory_bytes: float = 0.0
    """Of the process of its first rank, so far."""

    def skipped(self) -> list[int]:
        """Which of the updates were not applied."""
        return [number for number, result in enumerate(self.updates) if result.metrics["skipped"]]

    def update(self, result: UpdateResult) -> None:
        """An update. Its gap counts for agents that no pass of its own has measured."""
        self.updates.append(result)
        for agent, values in result.agents.items():
            gap = Gap()
            gap.add(values["tokens"], values["logprob_gap_mean"], values["logprob_gap_max"])
            self.gaps.setdefault(agent, gap)

    def logprob_gap(self, rows: Sequence[Row], logprobs: Sequence[Sequence[float]]) -> None:
        """The gap from a pass of its own: before the first of several updates, which later ones would blur, or without any."""
        for row, ours in zip(rows, logprobs, strict=True):
            distances = [abs(a - b) for a, b in zip(ours, row.logprobs, strict=True)]
            self.gaps.setdefault(row.agent, Gap()).add(len(distances), sum(distances) / len(distances), max(distances))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, said: dict[str, Any]) -> PolicyReport:
        updates = [UpdateResult(**each) for each in said["updates"]]
        gaps = {agent: Gap(**each) for agent, each in said["gaps"].items()}
        return cls(**(said | {"updates": updates, "gaps": gaps}))


@dataclass
class StepRecord:
    """The measurements of one step, as this rank took them, and every policy's report."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    policies: dict[str, PolicyReport] = field(default_factory=dict)
    syncs: list[SyncResult] = field(default_factory=list)
    failed_saves: int = 0
    """Of the run so far."""

    def add_seconds(self, phase: str, seconds: float) -> None:
        self.seconds[phase] += seconds

    def sync(self, result: SyncResult) -> None:
        self.syncs.append(result)

    def metrics(
        self,
        episodes: Sequence[Episode],
        values: Advantages,
        *,
        agents: Sequence[str],
        retried: int,
        peaks: Mapping[str, float] = MappingProxyType({}),
    ) -> Metrics:
        """The step's flat metrics, in the order in which a person reads them. `peaks`: FLOP/s of each policy's devices."""
        rows = rows_of(list(episodes))
        finished = [episode for episode in episodes if episode.failure is None]
        metrics: Metrics = {"reward/mean": _mean([episode.reward for episode in finished])}
        metrics |= self._rollout(episodes, retried)
        metrics |= {f"rollout/{agent}/rows": 0.0 for agent in agents}
        metrics |= self._agents(episodes, rows, values)
        metrics |= self._training(peaks)
        metrics["sync/seconds"] = math.fsum(result.seconds for result in self.syncs)
        metrics["sync/bytes"] = sum(result.bytes for result in self.syncs)
        metrics |= {f"sync/{policy}/version": report.version for policy, report in self.policies.items()}
        metrics["checkpoint/failed"] = self.failed_saves
        metrics |= {f"time/{phase}_seconds": self.seconds[phase] for phase in ("rollout", "train", "sync", "step")}
        return metrics

    def _rollout(self, episodes: Sequence[Episode], retried: int) -> Metrics:
        generated = sum(len(turn.response_ids) for episode in episodes for turn in episode.turns)
        gaps = list(self._gaps().values())
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
        factors, gaps = inflation_factors(rows), self._gaps()
        for agent, summary in agent_summary(rows, values).items():
            turns = [turn for episode in episodes if not episode.failure for turn in episode.turns if turn.agent == agent]
            metrics |= {f"rollout/{agent}/{name}": value for name, value in summary.items() if name not in _ADVANTAGE_KEYS}
            metrics[f"rollout/{agent}/truncated_share"] = _mean([turn.finish_reason == "length" for turn in turns])
            metrics[f"rollout/{agent}/valid_share"] = _mean([turn.valid for turn in turns])
            if agent in gaps:
                metrics[f"rollout/{agent}/logprob_gap_mean"] = _ratio(gaps[agent].total, gaps[agent].tokens)
                metrics[f"rollout/{agent}/logprob_gap_max"] = gaps[agent].largest
            metrics[f"advantage/{agent}/inflation_factor"] = factors.get(agent)
            metrics |= {f"advantage/{agent}/{name}": summary[name] for name in _ADVANTAGE_KEYS}
        return metrics

    def _gaps(self) -> dict[str, Gap]:
        """By agent; an agent has one policy."""
        return {agent: gap for report in self.policies.values() for agent, gap in report.gaps.items()}

    def _training(self, peaks: Mapping[str, float]) -> Metrics:
        reports = self.policies.values()
        metrics: Metrics = {"train/peak_memory_bytes": max((report.peak_memory_bytes for report in reports), default=0.0)}
        updates = [result.metrics for report in reports for result in report.updates]
        metrics["train/tokens_saved"] = math.fsum(update["tokens_saved"] for update in updates)
        for policy, report in self.policies.items():
            if report.trainable:
                metrics |= {f"train/{policy}/{name}": value for name, value in _policy(report, peaks.get(policy)).items()}
            for agent in dict.fromkeys(agent for result in report.updates for agent in result.agents):
                merged = _merge([result.agents[agent] for result in report.updates if agent in result.agents])
                metrics |= {f"train/{policy}/{agent}/{name}": value for name, value in merged.items() if name not in _GAP_KEYS}
        return metrics


def _policy(report: PolicyReport, peak: float | None) -> Metrics:
    """A trainable policy's own numbers; of one without rows, that it had none."""
    metrics: Metrics = {"rows": report.rows, "updates": len(report.updates) - len(report.skipped()), "skipped": 0.0}
    if report.updates:
        metrics |= _merge([result.metrics for result in report.updates])
        seconds = math.fsum(result.seconds for result in report.updates)
        metrics["tokens_per_second"] = _ratio(metrics["tokens"], seconds)
        metrics["flops_per_second"] = _ratio(metrics["flops"], seconds)
        if peak and seconds:
            metrics["mfu"] = metrics["flops"] / seconds / peak
    return metrics


def _merge(parts: Sequence[dict[str, float]]) -> Metrics:
    """One value per name over the step's updates; what only some of them measured, over those.

    Counts add up; extremes stay extreme, and not finite if one part is; the rest is averaged by tokens.
    """
    merged: Metrics = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        measured = [part for part in parts if name in part]
        column, tokens = [part[name] for part in measured], [part["tokens"] for part in measured]
        if name in _COUNTS:
            merged[name] = math.fsum(column)
        elif broken := [value for value in column if not math.isfinite(value)]:
            merged[name] = broken[0]
        elif name.endswith("grad_norm") or name.endswith("_max"):
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
