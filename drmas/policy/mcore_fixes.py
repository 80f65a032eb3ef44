"""Corrections to megatron-core 0.16.1 that hold on every device. Each names its fault; a test of it fails once it can go.

Called by the trainer, the reference and the critic before they build anything. The tests are in test_mcore_fixes.py: each shows
that Megatron alone is wrong, and that it is right with the correction. After an upgrade, delete what the first half fails for.

Two more faults of 0.16.1 need no correction, because the code around them isn't used: `drmas.policy.optimizer_state` saves
the optimiser in the place of `sharded_param_state_fully_reshardable`, which slices gathered state by offsets that still count
bucket padding, and `drmas.policy.checkpoint_writer` writes in the place of a writer that starts a manager process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import layers, random


def apply() -> None:
    """Apply every correction; idempotent."""
    _wrap(random.CheckpointWithoutOutput, "__init__", _without_fp8)
    for kind, dimension in _CUT.items():
        _wrap(kind, "__init__", functools.partial(_marked, dimension=dimension))


def _wrap(owner: type, name: str, correction: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, "__wrapped__"):
        setattr(owner, name, functools.wraps(original)(correction(original)))


def _without_fp8(init: Callable[..., None]) -> Callable[..., None]:
    """Recomputing a norm's output asks TransformerEngine for its fp8 state, which is a NameError where that isn't installed.

    The flag meant for that is `fp8 is not None`, and its default is False.
    """

    def corrected(self: random.CheckpointWithoutOutput, fp8: Any = False) -> None:
        init(self, fp8)
        self.fp8 = self.fp8 and random.HAVE_TE

    return corrected


_CUT = {layers.VocabParallelEmbedding: 0, layers.ColumnParallelLinear: 0, layers.RowParallelLinear: 1}
"""Layers whose weight tensor-parallel ranks share, and along which dimension."""


def _marked(init: Callable[..., None], *, dimension: int) -> Callable[..., None]:
    """Weights that aren't initialised (`perform_initialization=False`) aren't marked as tensor-parallel either.

    The gradient norm then takes every rank's part for a copy of rank 0's and leaves it out.
    """

    def corrected(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.weight is not None and not hasattr(self.weight, "tensor_model_parallel"):
            layers.set_tensor_model_parallel_attributes(self.weight, True, dimension, kwargs.get("stride", 1))

    return corrected
