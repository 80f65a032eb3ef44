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
from drmas.core.means import mean_of
from drmas.core.moments import AgentMoments
from drmas.policy.batch import UpdateResult
from drmas.policy.gaps import Gap, is_fresh
from drmas.runtime.probes import generated_tokens
from drmas.types import Episode, Row, rows_of
from drmas.weights.sync import SyncResult

Metrics = dict[str, float | None]

_ADVANTAGE_KEYS = ("row_sum", "constant_share", "singleton_share", "uncompared_share", "without_baseline")
_GAP_KEYS = ("logprob_gap_mean", "logprob_gap_max")
"""Of the loss, which measures from whatever the ratio is formed with, on all rows; `Gap` has those that count."""
_COUNTS = ("tokens", "computed_tokens", "tokens_saved", "flops", "skipped", "critic_skipped")


@dataclass
class PolicyReport:
    """What one policy did in a step, the same on all of its ranks; its leader's goes to every rank, as JSON."""

    version: int
    """Made with the one before the step's updates, and set to the one after them."""
    trainable: bool = True
    rows: int = 0
    """Those that had a say."""
    updates: list[UpdateResult] = field(default_factory=list)
    gaps: dict[str, Gap] = field(default_factory=dict)
    """Per agent with fresh rows: those that the weights before the step's updates sampled."""
    peak_memory_bytes: float = 0.0
    """Of the process of its first rank, so far."""
    before: int | None = None
    """The version before the step's updates."""

    def __post_init__(self) -> None:
        if self.before is None:
            self.before = self.version

    def skipped(self) -> list[int]:
        """Which of the updates were not applied."""
        return [number for number, result in enumerate(self.updates) if result.metrics["skipped"]]

    def update(self, result: UpdateResult) -> None:
        """An update. Its gap counts for agents that no pass of its own has measured."""
        self.updates.append(result)
        self.gaps = result.gaps | self.gaps

    def logprob_gap(self, rows: Sequence[Row], logprobs: Sequence[Sequence[float]]) -> None:
        """The gap from a pass of its own: before the first of several updates, which later ones would blur, or without any.

        Rows that an older version sampled are passed over: their distance is that of two versions.
        """
        for row, ours in zip(rows, logprobs, strict=True):
            if is_fresh(row, self.before):
                distances = [abs(a - b) for a, b in zip(ours, row.logprobs, strict=True)]
                gap = self.gaps.setdefault(row.agent, Gap())
                gap.add(f"{row.episode}/{row.turn}", tokens=len(distances), total=sum(distances), largest=max(distances))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, said: dict[str, Any]) -> PolicyReport:
        updates = [UpdateResult(**(each | {"gaps": _gaps_of(each["gaps"])})) for each in said["updates"]]
        return cls(**(said | {"updates": updates, "gaps": _gaps_of(said["gaps"])}))


