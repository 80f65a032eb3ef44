"""The engine protocol: token ids in, token ids with log-probs and versions out.

Called by the collector (generate) and by the controller (start, pause, sync, resume, sleep, close). `vllm_engine` talks to a
vLLM process, `torch_engine` runs a small model in this one, `scripted` answers by rule; all are held to this page by the same
tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drmas.errors import EngineError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is sampled. The log-probs returned are of exactly this distribution (I11).

    Training samples at a temperature alone, which the trainer mirrors; temperature 0 (greedy) is for evaluations and probes,
    `top_p` for evaluations.
    """

    max_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response; `logprobs` and `versions` have one entry per token of `token_ids`."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    """"stop" (end token or stop string), "length"."""


class Engine(Protocol):
    """One policy's engine. Methods other than `generate` and `advance` block and may be called from any thread."""

    version: int
    """The weight version that new tokens carry."""
    max_model_tokens: int
    """Longest prompt plus response; the collector refuses a request that could exceed it before the engine sees it."""

    def start(self) -> None:
        """Bring the engine up; EngineStartError with the log's tail if it doesn't come up in time."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int, key: str) -> Completion:
        """Sample one response. `key` names the request stably over runs (it orders simultaneous requests).

        EngineError: this request can't be served (too long, bad ids). EngineDied: the process is gone. A cancelled call
        aborts its request. Concurrent requests have distinct keys. Called in the event loop that calls `advance`; the loop
        may be another one from one rollout to the next.
        """

    async def advance(self) -> list[str]:
        """Deterministic mode: admit what was submitted, in key order, and run until at least one request finishes.

        Returns once the engine has stopped stepping and each finished request has its result, or its error, set on the
        future that its `generate` awaits (those coroutines may not have resumed yet): the keys of these requests. Empty if
        nothing was submitted or all of it was cancelled. EngineDied: the process is gone; the waiting calls get it too.
        Outside deterministic mode the engine runs by itself and this returns an empty list at once.
        """

    @property
    def idle(self) -> bool:
        """True when the engine isn't running a step: nothing admitted, or waiting for `advance`."""

    def pause(self) -> None:
        """Stop stepping, forget cached prefixes; requests in flight stay and continue after `resume`."""

    def resume(self) -> None: ...

    def sleep(self) -> None:
        """Give the device's memory back: weights go to host memory, caches are dropped. Harmless when repeated.

        Until it is awake it refuses requests and weight updates (EngineError). Those in flight stay, as in a pause, which it is
        independent of. An engine that dies asleep is started again awake.
        """

    def wake(self, *, cache: bool = True) -> None:
        """Take the memory back that `sleep` gave: all of it, or without `cache` that of the weights, of which an update changes
        what it brings. Nothing where it is awake. It serves requests again once it has all."""

    @property
    def sync_client(self) -> Any:
        """What the weight transport drives: init_weight_transfer_engine, start_weight_update, update_weights,
        finish_weight_update(weight_version) (vLLM's control protocol)."""

    @property
    def alive(self) -> bool: ...

    def stats(self) -> dict[str, float]:
        """peak_memory_bytes, prompt_tokens, generated_tokens since start."""

    def close(self) -> None:
        """Stop the process and wait for it; idempotent."""


def check_request(prompt_ids: Sequence[int], sampling: Sampling, key: str, *, vocab: int, max_model_tokens: int) -> None:
    """EngineError for a request that no engine of that vocabulary and room can serve."""
    if not prompt_ids:
        raise EngineError(f"{key}: the prompt has no tokens")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab:
        raise EngineError(f"{key}: the prompt has the id {max(prompt_ids)}; the vocabulary has {vocab}")
    if len(prompt_ids) + sampling.max_tokens > max_model_tokens:
        raise EngineError(
            f"{key}: the prompt has {len(prompt_ids)} tokens and max_tokens is {sampling.max_tokens}; together at most "
            f"{max_model_tokens} (max_model_tokens)"
        )
