"""The weights of a policy that doesn't live on rank 0, where the engines are: its leader hands them over, tensor by tensor.

    the policy's ranks: iterate its source together ──▶ leader ── one tensor at a time ──▶ rank 0: a source like any other

Every rank makes `relayed(...)` and gives it to its `WeightSync`, which treats it as the source that it is: each rank iterates
it equally often and to its end, the settling of an iteration that rank 0 gave up included. The two ranks have a communicator of
their own, so that nothing mixes in; neither holds more than one tensor beyond what it does with it. Called by the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from drmas.errors import SyncError
from drmas.weights.source import Source

_LEADER = 1
"""The leader's rank in the pair; rank 0 of the job is 0."""


def relayed(source: Source | None, pair: dist.ProcessGroup | None, *, device: torch.device) -> Source:
    """What this rank iterates in a sync. Collective over the pair, which learns the source's metadata here.

    `source` is the policy's, on its ranks; `pair` joins rank 0 and the policy's leader, in this order, and is None on other
    ranks and where rank 0 has the policy. `device` is where rank 0 receives.
    """
    if pair is None:
        return _Nothing() if source is None else source
    if source is None:
        return _Receiving(pair, device)
    return _Sending(source, pair)


class _Nothing:
    """On ranks that have no part in it."""

    def metadata(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]:
        return []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


class _Sending:
    """The leader's side. An error of the source reaches rank 0 in the place of the tensor, which raises it; here the iteration
    ends, for the policy's other ranks by iterating the rest."""

    def __init__(self, source: Source, pair: dist.ProcessGroup) -> None:
        self._source, self._pair = source, pair
        dist.broadcast_object_list([source.metadata()], group=pair, group_src=_LEADER)

    def metadata(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]:
        return self._source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = iter(self._source)
        for name, dtype, shape in self.metadata():
            problem, tensor = "", None
            try:
                found, tensor = next(tensors)
                if (found, tensor.dtype, tuple(tensor.shape)) != (name, dtype, tuple(shape)):
                    problem = f"the source gave {found} {tensor.dtype} {list(tensor.shape)} in its place"
            except Exception as error:  # rank 0 waits for this tensor, whatever went wrong
                problem = str(error) or type(error).__name__
            dist.broadcast_object_list([problem], group=self._pair, group_src=_LEADER)
            if problem:
                break
            dist.broadcast(_bytes(tensor), group=self._pair, group_src=_LEADER)
            yield name, tensor
        for _ in tensors:  # to its end, as the other ranks of the policy do
            pass


class _Receiving:
    """Rank 0's side: the leader's tensors, each in memory of its own."""

    def __init__(self, pair: dist.ProcessGroup, device: torch.device) -> None:
        self._pair, self._device = pair, device
        heard: list[list[tuple[str, torch.dtype, tuple[int, ...]]] | None] = [None]
        dist.broadcast_object_list(heard, group=pair, group_src=_LEADER)
        self._metadata = heard[0]

    def metadata(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in self._metadata:
            problem = [""]
            dist.broadcast_object_list(problem, group=self._pair, group_src=_LEADER)
            if problem[0]:
                raise SyncError(f"{name} did not leave the policy's ranks: {problem[0]}")
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
            dist.broadcast(_bytes(tensor), group=self._pair, group_src=_LEADER)
            yield name, tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n] uint8, without a copy where the tensor is contiguous: any dtype travels on any backend."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
