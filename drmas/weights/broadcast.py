"""The bytes of a bucket by one broadcast from the trainer to all workers: by gloo from host to host, by NCCL from GPU to GPU.

The NCCL way is written against torch's source and has not been run: it needs GPUs, and one for every end, since NCCL refuses
two ends on one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drmas.weights.meeting import Meeting
from drmas.weights.transport import in_background
from drmas.weights.wire import Bucket

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()  # over that variable


class BroadcastOutbox:
    """Buckets are filled on `device`. Two buffers take turns, since fresh memory costs more than the copy."""

    transport = "broadcast"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._meeting: Meeting | None = None
        self._way: Way | None = None
        self._buffer, self._other = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))

    def begin(self, meeting: Meeting, buckets: Sequence[Bucket]) -> dict[str, Any]:
        if meeting is not self._meeting:
            self.close()
            self._meeting, self._way = meeting, way(meeting, self.device)
        return {}

    def room(self, bucket: Bucket) -> torch.Tensor | None:
        if len(bucket.slots) == 1:
            return None
        self._buffer, self._other = self._other, self._buffer
        if self._buffer.numel() < bucket.num_bytes:
            self._buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer[: bucket.num_bytes]

    def seal(self, bucket: Bucket, payload: torch.Tensor) -> None:
        pass

    def wait(self) -> None:
        self._way.wait()

    def deliver(self, bucket: Bucket, payload: torch.Tensor) -> None:
        self._way.broadcast(payload, bucket.content)

    def end(self) -> None:
        pass

    def close(self) -> None:
        if self._way is not None:
            self._way.close()
        self._meeting = self._way = None


class BroadcastInbox:
    """Every bucket gets memory of its own: it is held until it is loaded, on a GPU only until its layers are."""

    overlaps = True

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self.staged = device.type == "cpu"
        self._way, self._device = way(meeting, device), device

    def begin(self, said: dict[str, Any]) -> None:
        pass

    def take(self, bucket: Bucket) -> torch.Tensor:
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        self._way.broadcast(buffer, bucket.content)
        return buffer

    def wait(self) -> None:
        self._way.wait()

    def close(self) -> None:
        self._way.close()


class Way:
    """Over the meeting's own group. One broadcast at a time."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._wait: Callable[[], None] | None = None

    def broadcast(self, buffer: torch.Tensor, content: str) -> None:
        """Begin with one; both ends keep `buffer` until `wait`."""
        self._wait = self._begin(buffer, content)

    def wait(self) -> None:
        waiting, self._wait = self._wait, None
        if waiting is not None:
            waiting()

    def _begin(self, buffer: torch.Tensor, content: str) -> Callable[[], None]:
        return self._meeting.broadcast(buffer, content)

    def close(self) -> None:
        pass


class NcclWay(Way):
    """Over a communicator of the same ends. Errors and timeouts are raised where somebody waits: torch's watchdog, which ends
    the process for them, isn't started for this group."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        """RuntimeError: an end is gone, or doesn't come within the meeting's timeout."""
        super().__init__(meeting)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=meeting.timeout_seconds)
        store = dist.PrefixStore("nccl", meeting.store)
        with torch.cuda.device(device), _blocking_wait():
            self._group = dist.ProcessGroupNCCL(store, meeting.number, meeting.size, options)
        connecting = in_background(self._group.eager_connect_single_device, device)  # NCCL knows no bound for it
        with meeting.reported("the others' GPUs"):
            try:
                connecting.result(meeting.timeout_seconds)
            except TimeoutError:
                self._group.abort()
                raise RuntimeError(f"NCCL made no communicator within {meeting.timeout_seconds:g} s") from None

    def _begin(self, buffer: torch.Tensor, content: str) -> Callable[[], None]:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self._group.broadcast([buffer], options)

        def wait() -> None:
            with self._meeting.reported(content):
                work.wait(timedelta(seconds=self._meeting.timeout_seconds))

        return wait

    def close(self) -> None:
        self._group.abort()


@contextlib.contextmanager
def _blocking_wait() -> Iterator[None]:
    """Groups that are made meanwhile have no watchdog."""
    with _environment:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before


def way(meeting: Meeting, device: torch.device) -> Way:
    return Way(meeting) if device.type == "cpu" else NcclWay(meeting, device)
