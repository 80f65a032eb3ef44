"""Adapters on two ranks: tensor-parallel, with sequence parallelism, and as two pipeline stages.

Rank 0 leaves found.pt in SHARED. Usage: torchrun --nproc-per-node 2 lora_ranks.py MODELS SHARED
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import ONE_KV_HEAD, make_rows
from lora_kit import LAYOUTS, Policy

from drmas.policy import host_platform, lora
from drmas.policy.groups import Groups, destroy, init_distributed


def numbers(folder: Path, groups: Groups, shared: Path, name: str, layout: str) -> dict[str, Any]:
    """Hidden states without and with adapters, their gradients and norm, for the adapters in SHARED/NAME."""
    policy = Policy(folder, groups, **LAYOUTS[layout])
    found = {"first": policy.adapters(), "base": policy.run(make_rows())}
    policy.read(shared / name)
    policy.train()
    found["hidden"] = policy.run(make_rows())
    found["gradients"] = policy.adapters(values=lambda parameter: parameter.main_grad)
    found["norm"] = policy.step()
    with lora.without_adapters(policy.model):
        found["under"] = policy.run(make_rows())
    return found


def folders(folder: Path, groups: Groups, shared: Path, name: str) -> dict[str, bool]:
    """Folders and checkpoints of the adapters, from each layout, and from one layout to another."""
    found = {}
    for layout, settings in LAYOUTS.items():
        policy = Policy(folder, groups, **settings)
        policy.read(shared / name)
        policy.write(shared / f"written-by-{layout}")
        policy.save(shared / f"saved-by-{layout}")
        given = policy.adapters()
        other = Policy(folder, groups, **LAYOUTS["pp2" if layout != "pp2" else "tp2-sp"])
        other.load(shared / f"saved-by-{layout}")
        loaded = other.adapters()
        found[layout] = given.keys() == loaded.keys() and all(torch.equal(given[key], loaded[key]) for key in given)
    return found


def main(models: Path, shared: Path) -> None:
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=60)
    groups = Groups(timeout_seconds=60)
    found: dict[str, Any] = {
        f"{name}/{layout}": numbers(models / name, groups, shared, name, layout)
        for name in ("qwen3-tied", "qwen2-untied", ONE_KV_HEAD)
        for layout in LAYOUTS
    }
    found["folders"] = folders(models / "qwen3-tied", groups, shared, "qwen3-tied")
    if dist.get_rank() == 0:
        torch.save(found, shared / "found.pt")
    dist.barrier()
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
