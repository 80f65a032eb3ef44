"""Fill a bucket on the host in one pass over memory: copy, look for NaN and Inf, and sum, while a piece is in a core's cache.

A bucket is cut into pieces, whatever lies in them; several threads take one after the other. Every operation is small enough
that torch gives it to the calling thread alone. Used by `buckets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import torch

from drmas.weights.checksum import PIECE_BYTES, PIECE_WORDS, Checksum, checksum
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
        self._pool: ThreadPoolExecutor | None = None

    def fill(self, payload: torch.Tensor, tensors: Sequence[tuple[Slot, torch.Tensor]]) -> tuple[int, str | None]:
        """Fill `payload` [n] uint8 with a bucket's `tensors`. Its checksum, and the name of the first one that isn't finite."""
        parts = [_Part(slot, _there(slot, tensor, payload)) for slot, tensor in tensors]
        for part, following in pairwise(parts):
            payload[part.end : following.slot.offset].zero_()
        if payload.device.type != "cpu":
            return checksum(payload), next((slot.name for slot, tensor in tensors if not is_finite(tensor)), None)
        total, starts, bad = Checksum(payload), range(0, payload.numel(), PIECE_BYTES), set()

        def take(thread: int) -> None:
            for start in starts[thread :: self._threads]:
                bad.update(_fill_piece(payload, parts, start))
                total.add(start)

        self._each(take)
        return total.value(), next((slot.name for slot, _ in tensors if slot.name in bad), None)

    def _each(self, action: Callable[[int], None]) -> None:
        if self._threads == 1:
            return action(0)
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "fill")
        for done in [self._pool.submit(action, thread) for thread in range(self._threads)]:
            done.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


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


def _fill_piece(payload: torch.Tensor, parts: Sequence[_Part], start: int) -> Iterator[str]:
    """The piece that begins at `start`. Gives the names of tensors that aren't finite in it."""
    for part in parts:
        slot, source = part
        first, last = max(start, slot.offset), min(start + PIECE_BYTES, part.end)
        if first < last:
            target = payload[first:last]
            if source is not None:
                _copy(source[first - slot.offset : last - slot.offset], target)
            if not all(map(is_finite, target.view(slot.dtype).split(PIECE_WORDS))):
                yield slot.name


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """[n] uint8, both at a multiple of 8 bytes: by words, so that torch counts few elements."""
    words = source.numel() // 8 * 8
    target[:words].view(torch.int64).copy_(source[:words].view(torch.int64))
    if words < source.numel():
        target[words:].copy_(source[words:])
