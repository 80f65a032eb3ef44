"""What carries weights, seen from `sync`: the interface of a transport, and which one a policy gets.

`choose_transport` follows the table in README.md beside this file. This file makes none but those that send nothing; the
others import it, and `choice` makes them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from drmas.errors import ConfigError, EngineDied, EngineError, SyncError
from drmas.weights.meeting import Meeting, Refused
from drmas.weights.source import CheckedSource, Source, finite

REASON_SECONDS = 5.0
"""How long an engine may take to say why it gave up: it knows more than a broken group does."""


class SyncClient(Protocol):
    """An engine's control channel: vLLM's protocol (`VLLMWeightSyncClient`), and what it lacks.

    One object per engine process (or set of replicas). A scripted engine's has no `num_workers`: there are no weights to carry,
    it only learns the version. That of an engine in this process takes the tensors themselves (`take_weights`), all or none.
    """

    num_workers: int
    trainer_address: str
    """Where the engine's workers can reach this process."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def stage_weights(self, update_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def get_weight_version(self) -> str: ...

    def abort_weight_update(self) -> bool: ...


class Transport:
    """One policy's, on every trainer rank. After an error it has to be closed; the next attempt connects anew.

    On every rank: `begin`, then `send` or `stage` (on the sender once more after a failure, if `untouched`), then `settle`.
    """

    can_stage = False
    """Whether workers may hold an update while the engine goes on with the one before; the same on every rank."""
    untouched = True
    """Whether another attempt may follow a failed one before `settle`."""
    from_stage = False
    """Whether the push that began goes by what was staged: if that is lost, all ranks must push anew."""

    def begin(self, version: int, *, staging: bool = False) -> None:
        """A push of `version` begins, or its staging."""

    def stage(self, client: SyncClient | None) -> None:
        """Bring the weights to where the workers hold them; engines go on with those that they have. Raises as `send` does."""
        raise NotImplementedError

    def unstage(self) -> None:
        """Forget what was staged; the next push sends anew."""

    def send(self, client: SyncClient | None, version: int) -> int:
        """Bring the weights to the engines behind `client` as `version`; collective, and only the sender has a client.

        The engines are paused. Returns the bytes that this rank sent. Only the sender raises. SyncError: the weights are at
        fault, or an engine, by its own word. RuntimeError: an end is gone or silent. The client's errors pass.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """What this rank owes the others, whatever became of it."""

    def close(self) -> None:
        """Leave the workers; harmless when repeated."""


class Idle(Transport):
    """On ranks that have no part in a policy's syncs."""

    def send(self, client: SyncClient | None, version: int) -> int:
        return 0


class InProcess(Transport):
    """Into an engine in the sender's own process: the tensors themselves are handed over."""

    def __init__(self, source: Source) -> None:
        self._source = CheckedSource(source)

    @property
    def untouched(self) -> bool:
        return self._source.untouched

    def send(self, client: SyncClient | None, version: int) -> int:
        if client is None:
            return 0
        client.take_weights(finite(self._source))
        client.finish_weight_update(str(version))
        return sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in self._source.metadata())

    def settle(self) -> None:
        self._source.settle(1)


def choose_transport(
    asked: str,
    *,
    policy: str,
    gpu: bool,
    engines_local: bool,
    shared_gpus: bool,
    shards: int,
    adapters: bool,
    in_process: bool,
) -> tuple[str, str]:
    """The transport of a policy, and why. ConfigError: the one that is `asked` for (policies.NAME.sync.transport) can't be.

    `engines_local`: all engines run on rank 0's host. `shared_gpus`: on GPUs of trainer ranks. `shards`: the parts that the
    trainer's model is cut into (tensor x pipeline parallel). `in_process`: the engine lives in rank 0's process.
    """
    key = f"policies.{policy}.sync.transport"
    if in_process:
        if asked != "auto":
            raise ConfigError(f"{key} is {asked}, and the backend of its engine is torch, which takes tensors: set it to auto")
        return "in-process", "the engine lives in this process"
    if asked == "shared-memory" and not engines_local:
        raise ConfigError(
            f"{key} is shared-memory, and engines run on other hosts (policies.{policy}.engine.hosts, cluster.engine_hosts): "
            "set it to broadcast, shards or disk"
        )
    if asked == "shards" and adapters:
        raise ConfigError(f"{key} is shards, and policies.{policy}.lora.sync is adapter, which are whole: set it to auto")
    if asked != "auto":
        return asked, f"{key} says so"
    if engines_local and (adapters or not gpu):
        return "shared-memory", "the engines are on the trainer's host"
    if engines_local and shared_gpus:
        return "shared-memory", "the engines are on the trainer's GPUs, on which NCCL takes one process each"
    where = "on other hosts" if not engines_local else "on GPUs of their own"
    if adapters or shards == 1:
        return "broadcast", f"the engines are {where}"
    return "shards", f"the engines are {where}, and the model is in {shards} parts: each sends its own"


def in_background(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run `call` in a thread that nothing waits for: a broken group may leave it blocked until the client's own timeout."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:  # handed to whoever asks the future
            future.set_exception(error)

    threading.Thread(target=run, name="weight-update", daemon=True).start()
    return future


def reason(call: Future[Any]) -> str:
    """What the engine says went wrong, if it says so soon; "" where it doesn't. EngineDied passes."""
    try:
        call.result(timeout=REASON_SECONDS)
    except EngineDied:
        raise
    except (EngineError, TimeoutError) as error:
        return str(error)
    return ""


@contextlib.contextmanager
def explained(meeting: Meeting, call: Callable[[], Future[Any]], *, is_over: Callable[[Future[Any]], bool]) -> Iterator[None]:
    """On the sender: what goes wrong in `meeting`, as `Transport.send` raises it.

    `call`: of the control channel, which knows more than a broken meeting does; `is_over` when no more can be learnt there.
    """
    try:
        yield
    except Refused as refusal:
        raise SyncError(str(refusal)) from None
    except (SyncError, EngineError):
        raise
    except RuntimeError as error:
        answering = call()
        blame = meeting.blame(error, is_over=lambda: is_over(answering))
        try:
            said = reason(answering)
        except EngineDied as death:
            first, _, log = str(death).partition("\n")
            raise EngineDied(f"{first}, and the trainer {error}\n{log}") from death
        raise RuntimeError(f"the transfer broke: {blame}{said and f' ({said})'}") from error


def has_died(call: Future[Any]) -> bool:
    """Whether the call has ended with the engine's death."""
    return call.done() and isinstance(call.exception(), EngineDied)
