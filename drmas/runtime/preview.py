"""What a dry run says: the job as it would be, and what of it isn't on this machine yet.

Nothing is fetched and nothing starts. A model that isn't here is described by its published shape, a data file that isn't here
by the command that makes it; a start refuses what it can't fetch. Called by `run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from drmas.agents.team import TeamConfig
from drmas.config.schema import RunConfig
from drmas.config.tasks import DataConfig, HuggingFaceData, JsonlData, MixData, ParquetData
from drmas.core.estimators import Estimator
from drmas.envs.hub import cache_only, is_here
from drmas.envs.named_sets import BUNDLES, SETS
from drmas.envs.rewards import check_reward
from drmas.envs.source import TaskSource
from drmas.policy import host_platform
from drmas.runtime.epochs import in_steps
from drmas.runtime.hub_models import is_hub_name, is_whole
from drmas.runtime.machine import Machine
from drmas.runtime.models import sketched_model
from drmas.runtime.placement import check, describe, has_critic, measures_kl, notes
from drmas.telemetry.console import Console
from drmas.types import Task


def planned_ranks(config: RunConfig) -> int | None:
    """How many ranks the dry run is of, where that is another job than this one: `train.ranks` outside of torchrun."""
    return config.train.ranks if "WORLD_SIZE" not in os.environ else None


def preview(
    config: RunConfig,
    team: TeamConfig,
    estimator: Estimator,
    console: Console,
    *,
    world: int,
    gpus_per_host: int | None = None,
    gpu_memory_gib: float | None = None,
    machine: Machine | None = None,
) -> None:
    """Print it. UserError kinds: what a start on such a machine would refuse, but for models and files that aren't here.

    A job that is planned has hosts of `gpus_per_host` GPUs of `gpu_memory_gib`; of this machine's, or assumed ones, if unset.
    `machine` says all of it at once.
    """
    planned = planned_ranks(config) is not None or (gpus_per_host, gpu_memory_gib) != (None, None)
    memory = None if gpu_memory_gib is None else int(gpu_memory_gib * 2**30)
    supposed = Machine.planned(world, gpus=gpus_per_host, gpu_bytes=memory) if planned else Machine.here(world)
    machine = machine or supposed
    check(config, team, world=world)
    source = None
    if not (absent := not_here(config.data)):
        with cache_only():
            source = TaskSource(config.data, seed=config.seed, curriculum=config.curriculum)
        config = in_steps(config, len(source))
    for note in notes(config, team, world=world, gpu=machine.gpus > 0):
        console.note(note)
    lines = {}
    if machine.gpus and host_platform.is_host():
        lines["machine"] = (
            f"{world} rank(s) with a GPU each, on hosts of {machine.gpus}{' (assumed)' if machine.assumed else ''}; stack and "
            "kernels are those of this machine, which has none"
        )
    specs = {f"policies.{name}.model": policy.model for name, policy in config.policies.items()}
    specs |= _companions(config, team)
    found = {key: sketched_model(spec, seed=config.seed, key=key).absolute() for key, spec in specs.items()}
    folders = {name: found[f"policies.{name}.model"] for name in config.policies}
    lines |= describe(config, team, estimator, world=world, folders=folders, find=sketched_model, machine=machine)
    lines |= {f"model {spec}": _model_not_here(spec) for key, spec in specs.items() if not _has_weights(spec, found[key])}
    eval_absent = not_here(config.eval.data) if config.eval.data is not None else []
    lines["data"] = _absence(absent, config) if source is None else _tasks(config, source, known=not eval_absent)
    if eval_absent:
        lines["eval data"] = "; ".join(eval_absent)
    console.start(lines)


def not_here(data: DataConfig) -> list[str]:
    """What `data` names and isn't on this machine, each with the way to it; a dataset of the hub that its cache has is here."""
    absent = [_files_not_here(files)] if (files := missing_files(data)) else []
    return absent + [
        f"{each.path}, split {each.split}, is not in the hub's cache; a start fetches it"
        for each in _leaves(data)
        if isinstance(each, HuggingFaceData) and not is_here(each)
    ]


def missing_files(data: DataConfig) -> list[str]:
    """The files that `data` names and that aren't here."""
    return [path for leaf in _leaves(data) for path in _files(leaf) if not Path(path).exists()]


def made_by(path: str) -> str | None:
    """The command that makes the file, where `path` is one that `drmas prepare-data` writes.

    Example: made_by("data/math/train.jsonl") == "drmas prepare-data math"
    """
    folder = Path(path).parent
    if folder.name not in (*BUNDLES, *SETS) or Path(path).suffix != ".jsonl":
        return None
    return f"drmas prepare-data {folder.name}" + ("" if folder == Path("data") / folder.name else f" --output {folder}")


def _has_weights(spec: str, folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) if Path(spec).expanduser().is_dir() else not is_hub_name(spec) or is_whole(folder)


def _model_not_here(spec: str) -> str:
    if Path(spec).expanduser().is_dir():
        return "has no safetensors; its sizes are those of its config.json, and a start refuses it"
    return f"not here; its sizes are those of its config.json, and a start fetches it, as hf download {spec} does"


def _companions(config: RunConfig, team: TeamConfig) -> dict[str, str]:
    """Setting -> model, of references and critics that have another one than their policy and are used."""
    specs = {}
    for name, policy in config.policies.items():
        if policy.reference is not None and policy.lora is None and measures_kl(config, policy):
            specs[f"policies.{name}.reference"] = policy.reference
        if policy.critic.model is not None and has_critic(config, team, name):
            specs[f"policies.{name}.critic.model"] = policy.critic.model
    return specs


def _leaves(data: DataConfig) -> Iterator[DataConfig]:
    if isinstance(data, MixData):
        for part in data.parts.values():
            yield from _leaves(part.data)
    else:
        yield data


def _files(data: DataConfig) -> list[str]:
    if not isinstance(data, JsonlData | ParquetData):
        return []
    return [data.path] if Path(data.path).exists() else data.path.split()


def _tasks(config: RunConfig, source: TaskSource, *, known: bool) -> str:
    """How many tasks there are, once they are known to be gradable; those of the evaluation too where they are `known`."""
    with cache_only():
        check_reward(config.reward, source.examples(), lambda: _eval_examples(config) if known else None)
    passes = config.train.steps * config.rollout.tasks_per_step / len(source)
    return f"{len(source)} task(s), over which {config.train.steps} step(s) pass {passes:.3g} times"


def _eval_examples(config: RunConfig) -> list[Task]:
    return TaskSource(config.eval.data, seed=config.seed).examples() if config.eval.data else []


def _absence(absent: list[str], config: RunConfig) -> str:
    epochs = config.train.epochs
    return "; ".join([*absent, *([f"train.epochs is {epochs}, which becomes steps then"] if epochs else [])])


def _files_not_here(paths: list[str]) -> str:
    commands = dict.fromkeys(command for path in paths if (command := made_by(path)) is not None)
    names = f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'} not here"
    return f"{names}; made by: {', '.join(commands)}" if commands else names
