"""Checkpoints of one policy: weights, optimiser, schedule, random states and version, sharded and independent of the layout.

Megatron's dist_checkpointing writes each tensor under its whole shape, so that a policy saved on one tensor-, pipeline-,
context- and data-parallel size loads on another. On the CPU, at the same layout, a resumed policy repeats the uninterrupted one
bit by bit. At another layout it differs by the rounding of sums in another order, and random states start anew from the seed.
On GPUs weights, moments and schedule come back as they were; that the next update has equal bits is not promised. Of a policy
with adapters only what is trained is saved; the base is the model folder's. The episode data and the step counter of the run
are the runtime's business. Called by the trainer inside its active context, on all of the policy's ranks; `read_facts` needs
no ranks.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from drmas.errors import CheckpointError
from drmas.policy import folders
from drmas.policy.checkpoint_writer import MANIFEST, PendingSave
from drmas.policy.optimizer_state import OptimizerState

if TYPE_CHECKING:
    from drmas.policy.trainer import PolicyTrainer

_FORMAT = 3
_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "non_homogeneous_layers": True,
    "chained_optim_avoid_prefix": True,
}
"""Every optimiser tensor in the shape of its parameter: the one format of megatron-core 0.16.1 that any layout can load."""


def save(trainer: PolicyTrainer, folder: Path) -> None:
    """Write `folder`; a killed process leaves the older one of that name or the new one, whole (see `folders`).

    The folder is one that all ranks reach. CheckpointError, on every rank: it can't be written, such as for want of room; an
    older one is untouched.
    """
    PendingSave(trainer.groups, folder, _state(trainer), copy=False).finish()


def save_async(trainer: PolicyTrainer, folder: Path) -> PendingSave:
    """`save` from a copy in host memory, written by a thread; the caller must `finish` what is returned, on all ranks."""
    return PendingSave(trainer.groups, folder, _state(trainer), copy=True)


def load(trainer: PolicyTrainer, folder: Path) -> None:
    """Continue from `folder`. CheckpointError, with nothing changed: missing, incomplete, of another format or model."""
    facts = trainer.groups.on_leader(lambda: read_facts(folder))
    _check_model(trainer, folder, facts)
    model, state = _model_state(trainer), {}
    optimizer = _optimizer_state(trainer, model)
    if optimizer is not None:
        state["optimizer"] = optimizer.to_load()
    if facts["layout"] == trainer.groups.sizes():  # states belong to ranks; on another layout the run's seed makes new ones
        state["rng"] = _rng(trainer)
    _load_model(trainer, folder, model)
    loaded = _read(folder, state, get_default_load_sharded_strategy(str(folder)))
    if optimizer is not None:
        optimizer.take(loaded["optimizer"])
        trainer.optimizer.load_state(facts["optimizer"], steps=facts["steps"])
    if "rng" in state:
        trainer.rng.restore(loaded["rng"])
    trainer.version = facts["version"]


def load_weights(trainer: PolicyTrainer, folder: Path) -> None:
    """Take the weights and the version of `folder`, whether it was trainable or not. CheckpointError as `load`."""
    facts = trainer.groups.on_leader(lambda: read_facts(folder))
    _check_model(trainer, folder, facts, but=("trainable",))
    _load_model(trainer, folder, _model_state(trainer))
    trainer.version = facts["version"]


def check_whole(folder: Path) -> None:
    """CheckpointError if `folder` isn't a whole checkpoint, by its files and their sizes."""
    folders.recover(folder)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {str(folder)!r} doesn't exist")
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"checkpoint {str(folder)!r} has no {MANIFEST}; it is incomplete, use an older one")
    try:
        sizes = json.loads(manifest.read_text())
    except ValueError as error:
        raise CheckpointError(f"{manifest} can't be read: {error}; use an older checkpoint") from error
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {str(folder)!r} has no {name}; it is incomplete, use an older one")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes; {size} were saved, use an older checkpoint")


