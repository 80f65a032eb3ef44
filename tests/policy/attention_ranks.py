"""The part of test_model.py that needs two ranks: torchrun starts it, rank 0 leaves what was found in found.pt.

Usage: torchrun --nproc-per-node 2 attention_ranks.py MODELS SHARED
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from model_kit import Built, tree_rows

from drmas.policy import host_platform
from drmas.policy.groups import Groups, destroy, init_distributed

LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp2-sp full": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
    "tp2-sp selective": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "selective"},
    "cp2": {"context_parallel": 2},
}
MODELS = ("qwen2-untied", "qwen3-tied")


def main(models: Path, shared: Path) -> None:
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=60)
    groups = Groups(timeout_seconds=60)
    found = {}
    for name in MODELS:
        for layout, settings in LAYOUTS.items():
            built = Built(models / name, groups, **settings)
            found[f"{name}/{layout}"] = (built.run(tree_rows()), built.gradients())
    if dist.get_rank() == 0:
        torch.save(found, shared / "found.pt")
    dist.barrier()
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
