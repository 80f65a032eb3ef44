"""Corrections to megatron-core 0.16.1 that hold on every device. Each names its fault and its test.

Called by the trainer before it builds anything. To upgrade Megatron, try to delete each of them.
"""

from __future__ import annotations

import functools
import queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def apply() -> None:
    """Apply every correction; idempotent."""
    _align_saved_optimizer_state()
    _collect_write_results_in_process()


def _collect_write_results_in_process() -> None:
    """Pass the results of a checkpoint's writers through a plain queue.

    The original starts a manager process, which imports `__main__` again: seconds, a second copy of the program in memory, and
    a deadlock where `__main__` has no guard. Saves here are synchronous, so the queue never leaves the process.
    Test: test_saving_starts_no_manager_process.
    """
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()


def _align_saved_optimizer_state() -> None:
    """Slice the gathered optimiser state by offsets without bucket padding.

    `sharded_param_state_fully_reshardable` gathers buffers with each bucket's end padding taken out, yet cuts parameters from
    them by offsets that still count it: every parameter behind a padded bucket is saved wrong, silently. Here the offsets are
    shifted while the method runs. Upstream mended it after 0.16.1 (Megatron-LM pull request 5077).
    Test: test_optimizer_state_survives_padded_buckets.
    """
    original = DistributedOptimizer.sharded_param_state_fully_reshardable
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def aligned(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        saved = [buffer.param_index_map for buffer in self.buffers]
        for buffer in self.buffers:
            buffer.param_index_map = _without_padding(buffer)
        try:
            return original(self, *args, **kwargs)
        finally:
            for buffer, index_map in zip(self.buffers, saved, strict=True):
                buffer.param_index_map = index_map

    DistributedOptimizer.sharded_param_state_fully_reshardable = aligned


def _without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """`buffer.param_index_map` (parameter -> start, end, bucket) in a buffer whose buckets end where their parameters end."""
    padding_before, total = [], 0
    for bucket in buffer.buckets:
        padding_before.append(total)
        total += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        param: (start - padding_before[bucket], end - padding_before[bucket], bucket)
        for param, (start, end, bucket) in buffer.param_index_map.items()
    }
