"""Two deterministic engines for the whole session, a Qwen3 with a tied head and a Qwen2 with biases, each with its trainer.

The trainer is a transformers model in this process, so that every comparison is with the weights that were sent.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from drmas.config.cluster import SyncConfig
from drmas.config.schema import EngineConfig
from drmas.rollout.engine import Completion, Engine, Sampling
from drmas.rollout.pool import make_engine
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import character_tokenizer, write_tiny_qwen3
from drmas.weights.choice import open_transport
from drmas.weights.sync import SyncResult, WeightSync
from drmas.weights.wire import Named

Tensors = list[Named]


class Trainer:
    """A model, its weight source, and the engine that follows it."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.engine = engine
        self.version = 0
        self.rounds = 0
        self.edit: Callable[[Tensors], Tensors] = lambda tensors: tensors
        self.sync = self.new_sync()
        self._noise = torch.Generator().manual_seed(1)

    def new_sync(self, transport: str = "broadcast", **options) -> WeightSync:
        config = SyncConfig(**{"timeout_seconds": 30, "bucket_bytes": 256 * 1024, **options})
        return WeightSync(self.engine, open_transport(transport, self, config, policy="main", folder=self.folder / "updates"))

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors()
        self.rounds += 1

    def _tensors(self) -> Tensors:
        return self.edit([(name, parameter.detach()) for name, parameter in self.model.named_parameters()])

    def with_engine(self, engine: Engine) -> Trainer:
        """The same model beside another engine."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def change(self, only: str = "") -> None:
        """Noise on every parameter whose name contains `only`."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if only in name:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=self._noise))

    def push(self, sync: WeightSync | None = None) -> SyncResult:
        self.version += 1
        return (sync or self.sync).push(self.version)

    def logprobs(self, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, -1)[range(len(response)), list(response)]

    def generate(self, prompts: Sequence[list[int]], max_tokens: int = 24) -> list[Completion]:
        async def run() -> list[Completion]:
            calls = [
                asyncio.ensure_future(self.engine.generate(prompt, Sampling(max_tokens), seed=i, key=f"{i:03d}"))
                for i, prompt in enumerate(prompts)
            ]
            await asyncio.sleep(0)
            while not all(call.done() for call in calls):
                await self.engine.advance()
            return [await call for call in calls]

        return asyncio.run(run())

    def gap(self, prompts: Sequence[list[int]] | None = None) -> float:
        """The largest difference between the engine's log-probs of fresh samples and this model's."""
        prompts = prompts or PROMPTS
        completions = self.generate(prompts)
        return max(
            float((self.logprobs(prompt, completion.token_ids) - torch.tensor(completion.logprobs)).abs().max())
            for prompt, completion in zip(prompts, completions, strict=True)
        )


PROMPTS = [random.Random(length).choices(range(4, 86), k=length) for length in (3, 33, 100)]


def write_tiny_qwen2(folder: Path) -> None:
    """A random Qwen2: biases on q, k and v, a head of its own."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        Qwen2ForCausalLM(config).save_pretrained(folder)


def _trainer(
    write: Callable[[Path], None], name: str, tmp_path_factory, *, replicas: int = 1, tensor_parallel: int = 1
) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp(name)
    write(folder)
    config = EngineConfig(
        max_model_tokens=256,
        kv_cache_bytes=16 * 2**20,
        threads=1,
        request_timeout_seconds=60,
        tensor_parallel=tensor_parallel,
    )
    engine = make_engine(
        lambda replica: VllmEngine(
            name, config, model_path=folder, log_dir=folder, seed=0, deterministic=True, replica=replica
        ),
        replicas,
        deterministic=True,
    )
    engine.start()
    yield Trainer(folder, engine)
    engine.close()


@pytest.fixture(scope="session")
def tied_session(tmp_path_factory) -> Iterator[Trainer]:
    yield from _trainer(lambda folder: write_tiny_qwen3(folder, seed=7, layers=2, tied=True), "tied", tmp_path_factory)


@pytest.fixture(scope="session")
def pair_session(tmp_path_factory) -> Iterator[Trainer]:
    write = partial(write_tiny_qwen3, seed=7, layers=2, tied=True)
    yield from _trainer(write, "pair", tmp_path_factory, replicas=2)


@pytest.fixture(scope="session")
def parallel_session(tmp_path_factory) -> Iterator[Trainer]:
    write = partial(write_tiny_qwen3, seed=7, layers=2, tied=True)
    yield from _trainer(write, "parallel", tmp_path_factory, tensor_parallel=2)


@pytest.fixture(scope="session")
def untied_session(tmp_path_factory) -> Iterator[Trainer]:
    yield from _trainer(write_tiny_qwen2, "untied", tmp_path_factory)


def _fresh(trainer: Trainer) -> Trainer:
    trainer.edit = lambda tensors: tensors
    trainer.change()
    trainer.push()
    return trainer


@pytest.fixture
def tied(tied_session) -> Trainer:
    """The tied trainer, changed and pushed, so that a test starts from an engine that follows it."""
    return _fresh(tied_session)


@pytest.fixture
def untied(untied_session) -> Trainer:
    return _fresh(untied_session)


@pytest.fixture
def pair(pair_session) -> Trainer:
    """A trainer with two replicas."""
    return _fresh(pair_session)


@pytest.fixture
def parallel(parallel_session) -> Trainer:
    """A trainer with one engine of two workers."""
    return _fresh(parallel_session)


@pytest.fixture(params=["tied", "untied"])
def trainer(request) -> Trainer:
    return request.getfixturevalue(request.param)
