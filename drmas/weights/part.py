"""A tensor of which only the region is here that this worker needs, in a shape that vLLM's weight loaders take.

A loader cuts its worker's part out of a whole tensor with `narrow`. A `Part` looks like the whole tensor, and answers the cut
with the values that it has, if they are those: so fusions (q, k, v into one), key-value heads that several workers share, and
the padding of a vocabulary stay the loaders' own business, and a plan that cuts otherwise than the engine is noticed by the
code that would use it. Anything but the cut fails, since there is no data. Used by `shard_worker`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drmas.core.resharding import Region


class Part(torch.Tensor):
    """Made by `part_of`. On the meta device, of the whole tensor's shape."""

    title: str
    region: Region
    values: torch.Tensor

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.narrow, torch.narrow):
            return args[0]._cut(*args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def _cut(self, dim: int, start: int, length: int) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            sides = [(0, size) for size in self.shape]
            sides[dim] = (start, start + length)
            (top, bottom), (left, right) = (*sides, (0, 1))[:2]
        if (asked := Region(top, bottom, left, right)) != self.region:
            raise ValueError(f"{self.title}: the engine takes {_words(asked)}, but is sent {_words(self.region)}")
        return self.values


def part_of(name: str, shape: tuple[int, ...], region: Region, values: torch.Tensor) -> torch.Tensor:
    """`values`, the `region` of a tensor of this `shape`; itself where that is all of it.

    The values may be on the meta device, where only the cut is to be tried.
    """
    if values.shape == shape:
        return values
    part = torch.empty(shape, dtype=values.dtype, device="meta").as_subclass(Part)
    part.title, part.region, part.values = name, region, values
    return part


def _words(region: Region) -> str:
    return f"rows {region.top} to {region.bottom}, columns {region.left} to {region.right}"
