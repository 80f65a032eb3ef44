"""Rank 0's side of a step: take tasks, run episodes, mend engines, write what happened.

The controller asks for `collect` until no engine had to be restarted, then for `finish`. Nothing here is collective.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drmas.config.schema import RunConfig
from drmas.core.advantages import Advantages
from drmas.envs.source import TaskSource
from drmas.errors import DataError, EngineDied, EngineError
from drmas.policy.batch import PolicyBatch
from drmas.rollout.collector import Collector
from drmas.rollout.engine import Engine
from drmas.runtime.feed import Feed, mark_stale
from drmas.runtime.probes import Baselines, baselines, generated_tokens, probe_metrics
from drmas.runtime.record import PolicyReport, StepRecord
from drmas.telemetry.alarms import Alarms, append_alarms
from drmas.telemetry.console import Console
from drmas.telemetry.episodes import write_episodes
from drmas.telemetry.nvml import GpuSampler
from drmas.telemetry.sinks import MetricsLog, replace_text
from drmas.types import Episode, rows_of
from drmas.weights.sync import StagedLost


class Driver:
    def __init__(
        self,
        config: RunConfig,
        *,
        source: TaskSource,
        collector: Collector,
        engines: Mapping[str, Engine],
        tokenizers: Mapping[str, Any],
        run_dir: Path,
        metrics: MetricsLog,
        alarms: Alarms,
        console: Console,
        peaks: Mapping[str, float] | None = None,
        gpus: GpuSampler | None = None,
    ) -> None:
        """`peaks`: policy -> FLOP/s that its ranks' devices can do at most, for the share of it that training reaches.

        `gpus` measures this host's.
        """
        self.config, self.source, self.collector, self.engines = config, source, collector, engines
        self.tokenizers, self.run_dir, self.metrics, self.console = tokenizers, run_dir, metrics, console
        self.alarms, self.peaks, self.gpus = alarms, dict(peaks or {}), gpus
        bound = config.rollout.max_staleness
        self.bounds = {
            name: bound if agent.max_staleness is None else agent.max_staleness for name, agent in collector.team.agents.items()
        }
        self.feed = Feed(
            collector, source, config.rollout, last_step=config.train.steps, on_progress=lambda episode: self._advance(1)
        )
        self.episodes: list[Episode] = []
        """Of the step in progress, once they are taken; those of probes, too."""
        self.dropped = 0
        self._advance: Callable[[int], None] = _ignore
        self.restarts = dict.fromkeys(engines, 0)
        self.stop_requested = False

    def collect(self, step: int, versions: Mapping[str, int]) -> dict[str, Any]:
        """Wait for the step's episodes; `versions` are the policies'.

        Returns the message for all ranks: `restarted` names engines that came up anew and need their weights before the next
        call; otherwise `rows` is complete, and `baselines` has what probes earned; `fatal` says why the run can't go on.
        """
        try:
            if trouble := self.wake():
                return _message(fatal=trouble)
            if dead := self._dead():
                return self._restarted(dead)
            if self.config.rollout.deterministic and not self.feed.in_flight:
                self._forget_prefixes()
            count = self.config.rollout.tasks_per_step * self.collector.episodes_per_task
            with self.console.progress("rollout", count) as advance:
                self._advance = advance
                groups = self.feed.take(step)
                self._advance = _ignore
            if groups is None:
                return self._restarted(self._dead())
        except (EngineDied, DataError) as error:
            return _message(fatal=str(error))
        mark_stale(groups, self.bounds, versions, versions_per_step=self.config.train.updates_per_step)
        self.episodes = [episode for group in groups for episode in group.rollout.episodes]
        if all(episode.failure for group in groups for episode in group.episodes):
            self.feed.put_back(groups)
            return _message(fatal=self._all_failed(step))
        if self.config.rollout.deterministic and self.config.rollout.max_staleness and not self.feed.in_flight:
            self._forget_prefixes()
        try:
            self.feed.accept(step, groups)
        except DataError as error:
            return _message(fatal=str(error))
        found = baselines(self.episodes, self.collector.probes)
        if trouble := self._each_sleeper("sleep"):
            return _message(fatal=trouble)
        return _message(rows=[row.to_dict() for row in rows_of(self.episodes)], baselines=found)

    def wake(self, *, cache: bool = True) -> str | None:
        """Engines that slept take their memory back, without `cache` only what an update needs; why one of them can't."""
        return self._each_sleeper("wake", cache=cache)

    def settle(self) -> dict[str, Any]:
        """Wait until no episode is in flight, so that weights may change; the message is as that of `collect`, without rows."""
        try:
            return _message() if self.feed.settle() else self._restarted(self._dead())
        except (EngineDied, DataError) as error:
            return _message(fatal=str(error))

    def after_push(self, name: str, trouble: Exception | None) -> dict[str, Any]:
        """Whether the weights must be pushed again, after the engine was started anew or where what was staged is lost; or why
        the run has to end."""
        if trouble is None:
            self.collector.revive(name)
            return {"fatal": None, "again": False}
        if isinstance(trouble, StagedLost):
            return {"fatal": None, "again": True}
        if not isinstance(trouble, EngineDied):
            return {"fatal": f"the weights of policy {name!r} could not be synced: {trouble}", "again": False}
        try:
            self._restart(name, trouble)
        except EngineDied as error:
            return {"fatal": str(error), "again": False}
        return {"fatal": None, "again": True}

    def finish(
        self, step: int, values: Advantages, record: StepRecord, skipped: Mapping[str, Sequence[PolicyBatch]]
    ) -> dict[str, Any]:
        """Write the step's episodes, metrics and console line, and the rows behind updates that were not applied.

        `skipped` has the batches of the policies with such an update. Returns `stop`, true after the user's first Ctrl-C, and
        `value`, the metric by which checkpoints are compared.
        """
        played, self.episodes = self.episodes, []
        self._write(step, played, values)
        episodes = [episode for episode in played if episode.probe is None]
        agents = list(self.collector.team.agents)
        ahead = self.config.rollout.max_staleness > 0
        beside = generated_tokens(played) - generated_tokens(episodes)
        metrics = record.metrics(episodes, values, agents=agents, peaks=self.peaks, ahead=ahead, probe_tokens=beside)
        metrics |= {"rollout/dropped_groups": self.feed.dropped - self.dropped, "rollout/groups_ahead": self.feed.ahead}
        self.dropped = self.feed.dropped
        metrics |= probe_metrics(played, self.collector.probes) | self.source.stats()
        for name, engine in self.engines.items():
            metrics[f"engine/{name}/peak_memory_bytes"] = engine.stats()["peak_memory_bytes"]
        if self.gpus is not None:
            metrics |= self.gpus.take()
        raised = self.alarms.check(step, metrics, episodes, values, gap_rows=record.gap_rows())
        metrics["alarms/count"] = self.alarms.active
        self.metrics.write(step, metrics)
        self.console.step(step, self.config.train.steps, metrics)
        append_alarms(self.run_dir, raised)
        for alarm in raised:
            self.console.alarm(alarm)
        for name, batches in skipped.items():
            self._keep_skipped(step, name, record.policies[name], batches)
        if self.stop_requested and step < self.config.train.steps:
            self.console.note(f"step {step} of {self.config.train.steps} is the last; saving it for --resume")
        best = self.config.checkpoint.best_metric
        if self.config.checkpoint.keep_best and best not in metrics:
            self.console.note(f"checkpoint.best_metric is {best!r}, which step {step} didn't measure; it counts as no best")
        return {"stop": self.stop_requested, "value": metrics.get(best)}

    def state(self) -> dict[str, Any]:
        """Where the task source stands, and the episodes that are on their way."""
        return self.feed.state()

    def handle_interrupts(self) -> None:
        """First Ctrl-C (or SIGTERM): finish the step, save, stop. Second: stop at once."""

        def request_stop(number: int, frame: Any) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            self.console.note("stopping after this step; interrupt again to stop at once")

        signal.signal(signal.SIGINT, request_stop)
        signal.signal(signal.SIGTERM, request_stop)

    def _forget_prefixes(self) -> None:
        """Nothing cached from before, whether or not the weights changed: what runs next depends on itself alone (I9)."""
        for engine in self.engines.values():
            with suppress(EngineDied):  # it is started anew before the step runs
                engine.pause()
            with suppress(EngineDied):  # the other replicas of a dead one were paused
                engine.resume()

    def _each_sleeper(self, do: str, **how: Any) -> str | None:
        """Of the engines that sleep during updates; why one of them fails. One that is dead is found to be so elsewhere."""
        for name, engine in self.engines.items():
            if self.config.policies[name].engine.sleep and self.config.shares_gpus(name):
                try:
                    getattr(engine, do)(**how)
                except EngineDied:
                    continue
                except EngineError as error:
                    return f"the engine of policy {name!r} can't {do}: {error}"
        return None

    def _write(self, step: int, played: Sequence[Episode], values: Advantages) -> None:
        if self.config.telemetry.episodes:
            write_episodes(self.run_dir, step, played, self.tokenizers, values)

    def _all_failed(self, step: int) -> str:
        """Why a step of failures only ends the run; its episodes are written."""
        self._write(step, self.episodes, Advantages([None] * len(rows_of(self.episodes)), []))
        failed = [episode for episode in self.episodes if episode.probe is None]
        first = failed[0].failure
        return f"all {len(failed)} episodes of step {step} failed; the first with {first.kind}: {first.message}"

    def _keep_skipped(self, step: int, name: str, report: PolicyReport, batches: Sequence[PolicyBatch]) -> None:
        """The rows of a policy's updates that were not applied, one a line, with all that the update got."""
        lines = [line for number in report.skipped() for line in batch_lines(batches[number], update=number)]
        path = self.run_dir / "skipped" / f"step_{step}-{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        replace_text(path, "".join(lines))
        norms = ", ".join(f"{report.updates[number].metrics['grad_norm']:g}" for number in report.skipped())
        self.console.note(
            f"step {step}: {len(report.skipped())} update(s) of policy {name!r} skipped, the gradient norm is {norms}; "
            f"their rows are in {path}"
        )

    def _dead(self) -> list[str]:
        return [name for name, engine in self.engines.items() if not engine.alive or name in self.collector.dead]

    def _restarted(self, dead: Sequence[str]) -> dict[str, Any]:
        for name in dead:
            self._restart(name)
        return _message(restarted=dead)

    def _restart(self, name: str, trouble: EngineDied | None = None) -> None:
        """Bring a dead engine up anew. `trouble`: what its death was noticed by, where that wasn't a request.

        EngineDied: it may not be, or could not be, started again.
        """
        limit = self.config.policies[name].engine.max_restarts
        cause = str(trouble).partition("\n")[0] if trouble else self.collector.cause_of_death(name)
        where = "its log is on its host" if self.config.hosts_of(name) else f"see {self.run_dir / 'logs'}"
        why = f" ({cause}{'; ' if cause else ''}{where})"
        if self.restarts[name] >= limit:
            raise EngineDied(
                f"the engine of policy {name!r} died {limit + 1} times{why}; policies.{name}.engine.max_restarts is {limit}"
            )
        self.collector.hold(name)  # until its weights are pushed
        self.console.note(f"the engine of policy {name!r} died{why}; starting it again ({self.restarts[name] + 1} of {limit})")
        self.engines[name].start()
        self.restarts[name] += 1


def _message(
    *,
    fatal: str | None = None,
    restarted: Sequence[str] = (),
    rows: Sequence[dict[str, Any]] = (),
    baselines: Baselines | None = None,
) -> dict[str, Any]:
    return {"fatal": fatal, "restarted": list(restarted), "rows": list(rows), "baselines": baselines or {}}


def _ignore(count: int) -> None:
    """What episodes that nobody waits for right now report to."""


def batch_lines(batch: PolicyBatch, **more: Any) -> Iterator[str]:
    """One JSON object per row: ids, log-probs, versions, what the update weighs it with. What isn't finite is null."""
    for row, advantage, weight, temperature in zip(
        batch.rows, batch.advantages, batch.token_weights, batch.temperatures, strict=True
    ):
        numbers = {"advantage": advantage, "token_weight": weight, "temperature": temperature}
        yield json.dumps(more | _finite(row.to_dict() | numbers), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same with null in the place of NaN and infinities, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
