"""The engine's side of "drmas-gloo": receive every bucket, verify, and only then load. Lives in vLLM's workers.

All of an update is held in memory before the first layer changes, so whatever goes wrong on the way (the trainer dies, a
bucket is corrupt, a name is wrong) leaves the model as it was. That costs one copy of the model during the update.
vLLM builds the class through the name that `drmas.weights.plugin` registers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from drmas.weights import reload
from drmas.weights.wire import Bucket, GlooInit, GlooUpdate, Group, checksum, plan_buckets

logger = logging.getLogger("vllm.drmas")


class GlooWorker(WeightTransferEngine[GlooInit, GlooUpdate]):
    """One worker. `whole` is False after a failure that left some layers on new weights, until an update succeeds."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    _group: Group | None = None
    _bucket_bytes = 0
    whole = True

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Join the trainer's group; an older group is left first."""
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._bucket_bytes = init_info.bucket_bytes
        self._group = Group.join(init_info, rank)

    def start_weight_update(self) -> None:
        reload.start(self.model)

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Take a whole update from the trainer. On any error the model is closed again and, if possible, as it was.

        ValueError: the update doesn't fit the model. RuntimeError: it arrived corrupt, or the trainer stopped or vanished.
        """
        started = time.perf_counter()
        try:
            received = self._receive(update_info)
            arrived = time.perf_counter()
            self._load(received)
        except Exception:
            self.abort()
            raise
        logger.info("weights: received in %.3f s, loaded in %.3f s", arrived - started, time.perf_counter() - arrived)

    def finish_weight_update(self) -> None:
        reload.finish(self.model, self.model_config)
        self.whole = True

    def abort(self) -> None:
        self.whole = reload.abort(self.model, self.model_config) and self.whole

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _check(self, tensors: Iterable[reload.Described]) -> None:
        """ValueError: the update doesn't fit the model."""
        reload.check(self.model, self.model_config, tensors)

    def _load(self, received: list[tuple[Bucket, torch.Tensor]]) -> None:
        """Take over what arrived whole; buffers are given back one by one."""
        while received:
            bucket, buffer = received.pop(0)
            self.model.load_weights([(slot.name, slot.view(buffer)) for slot in bucket.slots])

    def _receive(self, update: GlooUpdate) -> list[tuple[Bucket, torch.Tensor]]:
        if self._group is None:
            raise RuntimeError("no trainer is connected; init_weight_transfer_engine comes first")
        buckets = list(plan_buckets(update, self._bucket_bytes))
        fault: Exception | None = self._fault(buckets)
        received = []
        self._vote(fault)
        for bucket in buckets:
            crc = self._vote(fault)
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            self._group.broadcast(buffer)
            received.append((bucket, buffer))
            if checksum(buffer) != crc:
                first, last = bucket.slots[0].name, bucket.slots[-1].name
                fault = RuntimeError(f"the weights from {first} to {last} arrived corrupt: CRC {checksum(buffer)}, sent {crc}")
        self._vote(fault)
        return received

    def _vote(self, fault: Exception | None) -> int:
        """The sender's checksum, where nobody found a fault; else that fault, or word of another's."""
        going_on, crc = self._group.vote(fault is not None)
        if not going_on:
            raise fault or RuntimeError("the trainer or another worker stopped the update")
        return crc

    def _fault(self, buckets: list[Bucket]) -> ValueError | None:
        slots = (slot for bucket in buckets for slot in bucket.slots)
        try:
            self._check((slot.name, slot.dtype, slot.shape) for slot in slots)
        except ValueError as error:
            return error
        return None


class WorkerExtension:
    """Mixed into vLLM's worker by its option `worker_extension_cls`: what the control protocol lacks."""

    def abort_weight_update(self) -> bool:
        """End an update that was started and can't be finished. True where the model is whole, with its old weights."""
        transfer = self.weight_transfer_engine
        if self._weight_update_active:
            self._weight_update_active = False
            with set_current_vllm_config(self.vllm_config):
                if isinstance(transfer, GlooWorker):
                    transfer.abort()
                else:
                    transfer.whole = reload.abort(transfer.model, transfer.model_config) and getattr(transfer, "whole", True)
            transfer.reset_weight_update_target()
        return getattr(transfer, "whole", False)  # a stock backend that failed by itself doesn't say what it left behind

    def open_adapters(self, config: dict[str, Any]) -> None:
        """Expect adapters of PEFT's `config` from now on; until the first update they are zero."""
        self.weight_transfer_engine.open(self.model_runner.lora_manager, config)

    def install_adapter(self) -> None:
        """Compute with the adapters of the last update that was finished; vLLM drops them at the end of one."""
        self.weight_transfer_engine.install()
