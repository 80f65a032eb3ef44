"""What this rank's device can do at most, so that a policy's FLOP/s can be told as a share of it (MFU).

A GPU that is listed has the peak of its data sheet. Of any other device, a CPU among them, a data sheet says little about what
can be reached, so a large product is timed here and `origin` says so: the share is then of a measured GEMM. Called by the
runtime.
"""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import torch

from drmas.config.schema import PolicyConfig
from drmas.core.peaks import data_sheet
from drmas.policy import host_platform

_SIDE = {"cpu": 1024, "cuda": 8192}
_ROUNDS = 8


class Peak(NamedTuple):
    flops_per_second: float
    origin: str
    """"data sheet of NVIDIA H200", or "measured: a float32 product of 1024 x 1024 matrices"."""


def device_peak(config: PolicyConfig) -> Peak:
    """The peak of this rank's device for the types that a policy computes in.

    All ranks of a host should ask together where they share its cores: a measured peak is that of one rank among them. It is
    too low, and shares of it too high, if something else kept the cores busy meanwhile.
    """
    product = "fp8" if config.fp8 else config.dtype
    if not host_platform.is_host():
        name = torch.cuda.get_device_name()
        sheet = data_sheet(name)
        if sheet is not None and (known := getattr(sheet, product)) is not None:
            return Peak(known, f"data sheet of {name}")
    return measured_gemm(config.dtype)


@functools.cache
def measured_gemm(dtype: str) -> Peak:
    """FLOP/s of a large square product on this rank's device and threads, the best of a few; measured once per process."""
    device = host_platform.device()
    side = _SIDE[device.type]
    values = torch.arange(side * side, device=device).remainder(7).sub(3).to(getattr(torch, dtype))
    matrix = values.view(side, side)
    out = torch.empty_like(matrix)
    best = float("inf")
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        torch.mm(matrix, matrix, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return Peak(2 * side**3 / best, f"measured: a {dtype} product of {side} x {side} matrices")
