"""What both ends of the gloo weight transport agree on: the messages, the buckets, the group and the vote.

An update is one control message (`GlooUpdate`, through the engine's control channel), a first vote (the workers have compared
the message with their model, and the group still works), and then, for every bucket, one vote and one broadcast. The vote is a
sum over all ranks of (failed, checksum): whoever found something wrong says so there, everybody stops at the same place, and
nobody is left waiting in a collective. One more vote ends the update, so that all workers load or none does. Used by `sender`
(rank 0) and `worker` (the ranks after it); imports torch, never vLLM.
"""

from __future__ import annotations

import math
import socket
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

BACKEND = "drmas-gloo"
LOOPBACK = "127.0.0.1"
ALIGNMENT = 16  # bytes; a float32 view must not start in the middle of an element after a bfloat16 tensor of odd length


@dataclass
class GlooInit:
    """How a worker joins the trainer's group. A worker's rank is `rank_offset` plus its rank in the engine."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    bucket_bytes: int
    timeout_seconds: float


@dataclass
class GlooUpdate:
    """What is about to be sent, in order: Hugging Face names, torch dtype names, full shapes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"an update of {len(self.names)} names, {len(self.dtype_names)} dtypes and {len(self.shapes)} shapes; "
                "expected as many of each"
            )

    @classmethod
    def of(cls, metadata: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> GlooUpdate:
        return cls(
            names=[name for name, _, _ in metadata],
            dtype_names=[str(dtype).removeprefix("torch.") for _, dtype, _ in metadata],
            shapes=[list(shape) for _, _, shape in metadata],
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in its bucket; `offset` and `num_bytes` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor inside `buffer` (uint8), without a copy."""
        return buffer[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    slots: tuple[Slot, ...]
    num_bytes: int


def plan_buckets(update: GlooUpdate, bucket_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors together up to `bucket_bytes`; a larger tensor gets a bucket of its own. Same on both ends."""
    slots: list[Slot] = []
    end = 0
    for name, dtype_name, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if slots and start + num_bytes > bucket_bytes:
            yield Bucket(tuple(slots), end)
            slots, start = [], 0
        slots.append(Slot(name, dtype, tuple(shape), start, num_bytes))
        end = start + num_bytes
    if slots:
        yield Bucket(tuple(slots), end)


def checksum(buffer: torch.Tensor) -> int:
    """CRC-32 of a contiguous uint8 CPU tensor."""
    return zlib.crc32(buffer.numpy())


def free_port() -> int:
    """A loopback port that was free a moment ago, for those who insist on binding it themselves."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return listener.getsockname()[1]


class Store:
    """The rendezvous of one group, listening on a free loopback port from its first moment (no port is guessed or lost)."""

    def __init__(self, timeout_seconds: float) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        self.port: int = listener.getsockname()[1]
        self.store = dist.TCPStore(
            LOOPBACK,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class Group:
    """A gloo group between one trainer (rank 0) and the engine's workers; torch's default group is left alone."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, timeout_seconds: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, options)
        self._broadcast_options = dist.BroadcastOptions()
        self._broadcast_options.rootRank = 0
        self._broadcast_options.rootTensor = 0

    @classmethod
    def join(cls, init: GlooInit, rank: int) -> Group:
        """A worker's way in; the trainer made the store and waits."""
        timeout = timedelta(seconds=init.timeout_seconds)
        store = dist.TCPStore(init.master_address, init.master_port, is_master=False, timeout=timeout)
        return cls(store, rank=rank, world_size=init.world_size, timeout_seconds=init.timeout_seconds)

    def vote(self, failed: bool, crc: int = 0) -> tuple[bool, int]:
        """(nobody failed, the sender's checksum): a sum over the ranks, to which only the sender adds a checksum."""
        ballot = torch.tensor([int(failed), crc], dtype=torch.int64)
        self._group.allreduce([ballot]).wait()
        return int(ballot[0]) == 0, int(ballot[1])

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Rank 0's `buffer` (uint8) into everybody's. RuntimeError: a peer is gone, or the timeout passed."""
        self._group.broadcast([buffer], self._broadcast_options).wait()

    def close(self) -> None:
        self._group.shutdown()
