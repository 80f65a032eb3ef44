"""Sums: tasks small enough that a model of a million parameters learns them from nothing in minutes.

`sums_tasks` makes the tasks; `demonstrate` answers a prompt as a teacher with a stated error rate would, for the supervised
warm start. The prompts it understands end in `A+B=` (solve) or `A+B=C?` (check); the recipe arithmetic-tiny writes them so.
"""

from __future__ import annotations

import random
import re

from drmas.config.tasks import SumsData
from drmas.core.seeds import sample_seed
from drmas.types import Task

_PROMPT = re.compile(r"(\d+(?:\+\d+)+)=(\d*)(\??)")


def sums_tasks(config: SumsData) -> list[Task]:
    """`config.size` tasks with operands drawn from 0 to `config.largest`, the same for the same seed."""
    draw = random.Random(config.seed)
    tasks = []
    for index in range(config.size):
        terms = [draw.randint(0, config.largest) for _ in range(config.terms)]
        tasks.append(Task(id=f"sums/{index}", question="+".join(map(str, terms)), truth=str(sum(terms)), source="sums"))
    return tasks


def demonstrate(prompt: str, key: str, *, seed: int, error_rate: float) -> str:
    """The teacher's answer to `prompt`: the sum, or "yes" or "no" about a proposed one; wrong at `error_rate`.

    `key` names the request; with `seed` it decides the error, so that the same demonstration is always the same text.
    """
    found = _PROMPT.search(prompt)
    if found is None:
        raise ValueError(f"no sum in the prompt {prompt!r}; demonstrations are for prompts that end in 'A+B=' or 'A+B=C?'")
    draw = random.Random(sample_seed(seed, 0, key, 0, "teacher", 0))
    total = sum(map(int, found[1].split("+")))
    wrong = draw.random() < error_rate
    if found[3]:
        return "yes" if (found[2] == str(total)) != wrong else "no"
    return str(total + draw.choice([-3, -2, -1, 1, 2, 3]) if wrong and total > 3 else total + wrong)
