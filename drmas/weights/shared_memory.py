"""The bytes of an update in memory that the trainer and the workers of engines on its host share: nothing travels.

On the host: an anonymous file in memory (memfd) as large as the update, which the workers map through /proc and load from
without a copy. It has no name that could be left over, and no limit but the machine's memory. Between processes on one GPU: one
buffer of a bucket's size, by a handle of CUDA IPC; a worker copies each bucket out of it before the next is filled. The CUDA
way is written against torch's source and has not been run: it needs a GPU.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any

import torch

from drmas.weights.carrier import Unusable
from drmas.weights.meeting import Meeting
from drmas.weights.wire import Bucket


class MemoryOutbox:
    """The memory lives as long as this, and is used again by every update: fresh pages cost as much as the copy into them."""

    transport = "shared-memory"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def begin(self, meeting: Meeting, buckets: Sequence[Bucket]) -> dict[str, Any]:
        num_bytes = buckets[-1].start + buckets[-1].num_bytes
        if self._memory.numel() < num_bytes:
            self.close()
            self._descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, num_bytes)
            self._memory = mapped(_path(os.getpid(), self._descriptor), num_bytes)
        return {"pid": os.getpid(), "descriptor": self._descriptor, "bytes": self._memory.numel()}

    def room(self, bucket: Bucket) -> torch.Tensor:
        return self._memory[bucket.start : bucket.start + bucket.num_bytes]

    def seal(self, bucket: Bucket, payload: torch.Tensor) -> None:
        pass

    def wait(self) -> None:
        pass

    def deliver(self, bucket: Bucket, payload: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class MemoryInbox:
    """Maps what the trainer tells of, once."""

    staged = True
    overlaps = False

    def __init__(self) -> None:
        self._mapped: dict[str, Any] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def begin(self, said: dict[str, Any]) -> None:
        if said == self._mapped:
            return
        path = _path(said["pid"], said["descriptor"])
        try:
            self._memory = mapped(path, said["bytes"])
        except (OSError, RuntimeError) as error:
            where = "the engine must run on the trainer's host"
            raise Unusable(f"the trainer's memory {path} can't be mapped ({error}); {where}") from error
        self._mapped = said

    def take(self, bucket: Bucket) -> torch.Tensor:
        return self._memory[bucket.start : bucket.start + bucket.num_bytes]

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self._memory, self._mapped = torch.empty(0, dtype=torch.uint8), {}


class CudaOutbox:
    """One buffer on the trainer's GPU; a bucket is in it from the vote before its delivery to the one after it was taken."""

    transport = "shared-memory"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._meeting: Meeting | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._said: dict[str, Any] = {}

    def begin(self, meeting: Meeting, buckets: Sequence[Bucket]) -> dict[str, Any]:
        self._meeting, largest = meeting, max(bucket.num_bytes for bucket in buckets)
        if self._buffer.numel() < largest:
            self._buffer = torch.empty(largest, dtype=torch.uint8, device=self.device)
            self._said = {"gpu": _gpu(self.device), "handle": _handle(self._buffer)}
        return self._said

    def room(self, bucket: Bucket) -> torch.Tensor:
        return self._buffer[: bucket.num_bytes]

    def seal(self, bucket: Bucket, payload: torch.Tensor) -> None:
        torch.cuda.synchronize(self.device)

    def wait(self) -> None:
        pass

    def deliver(self, bucket: Bucket, payload: torch.Tensor) -> None:
        self._meeting.agree(content=bucket.content)

    def end(self) -> None:
        pass

    def close(self) -> None:
        self._meeting, self._said = None, {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)


class CudaInbox:
    """The whole model has no second place on a GPU: buckets are loaded as they come."""

    staged = False
    overlaps = False

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._mapped = meeting, {}
        self._buffer: torch.Tensor | None = None

    def begin(self, said: dict[str, Any]) -> None:
        if said == self._mapped:
            return
        devices = [index for index in range(torch.cuda.device_count()) if _gpu(torch.device("cuda", index)) == said["gpu"]]
        if not devices:
            raise Unusable(f"the engine doesn't see the trainer's GPU {said['gpu']}; it must run on that one")
        self._buffer, self._mapped = _opened(said["handle"], devices[0]), said

    def take(self, bucket: Bucket) -> torch.Tensor:
        buffer = self._buffer[: bucket.num_bytes].clone()
        torch.cuda.synchronize(buffer.device)
        self._meeting.agree(content=bucket.content)
        return buffer

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self._buffer, self._mapped = None, {}


def mapped(path: str, num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8: a file's bytes, written through to it. OSError or RuntimeError: it can't be opened."""
    with open(path, "r+b"):  # says why it can't, in the system's words
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _path(pid: int, descriptor: int) -> str:
    return f"/proc/{pid}/fd/{descriptor}"


def _gpu(device: torch.device) -> str:
    """The name of a GPU that all processes of a host have for it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _handle(buffer: torch.Tensor) -> list[str | int | bool]:
    """What another process needs to open `buffer`, but the number that it has for the GPU."""
    parts = buffer.untyped_storage()._share_cuda_()[1:]
    return [base64.b64encode(each).decode() if isinstance(each, bytes) else each for each in parts]


def _opened(handle: list[str | int | bool], device: int) -> torch.Tensor:
    """[n] uint8 on the GPU of number `device`: another process's memory."""
    parts = [base64.b64decode(each) if isinstance(each, str) else each for each in handle]
    storage = torch.UntypedStorage._new_shared_cuda(device, *parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
