"""The engine that a policy's `engine` section asks for, not started. Made by the run and by evaluations."""

from __future__ import annotations

from pathlib import Path

from drmas.config.schema import EngineConfig, LoraConfig
from drmas.rollout.engine import Engine
from drmas.rollout.pool import make_engine
from drmas.rollout.torch_engine import TorchEngine
from drmas.rollout.vllm_engine import VllmEngine


def open_engine(
    name: str,
    config: EngineConfig,
    *,
    model_path: Path,
    log_dir: Path,
    seed: int,
    deterministic: bool,
    lora: LoraConfig | None = None,
) -> Engine:
    """By `config.backend`; several behind one where `config.replicas` says so. `lora`: updates bring adapters of that shape."""
    if config.backend == "torch":
        return TorchEngine(name, config, model_path=model_path, deterministic=deterministic)

    def one(replica: int | None) -> VllmEngine:
        return VllmEngine(
            name,
            config,
            replica=replica,
            model_path=model_path,
            log_dir=log_dir,
            seed=seed,
            deterministic=deterministic,
            lora=lora,
        )

    return make_engine(one, config.replicas, deterministic=deterministic)
