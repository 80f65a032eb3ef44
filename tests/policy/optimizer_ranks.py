"""The part of test_optimizer.py that needs two ranks: torchrun starts it, rank 0 leaves what was found in found.pt.

Usage: torchrun --nproc-per-node 2 optimizer_ranks.py MODELS SHARED
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from optimizer_kit import Oracle, Trained, largest_state_difference

from drmas.policy import host_platform, mcore_fixes
from drmas.policy.groups import Groups, destroy, init_distributed
from drmas.policy.packing import pack
from drmas.types import Row

CASES = {
    "dp2": ("qwen3-tied", {}),
    "dp2-overlap": ("qwen3-tied", {"overlap": True, "bucket_size": 3000}),
    "dp2-bf16-overlap": ("qwen2-untied", {"overlap": True, "bucket_size": 3000, "dtype": "bfloat16"}),
    "dp2-frozen-embedding": ("qwen3-tied", {"freeze": ("embedding.word_embeddings.weight",)}),
    "tp2": ("qwen2-untied", {"tensor_parallel": 2}),
    "tp2-bf16": ("llama-tied", {"tensor_parallel": 2, "dtype": "bfloat16"}),
    "pp2-tied": ("qwen3-tied", {"pipeline_parallel": 2}),
    "pp2-untied": ("qwen2-untied", {"pipeline_parallel": 2}),
    "pp2-frozen-stage": (
        "qwen2-untied",
        {"pipeline_parallel": 2, "freeze": ("output_layer.weight", "decoder.final_layernorm.weight", "decoder.layers.1.")},
    ),
    "cp2": ("llama-untied", {"context_parallel": 2}),
}


def everywhere(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def shapes(trained: Trained) -> dict[str, tuple[int, ...]]:
    """Of all stages."""
    mine = {name: trained.whole_shape(parameter) for name, parameter in trained.named()}
    return {name: shape for stage in everywhere(mine) for name, shape in stage.items()}


def numbers(trained: Trained, step: int) -> tuple[list[int], list[int]]:
    """(this replica's microbatches, those of all replicas): one in the first step, then two, three, one, and so on."""
    group, count = trained.groups.dp_cp, 1 + (step - 1) % 3
    replicas = [[100 * step + 10 * replica + i for i in range(count)] for replica in range(group.size())]
    return replicas[group.rank()], [number for each in replicas for number in each]


def steps(models: Path, groups: Groups) -> dict[str, Any]:
    """Three steps of every case: norms beside the oracle's, the largest difference of weights and main parameters."""
    found = {}
    for case, (name, settings) in CASES.items():
        trained = Trained(models / name, groups, **settings)
        oracle = Oracle(trained, shapes=shapes(trained), freeze=settings.get("freeze", ()))
        norms = []
        for step in (1, 2, 3):
            mine, all_of_them = numbers(trained, step)
            norms.append((float(trained.update(*mine).norm), oracle.update(*all_of_them)))
        found[case] = {
            "norms": everywhere(norms),
            "weights": max(everywhere(oracle.difference(trained))),
            "main": max(everywhere(oracle.main_difference(trained))),
            "buckets": sum(len(buffer.buckets) for buffer in trained.optimizer.ddp.buffers),
        }
    return found


def parts(models: Path, groups: Groups) -> dict[str, Any]:
    """Two updates in three parts that are set aside; each part's norm beside the oracle's."""
    found = {}
    for case in ("dp2", "dp2-overlap", "tp2", "pp2-tied"):
        name, settings = CASES[case]
        trained = Trained(models / name, groups, **settings)
        whole = shapes(trained)
        oracle = Oracle(trained, shapes=whole)
        for step in (1, 2):
            squares = []
            with trained.groups.active():
                trained.optimizer.zero_grad()
            for part in range(3):
                trained.backward(*numbers(trained, 10 * step + part)[0])
                with trained.groups.active():
                    squares.append(float(trained.optimizer.set_aside()))
            norm = float(trained.finish().norm)
            numbers_of_all = [numbers(trained, 10 * step + part)[1] for part in range(3)]
            expected = oracle.update(*(number for each in numbers_of_all for number in each))
        alone = [Oracle(trained, shapes=whole).update(*each) for each in numbers_of_all]
        found[case] = {
            "parts": [(square**0.5, norm) for square, norm in zip(squares, alone, strict=True)],
            "norm": (norm, expected),
            "weights": max(everywhere(oracle.difference(trained))),
        }
    return found


def spoilt(models: Path, groups: Groups) -> dict[str, Any]:
    """A gradient that is infinite on rank 1 only, between two good ones."""
    trained = Trained(models / "qwen3-tied", groups)
    trained.update(*numbers(trained, 1)[0])
    before = trained.snapshot()
    flags = trained.update(*numbers(trained, 2)[0], spoil=float("inf") if dist.get_rank() == 1 else 0.0)
    return {
        "applied": everywhere(bool(flags.applied)),
        "changed": max(everywhere(largest_state_difference(trained.snapshot(), before))),
        "steps": everywhere(trained.optimizer.steps),
    }


def overlapped_forward(models: Path, groups: Groups) -> dict[str, Any]:
    """Hidden states and head weights right after a step, gathered by the forward pass itself, with and without overlap."""
    row = Row(
        task="",
        episode="",
        agent="",
        policy="",
        turn=0,
        prompt_ids=list(range(5, 12)),
        response_ids=list(range(30, 40)),
        logprobs=[0.0] * 10,
        versions=[0] * 10,
        reward=None,
    )
    packed = pack([row], device=host_platform.device())
    seen = {}
    for overlap in (False, True):
        for name in ("qwen3-tied", "qwen2-untied"):
            trained = Trained(models / name, groups, overlap=overlap, bucket_size=3000)
            with trained.groups.active():
                trained.optimizer.zero_grad()
                trained.backward(*numbers(trained, 1)[0])
                trained.optimizer.step()
                with torch.no_grad():
                    hidden = trained.model(packed.ids, packed.positions, None, packed_seq_params=packed.params)
                seen[name, overlap] = (hidden, trained.model.head_weight.detach().clone())
    return {
        name: max(
            everywhere(
                max(float((one - other).abs().max()) for one, other in zip(seen[name, False], seen[name, True], strict=True))
            )
        )
        for name in ("qwen3-tied", "qwen2-untied")
    }


def main(models: Path, shared: Path) -> None:
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=60)
    mcore_fixes.apply()
    groups = Groups(timeout_seconds=60)
    found = {
        "steps": steps(models, groups),
        "parts": parts(models, groups),
        "spoilt": spoilt(models, groups),
        "overlapped_forward": overlapped_forward(models, groups),
    }
    if dist.get_rank() == 0:
        torch.save(found, shared / "found.pt")
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
