"""Best times of alternating sides, peak memory of one step, and what the machine can do at most.

CPU: a clock around calls, and the high-water mark of a process. GPU: events with a cold L2 cache, and torch's allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from bench.kernel_bench.sides import Step

CALL_SECONDS = 0.02
"""A sample on the CPU repeats a shorter step until it lasts about so long."""
PEAK_ROUNDS = 10
MMAP_THRESHOLD = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}
"""For the environment of a process whose memory is measured: what a step frees goes back to the system at once."""

DATA_SHEETS = (
    ("GH200 480GB", 4.0e12, 989e12),
    ("GH200 144G", 4.9e12, 989e12),
    ("H200 NVL", 4.8e12, 835e12),
    ("H200", 4.8e12, 989e12),
    ("H100 PCIe", 2.0e12, 756e12),
    ("H100 NVL", 3.9e12, 835e12),
    ("H100", 3.35e12, 989e12),
    ("A100-SXM4-80GB", 2.039e12, 312e12),
    ("A100 80GB PCIe", 1.935e12, 312e12),
    ("A100", 1.555e12, 312e12),
)
"""(part of the device's name, bytes/s, dense bf16 FLOP/s), the first that fits counts. A MIG slice (named so) has less."""


class Peaks(NamedTuple):
    flops: float
    bytes: float
    origin: str


def best_seconds(steps: Mapping[str, Step], repeats: int, device: str) -> dict[str, float]:
    """Every step in turn, `repeats` rounds, the best of each. The steps have run before."""
    sample = _gpu_sample if device == "cuda" else _cpu_sample
    best = dict.fromkeys(steps, float("inf"))
    calls = {name: 1 if device == "cuda" else _calls(step) for name, step in steps.items()}
    for _ in range(repeats):
        for name, step in steps.items():
            best[name] = min(best[name], sample(step, calls[name]))
    return best


def _calls(step: Step) -> int:
    return max(1, min(1000, int(CALL_SECONDS / max(_cpu_sample(step, 1), 1e-7))))


def _cpu_sample(step: Step, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def _gpu_sample(step: Step, _: int) -> float:
    from triton.testing import do_bench

    return 1e-3 * do_bench(step, warmup=25, rep=100, return_mode="min")


def peak_bytes(step: Step, clear: Callable[[], None], device: str) -> tuple[int | None, float, float | None]:
    """(bytes that a step adds at its peak, its seconds, its answer). The step has run before; `clear` drops its gradients.

    On the CPU it is resident memory, so this process should do nothing else. None: the kernel doesn't tell.
    """
    clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        _return_freed_memory()
        before = _status("VmRSS") if _reset_high_water() else None
    start = time.perf_counter()
    answer = step()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    after = torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")
    peak = None if before is None else max(0, after - before)
    return peak, seconds, None if answer is None else float(answer)


def _status(name: str) -> int:
    """Bytes, from /proc: getrusage keeps the mark of the process that started this one."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _return_freed_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_memory(available: int | None = None) -> None:
    """Let this process fail where it asks for more than the machine has free, instead of somebody being killed for it."""
    if available is None:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        available = 1024 * int(line.split()[1])
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (available, hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def peaks(device: str, dtype: torch.dtype, *, quick: bool = False) -> Peaks:
    """Of a GPU by its data sheet, for bf16; else measured here and now. `quick` measures sizes that prove nothing."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        known = None if "MIG" in name else next((sheet for sheet in DATA_SHEETS if sheet[0] in name), None)
        if known and dtype == torch.bfloat16:
            return Peaks(known[2], known[1], f"data sheet of {known[0]}")
        flops, moved = _measured(device, dtype, 8192, 2**30)
        if known:
            return Peaks(flops, known[1], f"FLOP/s of a measured {dtype} product, bytes/s by the data sheet of {known[0]}")
        return Peaks(flops, moved, "measured in this run: a large product and a large copy")
    side, size = (256, 2**20) if quick else (2048, 2**28)
    flops, moved = _measured(device, torch.float32, side, size)
    if dtype != torch.float32:
        flops = max(flops, _measured(device, dtype, side, size)[0])
    return Peaks(flops, moved, f"measured in this run: a product of {side} x {side} matrices, a copy of {size // 2**20} MiB")


def _measured(device: str, dtype: torch.dtype, side: int, size: int) -> tuple[float, float]:
    matrix = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(matrix)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    steps = {"product": lambda: torch.mm(matrix, matrix, out=out), "copy": lambda: copied.copy_(source)}
    for step in steps.values():
        step()
    best = best_seconds(steps, PEAK_ROUNDS, device)
    return 2 * side**3 / best["product"], 2 * size / best["copy"]


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores"
