"""What a recipe's step costs at least, from FLOPs alone: `python bench/recipe_floor.py [RECIPE ...] [--prompt N --response N]`.

    python bench/recipe_floor.py paper-maths-4b paper-maths-8b --prompt 400 --response 1000
    python bench/recipe_floor.py paper-search-3b paper-search-7b --prompt 600 --response 100 --tasks 169615

An estimate of what was not run. Every turn is assumed to read `--prompt` and to write `--response` tokens, and every agent to
be called as often per episode as `CALLS` says (`--calls solver=1.2,verifier=1` says otherwise; a run's metrics have both). The
time is that of the products alone at the data sheet's peak of all the recipe's GPUs (`train.ranks`): no decoding at the speed
of memory, no communication, no waiting, nothing computed again. Real runs take many times as long. With `--tasks`, the tasks of
the data set, it is multiplied by the steps of the recipe's epochs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from drmas.agents.team import load_team
from drmas.config.load import load
from drmas.config.schema import RunConfig
from drmas.core.flops import causal_pairs, flops, forward_cost, training_flops
from drmas.core.peaks import data_sheet
from drmas.policy.architecture import read_architecture
from drmas.runtime.models import sketched_model

CALLS = {"solver": 1.5, "verifier": 1.0, "router": 2.0, "searcher": 1.5, "answerer": 1.0}
"""Calls per episode that are assumed: half of the maths answers are sent back; three searches in two episodes."""
RECIPES = ("paper-maths-4b", "paper-maths-8b", "paper-search-3b", "paper-search-7b", "paper-search-heterogeneous")


class Floor(NamedTuple):
    """FLOPs of one step, and the seconds that all GPUs together need for them at their peak."""

    rollout_flops: int
    train_flops: int
    seconds: float


def floor(config: RunConfig, *, prompt: int, response: int, calls: Mapping[str, float], gpu: str) -> Floor:
    """Of one step of `config`. Generating is one forward pass over prompt and response, training one forward and backward."""
    episodes = config.rollout.tasks_per_step * config.rollout.group_size
    length, rollout, train = prompt + response, 0, 0
    for name, agent in load_team(config.team).agents.items():
        policy = config.policies[agent.policy]
        shape = read_architecture(sketched_model(policy.model, seed=config.seed)).shape
        rows = round(episodes * calls[name])
        counts = {"tokens": rows * length, "pairs": rows * causal_pairs([length]), "responses": rows * response}
        rollout += flops(forward_cost(shape, policy.lora), **counts)
        train += training_flops(shape, **counts, config=policy)
    peak = data_sheet(gpu).bfloat16 * (config.train.ranks or 1)
    return Floor(rollout, train, (rollout + train) / peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--response", type=int, default=1000)
    parser.add_argument("--calls", default="", help="AGENT=N,AGENT=N: calls per episode")
    parser.add_argument("--gpu", default="NVIDIA H100 80GB HBM3")
    parser.add_argument("--tasks", type=int, help="tasks of the data set, for the whole run")
    args = parser.parse_args()
    calls = CALLS | {name: float(count) for name, _, count in (each.partition("=") for each in args.calls.split(",") if each)}
    for name in args.recipes:
        config = load(name)
        found = floor(config, prompt=args.prompt, response=args.response, calls=calls, gpu=args.gpu)
        line = f"{name}: {found.rollout_flops:.3g} + {found.train_flops:.3g} FLOPs, at least {found.seconds:.1f} s a step"
        line += f" on {config.train.ranks or 1} x {args.gpu}"
        if args.tasks:
            steps = (config.train.epochs or 1) * args.tasks // config.rollout.tasks_per_step
            line += f"; {steps} steps, {found.seconds * steps / 3600:.1f} h"
        print(line)


if __name__ == "__main__":
    main()
