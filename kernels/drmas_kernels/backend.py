"""Which implementation of an operation runs, and why. Read by the operations, `drmas doctor` and `--dry-run`.

There are two: "torch" runs on any device and is the specification; "triton" runs on NVIDIA GPUs, and on CPU tensors only in
Triton's interpreter, for tests. `use` and the environment variable DRMAS_KERNELS override the choice, `use` first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

OPS = (
    "segment_advantage",
    "linear_logprob",
    "linear_policy_loss",
    "logprob",
    "policy_loss",
    "squared_norms",
    "adamw_step",
)
BACKENDS = ("torch", "triton")
VARIABLE = "DRMAS_KERNELS"
OLDEST = (8, 0)
"""The compute capability from which on the tile tables have entries."""

_overrides: list[str] = []
"""Of the whole process: a backward pass on a GPU runs in threads of torch's own."""


class Backend(NamedTuple):
    name: str
    reason: str


@contextmanager
def use(name: str) -> Iterator[None]:
    """Run the process's operations with this implementation meanwhile. ValueError: it doesn't exist or isn't installed."""
    _check(name, "the backend")
    _overrides.append(name)
    try:
        yield
    finally:
        _overrides.pop()


def choose(op: str, device: torch.device | str = "cpu") -> Backend:
    """The implementation of `op` (one of `OPS`) for tensors on `device`.

    ValueError: there is no such operation, or the override names what can't run there.

    Example: choose("policy_loss") == Backend("torch", "Triton compiles for NVIDIA GPUs and the tensors are on cpu")
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(OPS)}")
    device, origin = torch.device(device), "drmas_kernels.backend.use"
    forced = _overrides[-1] if _overrides else None
    if forced is None:
        origin, forced = VARIABLE, os.environ.get(VARIABLE)
    if not forced:
        return _automatic(device)
    _check(forced, origin)
    if forced == "triton" and device.type == "cpu" and not _interpreting():
        raise ValueError(
            f"{origin} asks for triton, but tensors are on {device}, where it only interprets (TRITON_INTERPRET=1)"
        )
    return Backend(forced, f"asked for by {origin}")


def _check(name: str, origin: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{origin} is {name!r}; expected one of {', '.join(BACKENDS)}")
    if name == "triton" and not _installed():
        raise ValueError(f"{origin} is 'triton', but the package triton is not installed")


def _interpreting() -> bool:
    """Triton decides so when it is imported."""
    from triton import language

    return type(language.sum).__name__ == "InterpretedFunction"


def _automatic(device: torch.device) -> Backend:
    if device.type != "cuda":
        return Backend("torch", f"Triton compiles for NVIDIA GPUs and the tensors are on {device.type}")
    if not _installed():
        return Backend("torch", "the package triton is not installed")
    if torch.version.hip is not None:
        return Backend("torch", "the tile tables are for NVIDIA GPUs, this torch is for AMD's")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return Backend("torch", f"the tile tables begin with sm_80, the device is sm_{capability[0]}{capability[1]}")
    return Backend("triton", f"compiled for sm_{capability[0]}{capability[1]}")


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
