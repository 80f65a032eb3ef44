"""How the bytes of a bucket get from the trainer to the workers, while `buckets` and `receiver` do all that is common.

    Outbox (trainer)                                  Inbox (each worker)
    begin: what the workers must know of an update ─▶ begin
    room: where a bucket is to be filled
    seal: it is filled
    wait: the bucket before has left
                 ─────────── all ends vote, with the checksum ───────────
    deliver ────────────────────── bytes ───────────▶ take; wait: the bucket is there, to be verified
    end: the workers have loaded everything

So a bucket may be on its way while the next is filled, and while the one before is verified.

Implemented by `broadcast`, `shared_memory` and `disk`; each has both ends in one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from drmas.weights.meeting import Meeting
from drmas.weights.wire import Bucket


class Unusable(Exception):
    """This way doesn't exist here: a folder isn't there, memory can't be mapped. The message says which, and for whom."""


class Outbox(Protocol):
    """The trainer's end, for the life of one connection. Unusable and OSError: the bytes can't be brought on their way."""

    transport: str
    device: torch.device

    def begin(self, meeting: Meeting, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Before an update: what is said to the inboxes, as JSON."""

    def room(self, bucket: Bucket) -> torch.Tensor | None:
        """[num_bytes] uint8 to be filled, which isn't that of the bucket before. None: a tensor that is a bucket by itself can
        be sent from where it lies."""

    def seal(self, bucket: Bucket, payload: torch.Tensor) -> None:
        """The bucket is filled; the workers don't know yet."""

    def wait(self) -> None:
        """Until what `deliver` began is done; nothing where it began nothing."""

    def deliver(self, bucket: Bucket, payload: torch.Tensor) -> None:
        """All ends are ready for it. Begins."""

    def end(self) -> None:
        """Nobody needs the update any more."""

    def close(self) -> None: ...


class Inbox(Protocol):
    """A worker's end."""

    staged: bool
    """A whole update may lie here before the first layer changes; otherwise buckets are loaded as they come."""

    def begin(self, said: dict[str, Any]) -> None:
        """`said` is what the outbox's `begin` returned. Unusable: it can't be reached from here."""

    overlaps: bool
    """Whether a bucket is only there after `wait`."""

    def take(self, bucket: Bucket) -> torch.Tensor:
        """[num_bytes] uint8, valid until it is loaded."""

    def wait(self) -> None:
        """Until the bucket that was taken last is there."""

    def close(self) -> None: ...
