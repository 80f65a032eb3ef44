"""What a run will put where, with the arithmetic, before anything heavy starts: `--dry-run` prints it, and so does a start.

`policy_ranks` is the one place that says which trainer ranks a policy has; the runtime builds its groups from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from drmas.agents.team import TeamConfig
from drmas.config.derived import COMPANIONS
from drmas.config.schema import CriticConfig, LossOverrides, PolicyConfig, RunConfig
from drmas.core.estimators import Estimator, resolve
from drmas.core.estimators.roles import Roles
from drmas.core.stack import Stack
from drmas.errors import ConfigError, ModelError
from drmas.policy import host_platform
from drmas.policy.architecture import read_architecture
from drmas.policy.convert import frozen_names, slots
from drmas.policy.megatron_config import policy_stack
from drmas.rollout.vllm_options import check_options
from drmas.rollout.vllm_process import engine_arguments
from drmas.runtime import memory
from drmas.runtime.hub_models import is_whole
from drmas.runtime.machine import Machine
from drmas.runtime.models import resolve_model
from drmas.runtime.room import EngineNeed, Room, rank_needs
from drmas.telemetry.trace import Steps
from drmas.weights.transport import choose_transport
from drmas_kernels.backend import choose

_COUNTERS = {"failed": "failed episodes", "probe_failed": "failed episodes of baselines"}
"""Metrics that would be an agent's of that name."""
FindModel = Callable[..., Path]
"""`models.resolve_model`, or `models.sketched_model` where a model's shape is all that is wanted."""


def check(config: RunConfig, team: TeamConfig, *, world: int, here: bool = True) -> None:
    """ConfigError for settings that don't fit together, the machine or the `world` of trainer ranks. Opens no model.

    Without `here` the run is for other machines, and this one isn't looked at.
    """
    if config.train.ranks not in (None, world):
        raise ConfigError(
            f"train.ranks is {config.train.ranks} and the job has {world} trainer rank(s); start it with "
            f"launchers/torchrun/single_node.sh {config.train.ranks} RECIPE, or lay it out anew and set train.ranks"
        )
    ranks = policy_ranks(config, world)
    for name, policy in config.policies.items() if here else ():
        _stack(name, policy, len(ranks[name]))
    if config.telemetry.profile is not None:
        Steps.parse(config.telemetry.profile)
    for name, agent in team.agents.items():
        if name in _COUNTERS:
            raise ConfigError(f"an agent can't be called {name}: rollout/{name}/KIND counts {_COUNTERS[name]}")
        if (agent.max_staleness or 0) > config.rollout.max_staleness:
            raise ConfigError(
                f"team.{name}.max_staleness is {agent.max_staleness}, rollout.max_staleness is {config.rollout.max_staleness}; "
                "no turn gets older than the latter: lower the one or raise the other"
            )
        if agent.policy in config.remotes:
            continue
        room = config.policies[agent.policy].engine.max_model_tokens
        if agent.max_tokens >= room:
            raise ConfigError(
                f"team.{name}.max_tokens is {agent.max_tokens}, which leaves no room for a prompt: "
                f"policies.{agent.policy}.engine.max_model_tokens is {room}"
            )


def run_estimator(config: RunConfig, team: TeamConfig) -> Estimator:
    """What the run makes advantages with. ConfigError: settings that it has no use for, or dynamic sampling, which would drop
    groups that it learns from."""
    learns = {name for name, policy in config.policies.items() if policy.trainable}
    trained = [name for name, agent in team.agents.items() if agent.trainable and agent.policy in learns]
    estimator = resolve(**config.advantage.model_dump(exclude_none=True), team=list(team.agents), trained=trained)
    for name in team.agents if config.rollout.dynamic.enabled else ():
        if _of(estimator, name).equal_groups_teach:
            key, settings = "advantage", config.advantage
            if name in settings.agents:
                key, settings = f"advantage.agents.{name}", settings.agents[name]
            raise ConfigError(
                f"rollout.dynamic.enabled is true and {key}.preset is {settings.preset!r}, which learns from groups whose "
                "rewards are all equal, too; dynamic sampling would drop them: set rollout.dynamic.enabled to false, or "
                f"{key}.preset to one that compares the rewards of a group"
            )
    return estimator


def _of(estimator: Estimator, agent: str) -> Estimator:
    return estimator.of(agent) if isinstance(estimator, Roles) else estimator


