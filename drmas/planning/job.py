"""What a plan is made for: a run's configuration on a cluster, with the shapes of its models and the work of its team.

The trainer's layout is what the runtime makes of the configuration (`drmas.runtime.placement`); which devices engines take is
worked out here by the same rule. `make_job` refuses what can't be laid out at all; what doesn't fit into memory is the plan's
to say. Called by `plan`, `propose` and `published`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from pathlib import Path

from drmas.agents.team import TeamConfig
from drmas.config.schema import PolicyConfig, RunConfig
from drmas.core.flops import ModelShape
from drmas.core.stack import PACKAGES, Stack, choose_stack
from drmas.errors import ConfigError
from drmas.planning.types import Cluster, Layout, Workload
from drmas.policy.architecture import read_architecture
from drmas.policy.convert import slots
from drmas.runtime.memory import BYTES, Model, Share
from drmas.runtime.models import sketched_model
from drmas.runtime.placement import check, has_critic, measures_kl, policy_ranks


@dataclass(frozen=True, slots=True)
class PolicyJob:
    """One policy of a job."""

    name: str
    config: PolicyConfig
    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    """Of the engines, replica after replica; those below the number of trainer ranks are a trainer's, too."""
    model: Model
    shape: ModelShape
    """The model's; kept, since plans ask for it many thousand times."""
    reference: Model | None = None
    critic: Model | None = None
    apart: bool = False
    """Gradients are measured per agent."""
    stored: int = 0
    """Parameters that the model has, where they are more than a token meets (a mixture of experts)."""

    @property
    def parameters(self) -> int:
        return self.stored or parameter_count(self.shape)

    @property
    def data_parallel(self) -> int:
        c = self.config
        return len(self.ranks) // (c.tensor_parallel * c.pipeline_parallel * c.context_parallel)

    @property
    def layout(self) -> Layout:
        c = self.config
        return Layout(
            ranks=len(self.ranks),
            tensor_parallel=c.tensor_parallel,
            pipeline_parallel=c.pipeline_parallel,
            context_parallel=c.context_parallel,
            engine_tensor_parallel=c.engine.tensor_parallel,
            replicas=c.engine.replicas,
            gpus=c.engine.gpus,
            sleep=c.engine.sleep,
            sequence_parallel=c.sequence_parallel and c.tensor_parallel > 1,
        )

    def share(self, rank: int) -> Share:
        return Share(self.config, self.ranks, self.ranks.index(rank))


@dataclass(frozen=True, slots=True)
class Job:
    """`world` trainer ranks, one device each; on a host without GPUs all share it."""

    run: RunConfig
    cluster: Cluster
    world: int
    workload: Workload
    policies: Mapping[str, PolicyJob]
    elsewhere: bool = False
    """Of another system, whose engines share GPUs on all nodes and take weights from GPU to GPU there."""

    @property
    def gpus(self) -> int:
        """Devices that the job takes."""
        if not self.cluster.gpu:
            return 1
        return max(self.world, *(device + 1 for policy in self.policies.values() for device in policy.devices))

    @property
    def split(self) -> bool:
        """Whether policies have ranks of their own, and are updated at the same time."""
        return self.run.train.placement == "split"


def parameter_count(shape: ModelShape) -> int:
    """How many parameters a dense model has, without the padding of a vocabulary."""
    linear = sum(inputs * outputs for inputs, outputs in shape.linears().values())
    bias = shape.qkv_bias * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    norms = 2 * shape.hidden + 2 * shape.head_dim * shape.qk_norm
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return shape.layers * (linear + bias + norms) + tables + shape.hidden


def make_job(
    run: RunConfig,
    team: TeamConfig,
    cluster: Cluster,
    workload: Workload,
    *,
    find: Callable[..., Path] = sketched_model,
    stored: Mapping[str, int] | None = None,
    anywhere: bool = False,
) -> Job:
    """The job of `run` on `cluster`. `find` gives the folder of a model's shape; `stored`: policy -> parameters, where it has
    more than its shape says. `anywhere` as in `engine_devices`.

    ConfigError: more ranks or engine GPUs than the cluster has, or settings that don't fit each other. ModelError: a model that
    isn't known, or whose layout doesn't divide it.
    """
    world = trainer_ranks(run, cluster)
    run = run.model_copy(update={"train": run.train.model_copy(update={"ranks": world})})
    check(run, team, world=world, here=False)
    ranks = policy_ranks(run, world)
    devices = engine_devices(run, cluster, world, anywhere=anywhere)
    policies = {}
    for name, config in run.policies.items():
        model = _model(config.model, f"policies.{name}.model", run.seed, find, tuple(config.freeze))
        model.architecture.check_layout(config, policy=name)
        reference = critic = None
        if measures_kl(run, config) and config.lora is None:
            spec = config.reference or config.model
            reference = _model(spec, f"policies.{name}.reference", run.seed, find)
        if has_critic(run, team, name):
            critic = _model(config.critic.model or config.model, f"policies.{name}.critic.model", run.seed, find)
        sharers = sum(agent.policy == name for agent in team.agents.values())
        policies[name] = PolicyJob(
            name=name,
            config=config,
            ranks=tuple(ranks[name]),
            devices=devices[name],
            model=model,
            shape=model.architecture.shape,
            reference=reference,
            critic=critic,
            apart=sharers > 1 and config.agent_grad_norm_every > 0,
            stored=(stored or {}).get(name, 0),
        )
        _check_engine(name, policies[name], cluster)
    return Job(run, cluster, world, workload, policies, elsewhere=anywhere)


