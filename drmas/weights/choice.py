"""Makes the transports that send whole tensors, by their names. (`shards` needs a rank's own shards: the runtime makes it.)"""

from __future__ import annotations

from pathlib import Path

import torch

from drmas.config.cluster import SyncConfig
from drmas.weights.broadcast import BroadcastOutbox
from drmas.weights.buckets import BucketTransport
from drmas.weights.carrier import Outbox
from drmas.weights.disk import DiskOutbox
from drmas.weights.shared_memory import CudaOutbox, MemoryOutbox
from drmas.weights.source import Source
from drmas.weights.transport import InProcess, Transport

CPU = torch.device("cpu")


def open_transport(
    name: str, source: Source, config: SyncConfig | None = None, *, policy: str, folder: Path, device: torch.device = CPU
) -> Transport:
    """`name`: in-process, broadcast, shared-memory or disk. `source` is iterated on every rank of the policy.

    `device`: where bytes pass through, a GPU (`payload_device`) or the host. `folder`: of disk, this policy's alone.
    """
    if name == "in-process":
        return InProcess(source)
    config = config or SyncConfig()
    return BucketTransport(
        source,
        _outbox(name, device, folder),
        bucket_bytes=config.bucket_bytes,
        timeout_seconds=config.timeout_seconds,
        key=f"policies.{policy}.sync",
    )


def payload_device(name: str, *, gpu: torch.device | None, shared_gpus: bool, beside: bool, adapters: bool) -> torch.device:
    """Where the bytes of a transport pass through: rank 0's `gpu`, where every end can reach it; else the host.

    NCCL needs a GPU for every end; CUDA IPC is for a worker that is alone and `beside` rank 0, on its GPU. Adapters belong to
    the host.
    """
    direct = (name in ("broadcast", "shards") and not shared_gpus) or (name == "shared-memory" and beside)
    return gpu if gpu is not None and direct and not adapters else CPU


def _outbox(name: str, device: torch.device, folder: Path) -> Outbox:
    match name:
        case "broadcast":
            return BroadcastOutbox(device)
        case "shared-memory":
            return MemoryOutbox() if device.type == "cpu" else CudaOutbox(device)
        case "disk":
            return DiskOutbox(folder)
    raise ValueError(f"no transport {name!r} of whole tensors")