def policy_ranks(config: RunConfig, world: int) -> dict[str, list[int]]:
    """The trainer ranks of every policy, by `train.placement`, in the configuration's order.

    shared: all of them, for each. split: consecutive ones, each of one policy only, as many as `num_ranks` says or an equal
    share of the rest. ConfigError: they don't add up to the `world`, or a policy's layout doesn't divide its ranks.

    Example: two policies, split, world 3, the first with num_ranks 2: {"a": [0, 1], "b": [2]}
    """
    if config.train.placement == "shared":
        ranks = {name: list(range(world)) for name in config.policies}
    else:
        ranks, first = {}, 0
        for name, count in _split(config.policies, world).items():
            ranks[name] = list(range(first, first + count))
            first += count
    for name, policy in config.policies.items():
        sizes = (policy.tensor_parallel, policy.pipeline_parallel, policy.context_parallel)
        if len(ranks[name]) % _product(policy):
            own = "trainer rank(s)" if config.train.placement == "shared" else "rank(s) of its own (train.placement is split)"
            raise ConfigError(
                f"policies.{name}.tensor_parallel x pipeline_parallel x context_parallel is {' x '.join(map(str, sizes))} = "
                f"{_product(policy)}; it must divide the policy's {len(ranks[name])} {own}: change the layout, or start more "
                "ranks (launchers/torchrun/single_node.sh)"
            )
    return ranks


def _product(policy: PolicyConfig) -> int:
    return policy.tensor_parallel * policy.pipeline_parallel * policy.context_parallel


def _split(policies: Mapping[str, PolicyConfig], world: int) -> dict[str, int]:
    """How many ranks each policy has where none is shared."""
    named = {name: policy.num_ranks for name, policy in policies.items() if policy.num_ranks is not None}
    others = len(policies) - len(named)
    rest = world - sum(named.values())
    asked = ", ".join(f"policies.{name}.num_ranks {count}" for name, count in named.items()) or "no num_ranks"
    if others == 0:
        if rest:
            raise ConfigError(
                f"train.placement is split with {asked}: {world - rest} ranks in sum; the job has {world}, make them equal"
            )
        return named
    share, uneven = divmod(rest, others)
    if share < 1 or uneven:
        raise ConfigError(
            f"train.placement is split with {asked}: that leaves {rest} of the job's {world} rank(s) for {others} other "
            "policies, which must get equal shares of at least one; set num_ranks of each, or start more ranks"
        )
    return {name: named.get(name, share) for name in policies}


def _stack(name: str, policy: PolicyConfig, ranks: int) -> Stack:
    replicas = ranks // (policy.tensor_parallel * policy.pipeline_parallel)
    return policy_stack(name, policy, replicas=replicas)


def notes(config: RunConfig, team: TeamConfig, *, world: int, gpu: bool | None = None) -> list[str]:
    """Settings that have no effect in this run or on this machine, and what a preset brought along, a sentence each.

    `gpu` as in `describe`.
    """
    gpu = not host_platform.is_host() if gpu is None else gpu
    found = []
    if not any(policy.trainable for policy in config.policies.values()):
        found.append("no policy is trainable; the run samples and trains nothing")
    known = config.train.epochs is None  # else the steps aren't: the data can't be read here
    if known and config.telemetry.profile is not None and Steps.parse(config.telemetry.profile).last > config.train.steps:
        found.append(f"telemetry.profile is {config.telemetry.profile}; the run has {config.train.steps} steps to trace")
    if config.warm_start is not None and any(policy.lora for policy in config.policies.values()):
        found.append("the warm start gives every policy with adapters a base of its own; bases aren't shared in memory then")
    found += _brought(config)
    for name, agent in team.agents.items():
        if agent.length_buffer == 0 and agent.length_penalty != type(agent).model_fields["length_penalty"].default:
            found.append(f"team.{name}.length_penalty has no effect: length_buffer is 0")
    for name, ranks in policy_ranks(config, world).items():
        found += [f"policies.{name}.{key} has no effect: {why}" for key, why in _idle_keys(config, team, name, len(ranks), gpu)]
    return found


def _brought(config: RunConfig) -> Iterator[str]:
    """Which settings of other sections a preset comes with, and which of these the run has otherwise."""
    chosen = {"advantage": config.advantage.preset}
    chosen |= {f"advantage.agents.{name}": own.preset for name, own in config.advantage.agents.items()}
    for key, preset in chosen.items():
        if preset not in COMPANIONS or (key != "advantage" and preset == config.advantage.preset):
            continue
        wanted = dict(_leaves(COMPANIONS[preset]))
        otherwise = {name: own for path, value in wanted.items() for name, own in _places(config, path) if own != value}
        said = f"{key}.preset is {preset}, which comes with "
        if key != "advantage":
            said = f"{key}.preset is {preset}, which sets nothing else for a single agent; as the run's it comes with "
        said += _list({".".join(path): value for path, value in wanted.items()})
        yield f"{said}; here {_list(otherwise)}" if otherwise else f"{said}; so it is here"


