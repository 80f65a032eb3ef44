"""The scripted engine: answers by rule or from a list, in milliseconds, under the same protocol as the vLLM engine.

For tests of teams and workflows without a model, and for the `scripted` backend. It batches as a real engine does: in
deterministic mode an `advance` decodes all admitted requests token by token until the shortest is done. It computes nothing:
every token has the same log-prob. Running freely, it can take its time as a model would (`seconds`), for measurements and tests
of rollouts in which some answers take long:

    ScriptedEngine(tokenizer, rule, deterministic=False, seconds=lambda prompt, key: delays[key], max_concurrent=64)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from drmas.errors import EngineDied, EngineError
from drmas.rollout.engine import Completion, Sampling, check_request

LOGPROB = -1.0
"""The log-prob of every scripted token."""

Rule = Callable[[str, str], str | None]
"""(prompt text, key) -> the response; None never answers. EngineError refuses the request, EngineDied kills the engine, and
anything else that it raises is a mistake in the rule and ends the rollout."""


Seconds = Callable[[str, str], float]
"""(prompt text, key) -> how long the response takes."""


@dataclass(slots=True)
class _Request:
    key: str
    prompt_ids: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    completion: Completion | None = None
    """Set at admission, unless the rule never answers."""
    tokens_left: int = 0
    seconds: float = 0.0
    timer: asyncio.TimerHandle | None = None


class ScriptedEngine:
    """Answers with `answer(prompt text, key)`, or with the texts of a list in turn, tokenised by `tokenizer`.

    The end token follows where it fits into max_tokens. The prompt text that a rule reads has the special tokens in it.
    """

    def __init__(
        self,
        tokenizer: Any,
        answer: Rule | Sequence[str],
        *,
        deterministic: bool = True,
        max_model_tokens: int = 1024,
        seconds: Seconds | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        """`seconds` is how long each response takes from its admission on; at most `max_concurrent` are admitted at a time.

        ValueError: either is given for a deterministic engine, whose time is counted in tokens.
        """
        if deterministic and (seconds, max_concurrent) != (None, None):
            raise ValueError("seconds and max_concurrent are for free-running engines; set deterministic to False")
        self.version = 0
        self.max_model_tokens = max_model_tokens
        self.sync_client = ScriptedSync(self)
        self.keys: list[list[str]] = []
        """The keys of the requests that each advance admitted, for tests of what was batched together."""
        self._tokenizer = tokenizer
        self._rule = answer if callable(answer) else _in_turn(answer)
        self._deterministic = deterministic
        self._seconds, self._max_concurrent = seconds, max_concurrent
        self._due: list[_Request] = []  # their time came during a pause, or while it slept
        self._submitted: dict[str, _Request] = {}
        self._running: dict[str, _Request] = {}
        self._alive = True
        self._paused = False
        self.asleep: frozenset[str] = frozenset()
        """What it pretends to have given back: "weights" and "cache"."""
        self._advancing = False
        self._changed: asyncio.Event | None = None
        self._stats = {"peak_memory_bytes": 0.0, "prompt_tokens": 0.0, "generated_tokens": 0.0}

    def start(self) -> None:
        """Alive again after a death, as a fresh engine: version 0, nothing in flight."""
        self._alive, self._paused, self.asleep, self.version, self._due = True, False, frozenset(), 0, []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int, key: str) -> Completion:
        """See `Engine.generate`; `seed` has nothing to decide here."""
        self._check_alive()
        if self.asleep:
            raise EngineError(f"{key}: the scripted engine is asleep; wake it first")
        self._check(prompt_ids, sampling, key)
        request = _Request(key, list(prompt_ids), sampling, asyncio.get_running_loop().create_future())
        self._submitted[key] = request
        if not self._deterministic:
            asyncio.get_running_loop().call_soon(self._serve)
        try:
            return await request.future
        finally:
            self._submitted.pop(key, None)
            self._running.pop(key, None)
            self._wake()
            if request.timer is not None:
                request.timer.cancel()
            if self._max_concurrent is not None and self._submitted:
                asyncio.get_running_loop().call_soon(self._serve)

    async def advance(self) -> list[str]:
        """See `Engine.advance`. Waits where all admitted requests are of the kind that never answers."""
        self._check_alive()
        if not self._deterministic or self._still:
            return []
        self._advancing = True
        try:
            finished = self._admit(sorted(self._submitted))
            while self._running and not finished:
                if finished := self._decode():
                    break
                self._changed = asyncio.Event()
                await self._changed.wait()
                if not self._alive:
                    raise EngineDied("the scripted engine died")
            return sorted(finished)
        finally:
            self._advancing, self._changed = False, None

    @property
    def idle(self) -> bool:
        return not self._advancing

    def pause(self) -> None:
        self._check_alive()
        self._paused = True

    def resume(self) -> None:
        self._check_alive()
        self._paused = False
        self._go_on()

    def sleep(self) -> None:
        self._check_alive()
        self.asleep = frozenset({"weights", "cache"})

    def wake(self, *, cache: bool = True) -> None:
        self._check_alive()
        self.asleep -= {"weights", "cache"} if cache else {"weights"}
        self._go_on()

    @property
    def _still(self) -> bool:
        return self._paused or bool(self.asleep)

    def _go_on(self) -> None:
        """Free-running: answer what came due meanwhile, and serve what waits, if nothing stands against it."""
        if not self._deterministic and not self._still:
            due, self._due = self._due, []
            for request in due:
                request.future.get_loop().call_soon_threadsafe(self._end, request)
            for request in list(self._submitted.values()):
                request.future.get_loop().call_soon_threadsafe(self._serve)

    @property
    def alive(self) -> bool:
        return self._alive

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def die(self) -> None:
        """What a killed process is to its callers: whatever waits fails, and nothing more is served until `start`."""
        self._alive = False
        for request in [*self._submitted.values(), *self._running.values()]:
            if not request.future.done():
                request.future.set_exception(EngineDied("the scripted engine died"))
        self._submitted.clear()
        self._running.clear()
        self._wake()

    def close(self) -> None:
        if self._alive:
            self.die()

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineDied("the scripted engine is dead; start it again")

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling, key: str) -> None:
        if key in self._submitted or key in self._running:
            raise EngineError(f"{key}: a request of this key is in flight; keys of simultaneous requests must differ")
        check_request(prompt_ids, sampling, key, vocab=len(self._tokenizer), max_model_tokens=self.max_model_tokens)

    def _admit(self, keys: list[str]) -> list[str]:
        """Ask the rule for each of these submitted requests, in this order. Returns the keys of those it refused."""
        refused = []
        if keys:
            self.keys.append(keys)
        for key in keys:
            request = self._submitted.pop(key, None)
            if request is None or request.future.done():
                continue
            try:
                prompt = self._tokenizer.decode(request.prompt_ids)
                text = self._rule(prompt, key)
                request.seconds = self._seconds(prompt, key) if self._seconds else 0.0
            except EngineDied:
                self._running[key] = request
                self.die()
                raise
            except EngineError as error:
                request.future.set_exception(error)
                refused.append(key)
                continue
            except Exception as error:
                # free-running, nobody awaits this frame; the caller must not wait for ever
                request.future.set_exception(error)
                raise
            if text is not None:
                request.completion = self._complete(text, request.sampling)
                request.tokens_left = len(request.completion.token_ids)
            self._running[key] = request
        return refused

    def _decode(self) -> list[str]:
        """Run to the end of the shortest answer; the keys of all that end there."""
        answering = [request for request in self._running.values() if request.completion is not None]
        shortest = min((request.tokens_left for request in answering), default=0)
        finished = []
        for request in answering:
            request.tokens_left -= shortest
            if request.tokens_left == 0:
                del self._running[request.key]
                self._finish(request)
                finished.append(request.key)
        return finished

    def _serve(self) -> None:
        """Free-running: admit what there is room for, first come, first served. Each answer comes when its time is over."""
        if self._still or not self._alive:
            return
        room = len(self._submitted) if self._max_concurrent is None else self._max_concurrent - len(self._running)
        admitted = sorted(islice(self._submitted, max(room, 0)))
        try:
            self._admit(admitted)
        except EngineDied:
            return
        finally:
            for request in [self._running[key] for key in admitted if key in self._running]:
                if request.seconds > 0:
                    request.timer = request.future.get_loop().call_later(request.seconds, self._end, request)
                else:
                    self._end(request)

    def _end(self, request: _Request) -> None:
        """The time of a free-running response is over; one that the rule doesn't answer goes on waiting."""
        if self._still:
            self._due.append(request)
        elif request.completion is not None and self._running.get(request.key) is request:
            del self._running[request.key]
            self._finish(request)

    def _finish(self, request: _Request) -> None:
        if not request.future.done() and request.completion is not None:
            self._stats["prompt_tokens"] += len(request.prompt_ids)
            self._stats["generated_tokens"] += len(request.completion.token_ids)
            request.future.set_result(request.completion)

    def _complete(self, text: str, sampling: Sampling) -> Completion:
        ids, ended = list(self._tokenizer(text, add_special_tokens=False)["input_ids"]), False
        for size in range(1, len(ids) + 1) if sampling.stop else ():
            if any(stop in self._tokenizer.decode(ids[:size]) for stop in sampling.stop):
                ids, ended = ids[:size], True
                break
        if not ended and self._tokenizer.eos_token_id is not None:
            ids.append(self._tokenizer.eos_token_id)
            ended = True
        if len(ids) > sampling.max_tokens:
            ids, ended = ids[: sampling.max_tokens], False
        return Completion(
            token_ids=ids,
            logprobs=[LOGPROB] * len(ids),
            versions=[self.version] * len(ids),
            finish_reason="stop" if ended else "length",
        )

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()


class ScriptedSync:
    """The weight transport's side of a scripted engine: takes every update and counts, reads no weights."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, *args: Any, **options: Any) -> None:
        self.calls.append("init_weight_transfer_engine")

    def start_weight_update(self, *args: Any, **options: Any) -> None:
        self.calls.append("start_weight_update")

    def update_weights(self, *args: Any, **options: Any) -> None:
        self.calls.append("update_weights")

    def finish_weight_update(self, weight_version: int | str) -> None:
        if "weights" in self._engine.asleep:
            raise EngineError("the scripted engine is asleep; wake its weights before an update")
        self.calls.append("finish_weight_update")
        self._engine.version = int(weight_version)


def _in_turn(texts: Sequence[str]) -> Rule:
    if not texts:
        raise ValueError("a scripted engine needs at least one text; found an empty list")
    endless = cycle(texts)
    return lambda prompt, key: next(endless)
