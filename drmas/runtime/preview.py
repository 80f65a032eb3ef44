"""What a dry run says: the job as it would be, and what of it isn't on this machine yet.

Nothing is fetched and nothing starts. A model that isn't here is described by its published shape, a data file that isn't here
by the command that makes it; a start refuses both. Called by `run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from drmas.agents.team import TeamConfig
from drmas.config.schema import RunConfig
from drmas.config.tasks import DataConfig, JsonlData, MixData, ParquetData
from drmas.core.estimators import Estimator
from drmas.envs.named_sets import BUNDLES, SETS
from drmas.envs.rewards import check_reward
from drmas.envs.source import TaskSource
from drmas.policy import host_platform
from drmas.runtime.epochs import in_steps
from drmas.runtime.hub_models import is_hub_name, is_whole
from drmas.runtime.models import sketched_model
from drmas.runtime.placement import check, describe, notes
from drmas.telemetry.console import Console
from drmas.types import Task


def planned_ranks(config: RunConfig) -> int | None:
    """How many ranks the dry run is of, where that is another job than this one: `train.ranks` outside of torchrun."""
    return config.train.ranks if "WORLD_SIZE" not in os.environ else None


def preview(config: RunConfig, team: TeamConfig, estimator: Estimator, console: Console, *, world: int) -> None:
    """Print it. UserError kinds: what a start on such a machine would refuse, but for models and files that aren't here."""
    gpu = not host_platform.is_host() or planned_ranks(config) is not None
    check(config, team, world=world)
    for note in notes(config, team, world=world, gpu=gpu):
        console.note(note)
    lines = {}
    if gpu and host_platform.is_host():
        lines["machine"] = f"{world} rank(s) with a GPU each; stack and kernels are those of this machine, which has none"
    specs = {name: policy.model for name, policy in config.policies.items()}
    folders = {name: sketched_model(spec, seed=config.seed).absolute() for name, spec in specs.items()}
    lines |= describe(config, team, estimator, world=world, folders=folders, find=sketched_model, gpu=gpu)
    lines |= {f"model {spec}": _model_not_here(spec) for name, spec in specs.items() if not _has_weights(spec, folders[name])}
    lines["data"] = _tasks(config)
    if config.eval.data is not None and (absent := missing_files(config.eval.data)):
        lines["eval data"] = _not_here(absent)
    console.start(lines)


def missing_files(data: DataConfig) -> list[str]:
    """The files that `data` names and that aren't here."""
    return [path for path in _files(data) if not Path(path).exists()]


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


def _files(data: DataConfig) -> Iterator[str]:
    if isinstance(data, MixData):
        for part in data.parts.values():
            yield from _files(part.data)
    elif isinstance(data, JsonlData | ParquetData):
        yield from [data.path] if Path(data.path).exists() else data.path.split()


def _tasks(config: RunConfig) -> str:
    """How many tasks there are, once they are known to be gradable, or which files are missing."""
    if absent := missing_files(config.data):
        epochs = config.train.epochs
        return _not_here(absent) + (f"; train.epochs is {epochs}, which becomes steps then" if epochs else "")
    config = in_steps(config)
    source = TaskSource(config.data, seed=config.seed, curriculum=config.curriculum)
    known = config.eval.data is None or not missing_files(config.eval.data)
    check_reward(config.reward, source.examples(), lambda: _eval_examples(config) if known else None)
    passes = config.train.steps * config.rollout.tasks_per_step / len(source)
    return f"{len(source)} task(s), over which {config.train.steps} step(s) pass {passes:.3g} times"


def _eval_examples(config: RunConfig) -> list[Task]:
    return TaskSource(config.eval.data, seed=config.seed).examples() if config.eval.data else []


def _not_here(paths: list[str]) -> str:
    commands = dict.fromkeys(command for path in paths if (command := made_by(path)) is not None)
    names = f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'} not here"
    return f"{names}; made by: {', '.join(commands)}" if commands else names
