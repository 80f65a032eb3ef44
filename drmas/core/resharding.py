"""Who sends which part of a policy's weights to which engine worker: arithmetic on shapes, without tensors and communication.

A trainer rank holds regions of the whole Hugging Face tensors, cut as `policy.convert` cuts them; an engine worker needs
regions of them, cut as vLLM cuts them. Where the two overlap there is something to send.

    trainer_regions(rank): the regions that it holds, and where they lie in its shards  ─┐
                                                                                         ├─▶ plan: rounds of messages
    worker_regions(rank): the region that it needs of every tensor                      ─┘

Every end of a transfer makes the plan for itself, from the same numbers, and compares its digest with the others'. A tensor of
one dimension counts as one of a single column. Called by `drmas.weights.shards`; `policy.shard_source` describes the model.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

from drmas.errors import ConfigError

Arrangement = Literal["copy", "rows", "columns", "qkv", "gate_up"]
"""How a parameter lies on the tensor-parallel ranks. copy: the same on every one; rows: a vocabulary, padded at its end until
it can be cut evenly; columns: cut evenly along the second dimension; qkv: query, key and value interleaved by key-value head,
then cut by rows; gate_up: each of the two cut by rows, then joined per rank."""

VOCABULARY_MULTIPLE = 64
"""vLLM pads a vocabulary to a multiple of this (`DEFAULT_VOCAB_PADDING_SIZE`), then cuts it evenly."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the trainer's whole model: the Hugging Face tensors (name, shape) that it holds.

    `layer` counts from 0; -1 is what stands before the first one, the number of layers what stands behind the last one.
    """

    layer: int
    arrangement: Arrangement
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Tensors:
    """All parameters of a model, in one order on every end; a tied head comes once, as the embedding."""

    parameters: tuple[Parameter, ...]
    layers: int
    kv_heads: int
    itemsize: int
    """Bytes per element, of every tensor."""

    @cached_property
    def names(self) -> list[str]:
        """Of the tensors, by the index that pieces call them by."""
        return [name for parameter in self.parameters for name, _ in parameter.tensors]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [shape for parameter in self.parameters for _, shape in parameter.tensors]


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """How a policy's ranks share its model. Ranks are numbered as Megatron does by "tp-cp-dp-pp": tp varies fastest."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def place(self, rank: int) -> tuple[int, int]:
        """(tensor-parallel rank, pipeline stage)"""
        return rank % self.tp, rank // (self.tp * self.cp * self.dp)

    def holders(self, tp: int, stage: int) -> list[int]:
        """The ranks at that place: the replicas of one shard."""
        copies = self.cp * self.dp
        return [tp + self.tp * (copy + copies * stage) for copy in range(copies)]


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """The engine workers of a policy: `replicas` engines of `tp` workers each, one engine after the other."""

    tp: int = 1
    replicas: int = 1

    @property
    def workers(self) -> int:
        return self.tp * self.replicas


