"""A plan: one prediction, the layouts that would be better, what was assumed, and all of it as JSON.

    run + team + cluster + workload -> job -> prediction and proposals -> Plan -> text, plan.json, plan.html

The JSON's keys are stable; `SCHEMA` grows when one changes its meaning. Called by `drmas plan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from drmas.agents.team import TeamConfig
from drmas.config.schema import RunConfig
from drmas.planning import costs
from drmas.planning.engines import bound
from drmas.planning.job import Job, make_job, stack_of
from drmas.planning.memory import DeviceMemory
from drmas.planning.predict import Prediction, Roll, bottleneck, grown, predict
from drmas.planning.propose import Proposal, Proposals, propose, rank
from drmas.planning.simulation import simulate
from drmas.planning.types import Cluster, Efficiencies, Workload

SCHEMA = 1
SHOWN = 5
"""Proposals; twice as many are simulated."""
GROWTH = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Responses so many times as long as the plan's."""


@dataclass(frozen=True, slots=True)
class Plan:
    prediction: Prediction
    proposals: Proposals
    growth: tuple[tuple[float, Prediction], ...]
    """(mean response, prediction) with longer and shorter answers."""
    notes: tuple[str, ...]

    @property
    def steps(self) -> int | None:
        """Of the run; None where epochs decide, which the data's size turns into steps."""
        train = self.prediction.job.run.train
        return None if train.epochs is not None else train.steps

    @property
    def run_cost(self) -> float | None:
        cost = self.prediction.step_cost
        return None if cost is None or self.steps is None else cost * self.steps


def make_plan(
    run: RunConfig,
    team: TeamConfig,
    cluster: Cluster,
    workload: Workload,
    *,
    roll: Roll = simulate,
) -> Plan:
    """The plan of `run` on `cluster`. The run's own layout and those that `bound` finds best are predicted with `roll`, longer
    answers with `bound`.

    ConfigError, ModelError: as `make_job` and `predict`.
    """
    job = make_job(run, team, cluster, workload)
    prediction = predict(job, roll)
    proposals = propose(job, most=2 * SHOWN)
    better = sorted((_again(proposal, roll) for proposal in proposals.best), key=rank)[:SHOWN]
    proposals = Proposals(tuple(better), proposals.rejected, proposals.tried)
    return Plan(prediction, proposals, tuple(grown(job, GROWTH, bound)), tuple(_notes(prediction)))


def _again(proposal: Proposal, roll: Roll) -> Proposal:
    return Proposal(proposal.mode, predict(proposal.prediction.job, roll), proposal.overrides)


def _notes(prediction: Prediction) -> list[str]:
    job = prediction.job
    said = [f"calls, prompts and responses: {job.workload.source}"]
    if job.cluster.efficiencies == Efficiencies():
        said.append("efficiencies: the defaults, which are assumptions; a calibration on your machines replaces them")
    if job.cluster.price_per_gpu_hour is None:
        said.append(f"{job.cluster.name} has no price: no cost; --price or price.per_gpu_hour gives one")
    elif job.run.train.epochs is not None:
        said.append(f"train.epochs is {job.run.train.epochs}: --train.steps N gives the cost of a run of N steps")
    if job.cluster.gpu and any(
        device >= job.cluster.gpus_per_node for policy in job.policies.values() for device in policy.devices
    ):
        said.append(
            "engines on other nodes than the first: start drmas serve-engines there and name them in cluster.engine_hosts"
        )
    for name in prediction.cramped:
        speed, room = prediction.engines[name].speed, job.policies[name].config.engine.max_model_tokens
        said.append(f"the engine of {name} has room for {speed.kv_tokens} tokens, max_model_tokens is {room}: it won't start")
    return said


def to_dict(plan: Plan) -> dict[str, Any]:
    """Everything as JSON values. Numbers that aren't finite are null."""
    prediction, job = plan.prediction, plan.prediction.job
    cluster = asdict(job.cluster)
    efficiencies = cluster.pop("efficiencies")
    return _finite(
        {
            "schema": SCHEMA,
            "name": job.run.name,
            "cluster": {**cluster, "gpus": job.cluster.gpus},
            "efficiencies": efficiencies,
            "workload": asdict(job.workload),
            **_predicted(prediction),
            "steps": plan.steps,
            "run_cost": plan.run_cost,
            "proposals": [
                {"mode": str(one.mode), "overrides": list(one.overrides), **_predicted(one.prediction)}
                for one in plan.proposals.best
            ],
            "rejected": [asdict(one) for one in plan.proposals.rejected],
            "tried": plan.proposals.tried,
            "growth": [{"mean_response_tokens": mean, "phases": _phases(one), "fits": one.fits} for mean, one in plan.growth],
            "notes": list(plan.notes),
        }
    )


def _predicted(prediction: Prediction) -> dict[str, Any]:
    job = prediction.job
    return {
        "ranks": job.world,
        "gpus": job.gpus,
        "fits": prediction.fits,
        "layouts": {name: _layout(job, name) for name in job.policies},
        "memory": [_memory(device) for device in prediction.devices],
        "fullest": prediction.fullest.where,
        "phases": _phases(prediction),
        "bottleneck": bottleneck(prediction),
        "training": {name: asdict(training) for name, training in prediction.training.items()},
        "engines": {name: asdict(engines) for name, engines in prediction.engines.items()},
        "rollout": asdict(prediction.rollout),
        "trained_tokens": prediction.trained_tokens,
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "generated_tokens_per_second": prediction.generated_per_second,
        "step_cost": prediction.step_cost,
        "currency": job.cluster.currency,
    }


def _phases(prediction: Prediction) -> dict[str, Any]:
    phases = prediction.phases
    return {**asdict(phases), "step": phases.step}


def _layout(job: Job, name: str) -> dict[str, Any]:
    policy = job.policies[name]
    layout, stack = policy.layout, stack_of(policy, job.cluster)
    return {
        **asdict(layout),
        "data_parallel": layout.data_parallel,
        "recompute": policy.config.recompute,
        "tokens_per_microbatch": policy.config.tokens_per_microbatch,
        "gpu_memory_fraction": policy.config.engine.gpu_memory_fraction,
        "transport": costs.transport_of(job, policy),
        "layers": stack.layers,
        "attention": stack.attention,
        "model": policy.config.model,
        "parameters": policy.parameters,
    }


def _memory(device: DeviceMemory) -> dict[str, Any]:
    return {
        "where": device.where,
        "capacity_bytes": device.capacity,
        "total_bytes": device.total,
        "headroom_bytes": device.headroom,
        "parts": device.parts,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
