"""Checkpoints of one policy: weights, optimiser, schedule, random states and version, sharded and independent of the layout.

Megatron's dist_checkpointing writes each tensor under its whole shape, so that a policy saved on one tensor-, pipeline-,
context- and data-parallel size loads on another. On the CPU, at the same layout, a resumed policy repeats the uninterrupted one
bit by bit. At another layout it differs by the rounding of sums in another order, and random states start anew from the seed.
On GPUs weights, moments and schedule come back as they were; that the next update has equal bits is not promised, and scales of
fp8 are measured anew. Of a policy with adapters only what is trained is saved, with a digest of the base, which is the model
folder's. The episode data and the step counter of the run are the runtime's business. Called by the trainer inside its active
context, on all of the policy's ranks; `read_facts` needs no ranks.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import Metadata

from drmas.errors import CheckpointError
from drmas.policy import checkpoint_reader, folders
from drmas.policy.checkpoint_writer import MANIFEST, PendingSave
from drmas.policy.optimizer_state import OptimizerState, Sharded

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
    """Continue from `folder`. CheckpointError, with nothing changed: missing, incomplete, of another format, model or base.

    So too where an entry is missing or has another shape, or the random states can't be read. Tensors are read into their
    places, because there may be no room for a second copy: a CheckpointError over the bytes of one of them leaves weights and
    moments partly read, and the policy is not to be used. Schedule, random states and version change last.
    """
    facts = _fitting_facts(trainer, folder)
    model, state, rng = _model_state(trainer), {}, {}
    optimizer = _optimizer_state(trainer, model)
    if optimizer is not None:
        state["optimizer"] = optimizer.to_load()
    if facts["layout"] == trainer.groups.sizes():  # states belong to ranks; on another layout the run's seed makes new ones
        rng["rng"] = _rng(trainer)
    listing = _listing(trainer, folder, {"model": model, **state, **rng})
    strategy = checkpoint_reader.ListedTensors(listing)
    if rng:
        rng = checkpoint_reader.read(folder, rng, strategy)
        _agree(trainer, folder, None if trainer.rng.fits(rng["rng"]) else "has no random states of this policy")
    _load_model(trainer, folder, model, listing)
    if optimizer is not None:
        optimizer.take(checkpoint_reader.read(folder, state, strategy)["optimizer"])
        trainer.optimizer.load_state(facts["optimizer"], steps=facts["steps"])
    if rng:
        trainer.rng.restore(rng["rng"])
    trainer.version = facts["version"]


def load_weights(trainer: PolicyTrainer, folder: Path) -> None:
    """Take the weights and the version of `folder`, whether it was trainable or not. CheckpointError as `load`."""
    facts = _fitting_facts(trainer, folder, but=("trainable",))
    model = _model_state(trainer)
    _load_model(trainer, folder, model, _listing(trainer, folder, {"model": model}))
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
    facts = checkpoint_reader.read_plain(folder).get("policy", {})
    if facts.get("format") != _FORMAT:
        raise CheckpointError(f"checkpoint {str(folder)!r} has format {facts.get('format')!r}; this version reads {_FORMAT}")
    return facts


def model_facts(trainer: PolicyTrainer) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit the policy. Collective."""
    lora = trainer.config.lora
    return {
        **trainer.architecture.fingerprint(),
        "dtype": trainer.config.dtype,
        "trainable": trainer.config.trainable,
        "lora": None if lora is None else lora.model_dump(),
        "base model": None if lora is None else trainer.groups.on_leader(lambda: base_digest(trainer.model_path)),
    }


def base_digest(folder: Path) -> str:
    """Of the model in `folder`, however it is cut into files: every tensor's name, type and shape, and of its values one row.

    So that it is cheap; another training run changes some value in one of the rows. CheckpointError: it can't be read.
    """
    index, tensors = folder / "model.safetensors.index.json", {}
    try:
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        for name in files:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118, it is no dict
                    part = file.get_slice(key)
                    shape = part.get_shape()
                    row = part[shape[0] // 2 : shape[0] // 2 + 1] if len(shape) > 1 else file.get_tensor(key)
                    values = row.contiguous().view(torch.uint8).numpy().tobytes()
                    tensors[key] = [part.get_dtype(), shape, blake2b(values, digest_size=16).hexdigest()]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"the base model in {str(folder)!r} can't be read: {error}") from error
    return blake2b(json.dumps(tensors, sort_keys=True).encode(), digest_size=16).hexdigest()


def _fitting_facts(trainer: PolicyTrainer, folder: Path, *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """The checkpoint's facts. CheckpointError: one of its model, except `but`, is another than the policy's."""
    facts = trainer.groups.on_leader(lambda: read_facts(folder))
    for key, expected in model_facts(trainer).items():
        found = facts["model"].get(key)
        if found != expected and key not in but:
            raise CheckpointError(f"checkpoint {str(folder)!r} has {key} {found!r}; policies.{trainer.name} has {expected!r}")
    return facts


def _listing(trainer: PolicyTrainer, folder: Path, state: dict[str, Any]) -> Metadata:
    """What the checkpoint holds. CheckpointError: not all of any rank's `state`."""
    listing = trainer.groups.on_leader(lambda: checkpoint_reader.read_listing(folder))
    _agree(trainer, folder, checkpoint_reader.lacks(listing, state))
    return listing


def _agree(trainer: PolicyTrainer, folder: Path, trouble: str | None) -> None:
    """CheckpointError on every rank of the policy if any of them has met `trouble` with the checkpoint."""
    every = [None] * trainer.groups.whole.size()
    dist.all_gather_object(every, trouble, group=trainer.groups.whole)
    for each in every:
        if each is not None:
            raise CheckpointError(f"checkpoint {str(folder)!r} {each}; use another one")


def _state(trainer: PolicyTrainer) -> dict[str, Any]:
    if trainer.optimizer is not None:
        trainer.optimizer.settle()
    state: dict[str, Any] = {"model": _model_state(trainer), "rng": _rng(trainer), "policy": _facts(trainer)}
    optimizer = _optimizer_state(trainer, state["model"])
    if optimizer is not None:
        state["optimizer"] = optimizer.to_save()
    state["content_metadata"] = dict(_SHARDING)
    return state


def _model_state(trainer: PolicyTrainer) -> dict[str, Sharded]:
    """This rank's sharded tensors of the model; of a policy with adapters only those that are trained.

    Without the layers' extra state: TransformerEngine keeps scales in it, as a pickle that it opens unasked.
    """
    state = trainer.model.sharded_state_dict(metadata={**_SHARDING, "dp_cp_group": trainer.groups.dp_cp})
    tensors = {name: sharded for name, sharded in state.items() if isinstance(sharded, Sharded)}
    if trainer.config.lora is None:
        return tensors
    return {name: sharded for name, sharded in tensors.items() if sharded.data.requires_grad}


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


def _load_model(trainer: PolicyTrainer, folder: Path, state: dict[str, Sharded], listing: Metadata) -> None:
    """Fill the model. Replicas read a part each and exchange them; the optimiser's parts they need apart anyway."""
    strategy = FullyParallelLoadStrategyWrapper(checkpoint_reader.ListedTensors(listing), trainer.groups.dp_cp)
    trainer.model.load_state_dict(checkpoint_reader.read(folder, {"model": state}, strategy)["model"], strict=False)