def _places(config: RunConfig, path: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The value at a key, and those that policies have instead of it."""
    section: Any = config
    for name in path:
        section = getattr(section, name)
    yield ".".join(path), section
    for policy, settings in config.policies.items() if path[0] == "loss" else ():
        if (own := getattr(settings.loss, path[-1], None)) is not None:
            yield f"policies.{policy}.{'.'.join(path)}", own


def _leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _list(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'unset' if value is None else str(value).lower()}" for name, value in settings.items())


def _idle_keys(config: RunConfig, team: TeamConfig, name: str, ranks: int, gpu: bool) -> Iterator[tuple[str, str]]:
    """Keys of a policy that are set and change nothing, and why."""
    policy = config.policies[name]
    stack = _stack(name, policy, ranks)
    if policy.num_ranks is not None and config.train.placement == "shared":
        yield "num_ranks", "train.placement is shared"
    if policy.sequence_parallel and policy.tensor_parallel == 1:
        yield "sequence_parallel", "tensor_parallel is 1"
    if policy.freeze and not policy.trainable:
        yield "freeze", "trainable is false"
    for key, taken in (("prefix_sharing", stack.shares_prefixes), ("overlap", stack.overlap)):
        if getattr(policy, key) and not taken and policy.trainable:
            yield key, stack.reasons[key.replace("_", " ")].why
    if policy.offload_optimizer and not gpu:
        yield "offload_optimizer", "the trainer runs on a CPU"
    if config.hosts_of(name) and policy.engine.gpus == "shared":
        yield "engine.gpus", "its engines run on engine hosts, which have no trainer ranks"
    if policy.sync.folder is not None and transport_of(config, name, gpu=gpu)[0] != "disk":
        yield "sync.folder", "sync.transport isn't disk"
    if policy.engine.sleep and not (gpu and config.shares_gpus(name)):
        why = "its GPUs are its own" if gpu else "an engine on a CPU waits during updates and gives no memory back"
        yield "engine.sleep", why
    if policy.lr_schedule == "constant" and policy.lr_min:
        yield "lr_min", "lr_schedule is constant"
    if policy.loss.kl_coefficient is not None and not measures_kl(config, policy):
        yield "loss.kl_coefficient", "no loss.kl is set for a policy that is trained"
    if policy.loss != LossOverrides() and not policy.trainable:
        yield "loss", "trainable is false"
    if policy.reference is not None and not measures_kl(config, policy):
        yield "reference", "no loss.kl is set for a policy that is trained"
    if policy.critic != CriticConfig() and not has_critic(config, team, name):
        yield "critic", "only policies with an agent under advantage.preset ppo have one"


def measures_kl(config: RunConfig, policy: PolicyConfig) -> bool:
    """Whether the policy is trained with a KL term."""
    return policy.trainable and (policy.loss.kl or config.loss.kl) is not None


def has_critic(config: RunConfig, team: TeamConfig, name: str) -> bool:
    """Whether the policy is trained and takes the advantages of one of its agents from a critic."""

    estimator = resolve(**config.advantage.model_dump(exclude_none=True), team=list(team.agents))
    speakers = [agent for agent, settings in team.agents.items() if settings.policy == name]
    return config.policies[name].trainable and any(_of(estimator, agent).needs_critic for agent in speakers)


def describe(
    config: RunConfig,
    team: TeamConfig,
    estimator: Estimator,
    *,
    world: int,
    folders: Mapping[str, Path],
    find: FindModel = resolve_model,
    machine: Machine | None = None,
) -> dict[str, str]:
    """Label -> line. ModelError: a model of a family or shape that the trainer can't take in this layout. ConfigError: engines
    for which there are too few GPUs or too little memory. EngineStartError: `engine.options` that an engine can't have.

    `find(spec, seed=..., key=...)` gives the folders of references and critics, of which their shape is read. `machine`: the
    host of rank 0; this one if None.
    """
    rollout, agents = config.rollout, team.agents
    machine = Machine.here(world) if machine is None else machine
    gpu = machine.gpus > 0
    probes = sum(probe.episodes for probe in estimator.probes)
    episodes = rollout.tasks_per_step * (rollout.group_size + probes)
    each = f"({rollout.group_size} + {probes} for baselines)" if probes else f"{rollout.group_size}"
    lines = {
        "team": f"{config.team['name']}: " + ", ".join(f"{name} on {agent.policy}" for name, agent in agents.items()),
        "step": f"{rollout.tasks_per_step} tasks x {each} episodes = {episodes} episodes, "
        f"{config.train.updates_per_step} update(s) per policy",
        "advantage": f"{config.advantage.preset}: {estimator}",
    }
    lines["rollout"] = _rollouts(config)
    saved = config.checkpoint.every_steps
    lines["checkpoints"] = f"every {saved} step(s) and at the end" if saved else "at the end only (checkpoint.every_steps is 0)"
    for name, remote in config.remotes.items():
        lines[f"remote {name}"] = f"{remote.model} at {remote.url}, never trained"
    for name, tool in config.tools.items():
        callers = [agent for agent, settings in agents.items() if any(each.split(".")[0] == name for each in settings.tools)]
        place = getattr(tool, "url", None) or getattr(tool, "path", None) or " ".join(getattr(tool, "command", []))
        lines[f"tool {name}"] = f"{tool.type}{f' {place}' if place else ''}, for " + ", ".join(
            [*callers, *(["the team"] if name in team.tool_sections else [])]
        )
    ranks = policy_ranks(config, world)
    stacks = {name: str(_stack(name, policy, len(ranks[name]))) for name, policy in config.policies.items()}
    parts = {name: _parts(config, team, name, ranks[name], folders[name], find, gpu) for name in config.policies}
    for name, policy in config.policies.items():
        if policy.freeze and policy.trainable:
            frozen_names(read_architecture(folders[name]), policy.freeze, policy=name)
        lines[f"policy {name}"] = _policy(policy, ranks[name], parameters(folders[name]), parts[name])
    lines |= _engines(config, machine, ranks, folders, parts, world=world)
    for name in (name for name, policy in config.policies.items() if policy.trainable):
        lines[f"weights {name}"] = "by {}: {}".format(*transport_of(config, name, gpu=gpu))
    for text in dict.fromkeys(stacks.values()):
        alike = [name for name in stacks if stacks[name] == text]
        lines["stack" if len(alike) == len(stacks) else f"stack {', '.join(alike)}"] = text
    if len(config.policies) > 1:
        together = {rank: [part for own in parts.values() for part in own.get(rank, [])] for rank in range(world)}
        rank = memory.fullest(together)
        lines["memory"] = f"rank {rank} holds the most: {memory.describe(memory.by_part(together[rank]))} and activations"
    try:
        kernel = choose("linear_policy_loss", host_platform.device())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    lines["kernels"] = f"{kernel.name}: {kernel.reason}"
    return lines


def transport_of(config: RunConfig, name: str, *, gpu: bool) -> tuple[str, str]:
    """The transport of a policy on a machine with or without GPUs, and why. ConfigError: the one that is asked for can't be."""
    policy = config.policies[name]
    return choose_transport(
        policy.sync.transport,
        policy=name,
        gpu=gpu,
        engines_local=not config.hosts_of(name),
        shared_gpus=config.shares_gpus(name),
        shards=policy.tensor_parallel * policy.pipeline_parallel,
        adapters=policy.syncs_adapters,
        in_process=policy.engine.backend == "torch",
    )


def _rollouts(config: RunConfig) -> str:
    rollout = config.rollout
    ahead = f"up to {rollout.max_staleness} step(s) ahead" if rollout.max_staleness else "on-policy"
    how = [ahead, "deterministic" if rollout.deterministic else "free-running"]
    how += ["slow groups carried over"] if rollout.carry_over else []
    how += [f"dynamic sampling in up to {rollout.dynamic.max_tries} rounds"] if rollout.dynamic.enabled else []
    how += ["curriculum by success rate"] if config.curriculum.enabled else []
    return ", ".join(how)


def _policy(policy: PolicyConfig, ranks: list[int], count: int, parts: Mapping[int, list[memory.Part]]) -> str:
    sizes = {"TP": policy.tensor_parallel, "PP": policy.pipeline_parallel, "CP": policy.context_parallel}
    sizes["DP"] = len(ranks) // _product(policy)
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("TP", "DP"))
    places = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    how = "" if policy.trainable else ", frozen"
    how += f", LoRA of rank {policy.lora.rank}" if policy.lora else ""
    fullest = memory.describe(memory.by_part(parts[memory.fullest(parts)]))
    return (
        f"{policy.model}, {count / 1e6:.1f} M parameters; trainer {layout} on {places}, {policy.dtype}{how}, "
        f"about {fullest} per rank and activations; engine {policy.engine.dtype}"
    )


