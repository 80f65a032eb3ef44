"""vLLM as an engine of the protocol in `drmas.rollout.engine`, in a process of its own.

Called by the collector and the controller of the trainer's rank 0. This file is the protocol; `vllm_launch` starts the process,
or an engine host does where the engine lives elsewhere (`host_client`); `vllm_connection` talks to it, `vllm_process` and
`vllm_loop` are what runs in it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drmas.config.schema import EngineConfig, LoraConfig
from drmas.core.adapters import adapter_config
from drmas.errors import EngineDied, EngineError, EngineStartError, EngineTimeout
from drmas.rollout.engine import Completion, Sampling
from drmas.rollout.engine_process import EngineProcess
from drmas.rollout.host_client import RemoteHost
from drmas.rollout.vllm_connection import Connection
from drmas.rollout.vllm_launch import check_model_folder, engine_device, engine_environment, launch
from drmas.rollout.vllm_options import check_options
from drmas.rollout.vllm_process import adapter_arguments, engine_arguments

PROBE_SECONDS = 30.0
"""How long a process that is late with a response may take to answer anything before it counts as dead and is killed."""
UPDATE_SECONDS = 1800.0
"""How long an update of the weights may take at least, however short `request_timeout_seconds` is: its pieces have bounds of
their own (`sync.timeout_seconds`), and a large model has many."""
PREFILL_TOKENS = 4096
"""Most prompt tokens of one engine step; a longer prompt still fits, whole."""


class VllmEngine:
    """One policy's engine. `start` brings up a process, after a death a fresh one, always with the model folder's weights."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        model_path: Path,
        log_dir: Path,
        seed: int,
        deterministic: bool,
        initial_version: int = 0,
        lora: LoraConfig | None = None,
        replica: int | None = None,
        host: RemoteHost | None = None,
        gpus: Sequence[int] | None = None,
    ) -> None:
        """`name` is the policy's. `replica`: which one of its engines, where there are several (`pool`).

        `lora`: updates bring adapters of that shape for the model folder's weights, which stay; None: whole weights.
        `host`: where it runs; None: here. `gpus`: which it sees of those that this process sees, all if None; another host
        gives it `config.tensor_parallel` free ones of its own.
        """
        self.version = initial_version
        self.max_model_tokens = config.max_model_tokens
        self._policy, self._config, self._model_path = name, config, Path(model_path)
        self._name = name if replica is None else f"{name}-{replica}"
        self._log = Path(log_dir) / f"engine-{self._name}.log"
        self._seed, self._deterministic, self._initial_version = seed, deterministic, initial_version
        self._lora, self._host, self._gpus = lora, host, gpus
        self._advancing = self._asleep = False
        self._connection: Connection | None = None
        self._sync_client: VllmSyncClient | None = None
        self._prompt_tokens = self._generated_tokens = self._cached_tokens = 0

    def start(self) -> None:
        """Start the process and wait until it is ready. EngineStartError: it isn't, and why."""
        self.close()
        check_model_folder(self._model_path, self._name, where=f"; set policies.{self._policy}.model")
        device = engine_device() if self._host is None else self._host.describe()["device"]
        arguments = self._arguments(device)
        check_options(self._policy, self._config.options, arguments)
        self._connection = Connection(self._name, *self._launch(device))
        _, ready = self._connection.request(
            "start",
            arguments=arguments | self._config.options,
            deterministic=self._deterministic,
            version=self._initial_version,
            adapter=None if self._lora is None else adapter_config(self._lora, str(self._model_path)),
        )
        try:
            description = ready.result(self._config.start_timeout_seconds)
        except EngineDied as error:
            raise EngineStartError(f"engine {self._name} did not come up: {error}") from None
        except EngineError as error:
            self.close()
            raise EngineStartError(f"{error}; the whole log is {self._connection.process.log}") from None
        except TimeoutError:
            self._connection.kill()
            raise EngineStartError(
                f"engine {self._name} was not ready after {self._config.start_timeout_seconds:g} s "
                f"(policies.{self._policy}.engine.start_timeout_seconds)\n{self._connection.process.log_tail()}"
            ) from None
        self.version, self._asleep = self._initial_version, False
        self._sync_client = VllmSyncClient(self, self._connection, description, self._config.request_timeout_seconds)

    def _launch(self, device: str) -> tuple[EngineProcess, socket.socket]:
        """Start the process, here or on the engine's host."""
        threads = self._config.threads
        if self._host is None:
            return launch(engine_environment(device, threads, self._gpus), self._log)
        num_gpus = self._config.tensor_parallel
        return self._host.launch(self._name, model=self._model_path, num_gpus=num_gpus, threads=threads)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int, key: str) -> Completion:
        """Sample one response; see the protocol. EngineError also when the answer takes longer than the request timeout."""
        connection, client = self._running()
        prompt = list(prompt_ids)
        self._check(client, prompt, sampling)
        number, future = connection.request(
            "generate",
            key=key,
            prompt=prompt,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=list(sampling.stop),
            seed=seed,
        )
        timeout = self._config.request_timeout_seconds
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except TimeoutError:
            late = f"gave no response to {key} within {timeout:g} s (policies.{self._policy}.engine.request_timeout_seconds)"
            if not await _answers(connection):
                raise connection.give_up(f"{late}, nor to anything else") from None
            raise EngineTimeout(f"engine {self._name} {late}") from None
        finally:
            connection.forget(number)
        return self._completion(answer, len(prompt), key)

    async def advance(self) -> list[str]:
        """See the protocol. EngineDied also after a request timeout without any answer; the process is killed then.

        An engine that is only slow isn't dead: its requests time out one by one, and with the last of them the advance ends.
        """
        connection, _ = self._running()
        if not self._deterministic or not connection.waiting:
            return []
        number, future = connection.request("advance")
        answer, timeout = asyncio.wrap_future(future), self._config.request_timeout_seconds
        self._advancing = True
        try:
            while not (await asyncio.wait([answer], timeout=timeout))[0]:
                if not await _answers(connection):
                    raise connection.give_up(f"was silent for {timeout:g} s after an advance")
            return answer.result()
        finally:
            answer.cancel()
            connection.forget(number)
            self._advancing = False

    @property
    def idle(self) -> bool:
        if self._deterministic:
            return not self._advancing
        return self._connection is None or not self._connection.waiting

    def pause(self) -> None:
        """Stop stepping and forget cached prefixes. EngineDied where there is no process."""
        self._control("pause")

    def resume(self) -> None:
        self._control("resume")

    def sleep(self) -> None:
        """See the protocol. A GPU's weights take as many bytes of pinned host memory meanwhile; on a CPU nothing is given back.
        EngineDied where there is no process."""
        self._asleep = True
        self._control("sleep")

    def wake(self, *, cache: bool = True) -> None:
        self._control("wake", cache)
        self._asleep = self._asleep and not cache

    @property
    def sync_client(self) -> VllmSyncClient:
        """The control channel of the running process; a new object after every start. EngineDied where there is no process."""
        return self._running()[1]

    @property
    def pid(self) -> int | None:
        """The engine's process (and its group), None where none was started."""
        return self._connection.process.pid if self._connection is not None else None

    @property
    def alive(self) -> bool:
        return self._connection is not None and self._connection.alive and self._sync_client is not None

    def stats(self) -> dict[str, float]:
        """peak_memory_bytes of the process (0 where none runs); prompt_tokens, cached_tokens and generated_tokens so far."""
        return {
            "peak_memory_bytes": float(self._connection.process.peak_memory_bytes()) if self.alive else 0.0,
            "prompt_tokens": float(self._prompt_tokens),
            "cached_tokens": float(self._cached_tokens),
            "generated_tokens": float(self._generated_tokens),
        }

    def close(self) -> None:
        self._sync_client = None
        if self._connection is not None:
            self._connection.close()

    def _arguments(self, device: str) -> dict[str, Any]:
        config = self._config
        memory = (
            {"kv_cache_memory_bytes": config.kv_cache_bytes}
            if device == "cpu"
            else {"gpu_memory_utilization": config.gpu_memory_fraction}
        )
        return {
            "model": str(self._model_path),
            "dtype": config.dtype,
            "max_model_len": config.max_model_tokens,
            "max_num_seqs": config.max_concurrent,
            "max_num_batched_tokens": max(PREFILL_TOKENS, config.max_model_tokens, config.max_concurrent),
            "tensor_parallel_size": config.tensor_parallel,
            "seed": self._seed,
            **memory,
            **({"enable_sleep_mode": True} if config.sleep and device == "cuda" else {}),
            **engine_arguments(device),
            **({} if self._lora is None else adapter_arguments(self._lora.rank)),
        }

    def _running(self) -> tuple[Connection, VllmSyncClient]:
        if self._connection is None or self._sync_client is None:
            raise EngineDied(f"engine {self._name} is not running; start it first")
        return self._connection, self._sync_client

    def _control(self, do: str, *arguments: Any) -> None:
        self._running()[0].call(do, *arguments, timeout=self._config.request_timeout_seconds)

    def _check(self, client: VllmSyncClient, prompt: list[int], sampling: Sampling) -> None:
        limit, vocabulary = self.max_model_tokens, client.vocab_size
        if self._asleep:
            raise EngineError(
                f"engine {self._name} is asleep, as during updates (policies.{self._policy}.engine.sleep); wake it first"
            )
        if client.mixed:
            raise EngineError(f"engine {self._name} holds half-loaded weights after a failed sync; push them again first")
        if not 0 < len(prompt) < limit:
            raise EngineError(
                f"engine {self._name}: a prompt of {len(prompt)} tokens; it takes 1 to {limit - 1} "
                f"(policies.{self._policy}.engine.max_model_tokens is {limit})"
            )
        bad = [token for token in prompt if not 0 <= token < vocabulary]
        if bad:
            raise EngineError(f"engine {self._name}: the prompt holds token {bad[0]}; the vocabulary ends at {vocabulary - 1}")
        if sampling.max_tokens < 1:
            raise EngineError(f"engine {self._name}: max_tokens is {sampling.max_tokens}; expected at least 1")

    def _completion(self, answer: dict[str, Any], prompt_tokens: int, key: str) -> Completion:
        tokens, logprobs, versions = answer["token_ids"], answer["logprobs"], answer["versions"]
        if not len(tokens) == len(logprobs) == len(versions) or answer["finish_reason"] not in ("stop", "length"):
            raise EngineError(
                f"engine {self._name}: {key} ended with {answer['finish_reason']!r}, {len(tokens)} tokens, {len(logprobs)} "
                f"log-probs and {len(versions)} versions; expected stop or length, and as many of each"
            )
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += answer["cached_tokens"]
        self._generated_tokens += len(tokens)
        return Completion(tokens, logprobs, versions, answer["finish_reason"])