@dataclass
class StepRecord:
    """The measurements of one step, as this rank took them, and every policy's report."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    policies: dict[str, PolicyReport] = field(default_factory=dict)
    syncs: list[SyncResult] = field(default_factory=list)
    failed_saves: int = 0
    """Of the run so far."""
    moments: dict[str, AgentMoments] = field(default_factory=dict)
    """By agent, in steps that measure them."""

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
        peaks: Mapping[str, float] = MappingProxyType({}),
        ahead: bool = False,
        probe_tokens: int = 0,
    ) -> Metrics:
        """The step's flat metrics, in the order in which a person reads them.

        `peaks`: FLOP/s of each policy's devices. `ahead`: episodes ran while earlier steps were trained, so that the time in
        which they were waited for says nothing of how fast they were. `probe_tokens`: what episodes beside these generated in
        the same time.
        """
        rows = rows_of(list(episodes))
        finished = [episode for episode in episodes if episode.failure is None]
        metrics: Metrics = {"reward/mean": mean_of([episode.reward for episode in finished])}
        metrics |= self._rollout(episodes, probe_tokens, self.seconds["step" if ahead else "rollout"])
        metrics |= self._agents(agents, episodes, rows, values)
        for agent, moments in self.moments.items():
            metrics |= {f"moments/{agent}/{name}": value for name, value in asdict(moments).items()}
        metrics |= self._training(peaks)
        metrics["sync/seconds"] = math.fsum(result.seconds for result in self.syncs)
        metrics["sync/bytes"] = sum(result.bytes for result in self.syncs)
        metrics |= {f"sync/{policy}/version": report.version for policy, report in self.policies.items()}
        metrics["checkpoint/failed"] = self.failed_saves
        phases = ("rollout", *(["moments"] if self.moments else []), "train", "sync", "step")
        metrics |= {f"time/{phase}_seconds": self.seconds[phase] for phase in phases}
        return metrics

    def _rollout(self, episodes: Sequence[Episode], probe_tokens: int, seconds: float) -> Metrics:
        generated = generated_tokens(episodes)
        uses = [use for episode in episodes if episode.failure is None for use in episode.tool_uses]
        gaps = list(self._gaps().values())
        tokens = sum(gap.tokens for gap in gaps)
        metrics: Metrics = {
            "rollout/episodes": len(episodes),
            "rollout/tokens": generated,
            "rollout/tokens_per_second": _ratio(generated + probe_tokens, seconds),
            "rollout/logprob_gap_mean": _ratio(sum(gap.total for gap in gaps), tokens),
            "rollout/logprob_gap_max": max((gap.largest for gap in gaps), default=None),
            "rollout/retried": sum(episode.retried for episode in episodes),
            "rollout/tool_calls": len(uses),
            "rollout/tool_errors": sum(not use.ok for use in uses),
        }
        kinds = [episode.status for episode in episodes if episode.failure is not None]
        return metrics | {f"rollout/failed/{kind}": kinds.count(kind) for kind in sorted(set(kinds))}

    def _agents(self, agents: Sequence[str], episodes: Sequence[Episode], rows: Sequence[Row], values: Advantages) -> Metrics:
        """Of every agent of the team; `rows` only of those that speak with a policy: a remote model's turns give none."""
        factors, gaps, summaries = inflation_factors(rows), self._gaps(), agent_summary(rows, values)
        asked = {turn.agent: bool(turn.prompt_ids) for episode in episodes for turn in episode.turns}
        metrics: Metrics = {f"rollout/{agent}/rows": 0.0 for agent in agents if asked.get(agent, True)}
        for agent in dict.fromkeys([*asked, *agents]):
            summary = summaries.get(agent, {})
            found = {name: value for name, value in summary.items() if name not in _ADVANTAGE_KEYS} | _conduct(agent, episodes)
            if agent in summaries:
                found |= self._ages([row for row in rows if row.agent == agent])
            if agent in gaps:
                found |= {"logprob_gap_mean": gaps[agent].mean, "logprob_gap_max": gaps[agent].largest}
            metrics |= {f"rollout/{agent}/{name}": value for name, value in found.items()}
            if agent in summaries:
                metrics[f"advantage/{agent}/inflation_factor"] = factors.get(agent)
                metrics |= {f"advantage/{agent}/{name}": summary[name] for name in _ADVANTAGE_KEYS}
        return metrics

    def _ages(self, rows: Sequence[Row]) -> Metrics:
        """Of one agent's rows of finished episodes: how far their tokens lag behind the weights before the step's updates, in
        versions; how many are left out of the loss, the stale ones of the statistics too, the frozen ones not."""
        finished = [row for row in rows if row.status in ("ok", "stale")]
        reports = {row.policy: self.policies[row.policy] for row in finished if row.policy in self.policies}
        metrics: Metrics = {
            "stale": sum(row.status == "stale" for row in finished),
            "frozen": sum(not (row.trained and _trainable(reports.get(row.policy))) for row in finished if row.status == "ok"),
        }
        lags = [reports[row.policy].before - version for row in finished if row.policy in reports for version in row.versions]
        if lags:
            metrics |= {"version_lag_mean": math.fsum(lags) / len(lags), "version_lag_max": max(lags)}
            metrics["mixed_version_share"] = mean_of([len(set(row.versions)) > 1 for row in finished])
        return metrics

    def gap_rows(self) -> dict[str, list[str]]:
        """Per agent its fresh rows with the largest mean gap, first the largest."""
        return {agent: list(gap.worst) for agent, gap in self._gaps().items()}

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


def _conduct(agent: str, episodes: Sequence[Episode]) -> Metrics:
    """What an agent did. Tokens and seconds are sums over all episodes, since failed ones cost as much; the rest is of finished
    ones."""
    every = [turn for episode in episodes for turn in episode.turns if turn.agent == agent]
    finished = [episode for episode in episodes if episode.failure is None]
    turns = [turn for episode in finished for turn in episode.turns if turn.agent == agent]
    uses = [use for episode in finished for use in episode.tool_uses if use.agent == agent]
    called = sum(any(turn.agent == agent for turn in episode.turns) for episode in finished)
    metrics: Metrics = {"idle_share": 1.0 - called / len(finished) if finished else None}
    if every:
        metrics |= {
            "prompt_tokens": sum(len(turn.prompt_ids) for turn in every),
            "response_tokens": sum(len(turn.response_ids) for turn in every),
            "seconds": math.fsum(turn.seconds for turn in every),
            "truncated_share": mean_of([turn.finish_reason == "length" for turn in turns]),
            "valid_share": mean_of([turn.valid for turn in turns]),
            "invalid": sum(not turn.valid for turn in turns),
            "tool_calls_per_episode": _ratio(len(uses), len(finished)),
        }
    if uses:
        metrics["tool_errors_share"] = mean_of([not use.ok for use in uses])
    return metrics


def _gaps_of(said: Mapping[str, Any]) -> dict[str, Gap]:
    return {agent: Gap(**each) for agent, each in said.items()}


def _trainable(report: PolicyReport | None) -> bool:
    return report is None or report.trainable


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
            merged[name] = weighted / math.fsum(tokens) if any(tokens) else mean_of(column)
    return merged


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