def _engines(
    config: RunConfig,
    machine: Machine,
    ranks: Mapping[str, list[int]],
    folders: Mapping[str, Path],
    parts: Mapping[str, Mapping[int, list[memory.Part]]],
    *,
    world: int,
) -> dict[str, str]:
    """A line for each engine, and for what it shares with trainer ranks. Where GPUs are only assumed, too few are no error."""
    try:
        seats = machine.place(config, world=world)
    except ConfigError as error:
        if not machine.assumed:
            raise
        return {"engines": f"{error} ({machine.gpus} GPUs per host are assumed; --gpus-per-host says otherwise)"}
    needs, activations = {}, {}
    for name, policy in config.policies.items():
        if policy.engine.backend == "vllm":
            fixed = () if config.hosts_of(name) else engine_arguments("cuda" if machine.gpus else "cpu")
            check_options(name, policy.engine.options, fixed)
        architecture = read_architecture(folders[name])
        needs[name] = EngineNeed.of(policy.engine, architecture, parameters(folders[name]))
        shares = {rank: memory.Share(policy, tuple(ranks[name]), place) for place, rank in enumerate(ranks[name])}
        activations[name] = {
            rank: memory.activation_bytes(architecture, share, gpu=machine.gpus > 0) if policy.trainable else 0.0
            for rank, share in shares.items()
        }
    room = Room(config, seats, machine, needs, dict(rank_needs(parts, activations)))
    room.check()
    return room.lines()


