"""The part of the tests that needs products of layouts on four ranks; rank 0 leaves what was found in found.pt.

Usage: torchrun --nproc-per-node 4 four_ranks.py MODELS SHARED
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import PRODUCTS, make_trainer, run_updates, weights

from drmas.policy import host_platform
from drmas.policy.groups import Groups, destroy, init_distributed


def main(models: Path, shared: Path) -> None:
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=60)
    groups = Groups(timeout_seconds=60)
    found = {}
    for number, (name, settings) in enumerate(PRODUCTS.items()):
        trainer = make_trainer(models / "qwen3-tied", groups, tokens_per_microbatch=24, **settings)
        found[name] = {"sizes": trainer.groups.sizes(), "reports": run_updates(trainer, 2), "weights": weights(trainer)}
        trainer.save(shared / f"saved-{number}")
        trainer.export(shared / f"exported-{number}")
    if dist.get_rank() == 0:
        torch.save(found, shared / "found.pt")
    dist.barrier()
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