class Region(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a whole tensor."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def size(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def overlap(self, other: Region) -> Region | None:
        """What lies in both; None where that is nothing."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Region(top, bottom, left, right) if top < bottom and left < right else None


class Held(NamedTuple):
    """A region of tensor number `tensor`, whose corner lies at [row, column] of the rank's shard of parameter `parameter`."""

    parameter: int
    tensor: int
    region: Region
    row: int
    column: int


class Piece(NamedTuple):
    """A region of a tensor on its way. [row, column] is its corner in the sender's shard; see `Held`."""

    parameter: int
    tensor: int
    region: Region
    row: int
    column: int


class Message(NamedTuple):
    """What `source`, a trainer rank, sends `destination`, a worker, in one round: the pieces' rows, one after the other."""

    source: int
    destination: int
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        return sum(piece.region.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds`: messages that go at the same time. `digest`: 62 bits of a hash over all that the ends must agree on."""

    rounds: tuple[tuple[Message, ...], ...]
    itemsize: int
    digest: int

    def sent(self, source: int) -> int:
        """Bytes that a trainer rank sends."""
        return self.itemsize * sum(message.elements for message in chain(*self.rounds) if message.source == source)


def trainer_regions(tensors: Tensors, layout: TrainerLayout, rank: int) -> list[Held]:
    """What `rank` holds, padding left out. The last stage's copy of a tied embedding isn't counted: it is never a source.

    ConfigError: the model doesn't divide into the layout's parts.
    """
    tp, stage = layout.place(rank)
    held, first = [], 0
    for index, parameter in enumerate(tensors.parameters):
        if _stage(parameter, tensors.layers, layout.pp) == stage:
            for offset, region, row, column in _shard(parameter, tensors.kv_heads, layout.tp, tp):
                held.append(Held(index, first + offset, region, row, column))
        first += len(parameter.tensors)
    return held


def worker_regions(tensors: Tensors, tp: int, rank: int) -> list[Region]:
    """The region of every tensor that tensor-parallel rank `rank` of an engine of `tp` workers needs; it may be empty.

    ConfigError: vLLM couldn't cut the model so.
    """
    return [region for parameter in tensors.parameters for region in _needed(parameter, tensors.kv_heads, tp, rank)]


def plan(tensors: Tensors, trainer: TrainerLayout, workers: WorkerLayout, *, bucket_bytes: int) -> Plan:
    """Every byte that a worker needs, once, from a rank that holds it; of several ranks from the one that sends least so far.

    In a round no rank sends and no worker receives more than `bucket_bytes`, but for a single row that is larger. Larger pieces
    are cut by rows.
    """
    queues = _queues(tensors, trainer, workers, bucket_bytes)
    rounds = tuple(_rounds(queues, workers, bucket_bytes // tensors.itemsize))
    return Plan(rounds, tensors.itemsize, _digest(tensors, trainer, workers, rounds))


def _stage(parameter: Parameter, layers: int, stages: int) -> int:
    """The pipeline stage that holds it. Layers are cut evenly."""
    if layers % stages:
        raise ConfigError(f"{layers} layers don't divide into {stages} pipeline stages")
    return min(max(parameter.layer, 0), layers - 1) * stages // layers


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], shape[1] if len(shape) > 1 else 1


def _shard(parameter: Parameter, kv_heads: int, tp: int, rank: int) -> Iterator[tuple[int, Region, int, int]]:
    """(number of the tensor in the parameter, region, row, column) of what a tensor-parallel rank of the trainer holds."""
    rows, columns = _sides(parameter.tensors[0][1])
    match parameter.arrangement:
        case "copy":
            yield 0, Region(0, rows, 0, columns), 0, 0
        case "rows":
            share = -(-rows // tp)
            if rank * share < rows:
                yield 0, Region(rank * share, min((rank + 1) * share, rows), 0, columns), 0, 0
        case "columns":
            share = _divided(columns, tp, parameter)
            yield 0, Region(0, rows, rank * share, (rank + 1) * share), 0, 0
        case "gate_up":
            share = _divided(rows, tp, parameter)
            for number in (0, 1):
                yield number, Region(rank * share, (rank + 1) * share, 0, columns), number * share, 0
        case "qkv":
            share = _divided(sum(shape[0] for _, shape in parameter.tensors), tp, parameter)
            for number, region, row in _interleaved(parameter, kv_heads):
                top, bottom = max(row, rank * share), min(row + region.bottom - region.top, (rank + 1) * share)
                if top < bottom:
                    shift = region.top - row
                    yield number, Region(top + shift, bottom + shift, 0, columns), top - rank * share, 0


def _interleaved(parameter: Parameter, kv_heads: int) -> Iterator[tuple[int, Region, int]]:
    """(number of the tensor, region, first row) of the blocks of a whole qkv parameter: query, key, value, head by head."""
    row = 0
    for head in range(kv_heads):
        for number, (_, shape) in enumerate(parameter.tensors):
            rows, columns = _sides(shape)
            block = _divided(rows, kv_heads, parameter)
            yield number, Region(head * block, (head + 1) * block, 0, columns), row
            row += block


def _needed(parameter: Parameter, kv_heads: int, tp: int, rank: int) -> Iterator[Region]:
    """Of each of the parameter's tensors, what a worker needs."""
    for number, (_, shape) in enumerate(parameter.tensors):
        rows, columns = _sides(shape)
        match parameter.arrangement:
            case "copy":
                yield Region(0, rows, 0, columns)
            case "rows":
                padded = -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
                share = _divided(padded, tp, parameter)
                yield Region(min(rank * share, rows), min((rank + 1) * share, rows), 0, columns)
            case "columns":
                share = _divided(columns, tp, parameter)
                yield Region(0, rows, rank * share, (rank + 1) * share)
            case "gate_up":
                share = _divided(rows, tp, parameter)
                yield Region(rank * share, (rank + 1) * share, 0, columns)
            case "qkv":
                head = _divided(parameter.tensors[1][1][0], kv_heads, parameter)
                parts = min(tp, kv_heads) if number else tp  # several workers may need the same key-value head
                share, copies = _divided(rows // head, parts, parameter) * head, _divided(tp, parts, parameter)
                top = rank // copies * share
                yield Region(top, top + share, 0, columns)


def _divided(size: int, parts: int, parameter: Parameter) -> int:
    share, rest = divmod(size, parts)
    if rest:
        raise ConfigError(f"{parameter.tensors[0][0]} can't be cut evenly: {size} into {parts}")
    return share


_Queues = list[dict[int, list[Piece]]]
"""[worker][trainer rank]: the pieces, in the model's order."""


def _queues(tensors: Tensors, trainer: TrainerLayout, workers: WorkerLayout, bucket_bytes: int) -> _Queues:
    """All pieces by who needs them and who is to send them."""
    holders: dict[Held, list[int]] = defaultdict(list)
    for tp in range(trainer.tp):
        for stage in range(trainer.pp):
            replicas = trainer.holders(tp, stage)
            for held in trainer_regions(tensors, trainer, replicas[0]):
                holders[held] += replicas
    needed = [worker_regions(tensors, workers.tp, rank) for rank in range(workers.tp)]
    queues: _Queues = [defaultdict(list) for _ in range(workers.workers)]
    sent = [0] * trainer.ranks
    for held in sorted(holders):
        for rank in range(workers.tp):
            common = held.region.overlap(needed[rank][held.tensor])
            if common is None:
                continue
            row, column = held.row + common.top - held.region.top, held.column + common.left - held.region.left
            most_rows = max(1, bucket_bytes // ((common.right - common.left) * tensors.itemsize))
            for piece in _cut(Piece(held.parameter, held.tensor, common, row, column), most_rows):
                for worker in range(rank, workers.workers, workers.tp):
                    source = min(holders[held], key=sent.__getitem__)
                    sent[source] += piece.region.size
                    queues[worker][source].append(piece)
    return queues


def _cut(piece: Piece, rows: int) -> Iterator[Piece]:
    """The piece in parts of at most `rows` rows."""
    region = piece.region
    for top in range(region.top, region.bottom, rows):
        part = region._replace(top=top, bottom=min(top + rows, region.bottom))
        yield piece._replace(region=part, row=piece.row + top - region.top)


def _rounds(queues: _Queues, workers: WorkerLayout, capacity: int) -> Iterator[tuple[Message, ...]]:
    """Fill rounds until nothing is left. `capacity` is in elements.

    Each worker goes through its sources in an order of its own, so that the replicas of an engine don't all wait for the same
    stage; what a round has no room for comes in the next one.
    """
    left = []
    for worker, queue in enumerate(queues):
        sources, start = sorted(queue), worker // workers.tp * len(queue) // workers.replicas
        left.append({source: queue[source][::-1] for source in sources[start:] + sources[:start]})  # the first is on top
    number = 0
    while any(left):
        sent: dict[int, int] = defaultdict(int)
        messages = []
        for turn in range(len(left)):
            worker = (number + turn) % len(left)
            received = 0
            for source in list(left[worker]):
                pieces, stack = [], left[worker][source]
                while stack:
                    size = stack[-1].region.size
                    if (received and received + size > capacity) or (sent[source] and sent[source] + size > capacity):
                        break
                    pieces.append(stack.pop())
                    received += size
                    sent[source] += size
                if pieces:
                    messages.append(Message(source, worker, tuple(pieces)))
                if not stack:
                    del left[worker][source]
        yield tuple(sorted(messages))
        number += 1


def _digest(tensors: Tensors, trainer: TrainerLayout, workers: WorkerLayout, rounds: tuple[tuple[Message, ...], ...]) -> int:
    """Over the tensors, the layouts, and every message in its order."""
    numbers = array("q")
    for messages in rounds:
        numbers.append(len(messages))
        for source, destination, pieces in messages:
            numbers.extend((source, destination, len(pieces)))
            for parameter, tensor, region, row, column in pieces:
                numbers.extend((parameter, tensor, *region, row, column))
    digest = hashlib.blake2b(repr((tensors, trainer, workers)).encode(), digest_size=8)
    digest.update(numbers.tobytes())
    return int.from_bytes(digest.digest(), "big") >> 2
