"""What the two ends of a shard sync agree on: what a worker is told when it joins, and the bytes of a message.

A message is 8 bytes that hold the checksum of the rest, and then the plan's pieces one after the other, each with its rows
closely packed. Used by `shards` and `shard_worker`; imports torch, never vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from drmas.core.resharding import Message, Parameter, Piece, Plan, Tensors, TrainerLayout, WorkerLayout, plan
from drmas.weights.checksum import checksum
from drmas.weights.meeting import Ends

HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Terms:
    """What every end makes the same plan from. `trainers` are the policy's ranks in the job, in the order of `layout`."""

    tensors: Tensors
    layout: TrainerLayout
    workers: WorkerLayout
    trainers: tuple[int, ...]
    dtype: torch.dtype
    bucket_bytes: int

    @property
    def ends(self) -> Ends:
        return Ends(self.trainers, self.workers.tp, self.workers.replicas)

    def plan(self) -> Plan:
        return plan(self.tensors, self.layout, self.workers, bucket_bytes=self.bucket_bytes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Terms:
        """ValueError, KeyError or TypeError: that is none."""
        tensors = said["tensors"]
        parameters = tuple(
            Parameter(each["layer"], each["arrangement"], tuple((name, tuple(shape)) for name, shape in each["tensors"]))
            for each in tensors["parameters"]
        )
        return cls(
            tensors=Tensors(**(tensors | {"parameters": parameters})),
            layout=TrainerLayout(**said["layout"]),
            workers=WorkerLayout(**said["workers"]),
            trainers=tuple(said["trainers"]),
            dtype=getattr(torch, said["dtype"]),
            bucket_bytes=said["bucket_bytes"],
        )


@dataclass
class ShardInit:
    """How a worker joins: its number in the meeting is `rank_offset` plus its rank in the engine. `terms`: `Terms.to_json`."""

    transport: str
    master_address: str
    master_port: int
    rank_offset: int
    timeout_seconds: float
    terms: dict[str, Any]
    device: str
    """The type of device that messages are on: cpu, or cuda for each worker's own."""


def content(message: Message, tensors: Tensors) -> str:
    """The tensors of a message, in words."""
    first, last = (tensors.names[piece.tensor] for piece in (message.pieces[0], message.pieces[-1]))
    return first if first == last else f"{first} to {last}"


def empty(message: Message, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[bytes] uint8, for a message to be received."""
    return torch.empty(HEADER_BYTES + message.elements * dtype.itemsize, dtype=torch.uint8, device=device)


def part(piece: Piece, shard: torch.Tensor) -> torch.Tensor:
    """[rows, columns]: the piece in its sender's shard [rows, columns], without a copy."""
    region = piece.region
    rows, columns = slice(piece.row, piece.row + region.bottom - region.top), region.right - region.left
    return shard[rows, piece.column : piece.column + columns]


def pack(message: Message, shard: Callable[[int], torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[bytes] uint8 on `device`: the message, of the values of `shard(parameter)` [rows, columns]."""
    buffer = empty(message, dtype, device)
    for piece, values in _places(message, buffer, dtype):
        values.copy_(part(piece, shard(piece.parameter)))
    buffer[:HEADER_BYTES].view(torch.int64)[0] = checksum(buffer[HEADER_BYTES:])
    return buffer


def unpack(message: Message, buffer: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The pieces and their values [rows, columns], views of `buffer`. ValueError: it isn't what its sender packed."""
    sent, found = int(buffer[:HEADER_BYTES].view(torch.int64)[0]), checksum(buffer[HEADER_BYTES:])
    if sent != found:
        raise ValueError(f"arrived corrupt: checksum {found:x}, sent {sent:x}")
    return _places(message, buffer, dtype)


def _places(message: Message, buffer: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[Piece, torch.Tensor]]:
    values, start = buffer[HEADER_BYTES:].view(dtype), 0
    for piece in message.pieces:
        rows, end = piece.region.bottom - piece.region.top, start + piece.region.size
        yield piece, values[start:end].view(rows, -1)
        start = end
