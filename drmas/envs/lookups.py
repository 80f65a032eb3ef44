"""Made-up keys to look up, for tiny models: tasks, the corpus that answers them, and what a teacher says for the warm start.

There are 36 keys of a consonant and a vowel, none of them a word that an index passes over. The passage of a key holds its
value, a digit, or names another key that has one:

    ba          ki
    7           see ba

The question is the key, the truth the digit behind it, one or two searches away. The table is the same in every run. The
prompts that the teacher understands end in the question, what was found (`>` before each passage) and the mark of the speaker:
`?` for a router, `!` for a searcher, `=` for an answerer, `:` for one agent who does it all. The recipe search-tiny writes them
so.
"""

from __future__ import annotations

import random
import re
from functools import cache

from drmas.config.tasks import LookupsData
from drmas.core.seeds import sample_seed
from drmas.envs.search.corpus import Passage
from drmas.types import Task

KEYS = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aiu"]
_BEHIND_ANOTHER = 0.4
"""The share of keys whose passage names another key."""
_PROMPT = re.compile(r"(?<![a-z])([a-z]{2})((?:>[^>?!=:]*)*)([?!=:])[^?!=:]*$")


@cache
def table() -> dict[str, str]:
    """Key -> what its passage says: a digit, or `see KEY`."""
    draw = random.Random(0)
    behind = set(draw.sample(KEYS, int(_BEHIND_ANOTHER * len(KEYS))))
    plain = [key for key in KEYS if key not in behind]
    return {key: f"see {draw.choice(plain)}" if key in behind else str(draw.randrange(10)) for key in KEYS}


def value(key: str) -> str:
    """The digit behind a key, however far."""
    found = table()[key]
    return value(found.removeprefix("see ")) if found.startswith("see ") else found


def lookup_tasks(config: LookupsData) -> list[Task]:
    """`config.size` tasks, their keys drawn with replacement; the same for the same seed."""
    draw = random.Random(config.seed)
    keys = [draw.choice(KEYS) for _ in range(config.size)]
    return [Task(id=f"lookups/{i}", question=key, truth=value(key), source="lookups") for i, key in enumerate(keys)]


def passages() -> list[Passage]:
    """The corpus: a passage per key."""
    return [Passage(id=f"lookups/{key}", title=key, contents=found) for key, found in table().items()]


def demonstrate(prompt: str, key: str, *, seed: int, error_rate: float) -> str:
    """The teacher's answer to `prompt`; wrong at `error_rate`, as `key` and `seed` decide, so that it is always the same
    text."""
    match = _PROMPT.search(prompt)
    if match is None:
        raise ValueError(f"no lookup in the prompt {prompt!r}; expected KEY, what was found, and one of ? ! = :")
    question, found, mark = match.groups()
    draw = random.Random(sample_seed(seed, 0, key, 0, "teacher", 0))
    wrong = draw.random() < error_rate
    needed, answer = _followed(question, found.split(">")[1:])
    if mark == "?":
        return "yes" if (answer is not None) != wrong else "no"
    if mark == "!" or (mark == ":" and answer is None):
        return ("?" if mark == ":" else "") + (draw.choice(KEYS) if wrong else needed)
    return str(draw.randrange(10)) if wrong or answer is None else answer


def _followed(question: str, found: list[str]) -> tuple[str, str | None]:
    """The key that is still to be looked up, and the digit if it was found."""
    needed = question
    for passage in found:
        key, _, said = passage.strip().partition(" ")
        if key == needed and said.isdigit():
            return needed, said
        if key == needed:
            needed = said.removeprefix("see ")
    return needed, None
