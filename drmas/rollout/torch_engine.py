"""A small model in the trainer's own process, under the protocol of `drmas.rollout.engine`: transformers' forward pass, sampled
here.

    engine = TorchEngine("main", config, model_path=folder, deterministic=True)

For models so small that a serving process costs more than the model: it is up at once, and an update copies tensors. It serves
what was submitted as one batch, to its end, with a key-value cache that lives as long as the batch; vLLM is for everything
else. A response is drawn with a generator of its own, so that it depends on its seed and its probabilities alone.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from drmas.config.schema import EngineConfig
from drmas.errors import EngineDied, EngineError, EngineStartError, SyncError
from drmas.rollout.engine import Completion, Sampling, check_request


@dataclass(slots=True)
class _Request:
    key: str
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    future: asyncio.Future[Completion]


@dataclass(slots=True)
class _Response:
    """What was drawn so far."""

    sampling: Sampling
    draw: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class TorchEngine:
    """One policy's engine. `start` loads the model folder's weights, after a `close` again."""

    def __init__(
        self, name: str, config: EngineConfig, *, model_path: Path, deterministic: bool, initial_version: int = 0
    ) -> None:
        self.version, self.max_model_tokens = initial_version, config.max_model_tokens
        self.sync_client = TorchSync(self)
        self._name, self._config, self._model_path = name, config, Path(model_path)
        self._deterministic, self._initial_version = deterministic, initial_version
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Any = None
        self._tokenizer: Any = None
        self._end_ids: frozenset[int] = frozenset()
        self._cache_argument = "cache"
        self._submitted: dict[str, _Request] = {}
        self._serving: asyncio.Task[None] | None = None
        self._busy = self._paused = False
        self._computing = threading.Lock()
        """Held while a batch is computed: no weight changes under it."""
        self._prompt_tokens = self._generated_tokens = 0

    def start(self) -> None:
        """Load the model. EngineStartError: the folder holds none."""
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            dtype = getattr(torch, self._config.dtype)
            model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=dtype, trust_remote_code=False)
            self._tokenizer = AutoTokenizer.from_pretrained(self._model_path, trust_remote_code=False)
        except (OSError, ValueError, SafetensorError) as error:
            raise EngineStartError(f"engine {self._name}: {self._model_path} can't be loaded: {error}") from error
        self._model = model.eval().requires_grad_(False).to(self._device)
        ends = self._model.generation_config.eos_token_id
        ends = [self._tokenizer.eos_token_id] if ends is None else ends
        self._end_ids = frozenset([ends] if isinstance(ends, int) else [end for end in ends if end is not None])
        if "cache" not in inspect.signature(self._model.forward).parameters:  # its name before transformers 5.2x
            self._cache_argument = "past_key_values"
        self.version, self._paused = self._initial_version, False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int, key: str) -> Completion:
        """See `Engine.generate`."""
        self._check_alive()
        check_request(prompt_ids, sampling, key, vocab=self._model.config.vocab_size, max_model_tokens=self.max_model_tokens)
        if key in self._submitted:
            raise EngineError(f"{key}: a request of this key is in flight; keys of simultaneous requests must differ")
        loop = asyncio.get_running_loop()
        request = _Request(key, list(prompt_ids), sampling, seed, loop.create_future())
        self._submitted[key] = request
        if not self._deterministic:
            self._wake(loop)
        try:
            return await request.future
        finally:
            if self._submitted.get(key) is request:
                del self._submitted[key]

    async def advance(self) -> list[str]:
        """See `Engine.advance`: everything that was submitted runs to its end."""
        self._check_alive()
        if not self._deterministic or self._paused or not self._submitted:
            return []
        return await self._serve()

    @property
    def idle(self) -> bool:
        return not self._busy

    def pause(self) -> None:
        """Start no further batch, and wait for the one that is computed. Nothing is cached between two batches."""
        self._check_alive()
        self._paused = True
        with self._computing:
            pass

    def resume(self) -> None:
        self._check_alive()
        self._paused = False
        for request in list(self._submitted.values()) if not self._deterministic else ():
            loop = request.future.get_loop()
            loop.call_soon_threadsafe(self._wake, loop)

    def sleep(self) -> None:
        """Nothing: the model is small, the memory is the trainer's, and there is no cache between two batches."""

    def wake(self, *, cache: bool = True) -> None:
        """Nothing: see `sleep`."""

    @property
    def alive(self) -> bool:
        return self._model is not None

    def stats(self) -> dict[str, float]:
        """prompt_tokens and generated_tokens so far; peak_memory_bytes is 0: the memory is the trainer's."""
        counts = {"prompt_tokens": float(self._prompt_tokens), "generated_tokens": float(self._generated_tokens)}
        return {"peak_memory_bytes": 0.0, "cached_tokens": 0.0, **counts}

    def close(self) -> None:
        """Let go of the model; who waits gets EngineDied."""
        self._model = None
        for request in list(self._submitted.values()):
            if not request.future.done():
                loop = request.future.get_loop()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_fail, request.future, EngineDied(f"engine {self._name} was closed"))

    @torch.no_grad()
    def take_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy all tensors, by their Hugging Face names, or none. SyncError: a name or shape that the model doesn't have, or a
        parameter that none is for."""
        self._check_alive()
        own = self._model.state_dict()
        given = dict(tensors)
        for name, tensor in given.items():
            if name not in own or own[name].shape != tensor.shape:
                shape = list(own[name].shape) if name in own else "no such tensor"
                raise SyncError(f"engine {self._name} got {name} {list(tensor.shape)}; the model has {shape}")
        filled = {own[name].data_ptr() for name in given}
        if missing := [name for name, mine in own.items() if mine.data_ptr() not in filled]:
            raise SyncError(f"engine {self._name} got no {missing[0]}, which its model has")
        with self._computing:
            for name, tensor in given.items():
                own[name].copy_(tensor)

    def _check_alive(self) -> None:
        if self._model is None:
            raise EngineDied(f"engine {self._name} isn't running")

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Free-running: see to it that what was submitted is served."""
        if self._serving is None or self._serving.done():
            self._serving = loop.create_task(self._serve_all())

    async def _serve_all(self) -> None:
        await asyncio.sleep(0)  # who is about to submit joins the batch
        while self._submitted and not self._paused and self.alive:
            await self._serve()
            await asyncio.sleep(0)

    async def _serve(self) -> list[str]:
        """One batch, computed beside the event loop; the keys of its requests."""
        batch = [self._submitted[key] for key in sorted(self._submitted)][: self._config.max_concurrent]
        self._busy = True
        try:
            completions = await asyncio.get_running_loop().run_in_executor(None, self._complete, self._model, batch)
        except Exception as error:
            for request in batch:
                _fail(request.future, EngineError(f"{request.key}: engine {self._name} failed: {error}"))
            if not isinstance(error, RuntimeError):  # not the device's trouble: a fault of ours
                raise
        else:
            for request, completion in zip(batch, completions, strict=True):
                if not request.future.done():
                    request.future.set_result(completion)
        finally:
            self._busy = False
            for request in batch:
                if self._submitted.get(request.key) is request:
                    del self._submitted[request.key]
        return [request.key for request in batch]

    def _complete(self, model: Any, batch: Sequence[_Request]) -> list[Completion]:
        """Sample every request of the batch to its end, all with the same weights."""
        with self._computing, torch.inference_mode():
            return self._sample(model, batch)

    def _sample(self, model: Any, batch: Sequence[_Request]) -> list[Completion]:
        """Prompts are padded on the left, so that all end in one column."""
        width, version = max(len(request.prompt_ids) for request in batch), self.version
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(batch):
            ids[i, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[i, width - len(request.prompt_ids) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        responses = [_Response(request.sampling, torch.Generator().manual_seed(request.seed % 2**63)) for request in batch]
        positions, cache = (mask.cumsum(1) - 1).clamp(min=0), {}
        while True:
            output = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **cache
            )
            ids = self._draw(output.logits[:, -1].float().cpu(), responses).to(self._device)
            if all(response.finish_reason for response in responses):
                break
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=1)
            positions, cache = positions[:, -1:] + 1, {self._cache_argument: output[self._cache_argument]}
        self._prompt_tokens += sum(len(request.prompt_ids) for request in batch)
        self._generated_tokens += sum(len(response.token_ids) for response in responses)
        return [
            Completion(each.token_ids, each.logprobs, [version] * len(each.token_ids), each.finish_reason) for each in responses
        ]

    def _draw(self, logits: torch.Tensor, responses: Sequence[_Response]) -> torch.Tensor:
        """The next token of every response that isn't done, from `logits` [B, V]; all [B, 1], whatever of those that are."""
        temperatures = torch.tensor([[response.sampling.temperature or 1.0] for response in responses])
        logprobs = torch.log_softmax(logits / temperatures, dim=-1)
        for i, response in enumerate(responses):
            if response.sampling.top_p < 1.0 and not response.finish_reason:
                logprobs[i] = nucleus(logprobs[i], response.sampling.top_p)
        noise = torch.ones_like(logprobs)
        for i, response in enumerate(responses):
            if not response.finish_reason and response.sampling.temperature > 0:
                noise[i].exponential_(generator=response.draw)
        chosen = (logprobs - noise.log()).argmax(dim=-1)  # Gumbel's maximum: a sample of the softmax
        values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        for response, token, value in zip(responses, chosen.tolist(), values, strict=True):
            if not response.finish_reason:
                response.token_ids.append(token)
                response.logprobs.append(value if response.sampling.temperature > 0 else 0.0)
                response.finish_reason = self._ended(response)
        return chosen[:, None]

    def _ended(self, response: _Response) -> str:
        sampling, ids = response.sampling, response.token_ids
        if ids[-1] in self._end_ids:
            return "stop"
        if sampling.stop:
            text = self._tokenizer.decode(ids)
            if any(stop in text for stop in sampling.stop):
                return "stop"
        return "length" if len(ids) == sampling.max_tokens else ""


class TorchSync:
    """The side of the weight transport that an engine in the same process needs: tensors are handed over, not sent."""

    num_workers = 1

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine

    def take_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._engine.take_weights(tensors)

    def finish_weight_update(self, weight_version: str) -> None:
        self._engine.version = int(weight_version)

    def get_weight_version(self) -> str:
        return str(self._engine.version)

    def abort_weight_update(self) -> bool:
        """True: an update that fails has changed nothing."""
        return True


def nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """[V] log-probs of the smallest set of tokens that holds `top_p` of the probability (arXiv 1904.09751), the rest -inf."""
    ordered, order = logprobs.sort(descending=True)
    before = ordered.exp().cumsum(0) - ordered.exp()
    kept = torch.full_like(logprobs, -torch.inf)
    kept[order[before < top_p]] = ordered[before < top_p]
    return torch.log_softmax(kept, dim=0)


def _fail(future: asyncio.Future[Completion], error: EngineError) -> None:
    if not future.done():
        future.set_exception(error)
