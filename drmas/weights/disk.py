"""The bytes of an update through a folder that the trainer and the engines see: a safetensors file for every bucket.

    FOLDER/update-7/000000000000000.safetensors, 000000067108864.safetensors, ...

A file appears whole, under its name, before the ends vote on it. The files of an update go when all have loaded it, at the
latest with the next one. The slowest way, for engines that have nothing in common with the trainer but a file system.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drmas.weights.carrier import Unusable
from drmas.weights.meeting import Meeting
from drmas.weights.wire import Bucket


class DiskOutbox:
    transport = "disk"
    device = torch.device("cpu")

    def __init__(self, folder: Path) -> None:
        """`folder` is this policy's alone. It is made if it isn't there, and has the same path on all hosts."""
        self._parent, self._folder = folder, None
        self._numbers = itertools.count(1)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def begin(self, meeting: Meeting, buckets: Sequence[Bucket]) -> dict[str, Any]:
        for left_over in self._parent.glob("update-*"):  # by this process, or by one that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        folder = self._parent / f"update-{next(self._numbers)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unusable(f"{folder} can't be made: {error.strerror}") from error
        self._folder = folder
        return {"folder": str(folder)}

    def room(self, bucket: Bucket) -> torch.Tensor:
        if self._buffer.numel() < bucket.num_bytes:
            self._buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        return self._buffer[: bucket.num_bytes]

    def seal(self, bucket: Bucket, payload: torch.Tensor) -> None:
        path = file_of(self._folder, bucket)
        unfinished = path.with_suffix(".part")
        try:
            save_file({slot.name: slot.view(payload) for slot in bucket.slots}, unfinished)
            unfinished.rename(path)
        except (OSError, SafetensorError) as error:
            raise Unusable(f"{path} can't be written: {error}") from error

    def wait(self) -> None:
        pass

    def deliver(self, bucket: Bucket, payload: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        self.end()


class DiskInbox:
    staged = True
    overlaps = False

    def __init__(self) -> None:
        self._folder = Path()

    def begin(self, said: dict[str, Any]) -> None:
        self._folder = Path(said["folder"])
        if not self._folder.is_dir():
            raise Unusable(f"there is no folder {self._folder} on the engine's host; trainer and engines must see the same")

    def take(self, bucket: Bucket) -> torch.Tensor:
        path = file_of(self._folder, bucket)
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise Unusable(f"{path} can't be read: {error}") from error
        if said := _difference(bucket, found):
            raise Unusable(f"{path} {said}")
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for slot in bucket.slots:
            slot.view(buffer).copy_(found[slot.name])
        return buffer

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


def file_of(folder: Path, bucket: Bucket) -> Path:
    """Named by where the bucket starts, which no two of an update have in common."""
    return folder / f"{bucket.start:015d}.safetensors"


def _difference(bucket: Bucket, found: dict[str, torch.Tensor]) -> str:
    """What a file has that its bucket has not, or otherwise; "" where they agree."""
    expected = {slot.name: (slot.dtype, slot.shape) for slot in bucket.slots}
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}
    for name in [*expected, *described]:
        if expected.get(name) != described.get(name):
            return f"has {described.get(name, 'nothing')} as {name}; expected {expected.get(name, 'nothing')}"
    return ""
