"""A policy's adapters as a folder of PEFT's format, which PEFT, transformers and vLLM open beside the base model.

PEFT knows the query, key and value layers (and gate and up) one by one, and here one A serves those that are fused: it is
written once for each, and only folders whose copies are equal can be read. Called by the trainer inside its active context, on
all of the policy's ranks; its leader writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drmas.config.schema import LoraConfig
from drmas.core.adapters import PROJECTIONS, adapter_config
from drmas.errors import ModelError
from drmas.policy import folders
from drmas.policy.architecture import Architecture
from drmas.policy.convert import Arrangement, Slot, WeightSource, entries, to_shard
from drmas.policy.groups import PolicyGroups
from drmas.policy.lora import TARGETS
from drmas.policy.model import PolicyModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ARRANGEMENTS: dict[str, Arrangement] = {"qkv": "qkv", "proj": "copy", "fc1": "gate_up", "fc2": "copy"}


def adapter_slots(config: LoraConfig, architecture: Architecture) -> Iterator[Slot]:
    """The adapters of every layer under PEFT's names, in the form of `convert.slots`."""
    width, kv_width = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
    shapes: dict[str, tuple[tuple[int, ...], int]] = {  # (outputs of each projection, inputs)
        "qkv": ((width, kv_width, kv_width), architecture.hidden),
        "proj": ((architecture.hidden,), width),
        "fc1": ((architecture.ffn, architecture.ffn), architecture.hidden),
        "fc2": ((architecture.hidden,), architecture.ffn),
    }
    for layer in range(architecture.layers):
        for name in (each for each in TARGETS if each in config.targets):
            target, (outputs, inputs) = TARGETS[name], shapes[name]
            modules = [f"base_model.model.model.layers.{layer}.{each}" for each in PROJECTIONS[name]]
            for module in modules:
                a = (f"{module}.lora_A.weight", (config.rank, inputs))
                yield Slot(layer, f"{target.module}.lora_a", "columns" if target.cut == "columns" else "copy", (a,))
            b = ((f"{module}.lora_B.weight", (rows, config.rank)) for module, rows in zip(modules, outputs, strict=True))
            yield Slot(layer, f"{target.module}.lora_b", _ARRANGEMENTS[name], tuple(b))


def adapter_source(
    model: PolicyModel, architecture: Architecture, groups: PolicyGroups, config: LoraConfig, **options: Any
) -> WeightSource:
    """The adapters as whole tensors under PEFT's names; iterating is collective, see `WeightSource`."""
    return WeightSource(model, architecture, groups, table=partial(adapter_slots, config), **options)


def write_peft_folder(
    model: PolicyModel, architecture: Architecture, groups: PolicyGroups, config: LoraConfig, *, base: Path, folder: Path
) -> None:
    """Write `folder`, whole or not at all; `base` is where its readers find the base model. OSError on every rank."""
    leader = groups.whole.rank() == 0
    # The copies keep the names of one A apart: safetensors refuses tensors that share memory.
    source = adapter_source(model, architecture, groups, config)
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in source if leader}

    def write() -> None:
        partial = folders.begin(folder)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(adapter_config(config, str(base)), indent=2) + "\n")
        folders.commit(folder)

    groups.on_leader(write)


@torch.no_grad()
def read_peft_folder(
    model: PolicyModel, architecture: Architecture, groups: PolicyGroups, config: LoraConfig, folder: Path
) -> None:
    """Fill the adapters of `model` from `folder`. ModelError, with nothing changed: it holds another kind of adapters."""
    _check_config(folder, config)
    tensors = load_file(folder / WEIGHTS)
    names = {name for name, _, _ in adapter_source(model, architecture, groups, config).metadata()}
    if strange := sorted(set(tensors) - names):
        raise ModelError(f"{folder / WEIGHTS} has {strange[0]!r}, for which policies.NAME.lora.targets has no place")
    shards = []
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for entry in entries(model, architecture, partial(adapter_slots, config)):
        parts = [_read(tensors, name, shape, folder) for name, shape in entry.tensors]
        name, (same_name, same) = entry.tensors[0][0], first.setdefault(id(entry.parameter), (entry.tensors[0][0], parts[0]))
        if not torch.equal(same, parts[0]):
            raise ModelError(f"{folder / WEIGHTS}: {name!r} differs from {same_name!r}; fused layers share one lora_A here")
        shards.append((entry.parameter, to_shard(entry, parts, architecture, tp=groups.tp.size(), rank=groups.tp.rank())))
    for parameter, shard in shards:
        parameter.copy_(shard)


def _read(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], folder: Path) -> torch.Tensor:
    if name not in tensors:
        raise ModelError(f"{folder / WEIGHTS} has no {name!r}; policies.NAME.lora.targets asks for it")
    if tuple(tensors[name].shape) != shape:
        raise ModelError(f"{folder / WEIGHTS}: {name!r} has shape {tuple(tensors[name].shape)}; expected {shape}")
    return tensors[name]


def _check_config(folder: Path, config: LoraConfig) -> None:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(f"adapter folder {str(folder)!r} has no {name}")
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    expected = adapter_config(config, "")
    keys = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
    for key in ("peft_type", "r", "lora_alpha", "target_modules", "bias", "fan_in_fan_out", "use_dora", "use_rslora"):
        value = found.get(key, expected[key])
        value = sorted(value) if isinstance(value, list) else value
        if value != expected[key]:
            advice = f"; set policies.NAME.lora.{keys[key]} to fit" if key in keys else ""
            raise ModelError(f"{folder / CONFIG}: {key} is {value!r}; expected {expected[key]!r}{advice}")
