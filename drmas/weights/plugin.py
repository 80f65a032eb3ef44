"""The entry point that makes the transport "drmas-gloo" known to vLLM.

vLLM calls `register` through its general plugins in every process that it starts, at times more than once. Nothing heavy is
imported here: the factories load the classes when they are first asked for them.
"""

from __future__ import annotations


def register() -> None:
    """Name the worker's and the trainer's side of "drmas-gloo" in vLLM's factories; harmless when repeated."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from drmas.weights.wire import BACKEND

    for factory, module, name in (
        (WeightTransferEngineFactory, "drmas.weights.worker", "GlooWorker"),
        (WeightTransferTrainerFactory, "drmas.weights.sender", "GlooTrainer"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, module, name)