class VllmSyncClient:
    """vLLM's weight-transfer control protocol over one engine process's connection, for `drmas.weights`.

    `mixed` is True after a failed update that left some layers new and some old, until an update succeeds. `trainer_address` is
    where the engine's workers can reach this process.
    """

    def __init__(self, engine: VllmEngine, connection: Connection, description: dict[str, int], timeout: float) -> None:
        self.vocab_size = description["vocab_size"]
        self.num_workers = description["num_workers"]
        self.torch_threads = description["torch_threads"]
        self.mixed = False
        self.trainer_address = connection.own_address
        self._engine, self._connection, self._timeout = engine, connection, timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def stage_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers take an update beside the engine's work; returns at once."""
        self._call("stage_weights", update_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Blocks until the workers have received and loaded everything."""
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update; tokens from now on carry `weight_version`, which must be an integer's text."""
        if weight_version is None:
            raise ValueError("finish_weight_update without a version; every token carries one (I2)")
        self._call("finish_weight_update", weight_version)
        self._engine.version = int(weight_version)
        self.mixed = False

    def get_weight_version(self) -> str:
        return self._call("get_weight_version")

    def abort_weight_update(self) -> bool:
        """End a failed update. True if the engine still holds its old weights whole."""
        whole = self._call("abort_weight_update")
        self.mixed = not whole
        return whole

    def _call(self, do: str, *arguments: Any) -> Any:
        slow = do in ("init_weight_transfer_engine", "update_weights")
        return self._connection.call(do, *arguments, timeout=max(self._timeout, UPDATE_SECONDS if slow else 0.0))


async def _answers(connection: Connection) -> bool:
    """Does the process still read and answer? (A step or an update that is running delays it.)"""
    number, future = connection.request("get_weight_version")
    try:
        await asyncio.wait_for(asyncio.wrap_future(future), PROBE_SECONDS)
    except TimeoutError:
        connection.forget(number)
        return False
    return True
