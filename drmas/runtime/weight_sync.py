"""A policy's weight sync, from the configuration and from who holds the policy. The run makes each policy's, on every rank."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from drmas.config.schema import RunConfig
from drmas.policy import host_platform
from drmas.policy.groups import Groups
from drmas.policy.shard_source import ShardSource
from drmas.policy.trainer import PolicyTrainer
from drmas.rollout.engine import Engine
from drmas.runtime.gpus import Seat, place_engines
from drmas.runtime.placement import transport_of
from drmas.weights.choice import open_transport, payload_device
from drmas.weights.relay import relayed
from drmas.weights.shards import ShardTransport
from drmas.weights.sync import WeightSync
from drmas.weights.transport import Idle, Transport

MANY_GPUS = 2**20
"""Of a host, where it only matters which of the trainer's GPUs engines share."""


def make_sync(
    config: RunConfig,
    name: str,
    policy: PolicyTrainer | None,
    engine: Engine | None,
    *,
    groups: Groups,
    ranks: Sequence[int],
    folder: Path,
) -> WeightSync:
    """Collective over the job. `ranks` hold the policy, on others it is None; `engine` is rank 0's; `folder` is the run's.

    Where rank 0 isn't one of the policy's ranks, whole tensors reach it by way of the policy's first rank; shards do not.
    """
    transport, _ = transport_of(config, name, gpu=not host_platform.is_host())
    if transport == "shards":
        return WeightSync(engine, _shards(config, name, policy, groups=groups, ranks=ranks))
    settings = config.policies[name]
    pair = groups.get([0, ranks[0]], lane="relay") if 0 not in ranks else None
    return WeightSync(
        engine,
        open_transport(
            transport,
            relayed(policy and policy.sync_source(), pair, device=host_platform.device()),
            settings.sync,
            policy=name,
            folder=_files(config, folder, name),
            device=_device(config, name, transport),
        ),
    )


def _files(config: RunConfig, folder: Path, name: str) -> Path:
    """Where a policy's updates lie, of the transport disk: no other run's, as the run's `folder` is nobody else's."""
    if (given := config.policies[name].sync.folder) is None:
        return folder / "weights" / name
    own = hashlib.blake2b(str(folder.absolute()).encode(), digest_size=4).hexdigest()
    return Path(given) / f"{config.name}-{own}" / name


def _device(config: RunConfig, name: str, transport: str) -> torch.device:
    """Where the bytes pass through on the trainer's ranks: found alike on all of them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    gpus = 0 if host_platform.is_host() else MANY_GPUS
    seats = place_engines(config, world=world, ranks_per_host=ranks, gpus_per_host=gpus)[name]
    return payload_device(
        transport,
        gpu=host_platform.device() if gpus else None,
        shared_gpus=config.shares_gpus(name),
        beside=seats == (Seat(None, (0,)),),
        adapters=config.policies[name].syncs_adapters,
    )


def _shards(config: RunConfig, name: str, policy: PolicyTrainer | None, *, groups: Groups, ranks: Sequence[int]) -> Transport:
    together = sorted({0, *ranks})
    tell = groups.get(together, lane="shards") if len(together) > 1 else None
    if tell is None and len(together) > 1:
        return Idle()
    settings = config.policies[name]
    return ShardTransport(
        policy and ShardSource(policy.sync_source()),
        tell,
        trainers=ranks,
        engine_workers=settings.engine.tensor_parallel,
        bucket_bytes=settings.sync.bucket_bytes,
        timeout_seconds=settings.sync.timeout_seconds,
        device=_device(config, name, "shards"),
    )
