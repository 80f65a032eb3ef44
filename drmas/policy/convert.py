"""Weights between a Hugging Face folder and a Megatron model, exact in both directions.

One table (`entries`) says which Megatron parameter holds which Hugging Face tensors and how they are arranged over the
tensor-parallel ranks; loading, exporting and the weight sync all follow it, in its order. File formats are `safetensors` only.
Called by the trainer, by the export, and by the weight sync through `WeightSource`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.transformer_layer import TransformerLayer
from safetensors import safe_open

from drmas.errors import ModelError
from drmas.policy.architecture import Architecture
from drmas.policy.model import PolicyModel

Arrangement = Literal["copy", "rows", "columns", "qkv", "gate_up"]
"""copy: the same on every rank; rows, columns: cut evenly along that dimension; qkv: query, key and value interleaved by
key-value head, then cut by rows; gate_up: each of the two cut by rows, then joined per rank."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors (name, whole shape) that it holds."""

    parameter: torch.nn.Parameter
    arrangement: Arrangement
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


def entries(model: PolicyModel, architecture: Architecture) -> Iterator[Entry]:
    """The model's parameters in Hugging Face's order; a tied head comes once, as the embedding."""
    vocabulary = (architecture.vocab, architecture.hidden)
    yield Entry(model.embedding.word_embeddings.weight, "rows", (("model.embed_tokens.weight", vocabulary),))
    for layer in model.decoder.layers:
        yield from _layer_entries(layer, architecture)
    yield Entry(model.decoder.final_layernorm.weight, "copy", (("model.norm.weight", (architecture.hidden,)),))
    if not architecture.tied:
        yield Entry(model.output_layer.weight, "rows", (("lm_head.weight", vocabulary),))


def _layer_entries(layer: TransformerLayer, architecture: Architecture) -> Iterator[Entry]:
    prefix = f"model.layers.{layer.layer_number - 1}."
    hidden, ffn, width = architecture.hidden, architecture.ffn, architecture.heads * architecture.head_dim
    kv_width = architecture.kv_heads * architecture.head_dim
    attention, mlp = layer.self_attention, layer.mlp
    # TransformerEngine fuses the norms into the linear layers that follow them.
    fused = hasattr(attention.linear_qkv, "layer_norm_weight")
    attention_norm = attention.linear_qkv.layer_norm_weight if fused else layer.input_layernorm.weight
    mlp_norm = mlp.linear_fc1.layer_norm_weight if fused else layer.pre_mlp_layernorm.weight

    def entry(parameter: torch.nn.Parameter, arrangement: Arrangement, *tensors: tuple[str, tuple[int, ...]]) -> Entry:
        return Entry(parameter, arrangement, tuple((prefix + name, shape) for name, shape in tensors))

    yield entry(attention_norm, "copy", ("input_layernorm.weight", (hidden,)))
    widths = (("q", width), ("k", kv_width), ("v", kv_width))
    qkv = [(f"self_attn.{letter}_proj.weight", (rows, hidden)) for letter, rows in widths]
    yield entry(attention.linear_qkv.weight, "qkv", *qkv)
    if architecture.qkv_bias:
        yield entry(attention.linear_qkv.bias, "qkv", *((f"self_attn.{letter}_proj.bias", (rows,)) for letter, rows in widths))
    if architecture.qk_norm:
        yield entry(attention.q_layernorm.weight, "copy", ("self_attn.q_norm.weight", (architecture.head_dim,)))
        yield entry(attention.k_layernorm.weight, "copy", ("self_attn.k_norm.weight", (architecture.head_dim,)))
    yield entry(attention.linear_proj.weight, "columns", ("self_attn.o_proj.weight", (hidden, width)))
    yield entry(mlp_norm, "copy", ("post_attention_layernorm.weight", (hidden,)))
    gate_up = [("mlp.gate_proj.weight", (ffn, hidden)), ("mlp.up_proj.weight", (ffn, hidden))]
    yield entry(mlp.linear_fc1.weight, "gate_up", *gate_up)
    yield entry(mlp.linear_fc2.weight, "columns", ("mlp.down_proj.weight", (hidden, ffn)))


