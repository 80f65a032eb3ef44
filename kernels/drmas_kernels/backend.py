"""Which implementation of an operation runs, and why. Read by `drmas doctor` and `--dry-run`."""

from __future__ import annotations

from typing import NamedTuple

OPS = ("segment_advantage", "linear_logprob", "linear_policy_loss", "policy_loss", "squared_norms", "adamw_step")


class Backend(NamedTuple):
    name: str
    reason: str


def choose(op: str) -> Backend:
    """The implementation of `op` (one of `OPS`). ValueError: there is no such operation.

    Example: choose("policy_loss") == Backend("torch", "the Triton kernels are not part of this build")
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(OPS)}")
    return Backend("torch", "the Triton kernels are not part of this build")
