"""The trainer's weights as those transports read them that send whole tensors.

A source has `metadata()`, the (Hugging Face name, dtype, full shape) of every tensor, and iterates (name, full tensor) in that
order. Iterating is a collective of the trainer's ranks, so every rank must do it equally often and to its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from drmas.errors import SyncError

NOT_FINITE = "{name} holds NaN or Inf; the engine keeps the weights it has"


class Source(Protocol):
    """What `PolicyTrainer.weight_source()` returns."""

    def metadata(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True)
class Parameter:
    """One tensor's description."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class CheckedSource:
    """`source` for a sender. SyncError names the first tensor that isn't what `metadata` said.

    An iteration that is given up is owed to the other ranks; `settle` pays.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._rounds = 0

    def metadata(self) -> list[Parameter]:
        return [Parameter(name, dtype, tuple(shape)) for name, dtype, shape in self._source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        expected = iter(self.metadata())
        self._rounds += 1
        self._open = iter(self._source)
        for name, tensor in self._open:
            want = next(expected, None)
            if want is None or (name, tensor.dtype, tuple(tensor.shape)) != (want.name, want.dtype, want.shape):
                raise SyncError(f"the source gave {name} {tensor.dtype} {list(tensor.shape)}; its metadata said {want}")
            yield name, tensor
        left = next(expected, None)
        if left is not None:
            raise SyncError(f"the source ended before {left.name}, which its metadata names")

    @property
    def untouched(self) -> bool:
        """No iteration was begun since the last `settle`, so nothing is owed to the other ranks yet."""
        return self._rounds == 0

    def settle(self, rounds: int) -> None:
        """Complete the iteration that was given up, then iterate as often as `rounds` still asks for. Every rank calls it."""
        for _ in self._open:
            pass
        for _ in range(self._rounds, rounds):
            for _ in self._source:
                pass
        self._open, self._rounds = iter(()), 0


def finite(source: CheckedSource) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `source`. SyncError names the first that holds NaN or Inf."""
    for name, tensor in source:
        if not is_finite(tensor):
            raise SyncError(NOT_FINITE.format(name=name))
        yield name, tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """No NaN and no Inf. A sum settles it in most cases, ten times faster than looking at every element."""
    tensor = tensor.detach()
    total = tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else None)
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())
