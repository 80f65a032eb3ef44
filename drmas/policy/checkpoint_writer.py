"""Writing a checkpoint's tensors: at once, or by a thread while training goes on; then making the files a checkpoint.

Megatron's strategies plan who writes what. The writing itself is ours: theirs starts a process per file and a manager process,
copies every tensor that is a view of a larger buffer before the first byte is written, and leaves ranks waiting for one whose
disk is full. Here a rank writes one file, tensor by tensor, and every failure is known to all ranks. Called by
`drmas.policy.checkpoint`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    SerializationFormat,
    _StoragePrefix,
    _write_item,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from drmas.errors import CheckpointError
from drmas.policy import folders
from drmas.policy.groups import PolicyGroups

Result = TypeVar("Result")

MANIFEST = "files.json"
"""Every other file of the checkpoint with its size in bytes, written last. Sizes tell a short file, not a changed byte."""

_SLACK = 2**20
"""Bytes beyond the tensors: names, shapes and the manifest."""


class PendingSave:
    """A checkpoint that is being written. Until `finish` returns, `folder` is what it was before."""

    def __init__(self, groups: PolicyGroups, folder: Path, state: dict[str, Any], *, copy: bool) -> None:
        """Plan the save and check the room for it; with `copy`, start to write a copy of the tensors in a thread.

        `state` holds sharded tensors and objects, and plain entries that are equal on every rank. Collective over the policy's
        ranks, inside `groups.active`. CheckpointError: not enough room, or the folder can't be written.
        """
        self._groups, self._folder, self._needed = groups, folder, None
        self._partial = self._lead(lambda: folders.begin(folder))
        tensors, plain = save_preprocess(state)
        self._lead(lambda: self._write_plain(plain))
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
        self._format = CheckpointingConfig(strategy.backend, strategy.version)
        FullyParallelSaveStrategyWrapper(strategy, groups.dp_cp).apply_saving_parallelization(tensors)
        named, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
        self._writer = _RankWriter(self._partial)
        (_, self._metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(named), self._writer, planner=MCoreSavePlanner(flatten_state_dict=False)
        )
        self._needed = sum(self._heard(self._writer.size)) + _SLACK
        self._lead(self._check_room)
        self._thread = threading.Thread(target=self._writer.write, name=f"save {folder.name}", daemon=True)
        if copy:
            self._writer.copy()
            self._thread.start()

    def done(self) -> bool:
        """True when this rank has written its part, or failed to: `finish` waits for the other ranks only."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for every rank's part, then put the checkpoint in the place of `folder`. Collective over the policy's ranks.

        CheckpointError, on every rank: it can't be written; what was in `folder` is still there.
        """
        if self._thread.ident is None:
            self._writer.write()
        else:
            self._thread.join()
        with self._groups.active():
            outcomes = self._heard((self._writer.trouble, self._writer.results))
            self._lead(lambda: self._commit(outcomes))

    def abandon(self) -> None:
        """Wait until this rank writes no more. Nothing of it is a checkpoint; its folder is the caller's to remove."""
        if self._thread.ident is not None:
            self._thread.join()

    def _commit(self, outcomes: list[tuple[str | None, list[WriteResult]]]) -> None:
        for rank, (trouble, _) in enumerate(outcomes):
            if trouble is not None:
                raise OSError(trouble if len(outcomes) == 1 else f"rank {rank} of the policy: {trouble}")
        self._writer.finish(self._metadata, [results for _, results in outcomes])
        save_config(self._format, str(self._partial))
        sizes = {file.name: file.stat().st_size for file in sorted(self._partial.iterdir())}
        (self._partial / MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n")
        folders.commit(self._folder)

    def _write_plain(self, entries: dict[str, Any]) -> None:
        # Given a path, torch keeps the system's reason to itself.
        with open(self._partial / COMMON_STATE_FNAME, "wb") as stream:
            torch.save(entries, stream)

    def _check_room(self) -> None:
        free = shutil.disk_usage(self._partial).free
        if free < self._needed:
            raise OSError("not enough room on the disk")

    def _lead(self, action: Callable[[], Result]) -> Result:
        """`action` on the policy's first rank. Its OSError removes the partial folder and is a CheckpointError everywhere."""
        return self._groups.on_leader(lambda: self._guarded(action))

    def _guarded(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except (OSError, RuntimeError) as error:
            folders.abandon(self._folder)
            wanted = "" if self._needed is None else f"; it takes {self._needed:,} bytes"
            place = next(path for path in self._folder.absolute().parents if path.exists())
            free = f"{shutil.disk_usage(place).free:,} bytes are free there"
            raise CheckpointError(f"{self._folder} can't be saved: {_reason(error)}{wanted}; {free}") from error

    def _heard(self, value: Any) -> list[Any]:
        """What every rank of the policy says, in their order."""
        values = [None] * self._groups.whole.size()
        dist.all_gather_object(values, value, group=self._groups.whole)
        return values


class _RankWriter(FileSystemWriter):
    """One rank's file of a checkpoint, in torch's distributed format."""

    can_run_decentralized_global_plan = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.results: list[WriteResult] = []
        self.trouble: str | None = None
        self.size = 0

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{dist.get_rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Hold what the plan says this rank writes."""
        self._name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        self._items = [(item, planner.resolve_data(item)) for item in plan.items]
        self.size = sum(_size(data) for _, data in self._items)

    def copy(self) -> None:
        """Hold copies in host memory instead, because training goes on."""
        self._items = [(item, _copied(data)) for item, data in self._items]

    def write(self) -> None:
        """Write and flush the file, and let go of the data. What goes wrong is kept in `trouble`."""
        items, self._items = self._items, []
        if not items:
            return
        try:
            with open(self.path / self._name, "wb") as stream:
                for item, data in items:
                    whole = _apart(data)  # one at a time: in most cases it is a copy
                    self.results.append(
                        _write_item(self.transforms, stream, whole, item, self._name, SerializationFormat.TORCH_SAVE)
                    )
                stream.flush()
                os.fsync(stream.fileno())
        except Exception as error:  # in a thread, where nobody would see it; `PendingSave.finish` raises it on every rank
            self.trouble = _reason(error)


def _reason(error: BaseException) -> str:
    """What torch met, where it hides a full disk behind a file position that it did not expect."""
    met: BaseException | None = error
    while met is not None and not isinstance(met, OSError):
        met = met.__cause__ or met.__context__
    return str(met or error)


def _copied(data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    return data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data


def _apart(data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    """A tensor in host memory with a storage of its own: torch.save writes a view's whole storage."""
    if not isinstance(data, torch.Tensor):
        return data
    data = data.detach().cpu()
    return data if data.untyped_storage().nbytes() == data.nbytes else data.clone()


def _size(data: torch.Tensor | io.BytesIO) -> int:
    return data.nbytes if isinstance(data, torch.Tensor) else data.getbuffer().nbytes
