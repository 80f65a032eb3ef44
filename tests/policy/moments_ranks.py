"""Norms of single rows' gradients on two ranks: rank 0 leaves found.pt in SHARED.

Usage: torchrun --nproc-per-node 2 moments_ranks.py MODELS SHARED
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import LAYOUTS, make_rows, make_trainer, run_updates, weights

from drmas.policy import host_platform
from drmas.policy.groups import Groups, destroy, init_distributed

SETTINGS = {
    **LAYOUTS,
    "dp2, overlapped": {"overlap": True},
    "pp2, frozen embedding": {"pipeline_parallel": 2, "freeze": ["model.embed_tokens.*"]},
    "tp2-sp, adapters": {"tensor_parallel": 2, "sequence_parallel": True, "lora": {"rank": 4}},
}


def measured(models: Path, groups: Groups, settings: dict[str, Any]) -> dict[str, Any]:
    """The norms after one update, and a second update, with and without a measurement before each."""
    found = {}
    for name in ("measured", "plain"):
        trainer = make_trainer(models / "qwen3-tied", groups, tokens_per_microbatch=24, **settings)
        reports = []
        for number in range(2):
            if name == "measured":
                found["norms"] = trainer.score_norms(make_rows(), [1.0, 0.7, 1.0, 1.0, 1.0, 1.0])
            reports += run_updates(trainer, 1, first=number)
        found[name] = {"reports": reports, "weights": weights(trainer)}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found["norms"])
    return found | {"same": all(each == every[0] for each in every)}


def main(models: Path, shared: Path) -> None:
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=60)
    groups = Groups(timeout_seconds=60)
    found = {name: measured(models, groups, settings) for name, settings in SETTINGS.items()}
    if dist.get_rank() == 0:
        torch.save(found, shared / "found.pt")
    dist.barrier()
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
