"""Layouts for a job: which ones the model and the memory allow, which of them is the fastest, and why the others fell out.

Enumerated are, for every number of trainer ranks: tensor parallelism within a node, stages, context parallelism and recompute
for each kind of policy; engines on GPUs of their own or on the trainer's, asleep or awake while it updates; their tensor
parallelism and replicas; with GPUs of their own also rollouts one step ahead. Policies with equal settings get equal layouts.
Every candidate that survives the memory is predicted with `engines.bound`; the caller may simulate the best few.

    options of a policy (divisors, memory) -> fastest combination that leaves room for engines -> engines -> predictions, sorted

Batch arithmetic and everything else that changes results stays as the run has it, but for rollouts one step ahead, which such
proposals say. Microbatch budgets may shrink: results don't depend on them. Called by `plan`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import NamedTuple

from drmas.config.schema import PolicyConfig, RunConfig
from drmas.errors import ConfigError, ModelError
from drmas.planning import costs, memory
from drmas.planning.engines import bound
from drmas.planning.job import Job, PolicyJob, with_layout
from drmas.planning.predict import Prediction, predict
from drmas.runtime.memory import by_part, describe

RECOMPUTE = ("none", "selective", "full")
OWN_FRACTION = 0.9
"""Of its memory that an engine takes of a GPU of its own."""
EQUAL = 0.02
"""Steps whose seconds differ by less count as equally long; fewer GPUs go first then."""
_KEYS = (
    *("tensor_parallel", "sequence_parallel", "pipeline_parallel", "context_parallel"),
    *("recompute", "tokens_per_microbatch", "offload_optimizer"),
    *(f"engine.{key}" for key in ("gpus", "sleep", "tensor_parallel", "replicas", "gpu_memory_fraction")),
)
"""What a proposal may change of a policy."""
_TRIED = 3
"""Combinations of trainer layouts that engines are laid out for, per number of ranks and kind of engines."""


class Mode(NamedTuple):
    """Where engines run and when."""

    gpus: str
    sleep: bool
    ahead: int

    def __str__(self) -> str:
        where = {("own", False): "own GPUs", ("shared", True): "shared, asleep during updates"}
        said = where.get((self.gpus, self.sleep), "shared, always awake")
        return f"{said}, {'one step' if self.ahead == 1 else f'{self.ahead} steps'} ahead" if self.ahead else said


MODES = (Mode("shared", True, 0), Mode("shared", False, 0), Mode("own", False, 0), Mode("own", False, 1))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout and what it is predicted to take."""

    mode: Mode
    prediction: Prediction
    overrides: tuple[str, ...]
    """Command-line words that turn the run into it."""

    @property
    def engine_nodes(self) -> int:
        """Nodes that have engines and no trainer: they run `drmas serve-engines`."""
        job = self.prediction.job
        used = {device // job.cluster.gpus_per_node for policy in job.policies.values() for device in policy.devices}
        return len(used - set(range(self.trainer_nodes)))

    @property
    def trainer_nodes(self) -> int:
        return -(-self.prediction.job.world // self.prediction.job.cluster.gpus_per_node)

    @property
    def node_options(self) -> list[str]:
        """Of `drmas launch`."""
        return ["--nodes", str(self.trainer_nodes), "--engine-nodes", str(self.engine_nodes)]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Layouts that fell out for one reason, told of the one that came closest."""

    what: str
    count: int
    why: str


@dataclass(frozen=True, slots=True)
class Proposals:
    best: tuple[Proposal, ...]
    """The fastest of each kind of engines and number of ranks first."""
    rejected: tuple[Rejection, ...]
    tried: int


class _Option(NamedTuple):
    """A trainer layout of one kind of policy on so many ranks."""

    config: PolicyConfig
    seconds: float
    held: float
    """Bytes on the fullest rank at all times, of all policies of the kind."""
    transient: float
    parts: Mapping[str, float]

    def __str__(self) -> str:
        c = self.config
        sizes = {"TP": c.tensor_parallel, "PP": c.pipeline_parallel, "CP": c.context_parallel}
        layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "TP 1"
        away = ", optimiser in host memory" if c.offload_optimizer else ""
        return f"{layout}, recompute {c.recompute}, microbatches of {c.tokens_per_microbatch}{away}"


class _Fallen:
    """Reasons, with how often each came up and the nearest miss."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, float, str]] = {}

    def add(self, what: str, why: str, *, miss: float = math.inf) -> None:
        count, nearest, said = self._found.get(what, (0, math.inf, why))
        if miss < nearest:
            nearest, said = miss, why
        self._found[what] = (count + 1, nearest, said)

    def all(self) -> tuple[Rejection, ...]:
        return tuple(Rejection(what, count, why) for what, (count, _, why) in self._found.items())


def propose(job: Job, *, most: int = 5) -> Proposals:
    """The best layouts for `job` on its cluster; `most` of them. None on a host without GPUs, which has one layout."""
    if not job.cluster.gpu:
        return Proposals((), (), 0)
    fallen = _Fallen()
    found: list[Proposal] = []
    tried = 0
    for world in _worlds(job):
        options = [list(_options(job, kind, world, fallen)) for kind in _kinds(job)]
        if not all(options):
            continue
        for mode in _modes(job):
            for run in _candidates(job, world, mode, options, fallen):
                tried += 1
                proposal = _judge(job, run, mode, fallen)
                found += [proposal] if proposal else []
    return Proposals(tuple(_best(found, most)), fallen.all(), tried)


def _judge(job: Job, run: RunConfig, mode: Mode, fallen: _Fallen) -> Proposal | None:
    try:
        candidate = with_layout(job, run)
    except ConfigError as error:
        fallen.add("engines and ranks don't add up", str(error))
        return None
    node = job.cluster.gpus_per_node
    if candidate.gpus > node and candidate.world % node and mode.gpus == "own":
        why = f"{candidate.world} trainer ranks leave GPUs of their nodes to engines, of which others are elsewhere"
        fallen.add("engines beside the trainer and on other nodes", why)
        return None
    if (most := _fullest_engine_node(candidate)) > node:
        fallen.add("engine nodes that take replicas in turn", f"one of them would need {most} GPUs and has {node}")
        return None
    prediction = predict(candidate, bound)
    if prediction.fits:
        return Proposal(mode, prediction, overrides(job.run, run))
    device = prediction.fullest
    if device.headroom < 0:
        short = -device.headroom / 2**30
        fallen.add(
            f"memory with {mode.gpus} engines",
            f"{device.where}: {describe(device.parts)}, of {device.capacity / 2**30:.0f} GiB",
            miss=short,
        )
    else:
        name = prediction.cramped[0]
        policy, tokens = candidate.policies[name], prediction.engines[name].speed.kv_tokens
        fallen.add(
            f"KV cache of {mode.gpus} engines",
            f"the engine of {name} at TP {policy.config.engine.tensor_parallel} has room for {tokens} tokens, "
            f"max_model_tokens is {policy.config.engine.max_model_tokens}",
            miss=policy.config.engine.max_model_tokens - tokens,
        )
    return None


def _fullest_engine_node(job: Job) -> int:
    """GPUs that the engines of one node need where all are on nodes of their own: as a run deals replicas out in turn, over all
    policies (`drmas.runtime.gpus`)."""
    node = job.cluster.gpus_per_node
    nodes = {device // node for policy in job.policies.values() for device in policy.devices}
    if min(nodes) < -(-job.world // node):
        return 0
    load = dict.fromkeys(nodes, 0)
    turns = cycle(nodes)
    for policy in job.policies.values():
        for _ in range(policy.config.engine.replicas):
            load[next(turns)] += policy.config.engine.tensor_parallel
    return max(load.values())


def _best(found: Sequence[Proposal], most: int) -> list[Proposal]:
    """The fastest of each kind of engines and number of ranks; where steps are about equally long, fewer GPUs go first."""
    kept: dict[tuple[Mode, int], Proposal] = {}
    for proposal in sorted(found, key=rank):
        kept.setdefault((proposal.mode, proposal.prediction.job.world), proposal)
    return sorted(kept.values(), key=rank)[:most]


def rank(proposal: Proposal) -> tuple[int, int, float]:
    """What proposals are sorted by: seconds of a step in steps of EQUAL, then GPUs."""
    step = proposal.prediction.phases.step
    if math.isinf(step):
        return (sys.maxsize, proposal.prediction.job.gpus, step)
    return (round(math.log(step) / math.log1p(EQUAL)), proposal.prediction.job.gpus, step)


def overrides(old: RunConfig, new: RunConfig) -> tuple[str, ...]:
    """The command-line words that turn `old` into `new`, which differ in layout only.

    What changes for one policy is said for all: one may be `like` another in the recipe, and would change with it.
    """
    words = []
    if old.train.ranks != new.train.ranks:
        words += ["--train.ranks", str(new.train.ranks)]
    if old.train.placement != new.train.placement:
        words += ["--train.placement", new.train.placement]
    if old.rollout.max_staleness != new.rollout.max_staleness:
        words += ["--rollout.max-staleness", str(new.rollout.max_staleness)]
    for key in _KEYS:
        before, after = ({name: _value(policy, key) for name, policy in run.policies.items()} for run in (old, new))
        if before != after:
            words += [word for name in after for word in (f"--policies.{name}.{key}".replace("_", "-"), after[name])]
    return tuple(words)


def _value(policy: PolicyConfig, key: str) -> str:
    section, _, name = key.rpartition(".")
    return str(getattr(policy.engine if section else policy, name)).lower()


def _worlds(job: Job) -> Iterator[int]:
    """Numbers of trainer ranks: powers of two within a node, whole nodes beyond."""
    node, total = job.cluster.gpus_per_node, job.cluster.gpus
    within = [2**k for k in range(node.bit_length()) if 2**k < node]
    yield from (count for count in within if count <= total)
    yield from range(node, total + 1, node)


def _modes(job: Job) -> Iterator[Mode]:
    """A run whose rollouts are ahead stays so, since other settings may rest on it; one that is on-policy may also go a step
    ahead, which its proposals say: its loss is another one then."""
    ahead = job.run.rollout.max_staleness
    yield from (mode._replace(ahead=max(mode.ahead, ahead)) for mode in MODES if mode.ahead or not ahead)


def _kinds(job: Job) -> list[list[PolicyJob]]:
    """Policies with equal settings and models together."""
    kinds: list[list[PolicyJob]] = []
    for policy in job.policies.values():
        for kind in kinds:
            if kind[0].config == policy.config and kind[0].reference == policy.reference and kind[0].critic == policy.critic:
                kind.append(policy)
                break
        else:
            kinds.append([policy])
    return kinds


def _options(job: Job, kind: list[PolicyJob], world: int, fallen: _Fallen) -> Iterator[_Option]:
    """The trainer layouts of a kind on `world` ranks that the model divides into and that aren't worse than another in all."""
    device = job.cluster.device.memory_bytes - job.cluster.reserved_bytes
    every: list[_Option] = []
    longest = kind[0].config.engine.max_model_tokens
    contexts = 1
    for config in _layouts(kind[0], world, job.cluster.gpus_per_node, longest, fallen):
        if config.context_parallel > contexts and every:  # it is for rows that are too long for one rank
            break
        contexts = config.context_parallel
        option = _option(job, kind, config, world)
        if option.held + option.transient > device:
            need = option.held + option.transient + job.cluster.reserved_bytes
            fallen.add(
                "memory of the trainer",
                f"{world} rank(s), {option}: {describe({**option.parts, 'reserved': job.cluster.reserved_bytes})}, of "
                f"{job.cluster.device.memory_bytes / 2**30:.0f} GiB",
                miss=need,
            )
            continue
        every.append(option)
    for option in every:
        if not any(_dominates(other, option) for other in every):
            yield option


def _dominates(one: _Option, other: _Option) -> bool:
    ones, others = (one.seconds, one.held, one.transient), (other.seconds, other.held, other.transient)
    return ones != others and all(a <= b for a, b in zip(ones, others, strict=True))


def _layouts(policy: PolicyJob, world: int, node: int, longest: int, fallen: _Fallen) -> Iterator[PolicyConfig]:
    """Context parallelism comes last. A microbatch budget may go down to a quarter, but not below the longest row: results
    don't depend on it (I5)."""
    architecture, config = policy.model.architecture, policy.config
    sizes = [2**k for k in range(world.bit_length())]
    budget = config.tokens_per_microbatch
    budgets = [budget, *(budget // part for part in (2, 4) if budget // part >= longest)]
    for cp, tp, pp in product([1, 2, 4, 8], [size for size in sizes if size <= node], sizes):
        if world % (tp * pp * cp) or tp * cp > max(node, world):
            continue
        layout = {"tensor_parallel": tp, "pipeline_parallel": pp, "context_parallel": cp, "sequence_parallel": tp > 1}
        changed = config.model_copy(update=layout)
        try:
            architecture.check_layout(changed, policy=policy.name)
        except ModelError as error:
            fallen.add("the model doesn't divide", str(error))
            continue
        if not config.trainable:
            yield changed
            continue
        for recompute, tokens, away in product(RECOMPUTE, budgets, (False, True)):
            yield changed.model_copy(
                update={"recompute": recompute, "tokens_per_microbatch": tokens, "offload_optimizer": away}
            )


def _option(job: Job, kind: list[PolicyJob], config: PolicyConfig, world: int) -> _Option:
    laid = [replace(policy, config=config, ranks=tuple(range(world))) for policy in kind]
    trial = replace(job, world=world, policies={policy.name: policy for policy in laid})
    seconds = sum(costs.scoring(trial, policy) for policy in laid)
    seconds += sum(costs.training(trial, policy).total for policy in laid if config.trainable)
    stages, fullest = config.pipeline_parallel, None
    for stage in range(stages):
        rank = world // stages * stage
        everything = [memory.trainer_parts(trial, policy, rank) for policy in laid]
        held = by_part(part for parts, _ in everything for part in parts)
        held = {what: size for what, size in held.items() if not what.endswith("host memory")}
        training = max((needed for _, needed in everything), key=lambda needed: math.fsum(needed.values()))
        total = (math.fsum(held.values()), math.fsum(training.values()))
        if fullest is None or sum(total) > sum(fullest[0]):
            fullest = (total, {**held, **training})
    (held_bytes, transient), parts = fullest
    return _Option(config, seconds, held_bytes, transient, parts)


def _candidates(job: Job, world: int, mode: Mode, options: Sequence[Sequence[_Option]], fallen: _Fallen) -> Iterator[RunConfig]:
    """Runs with the fastest trainer layouts that leave room, and engines in all sizes that could be best."""
    if mode.gpus == "own" and world >= job.cluster.gpus:
        return
    kinds = _kinds(job)
    combined = sorted(product(*options), key=lambda chosen: sum(option.seconds for option in chosen))
    device = job.cluster.device.memory_bytes - job.cluster.reserved_bytes
    tried = 0
    for chosen in combined[:4096]:
        if tried == _TRIED:
            return
        held = sum(option.held for option in chosen)
        transient = max(option.transient for option in chosen)
        if held + transient > device:
            continue
        configs = {policy.name: option.config for kind, option in zip(kinds, chosen, strict=True) for policy in kind}
        runs = list(_with_engines(job, world, mode, configs, held, transient))
        tried += bool(runs)
        yield from runs
    if not tried:
        fallen.add(
            f"room for {mode.gpus} engines",
            f"{world} trainer rank(s), engines {mode}: no trainer layout leaves enough for them",
        )


def _with_engines(
    job: Job, world: int, mode: Mode, configs: Mapping[str, PolicyConfig], held: float, transient: float
) -> Iterator[RunConfig]:
    sizes = [size for size in (1, 2, 4, 8) if size <= job.cluster.gpus_per_node]
    kinds = _kinds(job)
    for chosen in product(sizes, repeat=len(kinds)):
        tp = {policy.name: size for kind, size in zip(kinds, chosen, strict=True) for policy in kind}
        if any(job.policies[name].shape.heads % size for name, size in tp.items()):
            continue
        layouts = _shared(job, world, mode, tp, held, transient) if mode.gpus == "shared" else _own(job, world, tp)
        for engines in layouts:
            yield _run(job.run, world, mode, configs, tp, engines)


Engine = tuple[int, float]
"""Replicas, and the share of a GPU's memory of each worker."""


def _shared(
    job: Job, world: int, mode: Mode, tp: Mapping[str, int], held: float, transient: float
) -> Iterator[dict[str, Engine]]:
    """Every policy's engines on all GPUs of the first node, or each policy's on an equal part of them."""
    pool = min(world, job.cluster.gpus_per_node)
    device = job.cluster.device.memory_bytes
    together = 0.0 if mode.sleep else transient
    room = (device - job.cluster.reserved_bytes - held - together) / device
    for parts in {1, len(tp)}:
        replicas = {name: pool // parts // size for name, size in tp.items()}
        if not all(replicas.values()) or any(pool // parts % size for size in tp.values()):
            continue
        workers = len(tp) if parts == 1 else 1
        fraction = math.floor(100 * room / workers) / 100
        if fraction > 0 and _weights_fit(job, tp, fraction):
            yield {name: (count, fraction) for name, count in replicas.items()}


def _own(job: Job, world: int, tp: Mapping[str, int]) -> Iterator[dict[str, Engine]]:
    """All GPUs behind the trainer's, and half of them: one replica each, the next ones where the most work is per replica."""
    if not _weights_fit(job, tp, OWN_FRACTION):
        return
    rest = job.cluster.gpus - world
    for gpus in dict.fromkeys((rest, rest // 2)):
        replicas = dict.fromkeys(tp, 1)
        free = gpus - sum(tp.values())
        if free < 0:
            continue
        work = {name: _work(job, name) for name in tp}
        while True:
            fitting = [name for name, size in tp.items() if size <= free]
            if not fitting:
                break
            name = max(fitting, key=lambda name: work[name] / (replicas[name] * tp[name]))
            replicas[name] += 1
            free -= tp[name]
        yield {name: (count, OWN_FRACTION) for name, count in replicas.items()}


def _work(job: Job, name: str) -> float:
    """A policy's share of the rollout's work: tokens, by the parameters that each meets."""
    tokens = sum(agent.calls * (agent.response.moment(1) * 4 + agent.prompt_tokens) for agent in job.workload.of(name))
    return tokens * job.policies[name].parameters


def _weights_fit(job: Job, tp: Mapping[str, int], fraction: float) -> bool:
    device = job.cluster.device.memory_bytes
    needs = (
        memory.element_bytes(job.policies[name].config.engine.dtype) * job.policies[name].parameters / size
        for name, size in tp.items()
    )
    return all(fraction * device > need + memory.ENGINE_OVERHEAD for need in needs)


def _run(
    run: RunConfig,
    world: int,
    mode: Mode,
    configs: Mapping[str, PolicyConfig],
    tp: Mapping[str, int],
    engines: Mapping[str, Engine],
) -> RunConfig:
    policies = {}
    for name, config in configs.items():
        replicas, fraction = engines[name]
        engine = run.policies[name].engine.model_copy(
            update={
                "gpus": mode.gpus,
                "sleep": mode.sleep,
                "tensor_parallel": tp[name],
                "replicas": replicas,
                "gpu_memory_fraction": fraction,
            }
        )
        policies[name] = config.model_copy(update={"engine": engine})
    return run.model_copy(
        update={
            "policies": {name: policies[name] for name in run.policies},
            "train": run.train.model_copy(update={"ranks": world, "placement": "shared"}),
            "rollout": run.rollout.model_copy(update={"max_staleness": mode.ahead}),
        }
    )
