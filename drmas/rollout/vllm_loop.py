"""The one thread that touches vLLM: it serves messages and steps the engine, so the two can't happen at the same time.

That is why requests can't run while weights change: while the engine is paused nothing here steps. In deterministic mode
requests are held until `advance`, admitted in the order of their keys, and stepped until at least one is done, so that the
batches, and with them the last bits of the log-probs, don't depend on when a request arrived.
Runs in the engine process, behind `vllm_process`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import SLEEP_TAGS

from drmas.core.adapters import ADAPTER_ID

if TYPE_CHECKING:
    from drmas.rollout.vllm_process import Channel, Message


class EngineLoop:
    """Serves one client until it says shutdown."""

    def __init__(
        self,
        engine: LLMEngine,
        channel: Channel,
        *,
        deterministic: bool,
        version: int,
        adapter: dict[str, Any] | None = None,
    ) -> None:
        """`adapter` is PEFT's description of the adapters that updates bring; None where they bring whole weights."""
        self._engine, self._channel, self._deterministic = engine, channel, deterministic
        self._held: list[Message] = []
        self._keys: dict[int, str] = {}
        self._advance: int | None = None  # the message that asked for the advance that is running
        self._paused = False
        self._asleep: frozenset[str] = frozenset()  # which memory is given back, by vLLM's names: weights, kv_cache
        self._updating = False
        self._mixed = False  # an update failed half-way: some layers are new, some old
        self._takes_adapters = adapter is not None
        self._adapter: LoRARequest | None = None
        if self._takes_adapters:
            self._on_workers("open_adapters", adapter)
        self._set_version(str(version))
        self._controls: dict[str, Callable[..., Any]] = {
            "pause": self._pause,
            "resume": self._resume,
            "sleep": self._sleep,
            "wake": self._wake,
            "init_weight_transfer_engine": self._rpc("init_weight_transfer_engine"),
            "stage_weights": self._rpc("stage_weights"),
            "start_weight_update": self._start_update,
            "update_weights": self._rpc("update_weights"),
            "finish_weight_update": self._finish_update,
            "abort_weight_update": self._abort_update,
            "get_weight_version": self._engine.get_weight_version,
        }

    def run(self) -> None:
        _return_freed_memory()
        while True:
            messages = list(self._channel.waiting()) if self._runnable else [self._channel.receive()]
            for message in messages:
                if message["do"] == "shutdown":
                    return
                self._serve(message)
            if self._runnable:
                self._step()

    @property
    def _runnable(self) -> bool:
        may_step = not self._paused and not self._asleep and (self._advance is not None or not self._deterministic)
        return may_step and self._engine.has_unfinished_requests()

    def _serve(self, message: Message) -> None:
        match message["do"]:
            case "generate" if self._deterministic:
                self._held.append(message)
            case "generate":
                self._report(self._admit([message]))
            case "advance":
                self._start_advance(message["id"])
            case "abort":
                self._drop(message["request"])
            case control:
                self._control(control, message)

    def _control(self, name: str, message: Message) -> None:
        try:
            result = self._controls[name](*message.get("arguments", []))
        except _WorkersError as error:
            self._channel.send({"id": message["id"], "error": str(error)})
        except Exception as error:  # whatever it was, it belongs to the caller, and the engine goes on
            self._channel.send({"id": message["id"], "error": f"{type(error).__name__}: {error}"})
        else:
            self._channel.send({"id": message["id"], "result": result})
            if name == "resume":  # after an update, most often; nobody waits for this
                _return_freed_memory()

    # requests

    def _start_advance(self, number: int) -> None:
        self._advance = number
        held, self._held = sorted(self._held, key=lambda message: (message["key"], message["id"])), []
        refused = self._admit(held)
        if refused or not self._engine.has_unfinished_requests():
            self._report(refused)

    def _admit(self, messages: list[Message]) -> list[Message]:
        """Hand requests to vLLM; returns the answers to those that it refused."""
        refused = []
        for message in messages:
            self._keys[message["id"]] = message["key"]
            prompt, adapter = tokens_input(message["prompt"]), self._adapter
            try:
                self._engine.add_request(str(message["id"]), prompt, _sampling_params(message), lora_request=adapter)
            except (VLLMClientError, ValueError) as error:
                refused.append({"id": message["id"], "error": str(error)})
        return refused

    def _step(self) -> None:
        done = [self._answer(output) for output in self._engine.step() if output.finished]
        if done or not self._engine.has_unfinished_requests():
            self._report(done)

    def _report(self, answers: list[Message]) -> None:
        """Send answers. In deterministic mode they end the advance, whose own answer, the keys that are done, comes last."""
        keys = [self._keys.pop(answer["id"]) for answer in answers]
        if self._advance is not None:
            answers = [*answers, {"id": self._advance, "result": keys}]
            self._advance = None
        if answers:
            self._channel.send({"answers": answers})

    def _answer(self, output: RequestOutput) -> Message:
        completion = output.outputs[0]
        versions: list[int] = []
        for span in completion.weight_versions or []:
            versions += [int(span.version)] * (span.end - span.start)
        result = {
            "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs.logprobs),
            "versions": versions,
            "finish_reason": completion.finish_reason,
            "cached_tokens": output.num_cached_tokens or 0,
        }
        return {"id": int(output.request_id), "result": result}

    def _drop(self, number: int) -> None:
        """The client gave up on a request, or on the advance itself: requests in flight then wait for the next one."""
        if number == self._advance:
            self._advance = None
            return
        self._held = [message for message in self._held if message["id"] != number]
        self._engine.abort_request([str(number)])
        self._keys.pop(number, None)
        if self._advance is not None and not self._engine.has_unfinished_requests():
            self._report([])

    # weights

    def _pause(self) -> None:
        """Stop stepping and forget every cached prefix. Requests in flight give up their blocks and are recomputed later."""
        self._paused = True
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the prefix cache could not be cleared")

    def _resume(self) -> None:
        if self._updating:
            raise RuntimeError("resume during a weight update; finish or abort it first")
        if self._mixed:
            raise RuntimeError("the weights are half old, half new after a failed update; push them again first")
        self._paused = False

    def _sleep(self) -> None:
        """Weights go to host memory (vLLM's level 1) and the cache is dropped. On a CPU, which gives nothing back, vLLM only
        stops scheduling. Level 2 would save that copy; but a failed update could not go back then, and nobody pushes weights
        that didn't change, nor the base of adapters."""
        if self._updating:
            raise RuntimeError("sleep during a weight update; finish or abort it first")
        if self._asleep != SLEEP_TAGS:
            self._engine.sleep(level=1, mode="keep")
            self._asleep = SLEEP_TAGS

    def _wake(self, cache: bool) -> None:
        """Of the weights alone, or of everything: then requests in flight go on, recomputed."""
        if wanted := self._asleep & (SLEEP_TAGS if cache else {"weights"}):
            self._engine.wake_up(sorted(wanted, reverse=True))  # weights first
            self._asleep -= wanted

    def _start_update(self) -> None:
        if not self._paused:
            raise RuntimeError("start_weight_update on a running engine; pause it first")
        if "weights" in self._asleep:
            raise RuntimeError("start_weight_update on an engine that sleeps; wake its weights first")
        self._on_workers("start_weight_update")
        self._updating = True

    def _finish_update(self, weight_version: str) -> None:
        self._on_workers("finish_weight_update")
        if self._takes_adapters:
            self._on_workers("install_adapter")
        self._set_version(weight_version)
        self._updating = self._mixed = False

    def _abort_update(self) -> bool:
        """True if the old weights are whole and the engine may go on with them."""
        whole = all(self._on_workers("abort_weight_update"))
        self._updating, self._mixed = False, not whole
        return whole

    def _set_version(self, version: str) -> None:
        """Of new tokens, and of new requests' cached prefixes.

        Requests in flight go on with the new weights: the number of the one set of adapters never changes.
        """
        self._engine.set_weight_version(version)
        if self._takes_adapters:
            self._adapter = LoRARequest(f"version {version}", ADAPTER_ID, "drmas")

    def _rpc(self, method: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self._on_workers(method, *args)

        return call

    def _on_workers(self, method: str, *args: Any) -> list[Any]:
        """What each worker's `method` returns. _WorkersError: what went wrong there, of each that has something to say.

        Not left to vLLM: where one of several workers raises, it doesn't read the others' answers, and takes them for those to
        its next call.
        """
        answers = self._engine.collective_rpc("answered", args=(method, args))
        if errors := dict.fromkeys(error for _, error in answers if error):
            raise _WorkersError("; ".join(errors))
        return [result for result, _ in answers]


class _WorkersError(Exception):
    """In the workers' own words, with the kinds of their errors."""


def _return_freed_memory() -> None:
    """To the system, where the C library is glibc: loading weights leaves some hundred MB of the heap free, in small pieces."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _sampling_params(message: Message) -> SamplingParams:
    return SamplingParams(
        max_tokens=message["max_tokens"],
        temperature=message["temperature"],
        top_p=message["top_p"],
        stop=message["stop"] or None,
        seed=message["seed"],
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,
        detokenize=bool(message["stop"]),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
