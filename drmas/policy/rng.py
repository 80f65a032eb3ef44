"""The random states of one policy, kept apart from everybody else's.

Megatron keeps one tracker of model-parallel generators per process; each policy owns a copy of the states and lends it while it
runs, so that neither another policy nor the caller's own draws move it (I9). Called by the trainer and the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from drmas.policy import host_platform

State = dict[str, Any]


def _read() -> State:
    accelerator = None if host_platform.is_host() else torch.cuda.get_rng_state()
    return {"cpu": torch.get_rng_state(), "accelerator": accelerator, "tracker": get_cuda_rng_tracker().get_states()}


def _write(state: State) -> None:
    torch.set_rng_state(state["cpu"])
    if state["accelerator"] is not None:
        torch.cuda.set_rng_state(state["accelerator"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _alike(found: Any, like: Any) -> bool:
    """True when the same keys lead to tensors of the same kind."""
    if isinstance(like, dict):
        return isinstance(found, dict) and found.keys() == like.keys() and all(_alike(found[key], like[key]) for key in like)
    if isinstance(like, torch.Tensor):
        return isinstance(found, torch.Tensor) and (found.dtype, found.shape) == (like.dtype, like.shape)
    return found == like


class PolicyRng:
    """A policy's generators, seeded by `seed` and by its tensor-parallel rank."""

    def __init__(self, seed: int, *, tp_rank: int) -> None:
        before = _read()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, tp_rank=tp_rank, ep_rank=0, etp_rank=0)
        self.state = _read()
        _write(before)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Run the body on this policy's states; keep where they end and give the caller's back."""
        before = _read()
        _write(self.state)
        try:
            yield
        finally:
            self.state = _read()
            _write(before)

    def fits(self, state: Any) -> bool:
        """True when `state` is made as this policy's states are."""
        return _alike(state, self.state)

    def restore(self, state: State) -> None:
        """Continue from a saved `state`; takes effect now where the states are lent already."""
        self.state = state
        _write(state)
