"""Adapter-only pushes into a real vLLM engine: exact after each, all or nothing, and no trace of the set before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drmas.config.schema import EngineConfig, LoraConfig
from drmas.core.adapters import PROJECTIONS
from drmas.errors import SyncError
from drmas.rollout.engine import Completion, Sampling
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import write_tiny_qwen3
from drmas.weights.choice import open_transport
from drmas.weights.sync import SyncResult, WeightSync

LORA = LoraConfig(rank=4, alpha=6.0, sync="adapter")
SCALE = 1.5
TOLERANCE = 1e-4
PROMPT = list(range(4, 80))
Tensors = dict[str, torch.Tensor]


class Adapters:
    """A set of adapters as a source, the engine that follows it, and the same model merged by hand."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(max_model_tokens=256, kv_cache_bytes=16 * 2**20, threads=1, request_timeout_seconds=60)
        self.folder = folder
        self.engine = VllmEngine("lora", config, model_path=folder, log_dir=folder, seed=0, deterministic=True, lora=LORA)
        self.engine.start()
        self.tensors: Tensors = {}
        self.version = 0
        self.sync = WeightSync(self.engine, open_transport("shared-memory", self, policy="lora", folder=folder))

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    def draw(self, seed: int) -> Tensors:
        """Adapters with an effect that is seen at once, under PEFT's names."""
        generator = torch.Generator().manual_seed(seed)
        shapes = {name: tuple(weight.shape) for name, weight in self.base().named_parameters()}
        modules = [each for name in LORA.targets for each in PROJECTIONS[name]]
        found = {}
        for layer in range(sum(name.endswith("o_proj.weight") for name in shapes)):
            for module in modules:
                outputs, inputs = shapes[f"model.layers.{layer}.{module}.weight"]
                name = f"base_model.model.model.layers.{layer}.{module}"
                found[f"{name}.lora_A.weight"] = 0.3 * torch.randn(LORA.rank, inputs, generator=generator)
                found[f"{name}.lora_B.weight"] = 0.3 * torch.randn(outputs, LORA.rank, generator=generator)
        return found

    def push(self, tensors: Tensors) -> SyncResult:
        self.tensors, self.version = tensors, self.version + 1
        return self.sync.push(self.version)

    def base(self):
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def logprobs(self, tensors: Tensors, response: list[int], prompt: list[int] = PROMPT) -> torch.Tensor:
        model = self.base()
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name in tensors:
                if "lora_A" in name:
                    weight = weights[name.removeprefix("base_model.model.").replace("lora_A.", "")]
                    weight.add_(SCALE * tensors[name.replace("lora_A", "lora_B")] @ tensors[name])
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, -1)[range(len(response)), response]

    def generate(self) -> Completion:
        async def run() -> Completion:
            call = asyncio.ensure_future(self.engine.generate(PROMPT, Sampling(24), seed=1, key="one"))
            await asyncio.sleep(0)
            await self.engine.advance()
            return await call

        return asyncio.run(run())

    def gap(self, tensors: Tensors) -> float:
        completion = self.generate()
        return float((self.logprobs(tensors, completion.token_ids) - torch.tensor(completion.logprobs)).abs().max())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Iterator[Adapters]:
    folder = tmp_path_factory.mktemp("lora")
    write_tiny_qwen3(folder, seed=7, layers=2, tied=True)
    made = Adapters(folder)
    yield made
    made.engine.close()


def test_adapters_are_zero_until_the_first_push(adapters):
    assert adapters.version == 0
    assert adapters.gap({}) < TOLERANCE


def test_I10_after_a_push_the_engine_computes_with_the_adapters(adapters):
    for seed in (1, 2):
        tensors = adapters.draw(seed)
        assert adapters.gap(tensors) > 0.1  # the effect is one that would be seen
        result = adapters.push(tensors)
        assert adapters.gap(tensors) < TOLERANCE
        assert set(adapters.generate().versions) == {adapters.version}
    assert result.bytes == sum(4 * tensor.numel() for tensor in tensors.values())
    assert result.bytes < sum(4 * weight.numel() for weight in adapters.base().parameters()) / 2


