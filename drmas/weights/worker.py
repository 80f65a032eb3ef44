"""The engine's side of every weight sync: one class that vLLM builds in each worker, on a CPU and on a GPU.

Which transport brings the tensors is the trainer's word when it connects; their receivers are in `RECEIVERS`. Here is what they
have in common: the model is opened, loaded by vLLM's own loaders, closed, or put back. vLLM finds the class through the name
that `drmas.weights.plugin` registers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from drmas.weights import reload
from drmas.weights.meeting import Refused
from drmas.weights.receiver import BucketReceiver, Check
from drmas.weights.shard_wire import ShardInit
from drmas.weights.shard_worker import ShardReceiver
from drmas.weights.wire import Named

logger = logging.getLogger("vllm.drmas")


class Receiver(Protocol):
    """What a transport does in a worker."""

    def receive(self, said: dict[str, Any], check: Check) -> Iterable[Named]:
        """The tensors of an update, as the model's loader takes them: Hugging Face names, full shapes. They are loaded in turn.

        `check` judges them without data, with ValueError. What goes wrong before the first one is given out leaves the model
        as it was. Refused: an end found a fault. RuntimeError: an end is gone or silent.
        """

    def close(self) -> None: ...


RECEIVERS: dict[str, Callable[[dict[str, Any], int, torch.device], Receiver]] = {
    "broadcast": BucketReceiver,
    "shared-memory": BucketReceiver,
    "disk": BucketReceiver,
    "shards": lambda init, number, device: ShardReceiver(ShardInit(**init), number, device),
}
"""Transport -> how a worker joins the trainer: what that said, the worker's number in their meeting, its device."""


class Worker(WeightTransferEngine[dict, dict]):
    """One worker. `whole` is False after a failure that left some layers on new weights, until an update succeeds."""

    init_info_cls = dict
    update_info_cls = dict

    _receiver: Receiver | None = None
    _fits: list[Any] | None = None  # what the model's loader has agreed to, of this connection
    whole = True

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer; an older connection is left first. ValueError: its transport isn't known here."""
        self.shutdown()
        self._fits = None
        transport = init_info.get("transport")
        if transport not in RECEIVERS:
            raise ValueError(f"the trainer's transport is {transport!r}; expected one of {', '.join(RECEIVERS)}")
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver = RECEIVERS[transport](init_info, init_info["rank_offset"] + rank, self.device)

    def stage(self, said: dict[str, Any]) -> None:
        """Begin to take an update while the engine goes on; `receive_weights` takes it from there. Returns at once."""
        self._connected().stage(said)

    def start_weight_update(self) -> None:
        reload.start(self.model)

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Take a whole update from the trainer. On any error the model is closed again and, if possible, as it was; the trainer
        is left, and has to connect anew.

        Refused: an end found a fault. RuntimeError: the trainer or another worker is gone or silent.
        """
        started = time.perf_counter()
        try:
            tensors = self._connected().receive(update_info, self._check)
            arrived = time.perf_counter()
            self._load(tensors)
        except Exception:
            self.shutdown()
            self.abort()
            raise
        logger.info("weights: received in %.3f s, loaded in %.3f s", arrived - started, time.perf_counter() - arrived)

    def finish_weight_update(self) -> None:
        reload.finish(self.model, self.model_config)
        self.whole = True

    def abort(self) -> None:
        self.whole = reload.abort(self.model, self.model_config) and self.whole

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _check(self, tensors: Iterable[Named]) -> None:
        """ValueError: the update doesn't fit the model. The loader is asked again only where something isn't as before."""
        tensors = list(tensors)
        described = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors]
        if described != self._fits:
            self._fits = None
            self._judge(tensors)
            self._fits = described

    def _judge(self, tensors: Iterable[Named]) -> None:
        reload.check(self.model, self.model_config, tensors)

    def _load(self, tensors: Iterator[Named]) -> None:
        self.model.load_weights(tensors)

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise RuntimeError("no trainer is connected; init_weight_transfer_engine comes first")
        return self._receiver


class WorkerExtension:
    """Mixed into vLLM's worker by its option `worker_extension_cls`: what the control protocol lacks."""

    def answered(self, method: str, args: tuple[Any, ...]) -> tuple[Any, str]:
        """(what `method` returned, "") or (None, what went wrong)."""
        try:
            return getattr(self, method)(*args), ""
        except Exception as error:
            foreseen = isinstance(error, (Refused, RuntimeError, ValueError))
            logger.warning("weights: %s: %s", method, error, exc_info=not foreseen)
            return None, f"{type(error).__name__}: {error}"

    def stage_weights(self, said: dict[str, Any]) -> None:
        """Take an update beside the engine's work; `update_weights` loads it."""
        self.weight_transfer_engine.stage(said)

    def abort_weight_update(self) -> bool:
        """End an update that was started and can't be finished. True where the model is whole, with its old weights."""
        transfer = self.weight_transfer_engine
        if self._weight_update_active:
            self._weight_update_active = False
            with set_current_vllm_config(self.vllm_config):
                transfer.abort()
            transfer.reset_weight_update_target()
        return transfer.whole

    def open_adapters(self, config: dict[str, Any]) -> None:
        """Expect adapters of PEFT's `config` from now on; until the first update they are zero."""
        self.weight_transfer_engine.open(self.model_runner.lora_manager, config)

    def install_adapter(self) -> None:
        """Compute with the adapters of the last update that was finished; vLLM drops them at the end of one."""
        self.weight_transfer_engine.install()
