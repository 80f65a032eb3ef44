"""The side "TRL" of `bench/end_to_end.py`: GRPOTrainer on the same tasks, which takes its turns step by step.

    TRL-PYTHON bench/peers/trl_side.py SETTINGS.json

Runs in an environment of its own, without drmas. The settings are what the benchmark wrote; `config` goes to GRPOConfig as it
is. vLLM is out of sight: TRL imports it where it finds it, and the memory would count.
"""

from __future__ import annotations

import json
import re
import string
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from turns import Turns

PUNCTUATION = str.maketrans("", "", string.punctuation)
ROLLOUT = ("transformers.generate", "transformers.generate_batch")


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


class TakesTurns(TrainerCallback):
    """`phases`: TRL's own phase -> its seconds, summed since they were last cleared."""

    def __init__(self, turns: Turns, episodes: int, phases: dict[str, float]) -> None:
        self.turns, self.episodes, self.phases = turns, episodes, phases
        self.seen, self.started = 0.0, 0.0

    def on_step_begin(self, args, state, control, **_):
        self.turns.wait()
        self.phases.clear()
        self.started = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" not in logs:
            return
        step = time.perf_counter() - self.started
        rollout = sum(seconds for name, seconds in self.phases.items() if name.endswith(ROLLOUT))
        trained, self.seen = logs["num_tokens"] - self.seen, logs["num_tokens"]
        self.turns.say(
            generated=logs["completions/mean_length"] * self.episodes,
            trained=trained,
            computed=trained,
            seconds={"rollout": rollout, "train": step - rollout, "sync": 0.0},
            loss=logs["loss"],
            grad_norm=logs["grad_norm"],
            reward=logs["reward"],
        )


def read_clocks() -> dict[str, float]:
    """What TRL's own clocks measure from now on."""
    from trl.extras.profiling import ProfilingContext

    phases: dict[str, float] = defaultdict(float)
    leave = ProfilingContext.__exit__

    def timed(self, *error):
        phases[self.name] += time.perf_counter() - self._start_time
        return leave(self, *error)

    ProfilingContext.__exit__ = timed
    return phases


def train(settings: Mapping, turns: Turns) -> None:
    sys.modules["vllm"] = None
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    tasks = [json.loads(line) for line in Path(settings["tasks"]).read_text().splitlines()]
    system = {"role": "system", "content": settings["system"]}
    rows = [{"prompt": [system, {"role": "user", "content": task["prompt"]}], "truth": task["answer"]} for task in tasks]
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=f1,
        args=GRPOConfig(**settings["config"]),
        train_dataset=Dataset.from_list(rows),
        callbacks=[TakesTurns(turns, settings["episodes"], read_clocks())],
    )
    trainer.train()


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()), Turns())
