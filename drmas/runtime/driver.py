"""Rank 0's side of a step: take tasks, run episodes, mend engines, write what happened.

The controller asks for `collect` until no engine had to be restarted, then for `finish`. Nothing here is collective.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drmas.config.schema import RunConfig
from drmas.core.advantages import Advantages
from drmas.envs.source import TaskSource
from drmas.errors import DataError, EngineDied
from drmas.policy.batch import PolicyBatch
from drmas.rollout.collector import Collector
from drmas.rollout.engine import Engine
from drmas.runtime.record import PolicyReport, StepRecord
from drmas.telemetry.console import Console
from drmas.telemetry.episodes import write_episodes
from drmas.telemetry.nvml import GpuSampler
from drmas.telemetry.sinks import MetricsLog, replace_text
from drmas.types import Episode, Task, rows_of


@dataclass
class Pending:
    """The step in progress: its tasks, and the episodes collected so far."""

    step: int
    tasks: list[Task]
    source_before: dict[str, Any]
    episodes: dict[tuple[int, int], Episode] = field(default_factory=dict)
    retried: int = 0


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
        console: Console,
        peaks: Mapping[str, float] | None = None,
        gpus: GpuSampler | None = None,
    ) -> None:
        """`peaks`: policy -> FLOP/s that its ranks' devices can do at most, for the share of it that training reaches.

        `gpus` measures this host's.
        """
        self.config, self.source, self.collector, self.engines = config, source, collector, engines
        self.tokenizers, self.run_dir, self.metrics, self.console = tokenizers, run_dir, metrics, console
        self.peaks, self.gpus = dict(peaks or {}), gpus
        self.pending: Pending | None = None
        self.restarts = dict.fromkeys(engines, 0)
        self.stop_requested = False

    def collect(self, step: int) -> dict[str, Any]:
        """Run what is left of the step's episodes.

        Returns the message for all ranks: `restarted` names engines that came up anew and need their weights before the next
        call; otherwise `rows` is complete; `fatal` says why the run can't go on.
        """
        try:
            if self.pending is None:
                self.pending = self._begin(step)
            for _ in range(2):  # a stall takes requests along and leaves the engine: what it took runs once more
                if not self._dead():
                    self._run(self.pending)
            if dead := self._dead():
                for name in dead:
                    self._restart(name)
                return {"fatal": None, "restarted": dead, "rows": []}
        except (EngineDied, DataError) as error:
            return {"fatal": str(error), "restarted": [], "rows": []}
        return self._complete(self.pending)

    def after_push(self, name: str, trouble: Exception | None) -> dict[str, Any]:
        """Whether the weights must be pushed again, after the engine was started anew, or why the run has to end."""
        if trouble is None:
            return {"fatal": None, "again": False}
        if not isinstance(trouble, EngineDied):
            return {"fatal": f"the weights of policy {name!r} could not be synced: {trouble}", "again": False}
        try:
            self._restart(name)
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
        pending, self.pending = self.pending, None
        episodes = self._episodes(pending)
        write_episodes(self.run_dir, step, episodes, self.tokenizers, values)
        agents = list(self.collector.team.agents)
        metrics = record.metrics(episodes, values, agents=agents, retried=pending.retried, peaks=self.peaks)
        for name, engine in self.engines.items():
            metrics[f"engine/{name}/peak_memory_bytes"] = engine.stats()["peak_memory_bytes"]
        if self.gpus is not None:
            metrics |= self.gpus.take()
        self.metrics.write(step, metrics)
        self.console.step(step, self.config.train.steps, metrics)
        for name, batches in skipped.items():
            self._keep_skipped(step, name, record.policies[name], batches)
        if self.stop_requested and step < self.config.train.steps:
            self.console.note(f"stopped after step {step} of {self.config.train.steps}; --resume goes on from there")
        best = self.config.checkpoint.best_metric
        if self.config.checkpoint.keep_best and best not in metrics:
            self.console.note(f"checkpoint.best_metric is {best!r}, which step {step} didn't measure; it counts as no best")
        return {"stop": self.stop_requested, "value": metrics.get(best)}

    def state(self) -> dict[str, Any]:
        """Where the task source stands before the step in progress, or now between steps."""
        return {"source": self.pending.source_before if self.pending else self.source.state()}

    def handle_interrupts(self) -> None:
        """First Ctrl-C (or SIGTERM): finish the step, save, stop. Second: stop at once."""

        def request_stop(number: int, frame: Any) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            self.console.note("stopping after this step; interrupt again to stop at once")

        signal.signal(signal.SIGINT, request_stop)
        signal.signal(signal.SIGTERM, request_stop)

    def _begin(self, step: int) -> Pending:
        """The step's tasks. Every engine starts it without cached prefixes, whether or not its weights changed (I9)."""
        for engine in self.engines.values():
            with suppress(EngineDied):  # it is started anew before the step runs
                engine.pause()
                engine.resume()
        before = self.source.state()
        return Pending(step, self.source.take(self.config.rollout.tasks_per_step), before)

    def _run(self, pending: Pending) -> None:
        """Collect the episodes that have not run, and again those that an engine took along when it died."""
        cells = [(task, sample) for task in range(len(pending.tasks)) for sample in range(self.config.rollout.group_size)]
        missing = [cell for cell in cells if (found := pending.episodes.get(cell)) is None or _lost(found)]
        if not missing:
            return
        pending.retried += sum(cell in pending.episodes for cell in missing)
        with self.console.progress("rollout", len(cells)) as advance:
            advance(len(cells) - len(missing))
            episodes = self.collector.collect(pending.tasks, step=pending.step, only=missing, on_progress=lambda *_: advance(1))
        pending.episodes |= dict(zip(missing, episodes, strict=True))

    def _complete(self, pending: Pending) -> dict[str, Any]:
        episodes = self._episodes(pending)
        rows = rows_of(episodes)
        failures = [episode.failure for episode in episodes if episode.failure]
        fatal = None
        if len(failures) == len(episodes):
            write_episodes(self.run_dir, pending.step, episodes, self.tokenizers, Advantages([None] * len(rows), []))
            first = failures[0]
            fatal = f"all {len(episodes)} episodes of step {pending.step} failed; the first with {first.kind}: {first.message}"
        return {"fatal": fatal, "restarted": [], "rows": [row.to_dict() for row in rows]}

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

    def _episodes(self, pending: Pending) -> list[Episode]:
        return [pending.episodes[cell] for cell in sorted(pending.episodes)]

    def _dead(self) -> list[str]:
        return [name for name, engine in self.engines.items() if not engine.alive]

    def _restart(self, name: str) -> None:
        """Bring a dead engine up anew. EngineDied: it may not be, or could not be, started again."""
        limit = self.config.policies[name].engine.max_restarts
        if self.restarts[name] >= limit:
            raise EngineDied(
                f"the engine of policy {name!r} died {limit + 1} times; policies.{name}.engine.max_restarts is {limit}"
            )
        self.restarts[name] += 1
        self.console.note(f"the engine of policy {name!r} died; starting it again ({self.restarts[name]} of {limit})")
        self.engines[name].start()


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


def _lost(episode: Episode) -> bool:
    return episode.failure is not None and episode.failure.transient
