"""The words of the kernels' benchmark: a case is one operation at one shape, a side one implementation of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from torch import Tensor

from drmas_kernels.numerics import Cost

Step = Callable[[], Tensor | None]
"""One run of a side. Its result is the number that sides of the same case must agree on; None: there is none to compare."""

OURS, EAGER, COMPILED = "drmas", "torch eager", "torch compile"


def always() -> None:
    return None


@dataclass(frozen=True)
class Side:
    implementation: str
    make: Callable[[SimpleNamespace], Step]
    """From the case's inputs; imports what it needs."""
    computes: str = ""
    """What it does less, or otherwise, than the operation; empty: the same work."""
    missing: Callable[[], str | None] = always
    """Why it can't run here, or None."""


@dataclass(frozen=True)
class Target:
    """What a GPU should reach: at most so many times the floor."""

    over_floor: dict[str, float]
    """By a part of the device's name; "" is any device."""

    def of(self, device_name: str) -> float:
        return next(limit for part, limit in self.over_floor.items() if part in device_name)


@dataclass(frozen=True)
class Case:
    name: str
    op: str
    """The public function; several cases may be of one."""
    shape: str
    dtype: str
    cost: Cost
    inputs: Callable[[], SimpleNamespace]
    """Tensors by name, and `leaves`: those that gradients gather at."""
    sides: tuple[Side, ...]
    target: Target | None = None

    @property
    def title(self) -> str:
        return f"{self.name}  {self.shape}  {self.dtype}"


@dataclass
class Measured:
    """A side's row. `reason` says why there are no numbers."""

    case: Case
    implementation: str
    seconds: float | None = None
    ratio: float | None = None
    """Time over that of torch eager in the same run."""
    peak_bytes: int | None = None
    answer: float | None = None
    floor_seconds: float = 0.0
    note: str = ""
    reason: str = ""

    @property
    def over_floor(self) -> float | None:
        return None if self.seconds is None else self.seconds / self.floor_seconds


def clear(inputs: SimpleNamespace) -> None:
    """Drop the gradients of the last step."""
    for leaf in inputs.leaves:
        leaf.grad = None


@dataclass(frozen=True)
class Head:
    """Sizes of an output head; `shard` is the part of the vocabulary that one tensor-parallel rank holds."""

    tokens: int
    hidden: int
    vocabulary: int
    shard: int = 1

    @property
    def columns(self) -> int:
        return self.vocabulary // self.shard

    @property
    def text(self) -> str:
        slice_ = f" (1/{self.shard} of the vocabulary)" if self.shard > 1 else ""
        return f"T={self.tokens} H={self.hidden} V={self.columns}{slice_}"


@dataclass(frozen=True)
class Preset:
    heads: tuple[Head, ...]
    rows: int
    """Of `segment_advantage`."""
    loss_tokens: int
    """Of `policy_loss`."""
    elements: dict[str, int] = field(default_factory=lambda: {"cpu": 2**24, "cuda": 500_000_000})
    """Of norm and AdamW, by device."""
    memory_only: bool = False
    """The head alone, each side once in a process of its own: what counts is the memory."""


PRESETS = {
    "small": Preset((Head(64, 32, 211),), rows=256, loss_tokens=256, elements={"cpu": 4096, "cuda": 4096}),
    "smollm2": Preset((Head(2048, 576, 49152),), rows=8192, loss_tokens=32768),
    "memory": Preset((Head(8192, 1024, 151936),), rows=0, loss_tokens=0, memory_only=True),
    "qwen": Preset(
        (Head(8192, 4096, 151936), Head(8192, 2560, 151936), Head(32768, 4096, 151936, 8)), rows=8192, loss_tokens=32768
    ),
    "paper": Preset(
        (
            *(Head(32768, 4096, 151936, shard) for shard in (1, 2, 4, 8)),
            *(Head(32768, 2560, 151936, shard) for shard in (1, 8)),
            *(Head(8192, 4096, 151936, shard) for shard in (1, 8)),
        ),
        rows=8192,
        loss_tokens=32768,
    ),
}
