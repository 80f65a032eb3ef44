"""One small random model, and one engine per mode for the whole session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drmas.config.schema import EngineConfig
from drmas.rollout.engine import Completion, Sampling
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import write_tiny_qwen3

TINY = EngineConfig(max_model_tokens=256, max_concurrent=32, kv_cache_bytes=16 * 2**20, threads=1, request_timeout_seconds=60)


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine-model")
    write_tiny_qwen3(folder, seed=3, hidden=256, layers=2)  # large enough that a batch's size decides the last bits (I9)
    return folder


@pytest.fixture(scope="session")
def make_engine(engine_model, tmp_path_factory):
    """VllmEngine of the small model; keyword arguments change its configuration."""

    def make(name: str, *, deterministic: bool = False, model_path: Path = engine_model, **changes) -> VllmEngine:
        config = TINY.model_copy(update=changes)
        logs = tmp_path_factory.mktemp("logs")
        return VllmEngine(name, config, model_path=model_path, log_dir=logs, seed=0, deterministic=deterministic)

    return make


@pytest.fixture(scope="session")
def engine(make_engine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # a user's setting that would override kv_cache_bytes
        patch.setenv("RANK", "3")  # a trainer under torchrun
        engine = make_engine("free")
        engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def deterministic_engine(make_engine):
    engine = make_engine("deterministic", deterministic=True)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def reference(engine_model):
    """(prompt, response, temperature) -> log-probs of the response by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.float32).eval()

    def logprobs(prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits / temperature, -1)[range(len(response)), list(response)]

    return logprobs


@pytest.fixture
def generate_all():
    """Generate many at once: [(prompt, sampling, seed)] -> completions, in order."""

    async def generate(engine: VllmEngine, requests: Sequence[tuple[list[int], Sampling, int]]) -> list[Completion]:
        calls = [
            engine.generate(prompt, sampling, seed=seed, key=f"{i:03d}") for i, (prompt, sampling, seed) in enumerate(requests)
        ]
        return await asyncio.gather(*calls)

    return generate
