"""Fill a bucket on the host in one pass over memory: copy, look for NaN and Inf, and sum, while a piece is in a core's cache.

A bucket is cut into pieces, whatever lies in them; several threads take one after the other, and torch computes each within
the thread that took it: to wake others takes longer than a piece. Used by `buckets`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from threading import Barrier
from typing import NamedTuple

import torch

from drmas.weights.checksum import PIECE_BYTES, Checksum, checksum
from drmas.weights.source import is_finite
from drmas.weights.wire import Slot

MOST_THREADS = 4
"""More than these don't make memory faster."""


class _Part(NamedTuple):
    """A tensor of a bucket: its place, and its bytes where they are now ([n] uint8; None: at that place)."""

    slot: Slot
    source: torch.Tensor | None

    @property
    def end(self) -> int:
        return self.slot.offset + self.slot.num_bytes


class Filler:
    """`threads`: at most so many."""

    def __init__(self, threads: int) -> None:
        self._threads = min(threads, MOST_THREADS)
        self._pool: ThreadPoolExecutor | None = None  # kept: a new thread takes milliseconds to its full speed

    def fill(self, payload: torch.Tensor, tensors: Sequence[tuple[Slot, torch.Tensor]]) -> tuple[int, str | None]:
        """Fill `payload` [n] uint8 with a bucket's `tensors`. Its checksum, and the name of the first one that isn't finite."""
        parts = [_Part(slot, _there(slot, tensor, payload)) for slot, tensor in tensors]
        for part, following in pairwise(parts):
            payload[part.end : following.slot.offset].zero_()
        if payload.device.type != "cpu":
            return checksum(payload), next((slot.name for slot, tensor in tensors if not is_finite(tensor)), None)
        pieces, total, bad = _Pieces(payload, parts), Checksum(payload), set()
        numbers = range(-(-payload.numel() // PIECE_BYTES))

        def take(thread: int) -> None:
            for number in numbers[thread :: self._threads]:
                bad.update(pieces.fill(number))
                total.add(number)

        self._each(take)
        return total.value(), next((slot.name for slot, _ in tensors if slot.name in bad), None)

    def _each(self, action: Callable[[int], None]) -> None:
        """`action` of the threads' numbers at the same time, each without threads of torch's own."""
        self._pool = self._pool or _lone_threads(self._threads)
        wait(doing := [self._pool.submit(action, thread) for thread in range(self._threads)])
        for done in doing:
            done.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _lone_threads(count: int) -> ThreadPoolExecutor:
    """So many threads that torch gives one core each. What a thread sets for itself holds for threads that start later, too, so
    all start at once, and the caller sets torch back."""
    threads, together = torch.get_num_threads(), Barrier(count)

    def alone() -> None:
        torch.get_num_threads()  # a thread takes what holds for all when torch is first used in it
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(count, "fill", initializer=alone)
    try:
        wait([pool.submit(together.wait) for _ in range(count)])
    finally:
        torch.set_num_threads(threads)
    return pool


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[n] uint8: the tensor's bytes where they are, if they are in order there; they start at a multiple of 8 bytes."""
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    return flat.view(torch.uint8)


def _there(slot: Slot, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor | None:
    """What is still to be copied by pieces. What comes from a GPU, or stays on one, is brought to its place at once."""
    target = slot.bytes_of(payload)
    if tensor.device.type == payload.device.type == "cpu":
        source = bytes_of(tensor)
        return None if source.data_ptr() == target.data_ptr() else source
    if tensor.data_ptr() != target.data_ptr():
        slot.view(payload).copy_(tensor)
    return None


class _Pieces:
    """Of a bucket on the host. What is copied is seen as 64-bit words, so that torch counts few elements."""

    def __init__(self, payload: torch.Tensor, parts: Sequence[_Part]) -> None:
        self._payload, self._parts, self._ends = payload, parts, [part.end for part in parts]
        self._words = as_type(payload, torch.int64)
        self._typed = {part.slot.dtype: as_type(payload, part.slot.dtype) for part in parts}
        self._sources = [None if source is None else as_type(source, torch.int64) for _, source in parts]

    def fill(self, piece: int) -> Iterator[str]:
        """The piece of this number. Gives the names of tensors that aren't finite in it."""
        start = piece * PIECE_BYTES
        for number in range(bisect_right(self._ends, start), len(self._parts)):
            slot = self._parts[number].slot
            if slot.offset >= start + PIECE_BYTES:
                break
            first, last = max(start, slot.offset), min(start + PIECE_BYTES, self._ends[number])
            if self._sources[number] is not None:
                self._copy(number, first, last)
            size = slot.dtype.itemsize
            if not is_finite(self._typed[slot.dtype][first // size : last // size]):
                yield slot.name

    def _copy(self, number: int, first: int, last: int) -> None:
        offset = self._parts[number].slot.offset  # like `first` a multiple of 8
        whole = last // 8
        self._words[first // 8 : whole].copy_(self._sources[number][(first - offset) // 8 : whole - offset // 8])
        if rest := last % 8:
            self._payload[last - rest : last].copy_(self._parts[number].source[last - rest - offset : last - offset])


def as_type(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As many elements as there are whole ones in `buffer` ([n] uint8)."""
    return buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
