"""`drmas export` and `drmas import`: a run's policies as Hugging Face folders, and such a folder as a policy of a run.

One process, whatever layout saved the checkpoint or will resume from it. An export builds no optimiser, but for the small one
of a policy with adapters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drmas.config.load import load
from drmas.config.schema import LossConfig, PolicyConfig, RunConfig
from drmas.errors import CheckpointError, ConfigError, ModelError
from drmas.policy import checkpoint, peft
from drmas.policy.architecture import read_architecture
from drmas.policy.groups import Groups, PolicyGroups, destroy, init_distributed
from drmas.policy.trainer import PolicyTrainer
from drmas.runtime.folder import RunFolder
from drmas.runtime.hub_models import read_commits
from drmas.runtime.models import resolve_model
from drmas.runtime.resume import read_whole, saved_steps

_ONE_PROCESS = {
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel"), 1),
    **{"sequence_parallel": False, "num_ranks": None, "attention": "auto", "fp8": None, "offload_optimizer": False},
}
"""Settings of a policy that don't change what its weights mean."""


def export_run(
    run: Path, *, step: int | None = None, policy: str | None = None, output: Path | None = None, adapter: bool = False
) -> dict[str, Path]:
    """Write each trained policy of the checkpoint of `step`, the newest if unset, to `output`/NAME; where each one is.

    `output` is RUN/export/step_N if unset; a `policy` that is named goes to a given `output` itself. With `adapter`, a policy
    with adapters gives PEFT's folder, NAME-adapter, not a merged model.
    UserError: there is no such policy or checkpoint, or something else is in the place; all of it is found before writing.
    """
    config = _settings(run)
    steps = saved_steps(run)
    if not steps or (step is not None and step not in steps):
        there = f"it has steps {', '.join(map(str, steps))}" if steps else "it has none yet"
        raise CheckpointError(f"{run} has no checkpoint{'' if step is None else f' of step {step}'}; {there}")
    step = steps[-1] if step is None else step
    read_whole(run, step)
    names = _trained(config, policy)
    parent, suffix = output or run / "export" / f"step_{step}", "-adapter" if adapter else ""
    targets = {name: output if output and policy else parent / f"{name}{suffix}" for name in names}
    for name, target in targets.items():
        if adapter and config.policies[name].lora is None:
            raise ConfigError(f"--adapter: policies.{name}.lora is unset, so it has no adapters; leave --adapter away")
        if target.exists() and not any((target / file).is_file() for file in ("config.json", peft.CONFIG)):
            raise ConfigError(f"{target} is there and is no exported model; give another --output")
    with _one_process() as groups:
        for name, target in targets.items():
            trainer = _policy(
                config, name, _start_model(run, config, name), groups, trainable=config.policies[name].lora is not None
            )
            with trainer.active():
                checkpoint.load_weights(trainer, run / "checkpoints" / f"step_{step}" / f"policy-{name}")
                if adapter:
                    peft.write_peft_folder(
                        *(trainer.model, trainer.architecture, groups, trainer.config.lora),
                        base=trainer.model_path,
                        folder=target,
                    )
            if not adapter:
                trainer.export(target)
    return targets


def import_model(run: Path, *, policy: str, model: Path) -> tuple[int, int]:
    """Make the weights in `model` those of `policy` in the newest checkpoint, for `--resume` to go on from.

    For a policy with adapters `model` is PEFT's folder. Moments start anew, the schedule stays where it is, and the version is
    one more, so that the engine gets the weights. Returns (step, version). UserError: they don't fit; nothing has changed then.
    """
    config = _settings(run)
    _trained(config, policy)
    place = run.resolve()
    folder = RunFolder(config.model_copy(update={"output": str(place.parent), "name": place.name}))
    folder.open(resume=True, overwrite=False)
    try:
        return _import(run, config, policy, model)
    finally:
        folder.close()


