"""The engine that a policy's `engine` section asks for, not started. Made by the run and by evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drmas.config.cluster import ClusterConfig
from drmas.config.schema import EngineConfig, LoraConfig
from drmas.rollout.engine import Engine
from drmas.rollout.host_client import RemoteHost
from drmas.rollout.pool import make_engine
from drmas.rollout.torch_engine import TorchEngine
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.gpus import Seat


def open_engine(
    name: str,
    config: EngineConfig,
    *,
    model_path: Path,
    log_dir: Path,
    seed: int,
    deterministic: bool,
    seats: Sequence[Seat],
    cluster: ClusterConfig,
    lora: LoraConfig | None = None,
) -> Engine:
    """By `config.backend`; several behind one where `config.replicas` says so. `lora`: updates bring adapters of that shape.

    `seats`: where each replica runs; `cluster` says how other hosts are reached.
    """
    if config.backend == "torch":
        return TorchEngine(name, config, model_path=model_path, deterministic=deterministic)

    def one(replica: int | None) -> VllmEngine:
        seat = seats[replica or 0]
        return VllmEngine(
            name,
            config,
            replica=replica,
            model_path=model_path,
            log_dir=log_dir,
            seed=seed,
            deterministic=deterministic,
            lora=lora,
            host=RemoteHost(seat.host, cluster) if seat.host is not None else None,
            gpus=seat.gpus,
        )

    return make_engine(one, config.replicas, deterministic=deterministic)