def read_facts(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: `version`, `steps` of the schedule, `layout`, `model`. CheckpointError if not whole."""
    check_whole(folder)
    try:
        facts = dist_checkpointing.load_common_state_dict(str(folder)).get("policy", {})
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError, CheckpointingException) as error:
        raise CheckpointError(f"checkpoint {str(folder)!r} can't be read: {error}; use an older one") from error
    if facts.get("format") != _FORMAT:
        raise CheckpointError(f"checkpoint {str(folder)!r} has format {facts.get('format')!r}; this version reads {_FORMAT}")
    return facts


def model_facts(trainer: PolicyTrainer) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit the policy."""
    lora = trainer.config.lora
    return {
        **trainer.architecture.fingerprint(),
        "dtype": trainer.config.dtype,
        "trainable": trainer.config.trainable,
        "lora": None if lora is None else lora.model_dump(),
    }


def _check_model(trainer: PolicyTrainer, folder: Path, facts: dict[str, Any], *, but: tuple[str, ...] = ()) -> None:
    for key, expected in model_facts(trainer).items():
        found = facts["model"].get(key)
        if found != expected and key not in but:
            raise CheckpointError(f"checkpoint {str(folder)!r} has {key} {found!r}; policies.{trainer.name} has {expected!r}")


def _state(trainer: PolicyTrainer) -> dict[str, Any]:
    if trainer.optimizer is not None:
        trainer.optimizer.settle()
    state: dict[str, Any] = {"model": _model_state(trainer), "rng": _rng(trainer), "policy": _facts(trainer)}
    optimizer = _optimizer_state(trainer, state["model"])
    if optimizer is not None:
        state["optimizer"] = optimizer.to_save()
    state["content_metadata"] = dict(_SHARDING)
    return state


def _model_state(trainer: PolicyTrainer) -> dict[str, Any]:
    """This rank's sharded tensors of the model; of a policy with adapters only those that are trained."""
    state = trainer.model.sharded_state_dict(metadata={**_SHARDING, "dp_cp_group": trainer.groups.dp_cp})
    if trainer.config.lora is None:
        return state
    return {name: sharded for name, sharded in state.items() if getattr(sharded.data, "requires_grad", False)}


def _optimizer_state(trainer: PolicyTrainer, model: dict[str, Any]) -> OptimizerState | None:
    return None if trainer.optimizer is None else OptimizerState(trainer.optimizer.megatron, model)


def _rng(trainer: PolicyTrainer) -> ShardedObject:
    """This rank's random states, under its place in the layout."""
    return ShardedObject("rng", trainer.rng.state, (trainer.groups.whole.size(),), (trainer.groups.whole.rank(),))


def _facts(trainer: PolicyTrainer) -> dict[str, Any]:
    facts = {
        "format": _FORMAT,
        "version": trainer.version,
        "layout": trainer.groups.sizes(),
        "model": model_facts(trainer),
        "steps": 0,
        "optimizer": None,
    }
    if trainer.optimizer is not None:
        facts |= {"steps": trainer.optimizer.steps, "optimizer": trainer.optimizer.megatron.state_dict()}
    return facts


def _load_model(trainer: PolicyTrainer, folder: Path, state: dict[str, Any]) -> None:
    """Fill the model. Replicas read a part each and exchange them; the optimiser's parts they need apart anyway."""
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(folder)), trainer.groups.dp_cp)
    loaded = _read(folder, {"model": state}, strategy)["model"]
    _, unexpected = trainer.model.load_state_dict(loaded, strict=trainer.config.lora is None)
    if unexpected:
        raise CheckpointError(f"checkpoint {str(folder)!r} has {unexpected[0]}, which policies.{trainer.name} has not")


def _read(folder: Path, state: dict[str, Any], strategy: LoadShardedStrategy) -> dict[str, Any]:
    """`state` with what the checkpoint holds of it; tensors that are there are read into."""
    try:
        return dist_checkpointing.load(state, str(folder), sharded_strategy=strategy)
    except (CheckpointingException, KeyError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"checkpoint {str(folder)!r} can't be read: {error}; use an older one") from error