def _parts(
    config: RunConfig, team: TeamConfig, name: str, ranks: list[int], folder: Path, find: FindModel, gpu: bool
) -> dict[int, list[memory.Part]]:
    """What the policy, its reference and its critic hold on each of its ranks. ModelError: one of them can't be had so."""
    policy = config.policies[name]
    model = memory.Model(str(folder), read_architecture(folder), _frozen_share(folder, policy.freeze))
    model.architecture.check_layout(policy, policy=name)
    reference = critic = None
    if measures_kl(config, policy) and policy.lora is None:
        reference = _companion(config, name, "reference", policy.reference, model, find)
    if has_critic(config, team, name):
        critic = _companion(config, name, "critic.model", policy.critic.model, model, find)
    sharers = sum(agent.policy == name for agent in team.agents.values())
    apart = sharers > 1 and policy.agent_grad_norm_every > 0
    places = {rank: memory.Share(policy, tuple(ranks), place) for place, rank in enumerate(ranks)}
    return {
        rank: list(memory.held(name, share, model, reference, critic, apart=apart, gpu=gpu)) for rank, share in places.items()
    }


def _companion(config: RunConfig, name: str, key: str, spec: str | None, model: memory.Model, find: FindModel) -> memory.Model:
    """The model beside a policy's own that reads the same tokens: `spec`, or the policy's own where unset."""
    if spec is None:
        return model
    folder = find(spec, seed=config.seed, key=f"policies.{name}.{key}").absolute()
    architecture = read_architecture(folder)
    architecture.check_layout(config.policies[name], policy=name)
    if architecture.vocab != model.architecture.vocab:
        raise ModelError(
            f"policies.{name}.{key} is {spec}, with {architecture.vocab} words; it reads the policy's tokens and must have the "
            f"{model.architecture.vocab} of policies.{name}.model"
        )
    return memory.Model(str(folder), architecture)


def parameters(folder: Path) -> int:
    """How many numbers the folder's safetensors files hold, from their headers alone; if some lack, how many they would."""
    return sum(_tensors(folder).values())


def _frozen_share(folder: Path, patterns: list[str]) -> float:
    """The share of the folder's numbers that stand in tensors whose names match."""
    sizes = _tensors(folder)
    frozen = sum(size for name, size in sizes.items() if any(fnmatchcase(name, pattern) for pattern in patterns))
    return frozen / max(1, sum(sizes.values()))


def _tensors(folder: Path) -> dict[str, int]:
    """Name -> how many numbers, of all the folder's safetensors files, or of the architecture where some aren't there yet."""
    if not is_whole(folder):
        every = (tensor for slot in slots(read_architecture(folder)) for tensor in slot.tensors)
        return {name: math.prod(shape) for name, shape in every}
    sizes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                sizes[name] = 1
                for extent in entry["shape"]:
                    sizes[name] *= extent
    return sizes
