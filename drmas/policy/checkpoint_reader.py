"""Reading a checkpoint's files without running anything that they name.

torch and Megatron open a checkpoint's list of tensors, and the objects in it, by pickle, which calls whatever the file asks.
Here the list may name torch's descriptions of tensors only, and everything else goes through `torch.load` with `weights_only`,
which makes tensors and plain values. Called by `drmas.policy.checkpoint`.
"""

from __future__ import annotations

import io
import pickle
import re
from enum import Enum
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from drmas.errors import CheckpointError

_LISTING = ".metadata"
_PARTS = (
    *(Metadata, descriptions.StorageMeta, PosixPath, BytesStorageMetadata, TensorStorageMetadata, torch.Size),
    *(descriptions.TensorProperties, descriptions._MEM_FORMAT_ENCODING, torch.serialization._get_layout),
    *(descriptions.ChunkStorageMetadata, MetadataIndex, _StorageInfo),
    *(plans.SavePlan, plans.WriteItem, plans.WriteItemType, plans.TensorWriteData),
)
_ADMITTED = {(part.__module__, part.__qualname__): part for part in _PARTS}
_ADMITTED |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""All that a list of tensors is made of, besides plain values. None of it acts on anything when it is called."""
_ENUMERATIONS = [part for part in _PARTS if isinstance(part, type) and issubclass(part, Enum)]


def _member(enumeration: Any, name: Any) -> Enum:
    """How the first releases of Python 3.11 write a member of an enumeration: as `getattr` of its class and name."""
    if not any(enumeration is each for each in _ENUMERATIONS):
        raise CheckpointError("it asks for an attribute of what is no enumeration of a checkpoint")
    return enumeration[name]


_ADMITTED["builtins", "getattr"] = _member


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise CheckpointError(f"it names {module}.{name}, which no checkpoint needs")
        return _ADMITTED[module, name]


def read_listing(folder: Path) -> Metadata:
    """Which tensors and objects `folder` holds, and where. CheckpointError: damaged, or it names something else."""
    names = {path.name for path in folder.iterdir()}
    try:
        with open(folder / _LISTING, "rb") as stream:
            found = _Unpickler(stream).load()
        listing = Metadata(dict(found.state_dict_metadata), storage_data=dict(found.storage_data))
        chunks = {key: getattr(entry, "chunks", [None]) for key, entry in listing.state_dict_metadata.items()}
        parts = [MetadataIndex(key, chunk and chunk.offsets) for key, these in chunks.items() for chunk in these]
        strange = {str(listing.storage_data[part].relative_path) for part in parts} - names
    except Exception as error:  # a damaged pickle fails in any way
        raise _unreadable(folder / _LISTING, error) from error
    if strange:
        raise CheckpointError(f"{folder / _LISTING} names {min(strange)}, which is no file of the checkpoint; use another one")
    return listing


def read_plain(folder: Path) -> dict[str, Any]:
    """What was saved beside the tensors. CheckpointError: damaged, or not only tensors and plain values."""
    return _load_plain(folder / COMMON_STATE_FNAME, folder / COMMON_STATE_FNAME)


def lacks(listing: Metadata, state: dict[str, Any]) -> str | None:
    """Why a checkpoint can't fill `state`, in words: the first entry that it lacks or has in another shape; None if it can."""
    for wanted in nested_values(load_preprocess(state)[0]):
        key, kind = wanted.key, TensorStorageMetadata
        if isinstance(wanted, ShardedObject):
            key, kind = wanted.unique_key, BytesStorageMetadata
        found = listing.state_dict_metadata.get(key)
        if not isinstance(found, kind):
            return f"has no {key}"
        if kind is TensorStorageMetadata and not wanted.allow_shape_mismatch and tuple(found.size) != wanted.global_shape:
            return f"has {key} in shape {tuple(found.size)}, not {wanted.global_shape}"
    return None


def read(folder: Path, state: dict[str, Any], strategy: LoadShardedStrategy) -> dict[str, Any]:
    """`state` with what the checkpoint holds of it; tensors that are there are read into. Collective; CheckpointError."""
    try:
        return dist_checkpointing.load(state, str(folder), sharded_strategy=strategy, common_strategy=_NothingBeside())
    except CheckpointException as error:  # torch's own, with the failure of every rank that had one
        cause = next(iter(error.failures.values()))[0]
        raise cause if isinstance(cause, CheckpointError) else _unreadable(folder, cause) from error
    except Exception as error:  # damaged contents fail in any way
        raise _unreadable(folder, error) from error


class ListedTensors(TorchDistLoadShardedStrategy):
    """Megatron's strategy for torch's format, with a list that was read already and with objects that are plain values."""

    def __init__(self, listing: Metadata) -> None:
        super().__init__()
        self._listing = listing

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> dict[str, Any]:
        tensors = [each for each in nested_values(sharded_state_dict) if isinstance(each, ShardedTensor)]
        named, paths, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(named, is_loading=True)
        planner = _Planner(
            Path(checkpoint_dir),
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
            shapes_validation_sharded_tensors=[each for each in tensors if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={each.key: each for each in tensors if each.allow_shape_mismatch},
        )
        dcp.load(state, storage_reader=_Reader(checkpoint_dir, self._listing), planner=planner)
        found = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        found = _replace_sharded_keys_with_state_dict_keys(found, paths, names)
        _restore_dict_types(found, sharded_state_dict)
        return found


class _Reader(FileSystemReader):
    def __init__(self, folder: str, listing: Metadata) -> None:
        super().__init__(folder)
        self._listing = listing

    def read_metadata(self) -> Metadata:
        return self._listing


class _Planner(MCoreLoadPlanner):
    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self._folder = folder

    def load_bytes(self, read_item: plans.ReadItem, value: io.BytesIO) -> None:
        file = self._folder / self.metadata.storage_data[read_item.storage_index].relative_path
        self.state_dict[read_item.dest_index.fqn] = _load_plain(value, file)


class _NothingBeside(TorchCommonLoadStrategy):
    """What is beside the tensors is read once, by `read_plain`."""

    def load_common(self, checkpoint_dir: str) -> dict[str, Any]:
        return {}


def _load_plain(source: Path | io.BytesIO, file: Path) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in any way
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: BaseException) -> CheckpointError:
    """Of torch's long advice on what it refused, the name."""
    refused = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    reason = f"it names {refused[1]}, which no checkpoint needs" if refused else (str(error) or type(error).__name__)
    return CheckpointError(f"{file} can't be read: {reason.splitlines()[0]}; use another checkpoint")
