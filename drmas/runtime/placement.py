"""What a run will put where, with the arithmetic, before anything heavy starts: `--dry-run` prints it, and so does a start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from drmas.agents.team import TeamConfig
from drmas.config.schema import PolicyConfig, RunConfig
from drmas.core.advantages import AdvantageRule
from drmas.errors import ConfigError
from drmas.policy import host_platform
from drmas.policy.architecture import read_architecture
from drmas_kernels.backend import choose

BYTES = {"float32": 4, "bfloat16": 2}


def check(config: RunConfig, team: TeamConfig, *, world: int) -> None:
    """ConfigError for settings that don't fit together, which neither section can see alone."""
    for name, policy in config.policies.items():
        if world % policy.tensor_parallel:
            raise ConfigError(
                f"policies.{name}.tensor_parallel is {policy.tensor_parallel}, but the job has {world} rank(s); "
                "it must divide them (launchers/torchrun/single_node.sh starts more ranks)"
            )
    for name, agent in team.agents.items():
        room = config.policies[agent.policy].engine.max_model_tokens
        if agent.max_tokens >= room:
            raise ConfigError(
                f"team.{name}.max_tokens is {agent.max_tokens}, which leaves no room for a prompt: "
                f"policies.{agent.policy}.engine.max_model_tokens is {room}"
            )
        if name == "failed":
            raise ConfigError("an agent can't be called failed: rollout/failed/KIND counts failed episodes")


def describe(
    config: RunConfig, team: TeamConfig, rule: AdvantageRule, *, world: int, folders: Mapping[str, Path]
) -> dict[str, str]:
    """Label -> line. ModelError: a model of a family or shape that the trainer can't take in this layout."""
    rollout, agents = config.rollout, team.agents
    episodes = rollout.tasks_per_step * rollout.group_size
    lines = {
        "team": f"{config.team['name']}: " + ", ".join(f"{name} on {agent.policy}" for name, agent in agents.items()),
        "step": f"{rollout.tasks_per_step} tasks x {rollout.group_size} episodes = {episodes} episodes, "
        f"{config.train.updates_per_step} update(s) per policy",
        "advantage": f"{config.advantage.preset}: mean over {rule.mean}, std over {rule.std}, weighting by {rule.weighting}",
    }
    for name, policy in config.policies.items():
        read_architecture(folders[name]).check_tensor_parallel(policy.tensor_parallel, policy=name)
        lines[f"policy {name}"] = _policy(policy, world, parameters(folders[name]))
    try:
        kernel = choose("linear_policy_loss", host_platform.device())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    lines["kernels"] = f"{kernel.name}: {kernel.reason}"
    return lines


def _policy(policy: PolicyConfig, world: int, count: int) -> str:
    tensor = policy.tensor_parallel
    data = world // tensor
    # parameters, an fp32 gradient buffer, and Adam's two moments (with an fp32 copy beside bf16) split over data-parallel ranks
    own = BYTES[policy.dtype] + (4 + (8 + 4 * (policy.dtype != "float32")) / data if policy.trainable else 0)
    engine = BYTES[policy.engine.dtype] * count / policy.engine.tensor_parallel + policy.engine.kv_cache_bytes
    return (
        f"{policy.model}, {count / 1e6:.1f} M parameters; trainer TP {tensor} x DP {data}, {policy.dtype}, "
        f"about {own * count / tensor / 2**30:.2f} GiB per rank and activations; "
        f"engine {policy.engine.dtype}, about {engine / 2**30:.2f} GiB"
    )


def parameters(folder: Path) -> int:
    """How many numbers the folder's safetensors files hold, from their headers alone."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                size = 1
                for extent in entry["shape"]:
                    size *= extent
                total += size
    return total
