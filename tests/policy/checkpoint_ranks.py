"""The part of test_checkpoint.py that needs four ranks: torchrun starts it, rank 0 leaves what was found in found.pt.

Usage: torchrun --nproc-per-node 4 checkpoint_ranks.py MODELS SHARED
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import AGENTS, largest_difference, run_updates, weights
from safetensors.torch import load_file

from drmas.config.schema import LossConfig, PolicyConfig
from drmas.errors import CheckpointError
from drmas.policy import checkpoint, checkpoint_writer, host_platform, trainer
from drmas.policy.groups import Groups, destroy, init_distributed
from drmas.policy.optimizer import PolicyOptimizer
from drmas.policy.trainer import PolicyTrainer

ALL = (0, 1, 2, 3)
CASES = {
    "tp2": ((0, 1), {"tensor_parallel": 2}),
    "pp2": ((2, 3), {"pipeline_parallel": 2}),
    "dp2": ((1, 3), {}),
    "cp2": ((0, 2), {"context_parallel": 2}),
    "last rank": ((3,), {}),
    "dp4": (ALL, {}),
    "dp4, overlapped": (ALL, {"overlap": True}),
    "tp2 pp2": (ALL, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "pp2 dp2": (ALL, {"pipeline_parallel": 2}),
    "tp2 dp2": (ALL, {"tensor_parallel": 2, "sequence_parallel": True}),
}
"""Ranks of the job and the layout on them. The first two, and the next two, are at work at the same time."""
NAMES = ("qwen3-tied", "qwen2-untied")
SETTINGS = {"qwen3-tied": {}, "qwen2-untied": {"dtype": "bfloat16"}}


class SmallBuckets(PolicyOptimizer):
    """Where communication overlaps: many buckets, which end in padding."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings | {"bucket_size": 3000})


def make(models: Path, name: str, groups: Groups, case: str, **changes: Any) -> PolicyTrainer | None:
    """A policy on the ranks of `case`; None on the others."""
    ranks, layout = CASES[case]
    settings = {"model": name, "lr": 1e-3, "adam_eps": 1e-4, "clip_grad_norm": 0.1} | SETTINGS[name] | layout | changes
    config = PolicyConfig(**settings)
    sizes = {"tp": config.tensor_parallel, "pp": config.pipeline_parallel, "cp": config.context_parallel}
    groups = groups.layout(**sizes, ranks=ranks)
    if groups is None:
        return None
    arguments = {"seed": 99, "total_steps": 10, "agents": AGENTS, "loss": LossConfig()}
    return PolicyTrainer("main", config, model_path=models / name, layout=groups, **arguments)


def through(models: Path, shared: Path, groups: Groups, name: str, case: str, found: dict[str, Any]) -> None:
    """Load what one rank saved, and save it again; by a thread in every second case."""
    policy = make(models, name, groups, case)
    if policy is None:
        return
    if "overlapped" in case:
        (buffer,) = policy.optimizer.ddp.buffers
        assert sum(bucket.grad_data.numel() > bucket.numel_unpadded for bucket in buffer.buckets) > 3
    start = {
        key: tensor.to(policy.model.config.params_dtype)
        for key, tensor in load_file(models / name / "model.safetensors").items()
    }
    assert largest_difference(weights(policy), start) == 0.0
    if policy.architecture.tied and policy.groups.is_last_stage and policy.groups.tp.size() == 1:
        assert torch.equal(policy.model.head_weight, start["model.embed_tokens.weight"])  # a pipeline's own copy, too
    policy.load(shared / f"{name} by one")
    folder = shared / f"{name} through {case}"
    if list(CASES).index(case) % 2:
        with policy.active():
            pending = checkpoint.save_async(policy, folder)
        pending.finish()
    else:
        policy.save(folder)
    # Every rank of every stage sees the whole model.
    expected = load_file(shared / f"{name} by one.safetensors")
    found[f"{name} {case}"] = (
        policy.version,
        largest_difference(weights(policy), expected),
        [entry[0] for entry in policy.weight_source().metadata()] == [name for name, _ in policy.weight_source()],
    )


def resumed(models: Path, shared: Path, groups: Groups, case: str) -> dict[str, Any]:
    """An update after resuming from one rank; the next one, straight and after resuming from this layout."""
    name = "qwen3-tied"
    straight = make(models, name, groups, case)
    straight.load(shared / "updated by one")
    found: dict[str, Any] = {"version": straight.version, "report": run_updates(straight, 1, first=1)[0]}
    folder = shared / f"updated through {case}"
    straight.save(folder)
    found["weights"] = weights(straight)
    expected = run_updates(straight, 1, first=2)
    again = make(models, name, groups, case)
    again.load(folder)
    found["bitwise"] = run_updates(again, 1, first=2) == expected
    found["bitwise"] &= largest_difference(weights(again), weights(straight)) == 0.0
    return found


def full_disk(models: Path, shared: Path, groups: Groups) -> dict[str, Any]:
    """Rank 1 of two meets a full disk while it writes its tensors; later the first one does, with the list of files."""
    policy = make(models, "qwen3-tied", groups, "dp2")
    if policy is None:
        return {}
    folder = shared / "full"
    policy.save(folder)
    kept = weights(policy)
    policy.version = 7
    write, found = checkpoint_writer._write_item, {}

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def attempt(asynchronous: bool) -> str:
        try:
            with policy.active():
                if asynchronous:
                    checkpoint.save_async(policy, folder).finish()
                else:
                    checkpoint.save(policy, folder)
        except CheckpointError as error:
            return str(error)
        return ""

    for asynchronous in (False, True):
        if policy.groups.whole.rank() == 1:
            checkpoint_writer._write_item = full
        found[f"tensors, asynchronous {asynchronous}"] = attempt(asynchronous)
        checkpoint_writer._write_item = write
        save_config = checkpoint_writer.save_config
        checkpoint_writer.save_config = full
        found[f"list, asynchronous {asynchronous}"] = attempt(asynchronous)
        checkpoint_writer.save_config = save_config
    found["left"] = sorted(path.name for path in shared.iterdir() if "full" in path.name)
    policy.load(folder)
    found["kept"] = policy.version == 0 and largest_difference(weights(policy), kept) == 0.0
    return found


def damaged(models: Path, shared: Path, groups: Groups) -> str:
    """A pipeline is given a checkpoint that lacks the last stage's file."""
    policy = make(models, "qwen3-tied", groups, "pp2")
    if policy is None:
        return ""
    policy.save(shared / "damaged")
    if policy.groups.is_last_stage:
        (shared / "damaged" / "__1_0.distcp").unlink()
    dist.barrier(group=policy.groups.whole)
    before = weights(policy)
    try:
        policy.load(shared / "damaged")
    except CheckpointError as error:
        return str(error) if largest_difference(weights(policy), before) == 0.0 else "changed"
    return ""


def main(models: Path, shared: Path) -> None:
    trainer.PolicyOptimizer = SmallBuckets
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=60)
    groups = Groups(timeout_seconds=60)
    moved: dict[str, Any] = {}
    for name in NAMES:
        for case in CASES:
            through(models, shared, groups, name, case, moved)
    found = {
        "moved": moved,
        "resumed": {case: resumed(models, shared, groups, case) for case, (ranks, _) in CASES.items() if len(ranks) == 4},
        "full": full_disk(models, shared, groups),
        "damaged": damaged(models, shared, groups),
    }
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        torch.save(every, shared / "found.pt")
    dist.barrier()
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
