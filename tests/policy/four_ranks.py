"""The part of the tests that needs two replicas of two tensor-parallel ranks; rank 0 leaves what was found in found.pt.

Usage: torchrun --nproc-per-node 4 four_ranks.py MODELS SHARED
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import TP2_DP2, make_trainer, run_updates, weights

from drmas.policy import host_platform
from drmas.policy.groups import Groups, destroy, init_distributed


def main(models: Path, shared: Path) -> None:
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=60)
    trainer = make_trainer(models / "qwen3-tied", Groups(timeout_seconds=60), tokens_per_microbatch=24, **TP2_DP2)
    found = {"sizes": (trainer.groups.tp.size(), trainer.groups.dp.size()), "reports": run_updates(trainer, 2)}
    trainer.save(shared / "saved")
    trainer.export(shared / "exported")
    found["weights"] = weights(trainer)
    if dist.get_rank() == 0:
        torch.save(found, shared / "found.pt")
    dist.barrier()
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
