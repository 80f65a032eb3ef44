"""How a step grows from one GPU to thousands: weak and strong scaling, on-policy and ahead, with the tails of the lengths.

    for each number of GPUs: the best split into trainer and engines -> seconds of training and syncs -> steps, simulated

Weak scaling gives every GPU as many tasks as the run has at `base` GPUs; strong scaling keeps the run's tasks. Tensor
parallelism, stages and microbatches stay the run's; only replicas grow. Engines have GPUs of their own, except where there are
too few GPUs for both, where they take turns with the trainer. One thread drives all episodes, as rank 0
does. Memory isn't looked at: `drmas plan` on one of the sizes does. Called by `drmas plan --growth`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from drmas.agents.team import TeamConfig
from drmas.config.schema import PolicyConfig, RunConfig
from drmas.errors import ConfigError
from drmas.planning import costs
from drmas.planning.cluster import resized
from drmas.planning.engines import engines_of
from drmas.planning.job import Job, make_job, with_layout
from drmas.planning.pipeline import Beside, Steady, simulate_steps, steady
from drmas.planning.predict import predict
from drmas.planning.propose import OWN_FRACTION
from drmas.planning.types import Cluster, Engines, Lengths, Workload
from drmas.planning.workload import Source

Scaling = Literal["weak", "strong"]
CALL_SECONDS = 5e-4
"""Of rank 0's one thread, per call. `bench/rollout.py overhead` measures 0.1 to 0.3 ms of templates, tokens, parsers and
bookkeeping; messages to engines and back come on top (an assumption)."""
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Of the GPUs that the trainer may get."""
SIZES = tuple(2**power for power in range(13))
STEPS = 4
MOST_EPISODES = 8192
"""Of a step that is simulated whole. Of more, an equal part of tasks, replicas and the driver's time stands for all."""
_ENOUGH = 4096
"""Episodes after which on-policy steps, which are all alike, tell nothing new."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How rollouts and training overlap."""

    name: str
    staleness: int
    carry_over: bool = False


ON_POLICY = Mode("on-policy", 0)
AHEAD = Mode("one step ahead", 1)
CARRIED = Mode("carried over", 1, carry_over=True)
MODES = (ON_POLICY, AHEAD, CARRIED)


@dataclass(frozen=True, slots=True)
class Point:
    """One size of the job in one mode."""

    gpus: int
    scaling: Scaling
    mode: str
    spread: float
    """Of the responses, as `Lengths.spread`; the widest agent's."""
    episodes: int
    trainer_gpus: int
    engine_gpus: int
    """Those of both where they take turns."""
    step: Steady

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Prompts' and responses', of the rows of a step."""
        return self.step.tokens / self.step.seconds / self.gpus

    @property
    def engine_idle(self) -> float:
        """Of the busiest policy's engines."""
        return min(self.step.engine_idle.values())


def simulate_growth(
    run: RunConfig,
    team: TeamConfig,
    cluster: Cluster,
    workload: Workload,
    source: Source,
    *,
    sizes: Sequence[int] = SIZES,
    scalings: Sequence[Scaling] = ("weak", "strong"),
    modes: Sequence[Mode] = MODES,
    base: int | None = None,
    steps: int = STEPS,
    seed: int = 0,
) -> list[Point]:
    """A point for every size, scaling and mode. `base`: the GPUs for which the run's tasks are meant; the cluster's if None.

    A mode that needs GPUs for trainer and engines at the same time has no point where there are too few. ConfigError: settings
    that no size fits, or a cluster whose nodes a size doesn't fill.
    """
    base = base or cluster.gpus
    found = []
    job = _start(run, team, cluster, workload)
    with _uncollected():
        for scaling, gpus in product(scalings, sizes):
            factor = gpus / base if scaling == "weak" else 1.0
            tasks = max(1, round(workload.tasks * factor))
            episodes = tasks * workload.group_size
            own = replace(workload, tasks=tasks, max_concurrent_episodes=max(episodes, workload.max_concurrent_episodes))
            sized = replace(job, cluster=resized(cluster, gpus), workload=own)
            points = [_point(sized, own, source, scaling, mode, steps, seed) for mode in modes]
            found += [point for point in points if point]
    if not found:
        raise ConfigError(f"no mode fits on {', '.join(map(str, sizes))} GPUs; take more of them, or less tensor parallelism")
    return found


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cycle collector, which goes through millions of calls again and again and finds nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def with_spread(workload: Workload, spread: float) -> Workload:
    """The same mean lengths with another tail."""
    agents = [
        replace(agent, response=Lengths.fitted(agent.response.moment(1), spread, agent.response.cap))
        for agent in workload.agents
    ]
    return replace(workload, agents=tuple(agents))


