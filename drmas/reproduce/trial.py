"""One trial: make a configuration, train as `drmas train` does, evaluate as `drmas eval` does, keep what the report needs.

A start trains its team on demonstrations and keeps the weights. Any other trial begins with those, trains with its method, and
leaves `result.json` (whose fields `drmas.reproduce.results` reads), the run's configuration and its metrics. Runs in a process
of its own, started by `runner`; what it prints goes to its log.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tqdm import tqdm

from drmas.agents.team import load_team
from drmas.config.schema import RunConfig
from drmas.reproduce.plan import START, Trial, start_of
from drmas.reproduce.scenarios import configure
from drmas.runtime.evaluate import evaluate
from drmas.runtime.models import resolve_model
from drmas.runtime.placement import parameters
from drmas.runtime.run import train
from drmas.telemetry.console import Console
from drmas.telemetry.sinks import read_metrics, replace_text

PART = 5
"""A run's beginning and its end are the first and last fifth of its steps."""
COLLAPSED = 0.5
"""A mean reward, or an agent's share of valid turns, below this share of what it was at the beginning counts as divergence."""
MOMENTS = ("rows", "score", "predicted", "covariance", "pooled", "per_agent", "own")


def run_trial(trial: Trial, root: Path, *, quick: bool) -> None:
    """Run it in `root`/trials/KEY and write its result last, at once. Raises what training or evaluation raise."""
    tqdm.set_lock(threading.RLock())  # its own lock is a semaphore of the system, which a killed process leaves behind
    folder = root / "trials" / trial.key
    names = {"scenario": trial.scenario, "method": trial.method, "seed": trial.seed}
    result: dict[str, Any] = names | {"status": "ok", "error": None}
    if trial.method == START:
        config = configure(trial, folder, quick=quick)
        run = train(config, overwrite=True)
        exported = {name: run / "export" / name for name in config.policies}
        result["eval"] = {"before": _evaluated(config, exported, folder)}
    else:
        start = root / "trials" / Trial(start_of(trial.scenario, trial.method), START, trial.seed).key
        before = json.loads((start / "result.json").read_text())["eval"]["before"]
        models = {path.name: path for path in (start / "run" / "export").iterdir()}
        config = configure(trial, folder, quick=quick, models=models)
        run = train(config, overwrite=True)
        steps = read_metrics(run)
        if len(steps) != config.train.steps:  # it was told to stop, by whoever shuts the machine down
            raise RuntimeError(f"the run ended after {len(steps)} of {config.train.steps} steps")
        result |= measured(config, steps)
        exported = {name: run / "export" / name for name in config.policies}
        result["eval"] = {"before": before, "after": _evaluated(config, exported, folder)}
        shutil.rmtree(run / "export")
    for left in ("checkpoints", "logs", "warm_start"):
        shutil.rmtree(run / left, ignore_errors=True)
    replace_text(folder / "result.json", json.dumps(result, allow_nan=False) + "\n")


def measured(config: RunConfig, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the report needs of a run's metrics, one entry per step, by agent; null where a step has none."""
    team = load_team(config.team)
    policies = {name: agent.policy for name, agent in team.agents.items()}

    def column(pattern: str) -> dict[str, list[float | None]]:
        return {
            agent: [_number(step.get(pattern.format(agent=agent, policy=policy))) for step in steps]
            for agent, policy in policies.items()
        }

    valid = column("rollout/{agent}/valid_share")
    rewards = [_number(step["reward/mean"]) for step in steps]
    skipped = sum(step.get(f"train/{policy}/skipped") or 0 for step in steps for policy in config.policies)
    return {
        "steps": len(steps),
        "reward": rewards,
        "grad_norm": column("train/{policy}/{agent}/grad_norm"),
        "inflation": column("advantage/{agent}/inflation_factor"),
        "row_sum": column("advantage/{agent}/row_sum"),
        "rows": column("rollout/{agent}/rows"),
        "calls": column("rollout/{agent}/calls_per_episode"),
        "entropy": column("train/{policy}/{agent}/entropy"),
        "valid": valid,
        "uncompared": column("advantage/{agent}/uncompared_share"),
        "skipped": skipped,
        "parameters": {
            name: parameters(resolve_model(policy.model, seed=config.seed)) for name, policy in config.policies.items()
        },
        "logprob_gap_max": max((step["rollout/logprob_gap_max"] or 0.0 for step in steps), default=None),
        "moments": [
            {"step": step["step"], "agent": agent} | {name: _number(step[f"moments/{agent}/{name}"]) for name in MOMENTS}
            for step in steps
            for agent in policies
            if step.get(f"moments/{agent}/rows")
        ],
        **_divergence(rewards, skipped, valid),
    }


def _divergence(rewards: Sequence[float | None], skipped: float, valid: Mapping[str, Sequence[float | None]]) -> dict[str, str]:
    """The status of a run that diverged, and why; nothing of any other."""
    if skipped:
        return {"status": "diverged", "error": f"{skipped:g} update(s) with a gradient that is not finite, which were skipped"}
    if any(reward is None for reward in rewards):
        return {"status": "diverged", "error": f"no finite reward in step {rewards.index(None) + 1}"}
    shares = {f"the share of valid turns of {agent}": _known(column) for agent, column in valid.items()}
    for what, column in {"the mean reward": list(rewards), **shares}.items():
        part = max(1, len(column) // PART)
        first, last = (mean(column[:part]), mean(column[-part:])) if column else (0.0, 0.0)
        if last < COLLAPSED * first:
            return {"status": "diverged", "error": f"{what} fell from {first:.2f} to {last:.2f}"}
    return {}


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _evaluated(config: RunConfig, models: dict[str, Path], folder: Path) -> dict[str, list[float]]:
    """Of every task of the evaluation: avg@n and pass@n of its n samples."""
    output = folder / "eval"
    scores = evaluate(config, models, output=output, console=Console(quiet=True)).team
    values, n = scores.values(), config.eval.samples
    shutil.rmtree(output)
    return {"avg": list(values[f"avg@{n}"].values()), "pass": list(values[f"pass@{n}"].values())}


def _number(value: float | None) -> float | None:
    """None also for what isn't finite."""
    return value if value is not None and math.isfinite(value) else None