def trainer_ranks(run: RunConfig, cluster: Cluster) -> int:
    """`train.ranks`, else the devices that engines with GPUs of their own leave. ConfigError: more than there are, or none."""
    if not cluster.gpu:
        return run.train.ranks or 1
    own = _own_gpus(run)
    taken = ", ".join(f"policies.{name}.engine {count}" for name, count in own.items() if count)
    rest = cluster.gpus - sum(own.values())
    world = run.train.ranks or rest
    if rest < 1 or world > rest:
        engines = (
            f"engines with GPUs of their own take {sum(own.values())} ({taken})" if taken else "no engine has its own GPUs"
        )
        asked = f"train.ranks is {world}" if run.train.ranks else "the trainer needs at least 1"
        raise ConfigError(
            f"{asked}, {engines}: {world if run.train.ranks else 1} + {sum(own.values())} GPUs are more than the "
            f"{cluster.gpus} of {cluster.name}; take a larger cluster (--gpus), fewer ranks (--train.ranks), smaller engines, "
            "or let these share the trainer's GPUs (--policies.NAME.engine.gpus shared)"
        )
    return world


def engine_devices(run: RunConfig, cluster: Cluster, world: int, *, anywhere: bool = False) -> dict[str, tuple[int, ...]]:
    """The devices of every policy's engines, replica after replica; no replica's lie on two nodes.

    As `drmas.runtime.gpus` places them: shared ones in turn over the trainer's GPUs of the first node (`anywhere`: of all
    nodes, which other systems can), own ones behind the trainer's. ConfigError: there are too few.
    """
    if not cluster.gpu:
        return {name: (0,) * policy.engine.tensor_parallel * policy.engine.replicas for name, policy in run.policies.items()}
    pool = world if anywhere else min(world, cluster.gpus_per_node)
    found: dict[str, tuple[int, ...]] = {}
    free, next_shared = world, 0
    for name, policy in run.policies.items():
        engine = policy.engine
        size, count = engine.tensor_parallel, engine.tensor_parallel * engine.replicas
        if engine.backend == "torch":
            found[name] = (0,)
        elif engine.gpus == "shared":
            if count > pool:
                raise ConfigError(
                    f"policies.{name}.engine takes {engine.replicas} replica(s) x {size} shared GPUs; the trainer has {pool} "
                    "on the first node, and only those can be shared: set replicas or tensor_parallel lower, or gpus to own"
                )
            first = next_shared if next_shared + count <= pool else 0
            next_shared = first + count
            found[name] = tuple(range(first, first + count))
        else:
            taken: list[int] = []
            for _ in range(engine.replicas):
                if free % cluster.gpus_per_node + size > cluster.gpus_per_node:
                    free += -free % cluster.gpus_per_node  # the rest of this node is too small
                taken += range(free, free + size)
                free += size
            found[name] = tuple(taken)
    if free > cluster.gpus:
        raise ConfigError(
            f"{world} trainer ranks and the engines behind them take {free} GPUs, since no engine's lie on two nodes; "
            f"{cluster.name} has {cluster.gpus}: set policies.NAME.engine.tensor_parallel or train.ranks lower"
        )
    return found


def with_layout(job: Job, run: RunConfig, *, anywhere: bool = False) -> Job:
    """`job` laid out as `run` says, whose models and team are the same. `anywhere` as in `engine_devices`.

    ConfigError: its ranks or devices don't add up.
    """
    world = run.train.ranks or job.world
    ranks, devices = policy_ranks(run, world), engine_devices(run, job.cluster, world, anywhere=anywhere)
    policies = {
        name: replace(policy, config=run.policies[name], ranks=tuple(ranks[name]), devices=devices[name])
        for name, policy in job.policies.items()
    }
    return Job(run, job.cluster, world, job.workload, policies)


def stack_of(policy: PolicyJob, cluster: Cluster) -> Stack:
    """What the policy's trainer is built from on the cluster, where every package is installed."""
    c = policy.config
    replicas = len(policy.ranks) // (c.tensor_parallel * c.pipeline_parallel)
    return choose_stack(policy.name, c, cuda=cluster.gpu, packages=dict.fromkeys(PACKAGES, cluster.gpu), replicas=replicas)


def _own_gpus(run: RunConfig) -> dict[str, int]:
    engines = {name: policy.engine for name, policy in run.policies.items()}
    return {
        name: engine.tensor_parallel * engine.replicas if engine.gpus == "own" and engine.backend == "vllm" else 0
        for name, engine in engines.items()
    }


def _check_engine(name: str, policy: PolicyJob, cluster: Cluster) -> None:
    """ConfigError for an engine whose tensor parallelism its model or the cluster's nodes can't be cut by."""
    tp, shape = policy.config.engine.tensor_parallel, policy.shape
    key = f"policies.{name}.engine.tensor_parallel is {tp}"
    if shape.heads % tp:
        raise ConfigError(f"{key}; it must divide the model's {shape.heads} attention heads")
    if cluster.gpu and tp > cluster.gpus_per_node:
        raise ConfigError(f"{key}; a node of {cluster.name} has {cluster.gpus_per_node} GPUs: set it to at most that")


@cache
def _architecture(folder: Path):
    return read_architecture(folder)


def _model(spec: str, key: str, seed: int, find: Callable[..., Path], freeze: tuple[str, ...] = ()) -> Model:
    folder = find(spec, seed=seed, key=key).absolute()
    architecture = _architecture(folder)
    frozen = 0.0
    if freeze:
        sizes = {name: prod(shape) for slot in slots(architecture) for name, shape in slot.tensors}
        matching = sum(size for name, size in sizes.items() if any(fnmatchcase(name, each) for each in freeze))
        frozen = matching / sum(sizes.values())
    return Model(str(folder), architecture, frozen)


def element_bytes(dtype: str) -> int:
    """Of one number of `dtype`."""
    return BYTES[dtype]