def _start(run: RunConfig, team: TeamConfig, cluster: Cluster, workload: Workload) -> Job:
    """The job on as few GPUs as it can have, whose models the sizes share."""
    unit = max(_trainer_unit(policy) for policy in run.policies.values())
    small = _laid_out(run, trainer=unit, replicas=dict.fromkeys(run.policies, 1), mode=ON_POLICY, together=True)
    size = max(unit, *(policy.engine.tensor_parallel for policy in run.policies.values()))
    place = replace(cluster, nodes=max(1, -(-size // cluster.gpus_per_node)))
    return make_job(small, team, place, workload, anywhere=True)


def _point(job: Job, workload: Workload, source: Source, scaling: Scaling, mode: Mode, steps: int, seed: int) -> Point | None:
    candidates = list(_splits(job, mode))
    if not candidates:
        return None
    laid, together = min(candidates, key=lambda one: predict_step(one[0]))
    engines, policies = engines_of(laid), laid.policies
    scores = sum(costs.scoring(laid, policy) for policy in policies.values())
    trains = sum(costs.training(laid, policy).total for policy in policies.values() if policy.config.trainable)
    beside = Beside(
        train=scores + trains,
        sync={name: costs.sync_seconds(laid, policy) for name, policy in policies.items() if policy.config.trainable},
        other=laid.cluster.efficiencies.step_seconds + costs.wake_seconds(laid),
    )
    if not mode.staleness:
        steps = max(1, min(steps, _ENOUGH // workload.episodes))
    part, own, share = _part(workload, engines)
    timed = simulate_steps(
        part, own, beside, laid.run.rollout, steps=steps, source=source, seed=seed, call_seconds=CALL_SECONDS / share
    )
    mean = steady(timed, skip=2 if mode.staleness else 0)
    return Point(
        gpus=job.cluster.gpus,
        scaling=scaling,
        mode=mode.name,
        spread=max(agent.response.spread for agent in workload.agents),
        episodes=workload.episodes,
        trainer_gpus=laid.world,
        engine_gpus=laid.world if together else sum(len(policy.devices) for policy in policies.values()),
        step=replace(mean, tokens=mean.tokens / share),
    )


def _part(workload: Workload, engines: Mapping[str, Engines]) -> tuple[Workload, dict[str, Engines], float]:
    """What stands for a large step: so many of its tasks as of its replicas, and which share of them that is."""
    parts = min(-(-workload.episodes // MOST_EPISODES), *(own.replicas for own in engines.values()))
    own = {name: replace(one, replicas=one.replicas // parts) for name, one in engines.items()}
    replicas = [sum(one.replicas for one in some.values()) for some in (own, engines)]
    tasks = max(1, round(workload.tasks * replicas[0] / replicas[1]))
    share = tasks / workload.tasks
    flying = max(1, round(workload.max_concurrent_episodes * share))
    return replace(workload, tasks=tasks, max_concurrent_episodes=flying), own, share


def predict_step(job: Job) -> float:
    """Seconds, by the quick bound: for choosing a split."""
    return predict(job).phases.step


def _splits(job: Job, mode: Mode) -> Iterator[tuple[Job, bool]]:
    """(the job, whether trainer and engines take turns), with every share of the GPUs that gives both whole units."""
    run, gpus = job.run, job.cluster.gpus
    unit = max(_trainer_unit(policy) for policy in run.policies.values())
    apart = False
    for trainer in dict.fromkeys(max(unit, int(gpus * share) // unit * unit) for share in SHARES):
        if replicas := _replicas(job, gpus - trainer):
            apart = True
            yield with_layout(job, _laid_out(run, trainer=trainer, replicas=replicas, mode=mode, together=False)), False
    if not apart and not mode.staleness and gpus % unit == 0:
        replicas = {name: gpus // policy.engine.tensor_parallel for name, policy in run.policies.items()}
        if all(replicas.values()):
            laid = _laid_out(run, trainer=gpus, replicas=replicas, mode=mode, together=True)
            yield with_layout(job, laid, anywhere=True), True


def _trainer_unit(policy: PolicyConfig) -> int:
    return policy.tensor_parallel * policy.pipeline_parallel * policy.context_parallel


def _replicas(job: Job, gpus: int) -> dict[str, int]:
    """So many GPUs as replicas, one more each time where the most work is per replica; empty where one would get none."""
    sizes = {name: policy.config.engine.tensor_parallel for name, policy in job.policies.items()}
    work = {
        name: policy.parameters * sum(a.calls * (4 * a.response.moment(1) + a.prompt_tokens) for a in job.workload.of(name))
        for name, policy in job.policies.items()
    }
    found, free = dict.fromkeys(sizes, 1), gpus - sum(sizes.values())
    if free < 0:
        return {}
    while fitting := [name for name, size in sizes.items() if size <= free]:
        name = max(fitting, key=lambda name: work[name] / (found[name] * sizes[name]))
        found[name] += 1
        free -= sizes[name]
    return found


def _laid_out(run: RunConfig, *, trainer: int, replicas: Mapping[str, int], mode: Mode, together: bool) -> RunConfig:
    policies = {}
    for name, policy in run.policies.items():
        place = {"replicas": replicas[name], "gpus": "shared" if together else "own", "sleep": together}
        place |= {} if together else {"gpu_memory_fraction": OWN_FRACTION}
        policies[name] = policy.model_copy(update={"engine": policy.engine.model_copy(update=place)})
    ahead = {"max_staleness": mode.staleness, "carry_over": mode.carry_over, "deterministic": False}
    return run.model_copy(
        update={
            "policies": policies,
            "train": run.train.model_copy(update={"ranks": trainer, "placement": "shared"}),
            "rollout": run.rollout.model_copy(update=ahead),
        }
    )


LEGEND = (
    "train+eng: GPUs of the trainer and of the engines; where both are as many as there are in all, they take turns",
    "wait: seconds of a step in which the trainer waits for episodes; train: in which it trains; idle: shares of their time",
    "lag: how many steps old the weights are that sampled a step's tokens; carried over: slow groups come a step later",
)


def table(points: Sequence[Point]) -> str:
    """One line per point."""
    lines = [
        f"{'GPUs':>6} {'scaling':8} {'mode':15} {'train+eng':>11} {'episodes':>9} {'step s':>9} {'wait s':>8} {'train s':>8} "
        f"{'tok/s/GPU':>10} {'idle eng':>9} {'idle trn':>9} {'lag':>5}"
    ]
    for one in points:
        step = one.step
        split = f"{one.trainer_gpus}+{one.engine_gpus}"
        lines.append(
            f"{one.gpus:6} {one.scaling:8} {one.mode:15} {split:>11} {one.episodes:9} {step.seconds:9.1f} {step.rollout:8.1f} "
            f"{step.train:8.1f} {one.tokens_per_second_per_gpu:10.0f} {one.engine_idle:9.0%} {step.trainer_idle:9.0%} "
            f"{step.lag_mean:5.2f}"
        )
    return "\n".join([*lines, "", *LEGEND]) + "\n"
