"""The engine's side of an adapter-only sync: the base stays, and one set of adapters is exchanged whole.

The transports and their all-or-nothing rule are those of `worker`. vLLM knows the adapters by one number for good
(`ADAPTER_ID`): there is never a second set to be evicted or left over, and requests in flight go on with the new one. Caches of
the old one are forgotten by the pause that every update needs. Lives in vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear

from drmas.core.adapters import ADAPTER_ID
from drmas.weights.wire import Named
from drmas.weights.worker import Worker


class AdapterWorker(Worker):
    """One worker of an engine with adapters. A failed update leaves the adapters of the one before."""

    _manager: WorkerLoRAManager
    _config: dict[str, Any]
    _arrived: LoRAModel | None = None  # of the update that is running
    _current: LoRAModel | None = None  # of the last one that was finished

    def open(self, manager: WorkerLoRAManager, config: dict[str, Any]) -> None:
        """Start with adapters that are zero; `config` is PEFT's description of those to come."""
        self._manager, self._config = manager, config
        manager.add_dummy_lora(LoRARequest("zero", ADAPTER_ID, "drmas"), config["r"])

    def install(self) -> None:
        """Put the adapters of the last finished update in the place of whatever vLLM holds."""
        adapters = self._manager._adapter_manager
        adapters.remove_adapter(ADAPTER_ID)
        adapters.add_adapter(self._current)
        adapters.activate_adapter(ADAPTER_ID)

    def start_weight_update(self) -> None:
        self._arrived = None

    def finish_weight_update(self) -> None:
        self._current, self._arrived = self._arrived, None

    def abort(self) -> None:
        self._arrived = None

    def _judge(self, tensors: Iterable[Named]) -> None:
        expected = self._shapes()
        for name, shape in ((name, tuple(tensor.shape)) for name, tensor in tensors):
            if name not in expected:
                raise ValueError(f"{name} {list(shape)} is no adapter that this engine takes")
            if shape != expected[name]:
                raise ValueError(f"{name} has shape {list(shape)}; the engine's model needs {list(expected[name])}")
            del expected[name]
        if expected:
            raise ValueError(
                f"the update is incomplete: {len(expected)} adapters are missing, the first is {next(iter(expected))}"
            )

    def _load(self, tensors: Iterator[Named]) -> None:
        """Each in memory of its own: vLLM keeps them, and the next update may come in the memory of this one."""
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
        self._arrived = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            copies,
            PEFTHelper.from_dict(self._config),
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a whole update, under PEFT's names."""
        manager, rank, shapes = self._manager._adapter_manager, self._config["r"], {}
        for fused, module in manager.modules.items():
            names = manager.packed_modules.get(fused, [fused])
            if names[0].rpartition(".")[2] in self._config["target_modules"]:
                for name, rows in zip(names, _rows(module.base_layer), strict=True):
                    shapes[f"base_model.model.{name}.lora_A.weight"] = (rank, module.base_layer.input_size)
                    shapes[f"base_model.model.{name}.lora_B.weight"] = (rows, rank)
        return shapes


def _rows(layer: LinearBase) -> list[int]:
    """The outputs, over all ranks, of each layer that this one fuses."""
    if isinstance(layer, QKVParallelLinear):  # its own sizes count a key-value head once for every rank that holds a copy
        heads = (layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads)
        return [count * layer.head_size for count in heads]
    if isinstance(layer, MergedColumnParallelLinear):
        return list(layer.output_sizes)
    return [layer.output_size]
