"""The side "TRL" of `bench/end_to_end.py`: GRPOTrainer on the same tasks, which takes its turns step by step.

    TRL-PYTHON bench/peers/trl_side.py SETTINGS.json

Runs in an environment of its own, without drmas. The settings are what the benchmark wrote; `config` goes to GRPOConfig as it
is. vLLM is out of sight unless it is asked for: TRL imports it where it finds it, and the memory would count.
"""

from __future__ import annotations

import json
import re
import string
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import ClassVar

SETTINGS = json.loads(Path(sys.argv[1]).read_text())
if not SETTINGS["config"].get("use_vllm"):
    sys.modules["vllm"] = None

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.extras import profiling
from turns import Turns

PUNCTUATION = str.maketrans("", "", string.punctuation)
PHASES = {"transformers.generate": "rollout", "transformers.generate_batch": "rollout", "vLLM.generate": "rollout"}
PHASES |= {"sync_weights": "sync"}


def words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


def f1(completions, truth, **_) -> list[float]:
    """SQuAD's word F1, the reward of both sides."""
    scores = []
    for completion, accepted in zip(completions, truth, strict=True):
        said, true = words(completion[0]["content"]), words(accepted)
        common = sum((Counter(said) & Counter(true)).values())
        scores.append(2 * common / max(1, len(said) + len(true)))
    return scores


class Timed(profiling.ProfilingContext):
    """TRL's own clock of its phases, read as well."""

    seconds: ClassVar[defaultdict[str, float]] = defaultdict(float)

    def __exit__(self, *error):
        Timed.seconds[PHASES.get(self.name.rpartition("Trainer.")[2], "other")] += time.perf_counter() - self._start_time
        return super().__exit__(*error)


class TakesTurns(TrainerCallback):
    def __init__(self, turns: Turns, episodes: int) -> None:
        self.turns, self.episodes, self.seen, self.started = turns, episodes, 0.0, 0.0

    def on_step_begin(self, args, state, control, **_):
        self.turns.wait()
        Timed.seconds.clear()
        self.started = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" not in logs:
            return
        step = time.perf_counter() - self.started
        rollout, sync = Timed.seconds["rollout"], Timed.seconds["sync"]
        trained, self.seen = logs["num_tokens"] - self.seen, logs["num_tokens"]
        self.turns.say(
            generated=logs["completions/mean_length"] * self.episodes,
            trained=trained,
            computed=trained,
            seconds={"rollout": rollout, "train": step - rollout - sync, "sync": sync},
            loss=logs["loss"],
            grad_norm=logs["grad_norm"],
            reward=logs["reward"],
        )


def main() -> None:
    turns = Turns()
    torch.set_num_threads(SETTINGS["threads"])
    profiling.ProfilingContext = Timed
    tasks = [json.loads(line) for line in Path(SETTINGS["tasks"]).read_text().splitlines()]
    system = {"role": "system", "content": SETTINGS["system"]}
    rows = [{"prompt": [system, {"role": "user", "content": task["prompt"]}], "truth": task["answer"]} for task in tasks]
    trainer = GRPOTrainer(
        model=SETTINGS["model"],
        reward_funcs=f1,
        args=GRPOConfig(**SETTINGS["config"]),
        train_dataset=Dataset.from_list(rows),
        callbacks=[TakesTurns(turns, SETTINGS["episodes"])],
    )
    trainer.train()


if __name__ == "__main__":
    main()
