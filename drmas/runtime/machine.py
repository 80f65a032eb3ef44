"""The host of rank 0 as placement sees it: how many trainer ranks and GPUs it has, and how much memory each of them.

`Machine.here` looks at this one; `Machine.planned` is one that a dry run is told of, with what it isn't told assumed. Called by
the run, by `preview` and by evaluations.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from drmas.config.schema import RunConfig
from drmas.runtime.gpus import Seat, place_engines
from drmas.telemetry.host_memory import available_memory

USUAL_GPUS = 8
"""Of a host, where a dry run isn't told."""


@dataclass(frozen=True, slots=True)
class Machine:
    ranks: int
    """Trainer ranks of this host; rank r has GPU r."""
    gpus: int
    """0: trainers and engines run on its CPU and share its memory."""
    gpu_bytes: int | None = None
    """Of the smallest GPU; None: not known."""
    free_bytes: int | None = None
    """Host memory that processes can still take; None: not known, or not asked for."""
    assumed: bool = False
    """Nobody counted the GPUs, nor said how many there are."""

    @classmethod
    def here(cls, world: int) -> Machine:
        """This one, in a job of `world` trainer ranks; 0 in an evaluation."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        smallest = min((torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpus)), default=None)
        ranks = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        return cls(ranks, gpus, smallest, available_memory())

    @classmethod
    def planned(cls, world: int, *, gpus: int | None = None, gpu_bytes: int | None = None) -> Machine:
        """One with GPUs for `world` ranks, or for as many as it has GPUs: `gpus`, or this machine's, or the usual number."""
        here = cls.here(world)
        count = gpus or here.gpus or USUAL_GPUS
        known = gpu_bytes or (here.gpu_bytes if gpus is None else None)
        return cls(min(world, count), count, known, assumed=gpus is None and here.gpus == 0)

    def place(self, config: RunConfig, *, world: int) -> dict[str, tuple[Seat, ...]]:
        """`place_engines` on such hosts."""
        return place_engines(config, world=world, ranks_per_host=self.ranks, gpus_per_host=self.gpus)
