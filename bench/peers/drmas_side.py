"""The side "drmas" of `bench/end_to_end.py`: `drmas train` of a recipe, which takes its turns step by step.

python bench/peers/drmas_side.py RECIPE.json
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as the command does
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # instead of bench/peers/

from bench.peers.turns import Turns
from drmas.config.load import load
from drmas.runtime import run
from drmas.runtime.controller import Controller
from drmas.telemetry.sinks import read_metrics


def main() -> None:
    turns, config = Turns(), load(sys.argv[1])
    folder = Path(config.output) / config.name

    class TakesTurns(Controller):
        def rollout(self, step):
            turns.wait()
            return super().rollout(step)

        def finish(self, step, *args, **options):
            stop = super().finish(step, *args, **options)
            done = read_metrics(folder)[-1]
            turns.say(
                generated=done["rollout/tokens"],
                trained=done["train/main/tokens"],
                computed=done["train/main/computed_tokens"],
                seconds={phase: done[f"time/{phase}_seconds"] for phase in ("rollout", "train", "sync")},
                loss=done["train/main/loss"],
                grad_norm=done["train/main/grad_norm"],
                reward=done["reward/mean"],
            )
            return stop

    with patch.object(run, "Controller", TakesTurns):
        run.train(config, overwrite=True)


if __name__ == "__main__":
    main()
