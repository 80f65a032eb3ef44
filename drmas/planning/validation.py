"""Predicted beside measured, for a finished run: how far a plan of this machine is off, phase by phase.

    compare(cluster, folder) -> one line per step: rollout, train, sync, step; predicted with the run's own lengths, measured

What is predicted is time, given how long the run's texts were; `from_defaults` is the same prediction before anything ran, from
the configuration alone. The cluster's description comes from `calibration`, which has seen none of the run. The first step is
left out of the means: engines and trainer meet in it for the first time. Called by `bench/plan_validation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drmas.agents.team import TeamConfig, load_team
from drmas.config.load import load
from drmas.config.schema import RunConfig
from drmas.errors import DataError
from drmas.planning.growth import CALL_SECONDS
from drmas.planning.job import make_job
from drmas.planning.measured import Fixed, read_run
from drmas.planning.predict import predict
from drmas.planning.simulation import simulate
from drmas.planning.types import Cluster, Phases, Workload
from drmas.planning.workload import Source, default_workload
from drmas.telemetry.episodes import steps_with_episodes
from drmas.telemetry.sinks import read_metrics

PHASES = ("rollout", "train", "sync", "step")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step by phase, as in PHASES."""

    step: int
    predicted: Mapping[str, float]
    measured: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run and the predictions of it."""

    name: str
    cluster: str
    steps: tuple[StepTimes, ...]
    """But the first, where there are more."""
    defaults: Mapping[str, float]
    """Predicted by phase from the configuration alone."""

    def mean(self, phase: str, *, predicted: bool) -> float:
        """Seconds, over the steps."""
        values = [(step.predicted if predicted else step.measured)[phase] for step in self.steps]
        return math.fsum(values) / len(values)

    def error(self, phase: str) -> float:
        """Of the mean prediction: -0.1 is a tenth too low."""
        return self.mean(phase, predicted=True) / self.mean(phase, predicted=False) - 1

    @property
    def defaults_error(self) -> float:
        """Of the step that the configuration alone predicts."""
        return self.defaults["step"] / self.mean("step", predicted=False) - 1


def compare(cluster: Cluster, folder: Path) -> Comparison:
    """The run in `folder` beside predictions for `cluster`. DataError: it has no steps with times and episodes."""
    run = load(str(folder / "config.json"), [])
    team = load_team(run.team)
    metrics = {int(each["step"]): each for each in read_metrics(folder)}
    steps = [step for step in steps_with_episodes(folder) if step in metrics]
    if not steps:
        raise DataError(f"{folder}: no step with metrics and episodes; expected a run's folder, of a run that has done a step")
    chosen = steps[1:] or steps
    times = [
        StepTimes(step, _by_phase(_predicted(run, team, cluster, folder, step)), _measured(metrics[step])) for step in chosen
    ]
    workload, source = default_workload(run, team)
    return Comparison(run.name, cluster.name, tuple(times), _by_phase(_phases(run, team, cluster, workload, source)))


def _predicted(run: RunConfig, team: TeamConfig, cluster: Cluster, folder: Path, step: int) -> Phases:
    workload, source = read_run(folder, run, team, steps=[step])
    return _phases(run, team, cluster, workload, Fixed(source.measured))


def _phases(run: RunConfig, team: TeamConfig, cluster: Cluster, workload: Workload, source: Source) -> Phases:
    deterministic = run.rollout.deterministic
    roll = partial(simulate, source=source, deterministic=deterministic, call_seconds=CALL_SECONDS)
    return predict(make_job(run, team, cluster, workload), roll).phases


def _by_phase(phases: Phases) -> dict[str, float]:
    return {
        "rollout": phases.rollout,
        "train": phases.score + phases.train,
        "sync": phases.sync + phases.wake,
        "step": phases.step,
    }


def _measured(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {phase: float(metrics[f"time/{phase}_seconds"]) for phase in PHASES}


def table(comparisons: Sequence[Comparison]) -> str:
    """Markdown: a line per run and phase."""
    lines = [
        "| run | phase | measured | predicted, given lengths | error | predicted from the configuration | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in comparisons:
        for phase in PHASES:
            measured = one.mean(phase, predicted=False)
            given, guess = one.mean(phase, predicted=True), one.defaults[phase]
            lines.append(
                f"| {one.name} | {phase} | {measured:.2f} s | {given:.2f} s | {one.error(phase):+.0%} "
                f"| {guess:.2f} s | {guess / measured - 1:+.0%} |"
            )
    return "\n".join(lines) + "\n"


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """As JSON values, with the means and errors."""
    phases = {
        phase: {
            "measured": comparison.mean(phase, predicted=False),
            "predicted": comparison.mean(phase, predicted=True),
            "error": comparison.error(phase),
            "from_defaults": comparison.defaults[phase],
        }
        for phase in PHASES
    }
    return {
        "name": comparison.name,
        "cluster": comparison.cluster,
        "phases": phases,
        "steps": [asdict(step) for step in comparison.steps],
    }