@pytest.mark.parametrize("transport", ["broadcast", "disk", "shared-memory"])
@pytest.mark.parametrize("stages", [False, True])
def test_adapters_travel_by_every_transport_staged_or_not(adapters, transport, stages):
    adapters.push(adapters.draw(1))
    adapters.sync.close()
    adapters.sync = WeightSync(
        adapters.engine, open_transport(transport, adapters, policy="lora", folder=adapters.folder / "to")
    )
    old, new = adapters.tensors, adapters.draw(2)
    if stages:
        adapters.tensors = new
        adapters.sync.stage(adapters.version + 1)
        assert adapters.gap(old) < TOLERANCE
    adapters.push(new)
    assert adapters.gap(new) < TOLERANCE


def test_no_cached_prefix_survives_a_push(adapters):
    tensors = adapters.draw(3)
    adapters.push(tensors)

    def cached() -> float:
        before = adapters.engine.stats()["cached_tokens"]
        assert adapters.gap(tensors) < TOLERANCE
        return adapters.engine.stats()["cached_tokens"] - before

    assert [cached(), cached()] == [0, 64]
    tensors = adapters.draw(4)
    adapters.push(tensors)
    assert [cached(), cached()] == [0, 64]


def test_fifty_pushes_leave_one_set_of_adapters(adapters):
    for seed in range(50):
        adapters.push(adapters.draw(seed % 3))
    assert adapters.gap(adapters.draw(49 % 3)) < TOLERANCE


def test_requests_in_flight_go_on_with_the_new_adapters(adapters):
    old, new = adapters.draw(5), adapters.draw(6)
    adapters.push(old)

    async def run() -> Completion:
        long = asyncio.ensure_future(adapters.engine.generate(PROMPT, Sampling(40), seed=1, key="b"))
        short = asyncio.ensure_future(adapters.engine.generate(PROMPT[:9], Sampling(10), seed=2, key="a"))
        await asyncio.sleep(0)
        await adapters.engine.advance()
        await short
        adapters.push(new)
        await adapters.engine.advance()
        return await long

    completion = asyncio.run(run())
    versions = torch.tensor(completion.versions)
    assert set(completion.versions) == {adapters.version - 1, adapters.version}
    found = torch.tensor(completion.logprobs)
    for tensors, version in ((old, adapters.version - 1), (new, adapters.version)):
        expected = adapters.logprobs(tensors, completion.token_ids)
        assert (expected - found)[versions == version].abs().max() < TOLERANCE
        assert (expected - found)[versions != version].abs().max() > 1e-2


def damaged(tensors: Tensors, fault: str) -> Tensors:
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
    match fault:
        case "nan":
            return tensors | {name: tensors[name] * float("nan")}
        case "shape":
            return tensors | {name: tensors[name][:-1]}
        case "missing":
            return {key: value for key, value in tensors.items() if key != name}
        case "strange":
            return tensors | {"model.norm.weight": torch.zeros(3)}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "holds NaN or Inf"),
        ("shape", "k_proj.lora_B.weight has shape .*the engine's model needs"),
        ("missing", "1 adapters are missing, the first is .*k_proj.lora_B.weight"),
        ("strange", "model.norm.weight .*is no adapter that this engine takes"),
    ],
)
def test_a_push_that_fails_leaves_the_adapters_before(adapters, fault, message):
    good = adapters.draw(7)
    adapters.push(good)
    version = adapters.version
    with pytest.raises(SyncError, match=message):
        adapters.push(damaged(adapters.draw(8), fault))
    assert adapters.gap(good) < TOLERANCE
    assert set(adapters.generate().versions) == {version}
    adapters.push(adapters.draw(9))
    assert adapters.gap(adapters.draw(9)) < TOLERANCE
