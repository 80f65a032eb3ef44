"""A run of three policies with two checkpoints, its exports and imports, in one process; test_weights.py looks at the folders.

Usage: weights_process.py PLACE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from drmas.agents.team import load_team
from drmas.cli.weights import export_run, import_model
from drmas.config.load import dump
from drmas.config.schema import LossConfig, RunConfig
from drmas.policy import checkpoint, host_platform
from drmas.policy.broadcast import Broadcast
from drmas.policy.groups import Groups, destroy, init_distributed
from drmas.policy.trainer import PolicyTrainer
from drmas.runtime.models import write_tiny_qwen3
from drmas.runtime.resume import Checkpoints


def policies(config: RunConfig) -> dict[str, PolicyTrainer]:
    layout = Groups().layout()
    arguments = {"layout": layout, "seed": 0, "total_steps": 10, "agents": [], "loss": LossConfig()}
    return {
        name: PolicyTrainer(name, policy, model_path=Path(policy.model), **arguments)
        for name, policy in config.policies.items()
    }


@torch.no_grad()
def shift(trainers: dict[str, PolicyTrainer], number: int) -> None:
    """Other weights of what is trained, at version `number`; of the moments one number."""
    for trainer in trainers.values():
        generator = torch.Generator().manual_seed(number)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
                trainer.optimizer.megatron._get_main_param_and_optimizer_states(parameter)["exp_avg"].fill_(number)
        if trainer.optimizer is not None:
            trainer.version = trainer.optimizer.steps = number


def main(place: Path) -> None:
    host_platform.set_threads(1)
    for name, seed in (("start", 0), ("other", 1)):
        write_tiny_qwen3(place / name, seed=seed, hidden=32, layers=2)
    write_tiny_qwen3(place / "wider", hidden=64, layers=2)
    start = str(place / "start")
    config = RunConfig(
        name="run",
        output=str(place),
        policies={
            "main": {"model": start},
            "judge": {"model": start, "trainable": False},
            "adapted": {"model": start, "lora": {"rank": 4}},
        },
        team={"name": "solver-verifier"},
        data={"type": "sums"},
    )
    run, found = place / "run", {}
    init_distributed()
    checkpoints = Checkpoints(run, load_team(config.team), Broadcast(), keep=5)
    trainers = policies(config)
    (run / "config.json").parent.mkdir(exist_ok=True)
    (run / "config.json").write_text(dump(config))
    for step in (1, 2):
        shift(trainers, step)
        checkpoints.save(step, trainers, dict)
        found[step] = {
            name: {key: tensor.clone() for key, tensor in trainer.weight_source()} for name, trainer in trainers.items()
        }
    destroy()

    found["exported"] = export_run(run)
    export_run(run, step=1, policy="main", output=place / "chosen")
    export_run(run, step=1, policy="adapted", output=place / "adapters", adapter=True)
    found["imported"] = import_model(run, policy="main", model=place / "other")
    found["adapters imported"] = import_model(run, policy="adapted", model=place / "adapters")
    export_run(run, output=place / "after")

    init_distributed()
    trainers = policies(config)
    checkpoints.load(2, trainers)
    main = trainers["main"]
    states = [main.optimizer.megatron._get_main_param_and_optimizer_states(parameter) for parameter in main.model.parameters()]
    found["after"] = {
        "version": main.version,
        "steps": main.optimizer.steps,
        "counted": main.optimizer.megatron.steps_taken.tolist(),
        "moments": max(float(state[key].abs().max()) for state in states for key in ("exp_avg", "exp_avg_sq")),
        "facts": checkpoint.read_facts(run / "checkpoints" / "step_1" / "policy-main")["version"],
    }
    destroy()
    torch.save(found, place / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
