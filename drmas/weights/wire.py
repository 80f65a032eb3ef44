"""What the ends of a transfer agree on: where they meet, the message, the buckets, and the checksum.

An update is one control message (`Update`, through the engine's control channel); its tensors travel packed in buckets, which
every end plans for itself from the message. `digest` of the plan is what the ends compare before anything is sent. Used by
all transports, on both sides; imports torch, never vLLM.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "drmas"
"""What vLLM calls the workers' side (`weight_transfer_config`)."""
LOOPBACK = "127.0.0.1"
ALIGNMENT = 16  # bytes; a float32 view must not start in the middle of an element after a bfloat16 tensor of odd length
PAGE = 4096  # bytes; every bucket of memory that is mapped starts at a page

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Update:
    """What is about to be sent, in order: Hugging Face names, torch dtype names, full shapes."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"an update of {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes; "
                "expected as many of each"
            )

    @classmethod
    def of(cls, metadata: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> Update:
        return cls(
            names=[name for name, _, _ in metadata],
            dtypes=[str(dtype).removeprefix("torch.") for _, dtype, _ in metadata],
            shapes=[list(shape) for _, _, shape in metadata],
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in its bucket; `offset` and `num_bytes` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def bytes_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """[num_bytes] uint8 inside the bucket's `buffer`, without a copy."""
        return buffer[self.offset : self.offset + self.num_bytes]

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor inside `buffer` (uint8), without a copy."""
        return self.bytes_of(buffer).view(self.dtype).view(self.shape)

    def stand_in(self) -> torch.Tensor:
        """A tensor of this kind without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Bucket:
    """`start`: where the bucket lies, in bytes, when all of an update are put one behind the other."""

    slots: tuple[Slot, ...]
    start: int
    num_bytes: int

    @property
    def content(self) -> str:
        """Its tensors, in words."""
        first, last = self.slots[0].name, self.slots[-1].name
        return first if first == last else f"{first} to {last}"


def plan_buckets(update: Update, bucket_bytes: int) -> list[Bucket]:
    """Consecutive tensors together up to `bucket_bytes`; a larger tensor gets a bucket of its own. Same on all ends."""
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    start = end = 0
    for name, dtype_name, shape in zip(update.names, update.dtypes, update.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        offset = _aligned(end, ALIGNMENT)
        if slots and offset + num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), start, end))
            start, slots, offset = start + _aligned(end, PAGE), [], 0
        slots.append(Slot(name, dtype, tuple(shape), offset, num_bytes))
        end = offset + num_bytes
    return [*buckets, Bucket(tuple(slots), start, end)] if slots else buckets


def digest(transport: str, update: Update, buckets: Sequence[Bucket]) -> int:
    """62 bits of a hash over everything that the ends of a transfer must have in common before they start it."""
    plan = [[bucket.start, bucket.num_bytes, *(slot.offset for slot in bucket.slots)] for bucket in buckets]
    text = json.dumps([transport, update.to_json(), plan])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def store_at(address: str, port: int, timeout_seconds: float) -> dist.Store:
    """The rendezvous that another process made. RuntimeError: there is none within the timeout."""
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))


def address_towards(host: str) -> str:
    """This host's own address as seen from `host`: that of the interface over which the system would reach it. Sends nothing.

    OSError: there is no way there.
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


class Store:
    """The rendezvous of one group, listening on a free port from its first moment (no port is guessed or lost)."""

    def __init__(self, timeout_seconds: float, address: str = LOOPBACK) -> None:
        """`address` is this host's, as the others see it; nothing listens on any other."""
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port: int = listener.getsockname()[1]
        self.store = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _aligned(end: int, unit: int) -> int:
    return -(-end // unit) * unit
