"""The part of the tests that needs two ranks: torchrun starts it, rank 0 leaves what was found in found.pt.

Usage: torchrun --nproc-per-node 2 ranks.py MODELS SHARED
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import (
    LAYOUTS,
    LOSSES,
    MODELS,
    ONE_KV_HEAD,
    gradients,
    layout_of,
    make_batch,
    make_critic,
    make_rows,
    make_trainer,
    model_name,
    off_policy_batch,
    run_critic,
    run_updates,
    weights,
    whole_logits,
)

from drmas.config.schema import LossConfig, PolicyConfig
from drmas.errors import ConfigError
from drmas.policy import host_platform
from drmas.policy.groups import Groups, destroy, init_distributed
from drmas.policy.reference import Reference


def same_on_every_rank(value: Any) -> bool:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(each == values[0] for each in values)


def logits(models: Path, groups: Groups) -> dict[str, torch.Tensor]:
    found = {}
    for name in (*(model_name(*model) for model in MODELS), ONE_KV_HEAD):
        for layout in ("tp2", "tp2-sp"):
            trainer = make_trainer(models / name, groups, trainable=False, **LAYOUTS[layout])
            found[f"{name}/{layout}"] = whole_logits(trainer, make_rows())
    return found


def updates(models: Path, groups: Groups) -> dict[str, Any]:
    """Two updates per model and layout, in small microbatches, unclipped; the first gradient, where it is whole."""
    found = {}
    for name in ("qwen3-tied", "qwen2-untied", "llama-untied", ONE_KV_HEAD):
        for layout, settings in LAYOUTS.items():
            trainer = make_trainer(models / name, groups, clip_grad_norm=1e9, tokens_per_microbatch=24, **settings)
            first = run_updates(trainer, 1)
            gradient = gradients(trainer) if layout in ("tp2", "tp2-sp", "pp2") else None
            reports = first + run_updates(trainer, 1, first=1)
            found[f"{name}/{layout}"] = {
                "reports": reports,
                "same": same_on_every_rank(reports),
                "gradient": gradient,
                "weights": weights(trainer),
                "logprobs": trainer.logprobs(make_rows(), [1.0] * 6),
            }
    return found


def losses(models: Path, groups: Groups) -> dict[str, Any]:
    """One update off the policy per loss, clipping its tokens, in small microbatches."""
    found = {}
    for name, loss in LOSSES.items():
        for layout in ("tp2-sp", "dp2"):
            settings = {"loss": loss, "clip_grad_norm": 1e9, "tokens_per_microbatch": 24} | LAYOUTS[layout]
            trainer = make_trainer(models / "qwen3-tied", groups, **settings)
            batch = make_batch()
            batch = off_policy_batch(batch, trainer.logprobs(batch.rows, batch.temperatures))
            result = trainer.update(batch)
            found[f"{name}/{layout}"] = {
                "batch": batch,
                "metrics": result.metrics,
                "agents": result.agents,
                "weights": weights(trainer),
            }
    return found


def bfloat16(models: Path, groups: Groups) -> dict[str, Any]:
    """Two updates in bfloat16 under tensor and sequence parallelism."""
    trainer = make_trainer(models / "qwen3-tied", groups, dtype="bfloat16", clip_grad_norm=1e9, **LAYOUTS["tp2-sp"])
    return {"reports": run_updates(trainer, 2), "gradient": gradients(trainer), "weights": weights(trainer)}


def idle_rank(models: Path, groups: Groups) -> dict[str, Any]:
    """One row for two data-parallel ranks: one of them has nothing to do."""
    trainer = make_trainer(models / "qwen3-tied", groups)
    result = trainer.update(make_batch(make_rows(1)))
    return {"metrics": result.metrics, "weights": weights(trainer), "logprobs": trainer.logprobs(make_rows(1), [1.0])}


def infinite_gradient(models: Path, groups: Groups) -> dict[str, Any]:
    """An infinite advantage, seen by one data-parallel rank only."""
    trainer = make_trainer(models / "qwen3-tied", groups)
    before = weights(trainer)
    result = trainer.update(make_batch(advantages=[float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0]))
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    facts = (result.metrics["skipped"], trainer.version, unchanged)
    return {"facts": facts, "same": same_on_every_rank(facts), "after": run_updates(trainer, 1)[0]["metrics"]}


def checkpoints(models: Path, groups: Groups, shared: Path) -> dict[str, Any]:
    """Checkpoints from one rank to two, and from two ranks to other layouts."""
    found = {}
    for layout, settings in LAYOUTS.items():
        trainer = make_trainer(models / "qwen3-tied", groups, seed=99, **settings)
        trainer.load(shared / "saved-by-one")
        found[f"one to {layout}"] = {"version": trainer.version, "reports": run_updates(trainer, 1, first=1)}
        found[f"one to {layout}"]["weights"] = weights(trainer)
    straight = make_trainer(models / "qwen3-tied", groups, **LAYOUTS["tp2-sp"])
    run_updates(straight, 1)
    straight.save(shared / "saved-by-tp2")
    run_updates(straight, 1, first=1)
    resumed = make_trainer(models / "qwen3-tied", groups, seed=99, **LAYOUTS["tp2-sp"])
    resumed.load(shared / "saved-by-tp2")
    run_updates(resumed, 1, first=1)
    found["bitwise"] = all(
        torch.equal(a, b) for a, b in zip(weights(straight).values(), weights(resumed).values(), strict=True)
    )
    replicas = make_trainer(models / "qwen3-tied", groups)
    run_updates(replicas, 1)
    replicas.save(shared / "saved-by-dp2")
    return found


def two_policies(models: Path, groups: Groups) -> dict[str, Any]:
    """A tensor-parallel and a data-parallel policy updated in turn; each must end where it ends alone."""
    one = make_trainer(models / "qwen3-tied", groups, clip_grad_norm=1e9, tokens_per_microbatch=24, **LAYOUTS["tp2-sp"])
    other = make_trainer(models / "qwen2-untied", groups, clip_grad_norm=1e9, tokens_per_microbatch=24)
    for i in range(2):
        run_updates(one, 1, first=i)
        run_updates(other, 1, first=i)
    return {"qwen3-tied/tp2-sp": weights(one), "qwen2-untied/dp2": weights(other)}


def critics(models: Path, groups: Groups) -> dict[str, Any]:
    """A critic and a policy with a reference, by layout."""
    found = {}
    for name, settings in LAYOUTS.items():
        updates = run_critic(make_critic(models / "qwen3-tied", groups, **settings))
        config = PolicyConfig(model="llama", **settings)
        reference = Reference("main", config, model_path=models / "llama-tied", layout=layout_of(config, groups))
        loss = LossConfig(kl="k2", kl_coefficient=0.5)
        result = make_trainer(models / "qwen3-tied", groups, loss=loss, reference=reference, **settings).update(make_batch())
        found[name] = {**updates, "kl": {"metrics": result.metrics, "agents": result.agents}}
    return found


def frozen_embedding(models: Path, groups: Groups) -> dict[str, Any]:
    """The first stage's embedding is tied to the last stage's head: both stay, or the stages wait for each other."""
    trainer = make_trainer(models / "qwen3-tied", groups, freeze=["model.embed_tokens.*"], **LAYOUTS["pp2"])
    return {"reports": run_updates(trainer, 2), "weights": weights(trainer)}


def refused_layout(models: Path, groups: Groups) -> str:
    try:
        make_trainer(models / "qwen3-tied", groups, tensor_parallel=4)
    except ConfigError as error:
        return str(error)
    return ""


def shared_error(groups: Groups) -> str:
    def fail() -> None:
        raise OSError("no space left")

    try:
        groups.layout().on_leader(fail)
    except OSError as error:
        return str(error)
    return ""


def main(models: Path, shared: Path) -> None:
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=60)
    groups = Groups(timeout_seconds=60)
    found = {
        "logits": logits(models, groups),
        "updates": updates(models, groups),
        "losses": losses(models, groups),
        "bfloat16": bfloat16(models, groups),
        "idle": idle_rank(models, groups),
        "infinite": infinite_gradient(models, groups),
        "checkpoints": checkpoints(models, groups, shared),
        "critics": critics(models, groups),
        "frozen embedding": frozen_embedding(models, groups),
        "two policies": two_policies(models, groups),
        "refused": refused_layout(models, groups),
    }
    error = shared_error(groups)
    found["shared error"] = error if same_on_every_rank(error) else "differs"
    make_trainer(models / "qwen3-tied", groups, **LAYOUTS["tp2"]).export(shared / "exported-by-tp2")
    if dist.get_rank() == 0:
        torch.save(found, shared / "found.pt")
    dist.barrier()
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
