"""A worker's side of the transports that send whole tensors, behind `worker`: vote, take every bucket, verify, hand over.

Where there is room for a whole update beside the model, all of it is held before the first layer changes: whatever goes wrong
on the way leaves the model as it was. On a GPU there is no such room, and buckets are loaded as they come. `stage` takes an
update in a thread of its own, while the engine goes on. Imports torch, never vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from drmas.weights.broadcast import BroadcastInbox
from drmas.weights.carrier import Inbox, Unusable
from drmas.weights.checksum import checksum
from drmas.weights.disk import DiskInbox
from drmas.weights.meeting import Ends, Meeting
from drmas.weights.shared_memory import CudaInbox, MemoryInbox
from drmas.weights.staged import Staged, given_away
from drmas.weights.wire import Bucket, Named, Update, address_towards, digest, plan_buckets, store_at

Check = Callable[[Iterable[Named]], None]
Held = list[tuple[Bucket, torch.Tensor]]


class BucketReceiver:
    """One worker, in its meeting with the trainer and all other workers of the policy's engines."""

    def __init__(self, init: dict[str, Any], number: int, device: torch.device) -> None:
        """Join the meeting that the trainer told of as its end `number`. `device`: the one of the worker's model.

        RuntimeError: an end didn't come within the timeout.
        """
        self._transport, self._bucket_bytes, self._key = init["transport"], init["bucket_bytes"], init["key"]
        address, timeout = init["master_address"], init["timeout_seconds"]
        ends = Ends((0,), init["engine_workers"], init["engines"])
        store = store_at(address, init["master_port"], timeout)
        self._meeting = Meeting(store, ends, number, address=address_towards(address), timeout_seconds=timeout)
        self._inbox = _inbox(init, self._meeting, device)
        self._staged: Staged[Held] = Staged(self._meeting)

    def stage(self, said: dict[str, Any]) -> None:
        """Take an update in the background, until `receive` is told that it was staged."""
        self._staged.begin(lambda: list(self._arriving(said, check=None)))

    def receive(self, said: dict[str, Any], check: Check) -> Iterator[Named]:
        """The tensors of an update, to be loaded one by one; what was loaded is let go.

        `check` gets all of them without data, and raises ValueError where the model can't take them. Refused: an end found a
        fault. RuntimeError: an end is gone or silent.
        """
        arriving = self._took_staged(check) if said.get("staged") else self._arriving(said, check)
        return _unpacked(given_away(list(arriving)) if self._inbox.staged else arriving)

    def close(self) -> None:
        self._meeting.close()
        self._inbox.close()

    def _took_staged(self, check: Check) -> Held:
        held = self._staged.taken()
        self._meeting.agree(_fault(check, [bucket for bucket, _ in held]), content="what was staged")
        return held

    def _arriving(self, said: dict[str, Any], check: Check | None) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Every bucket, verified; the last one only when all ends have all of theirs."""
        update = Update(**said["update"])
        buckets = plan_buckets(update, self._bucket_bytes)
        fault = _fault(check, buckets) or self._begin(said["carrier"])
        self._meeting.agree(fault, plan=digest(self._transport, update, buckets), content=buckets[0].content)
        fault, held = "", deque()
        for bucket in buckets:
            expected = self._meeting.agree(fault, content=bucket.content)
            try:
                held.append((bucket, self._inbox.take(bucket), expected))
            except Unusable as error:
                fault = f"{error}; see {self._key}"
                continue
            if len(held) > self._inbox.overlaps and bucket is not buckets[-1]:
                bucket, buffer, expected = held.popleft()
                fault = _corruption(bucket, buffer, expected)
                if not fault:
                    yield bucket, buffer
            self._inbox.wait()
        for each in held:
            fault = fault or _corruption(*each)
        self._meeting.agree(fault, content="what was sent")
        yield from ((bucket, buffer) for bucket, buffer, _ in held)

    def _begin(self, said: dict[str, Any]) -> str:
        try:
            self._inbox.begin(said)
        except Unusable as error:
            return f"{error}; see {self._key}"
        return ""


def _inbox(init: dict[str, Any], meeting: Meeting, device: torch.device) -> Inbox:
    if init["transport"] == "broadcast":
        return BroadcastInbox(meeting, device if init["device"] == "cuda" else torch.device("cpu"))
    if init["transport"] == "disk":
        return DiskInbox()
    return MemoryInbox() if init["device"] == "cpu" else CudaInbox(meeting)


def _fault(check: Check | None, buckets: list[Bucket]) -> str:
    """Why the model can't take these tensors; "" if it can."""
    try:
        if check is not None:
            check((slot.name, slot.stand_in()) for bucket in buckets for slot in bucket.slots)
    except ValueError as error:
        return str(error)
    return ""


def _corruption(bucket: Bucket, buffer: torch.Tensor, expected: int) -> str:
    found = checksum(buffer)
    return "" if found == expected else f"{bucket.content} arrived corrupt: checksum {found:016x}, sent {expected:016x}"


def _unpacked(arriving: Iterator[tuple[Bucket, torch.Tensor]]) -> Iterator[Named]:
    for bucket, buffer in arriving:
        for slot in bucket.slots:
            yield slot.name, slot.view(buffer)