def to_shard(entry: Entry, tensors: list[torch.Tensor], architecture: Architecture, *, tp: int, rank: int) -> torch.Tensor:
    """The part of the whole Hugging Face `tensors` that tensor-parallel rank `rank` of `tp` holds."""
    match entry.arrangement:
        case "copy":
            return tensors[0]
        case "rows":
            padding = -tensors[0].shape[0] % tp
            return F.pad(tensors[0], (0, 0, 0, padding)).chunk(tp)[rank]
        case "columns":
            return tensors[0].chunk(tp, dim=1)[rank]
        case "gate_up":
            return torch.cat([tensor.chunk(tp)[rank] for tensor in tensors])
        case "qkv":
            groups = [tensor.reshape(architecture.kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
            return torch.cat(groups, dim=1).flatten(0, 1).chunk(tp)[rank]


def from_shards(entry: Entry, shards: list[torch.Tensor], architecture: Architecture) -> list[torch.Tensor]:
    """The whole Hugging Face tensors of an entry from every tensor-parallel rank's shard, in rank order."""
    match entry.arrangement:
        case "copy":
            return [shards[0]]
        case "rows":
            return [_join(shards)[: architecture.vocab]]
        case "columns":
            return [_join(shards, dim=1)]
        case "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            return [_join([half[i] for half in halves]) for i in (0, 1)]
        case "qkv":
            whole = _join(shards)
            per_group = [shape[0] // architecture.kv_heads for _, shape in entry.tensors]
            groups = whole.reshape(architecture.kv_heads, -1, *whole.shape[1:])
            return [part.flatten(0, 1) for part in groups.split(per_group, dim=1)]


def _join(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, read one at a time. `model.safetensors` or shards with an index."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            self._files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        elif single.is_file():
            with safe_open(single, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), single)
        else:
            raise ModelError(f"model folder {str(folder)!r} has no model.safetensors and no index; only safetensors are read")
        self._folder = folder

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Tensor `name`. ModelError: it isn't there, its file isn't, or its shape isn't `shape`."""
        if name not in self._files:
            raise ModelError(f"model folder {str(self._folder)!r} has no tensor {name!r}; its config.json asks for one")
        if not self._files[name].is_file():
            raise ModelError(f"{self._files[name]} is missing; the index names it for tensor {name!r}")
        with safe_open(self._files[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self._files[name]}: {name!r} has shape {tuple(tensor.shape)}; config.json asks for {shape}")
        return tensor


@torch.no_grad()
def load_hf(model: PolicyModel, architecture: Architecture, folder: Path, *, tp_group: dist.ProcessGroup) -> None:
    """Fill `model` with the weights of `folder`, cast to the model's dtype. Call before the optimiser is built."""
    source = SafetensorsFolder(folder)
    for entry in entries(model, architecture):
        tensors = [source.read(name, shape) for name, shape in entry.tensors]
        entry.parameter.copy_(to_shard(entry, tensors, architecture, tp=tp_group.size(), rank=tp_group.rank()))


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A policy's weights as whole Hugging Face tensors. Iterating is collective over the tensor-parallel group.

    `values` picks what is read of a parameter (its data, or its gradient). Tensors may share memory with the model: use them
    before the next update, and don't write to them.
    """

    model: PolicyModel
    architecture: Architecture
    tp_group: dist.ProcessGroup
    values: Callable[[torch.nn.Parameter], torch.Tensor] = torch.nn.Parameter.detach

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) in the order of iteration, without communication."""
        return [
            (name, entry.parameter.dtype, shape)
            for entry in entries(self.model, self.architecture)
            for name, shape in entry.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in entries(self.model, self.architecture):
            with torch.no_grad():
                whole = from_shards(entry, self._gather(entry), self.architecture)
            yield from ((name, tensor) for (name, _), tensor in zip(entry.tensors, whole, strict=True))

    def _gather(self, entry: Entry) -> list[torch.Tensor]:
        shard, size = self.values(entry.parameter), self.tp_group.size()
        if entry.arrangement == "copy" or size == 1:
            return [shard]
        gathered = shard.new_empty((size * shard.shape[0], *shard.shape[1:]))
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=self.tp_group)
        return list(gathered.chunk(size))
