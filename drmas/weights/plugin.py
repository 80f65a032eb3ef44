"""The entry point that makes the transport "drmas-gloo" known to vLLM.

vLLM calls `register` through its general plugins in every process that it starts, at times more than once. Nothing heavy is
imported here: the factories load the classes when they are first asked for them.
"""

from __future__ import annotations


def register() -> None:
    """Name the workers' and the trainer's sides of "drmas-gloo" in vLLM's factories; harmless when repeated."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from drmas.core import adapters
    from drmas.weights.wire import BACKEND

    for factory, backend, module, name in (
        (WeightTransferEngineFactory, BACKEND, "drmas.weights.worker", "GlooWorker"),
        (WeightTransferEngineFactory, adapters.BACKEND, "drmas.weights.adapters", "AdapterWorker"),
        (WeightTransferTrainerFactory, BACKEND, "drmas.weights.sender", "GlooTrainer"),
    ):
        if backend not in factory._registry:
            factory.register_engine(backend, module, name)
