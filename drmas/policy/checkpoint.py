"""Checkpoints of one policy: weights, optimiser, schedule, random states and version, sharded and independent of the layout.

Megatron's dist_checkpointing writes each tensor under its whole shape, so that a policy saved on one tensor- and data-parallel
size loads on another. On the CPU, at the same layout, a resumed policy repeats the uninterrupted one bit by bit. At another
layout it differs by the rounding of sums in another order, and random states start anew from the seed. On GPUs weights, moments
and schedule come back as they were; that the next update has equal bits is not promised. The episode data and the step counter
of the run are the runtime's business. Called by the trainer inside its active context, on all ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from drmas.errors import CheckpointError
from drmas.policy import folders
from drmas.policy.groups import on_rank_zero

if TYPE_CHECKING:
    from drmas.policy.trainer import PolicyTrainer

_FORMAT = 2
_MANIFEST = "files.json"
"""Every other file of the checkpoint with its size in bytes, written last. Sizes tell a short file, not a changed byte."""
_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""Every optimiser tensor in the shape of its parameter: the one format of megatron-core 0.16.1 that any layout can load."""


def save(trainer: PolicyTrainer, folder: Path) -> None:
    """Write `folder`; a killed process leaves the older one of that name or the new one, whole (see `folders`).

    OSError of rank 0's own steps is raised on every rank. The folder is one that all ranks reach.
    """
    partial = on_rank_zero(lambda: folders.begin(folder))
    dp_cp = trainer.groups.collection.dp_cp
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), dp_cp, True)
    state = _tensors(trainer, is_loading=False)
    state["rng"] = _rng(trainer)
    state["policy"] = _facts(trainer)
    dist_checkpointing.save(state, str(partial), sharded_strategy=strategy, content_metadata=_SHARDING)
    on_rank_zero(lambda: _finish(folder, partial))


def load(trainer: PolicyTrainer, folder: Path) -> None:
    """Continue from `folder`. CheckpointError, with nothing changed: missing, incomplete, of another format or model."""
    facts = on_rank_zero(lambda: _read_facts(trainer, folder))
    state = _tensors(trainer, is_loading=True)
    same_layout = facts["layout"] == _layout(trainer)
    if same_layout:
        state["rng"] = _rng(trainer)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(folder)), trainer.groups.collection.dp_cp)
    loaded = dist_checkpointing.load(state, str(folder), sharded_strategy=strategy)
    trainer.model.load_state_dict(loaded["model"], strict=True)
    if trainer.optimizer is not None:
        trainer.optimizer.load_state(loaded["optimizer"], steps=facts["scheduler_steps"])
    if same_layout:  # states belong to ranks; on another layout the run's seed makes new ones
        trainer.rng.restore(loaded["rng"])
    trainer.version = facts["version"]


def _finish(folder: Path, partial: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
    (partial / _MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n")
    folders.commit(folder)


def _tensors(trainer: PolicyTrainer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {**_SHARDING, "dp_cp_group": trainer.groups.collection.dp_cp}
    model = trainer.model.sharded_state_dict(metadata=metadata)
    state = {"model": model}
    if trainer.optimizer is not None:
        state["optimizer"] = trainer.optimizer.megatron.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return state


def _rng(trainer: PolicyTrainer) -> ShardedObject:
    """This rank's random states, under its place in the layout."""
    world = dist.get_world_size()
    return ShardedObject("rng", trainer.rng.state, (world,), (dist.get_rank(),))


def _layout(trainer: PolicyTrainer) -> dict[str, int]:
    return {"tp": trainer.groups.tp.size(), "dp": trainer.groups.dp.size()}


def _model(trainer: PolicyTrainer) -> dict[str, Any]:
    return {**trainer.architecture.fingerprint(), "dtype": trainer.config.dtype, "trainable": trainer.config.trainable}


def _facts(trainer: PolicyTrainer) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": trainer.version,
        "scheduler_steps": 0 if trainer.optimizer is None else trainer.optimizer.scheduler.num_steps,
        "layout": _layout(trainer),
        "model": _model(trainer),
    }


def _check_files(folder: Path) -> None:
    if not (folder / _MANIFEST).is_file():
        raise CheckpointError(f"checkpoint {str(folder)!r} has no {_MANIFEST}; it is incomplete, use an older one")
    for name, size in json.loads((folder / _MANIFEST).read_text()).items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {str(folder)!r} has no {name}; it is incomplete, use an older one")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes; {size} were saved, use an older checkpoint")


def _read_facts(trainer: PolicyTrainer, folder: Path) -> dict[str, Any]:
    folders.recover(folder)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {str(folder)!r} doesn't exist")
    _check_files(folder)
    facts = dist_checkpointing.load_common_state_dict(str(folder)).get("policy", {})
    if facts.get("format") != _FORMAT:
        raise CheckpointError(f"checkpoint {str(folder)!r} has format {facts.get('format')!r}; this version reads {_FORMAT}")
    for key, expected in _model(trainer).items():
        found = facts["model"].get(key)
        if found != expected:
            raise CheckpointError(f"checkpoint {str(folder)!r} has {key} {found!r}; policies.{trainer.name} has {expected!r}")
    return facts