def _import(run: Path, config: RunConfig, policy: str, model: Path) -> tuple[int, int]:
    steps = saved_steps(run)
    if not steps:
        raise CheckpointError(f"{run} has no checkpoint yet; set policies.{policy}.model to the folder and start the run")
    read_whole(run, steps[-1])
    saved = run / "checkpoints" / f"step_{steps[-1]}" / f"policy-{policy}"
    facts = checkpoint.read_facts(saved)
    start = _start_model(run, config, policy)
    adapters = config.policies[policy].lora
    if adapters is None and not (model / "config.json").is_file():
        raise ModelError(f"--model {model} has no config.json; expected a Hugging Face folder, as drmas export writes it")
    if adapters is None:
        _check_fits(model, start, facts["model"], policy)
    elif not (model / peft.CONFIG).is_file():
        raise ModelError(
            f"policies.{policy}.lora is set, and {model} has no {peft.CONFIG}; expected PEFT's folder, as "
            "drmas export --adapter writes it"
        )
    with _one_process() as groups:
        trainer = _policy(config, policy, start if adapters else model, groups, trainable=True)
        with trainer.active():
            if adapters is not None:
                peft.read_peft_folder(trainer.model, trainer.architecture, groups, adapters, model)
            trainer.version, trainer.optimizer.steps = facts["version"] + 1, facts["steps"]
            checkpoint.save(trainer, saved)
    return steps[-1], facts["version"] + 1


def _settings(run: Path) -> RunConfig:
    if not (run / "config.json").is_file():
        raise ConfigError(f"{run} is not the folder of a run; it has no config.json")
    return load(str(run / "config.json"))


def _trained(config: RunConfig, policy: str | None) -> list[str]:
    """The policies asked for, all of which have checkpoints."""
    trained = [name for name, settings in config.policies.items() if settings.trainable]
    if policy is not None and policy not in config.policies:
        raise ConfigError(f"--policy {policy}: the run has no such policy; it has {', '.join(config.policies)}")
    if policy is not None and policy not in trained:
        raise ConfigError(f"--policy {policy}: policies.{policy}.trainable is false, its weights are its model folder's")
    return trained if policy is None else [policy]


def _start_model(run: Path, config: RunConfig, name: str) -> Path:
    """The folder that the policy started from: its own model, or what the warm start made of it."""
    warm = run / "warm_start" / name
    if config.warm_start is not None and warm.is_dir():
        return warm.absolute()
    spec, key = config.policies[name].model, f"policies.{name}.model"
    return resolve_model(spec, seed=config.seed, key=key, commit=read_commits(run).get(spec)).absolute()


def _check_fits(model: Path, start: Path, expected: dict[str, Any], policy: str) -> None:
    """ModelError unless `model` is the policy's architecture with the policy's vocabulary."""
    for key, found in read_architecture(model).fingerprint().items():
        if expected.get(key) != found:
            raise ModelError(f"{model} has {key} {found!r}; the run's policies.{policy} has {expected.get(key)!r}")
    if all((folder / "tokenizer.json").is_file() for folder in (model, start)) and _vocabulary(model) != _vocabulary(start):
        raise ModelError(f"{model} has another tokenizer than {start}, with which the run's episodes are encoded")


def _vocabulary(folder: Path) -> Any:
    return json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]


@contextmanager
def _one_process() -> Iterator[PolicyGroups]:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("export and import are the work of one process; start them without torchrun")
    init_distributed()
    try:
        yield Groups().layout()
    finally:
        destroy()


def _policy(config: RunConfig, name: str, model: Path, groups: PolicyGroups, *, trainable: bool) -> PolicyTrainer:
    settings: PolicyConfig = config.policies[name].model_copy(update=_ONE_PROCESS | {"trainable": trainable})
    steps = config.train.steps * config.train.updates_per_step
    return PolicyTrainer(
        *(name, settings), model_path=model, layout=groups, seed=config.seed, total_steps=steps, agents=[], loss=LossConfig()
    )
