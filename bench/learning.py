"""Reward over the steps of several runs as one picture: `python bench/learning.py OUT.svg RUN [RUN ...]`.

    for seed in 0 1 2; do drmas train arithmetic-tiny --seed $seed --name arithmetic-tiny-$seed; done
    python bench/learning.py bench/arithmetic-tiny.svg runs/arithmetic-tiny-{0,1,2}

Draws the mean over the runs with their range, and prints each run's reward over its first and last five steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from drmas.telemetry.plot import band, line_chart
from drmas.telemetry.sinks import read_metrics

WINDOW = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    rewards = []
    for run in args.runs:
        steps = read_metrics(run)
        rewards.append([step["reward/mean"] for step in steps])
        seconds = sum(step["time/step_seconds"] for step in steps)
        first, last = mean(rewards[-1][:WINDOW]), mean(rewards[-1][-WINDOW:])
        print(f"{run.name}: reward {first:.2f} -> {last:.2f}, {seconds:.0f} s in steps")
    series = band(f"mean and range of {len(rewards)} runs", rewards, range(1, min(map(len, rewards)) + 1))
    args.out.write_text(line_chart([series], title="Reward", y_label="mean reward", standalone=True))


if __name__ == "__main__":
    main()
