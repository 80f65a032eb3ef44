"""Seeds of samples: a pure function of who samples what, never of scheduling (I9)."""

from __future__ import annotations

import json
from hashlib import blake2b


def sample_seed(run_seed: int, step: int, task: str, sample: int, agent: str, turn: int) -> int:
    """A seed of 63 bits for one agent call.

    The fields are written as a JSON list before hashing, so that no two different calls give the same bytes.
    """
    key = json.dumps([run_seed, step, task, sample, agent, turn]).encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1
