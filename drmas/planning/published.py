"""What others measured, beside what a plan says of the same settings: `published.toml` as a table of errors.

One set of efficiencies predicts all points; none is fitted to a point. Settings that a source leaves open are assumed and say
so. Called by `drmas plan --published`, which wrote the table of the README beside this file.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from drmas.agents.team import TeamConfig, load_team
from drmas.config.load import load
from drmas.config.schema import RunConfig
from drmas.planning.assumed import SPREAD, assumed
from drmas.planning.cluster import load_cluster, parse_cluster, resized
from drmas.planning.costs import step_rows
from drmas.planning.job import Job, make_job
from drmas.planning.predict import Prediction, Roll, predict
from drmas.planning.simulation import simulate
from drmas.planning.types import Cluster
from drmas.runtime.models import sketched_model

QUANTITIES = {
    "step_seconds": "step",
    "rollout_seconds": "rollout",
    "score_seconds": "old log-probs",
    "train_seconds": "updates",
    "sync_seconds": "weight sync",
    "train_tokens_per_second": "trained tokens/s",
    "run_hours": "run",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One published number and the prediction of it."""

    name: str
    quantity: str
    """A key of QUANTITIES."""
    published: float
    predicted: float
    assumed: str
    source: str

    @property
    def error(self) -> float:
        """Of the prediction: -0.2 is a fifth too low."""
        return self.predicted / self.published - 1


def compare(roll: Roll = simulate) -> list[Compared]:
    """Every published number with its prediction, in the file's order."""
    table = _table()
    found = []
    with _models(table["models"]) as folders:
        for point in table["points"]:
            prediction = predict(_job(point, table, folders), roll)
            values = _values(prediction, point)
            found += [
                Compared(point["name"], quantity, value, values[quantity], point["assumed"], point["source"])
                for quantity, value in point["measured"].items()
            ]
    return found


def summary(found: list[Compared]) -> dict[str, float]:
    """How far off the predictions are: median and largest factor, and the share within a factor of 1.5."""
    factors = sorted(max(1 + one.error, 1 / (1 + one.error)) for one in found)
    return {
        "points": len(factors),
        "median_factor": factors[len(factors) // 2],
        "largest_factor": factors[-1],
        "within_1.5": sum(factor <= 1.5 for factor in factors) / len(factors),
    }


def _values(prediction: Prediction, point: Mapping[str, Any]) -> dict[str, float]:
    job, phases = prediction.job, prediction.phases
    rows = sum(step_rows(policy, job.workload, share_prefixes=False).tokens for policy in job.policies.values())
    return {
        "step_seconds": phases.step,
        "rollout_seconds": phases.rollout,
        "score_seconds": phases.score,
        "train_seconds": phases.train,
        "sync_seconds": phases.sync,
        "train_tokens_per_second": rows / (phases.score + phases.train),
        "run_hours": phases.step * point.get("steps", 1) / 3600,
    }


def _job(point: Mapping[str, Any], table: Mapping[str, Any], folders: Mapping[str, Path]) -> Job:
    cluster = _cluster(point, table)
    run, team = _run(point)
    of = {"calls": {"": 1.0}, "prompt": {"": point.get("prompt", 1)}, "response": {"": point.get("response", 1)}}
    if "recipe" in point:
        of = {"calls": {}, "prompt": point["prompts"], "response": point["responses"]}
    workload = assumed(run, team, spread=point.get("spread", SPREAD), **of)

    def find(spec: str, *, seed: int, key: str) -> Path:
        return folders[spec] if spec in folders else sketched_model(spec, seed=seed, key=key)

    parameters = table["models"].get(point.get("model"), {}).get("parameters", 0)
    return make_job(run, team, cluster, workload, find=find, stored=dict.fromkeys(run.policies, parameters), anywhere=True)


def _run(point: Mapping[str, Any]) -> tuple[RunConfig, TeamConfig]:
    if "recipe" in point:
        run = load(point["recipe"])
        return run, load_team(run.team)
    trainer = {key: value for key, value in point["trainer"].items() if key != "ranks"}
    engine = {"dtype": "bfloat16", "max_concurrent": 256, **point["engine"]}
    run = RunConfig.model_validate(
        {
            "policies": {"main": {"model": point["model"], "dtype": "bfloat16", **trainer, "engine": engine}},
            "team": {"name": "single", "solver": {"max_tokens": point["cap"]}},
            "data": {"type": "sums"},
            "rollout": {
                "tasks_per_step": point["tasks"],
                "group_size": point["group"],
                "max_concurrent_episodes": point["tasks"] * point["group"],
                "max_staleness": point.get("ahead", 0),
                "deterministic": False,
            },
            "loss": {"kl": "k3" if point.get("reference") else None},
            "train": {"ranks": point["trainer"]["ranks"], "updates_per_step": point.get("updates", 1)},
        }
    )
    return run, load_team(run.team)


def _cluster(point: Mapping[str, Any], table: Mapping[str, Any]) -> Cluster:
    name, gpus = point["cluster"], point.get("gpus")
    if name not in table["clusters"]:
        return load_cluster(name, gpus=gpus)
    cluster = parse_cluster(table["clusters"][name], f"published.toml, clusters.{name}")
    return cluster if gpus is None else resized(cluster, gpus)


@contextmanager
def _models(table: Mapping[str, Any]) -> Iterator[dict[str, Path]]:
    """Name -> a folder with the config.json of each model that drmas has no published shape of."""
    with tempfile.TemporaryDirectory(prefix="drmas-published-") as folder:
        found = {}
        for name, model in table.items():
            if "like" in model:
                found[name] = sketched_model(model["like"])
                continue
            found[name] = Path(folder) / name
            found[name].mkdir()
            (found[name] / "config.json").write_text(json.dumps(model["config"]))
        yield found


def _table() -> dict[str, Any]:
    return tomllib.loads((resources.files("drmas.planning") / "published.toml").read_text(encoding="utf-8"))
