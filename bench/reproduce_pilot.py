"""The runs by which the learning rate of all methods was picked: grpo alone, on a seed that no report has.

    python bench/reproduce_pilot.py         # prints the final reward of each learning rate, in a few minutes

For what `drmas.reproduce.tuning.TUNING` says; a reproduction doesn't need it.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from statistics import mean

from drmas.reproduce.plan import PILOT_SEED, START, Trial, scale
from drmas.reproduce.scenarios import configure
from drmas.reproduce.trial import PART
from drmas.runtime.run import train
from drmas.telemetry.sinks import read_metrics

GRID = (1e-4, 3e-4, 1e-3)
SCENARIOS = ("maths-shared", "maths-separate", "search-shared", "search-separate")


def final_reward(scenario: str, lr: float, start: Path, folder: Path) -> float:
    """The mean reward of the last fifth of the steps of a quick trial of grpo."""
    trial = Trial(scenario, "grpo", PILOT_SEED)
    models = {policy.name: policy for policy in (start / "run" / "export").iterdir()}
    config = configure(trial, folder, quick=True, models=models)
    policies = {name: policy.model_copy(update={"lr": lr}) for name, policy in config.policies.items()}
    run = train(config.model_copy(update={"policies": policies}), overwrite=True)
    return mean(step["reward/mean"] for step in read_metrics(run)[-scale(quick=True).steps // PART :])


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for scenario in SCENARIOS:
            start = Path(scratch) / scenario
            with contextlib.redirect_stdout(io.StringIO()):
                train(configure(Trial(scenario, START, PILOT_SEED), start, quick=True), overwrite=True)
                rewards = {lr: final_reward(scenario, lr, start, Path(scratch) / "run") for lr in GRID}
            print(f"{scenario}: " + ", ".join(f"{lr:g} -> {reward:.2f}" for lr, reward in rewards.items()), flush=True)


if __name__ == "__main__":
    main()
