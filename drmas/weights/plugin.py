"""The entry point that makes the workers' side of the weight sync known to vLLM, under "drmas" and, for adapters, another name.

vLLM calls `register` through its general plugins in every process that it starts, at times more than once. Nothing heavy is
imported here: the factory loads a class when it is first asked for it.
"""

from __future__ import annotations


def register() -> None:
    """Name the workers' sides in vLLM's factory; harmless when repeated."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from drmas.core import adapters
    from drmas.weights.wire import BACKEND

    for backend, module, name in (
        (BACKEND, "drmas.weights.worker", "Worker"),
        (adapters.BACKEND, "drmas.weights.adapters", "AdapterWorker"),
    ):
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)
