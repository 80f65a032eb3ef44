"""A policy's weights where they lie: the description of its tensors, and the shards that this rank holds of them.

Beside `convert.WeightSource`, which joins whole tensors, and after the same table. Nothing is communicated here. Read by the
weight sync that sends each engine worker what this one needs.
"""

from __future__ import annotations

import torch

from drmas.core.resharding import Parameter, Tensors, TrainerLayout
from drmas.policy.architecture import Architecture
from drmas.policy.convert import Slot, WeightSource, entries, slots


def describe(architecture: Architecture, *, itemsize: int) -> Tensors:
    """What `core.resharding` needs to know of the model; `itemsize` in bytes per element."""
    parameters = [Parameter(_layer(slot, architecture), slot.arrangement, slot.tensors) for slot in slots(architecture)]
    return Tensors(tuple(parameters), architecture.layers, architecture.kv_heads, itemsize)


def _layer(slot: Slot, architecture: Architecture) -> int:
    if slot.layer is not None:
        return slot.layer
    return -1 if slot.place.startswith("embedding") else architecture.layers


class ShardSource:
    """This rank's part of what `source` would join. Like its tensors, shards may share memory with the model."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        numbers = {slot.tensors: number for number, slot in enumerate(slots(source.architecture))}
        self._held = {numbers[entry.tensors]: entry.parameter for entry in entries(source.model, source.architecture)}

    @property
    def dtype(self) -> torch.dtype:
        return self._source.model.config.params_dtype

    @property
    def tensors(self) -> Tensors:
        return describe(self._source.architecture, itemsize=self.dtype.itemsize)

    @property
    def layout(self) -> TrainerLayout:
        return TrainerLayout(**self._source.groups.sizes())

    @property
    def rank(self) -> int:
        """This rank's number in `layout`."""
        groups = self._source.groups
        rank = groups.pp.rank()
        for group in (groups.dp, groups.cp, groups.tp):
            rank = rank * group.size() + group.rank()
        return rank

    def settle(self) -> None:
        """Wait for parameters that still arrive behind a step; call it before `shard`."""
        if self._source.before is not None:
            self._source.before()

    def shard(self, parameter: int) -> torch.Tensor:
        """[rows, columns]: parameter number `parameter` of `tensors`. KeyError: this rank's stage doesn't hold it."""
        with torch.no_grad():
            values = self._source.values(self._held[parameter])
        return values.reshape(values.shape[0], -1)
