"""Weights between a Hugging Face folder and a Megatron model, exact in both directions.

One table (`slots`) says which Megatron parameter holds which Hugging Face tensors and how they are arranged over the
tensor-parallel ranks; loading, exporting and the weight sync all follow it, in its order. A pipeline stage holds some of the
slots; `entries` pairs those with its parameters. File formats are `safetensors` only. Called by the trainer, by the export, and
by the weight sync through `WeightSource`.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open

from drmas.core.resharding import Arrangement
from drmas.errors import ConfigError, ModelError
from drmas.policy.architecture import Architecture
from drmas.policy.groups import PolicyGroups
from drmas.policy.model import PolicyModel

EMBEDDING = "model.embed_tokens.weight"

_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Where TransformerEngine keeps the norms of a layer: in the linear layers that follow them."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter of the whole model: its place in the layer number `layer` (from 0), or in the model where that is None.

    `tensors` are the Hugging Face tensors (name, whole shape) that it holds.
    """

    layer: int | None
    place: str
    arrangement: Arrangement
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter of this rank and the Hugging Face tensors (name, whole shape) that it holds."""

    parameter: torch.nn.Parameter
    arrangement: Arrangement
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


def slots(architecture: Architecture) -> Iterator[Slot]:
    """The whole model's parameters in Hugging Face's order; a tied head comes once, as the embedding."""
    vocabulary = (architecture.vocab, architecture.hidden)
    yield Slot(None, "embedding.word_embeddings.weight", "rows", ((EMBEDDING, vocabulary),))
    for layer in range(architecture.layers):
        yield from _layer_slots(layer, architecture)
    yield Slot(None, "decoder.final_layernorm.weight", "copy", (("model.norm.weight", (architecture.hidden,)),))
    if not architecture.tied:
        yield Slot(None, "output_layer.weight", "rows", (("lm_head.weight", vocabulary),))


Table = Callable[[Architecture], Iterator[Slot]]
"""What there is: `slots`, or what another kind of parameters is called."""


def _layer_slots(layer: int, architecture: Architecture) -> Iterator[Slot]:
    prefix = f"model.layers.{layer}."
    hidden, ffn, width = architecture.hidden, architecture.ffn, architecture.heads * architecture.head_dim
    kv_width = architecture.kv_heads * architecture.head_dim

    def slot(place: str, arrangement: Arrangement, *tensors: tuple[str, tuple[int, ...]]) -> Slot:
        return Slot(layer, place, arrangement, tuple((prefix + name, shape) for name, shape in tensors))

    yield slot("input_layernorm.weight", "copy", ("input_layernorm.weight", (hidden,)))
    widths = (("q", width), ("k", kv_width), ("v", kv_width))
    qkv = [(f"self_attn.{letter}_proj.weight", (rows, hidden)) for letter, rows in widths]
    yield slot("self_attention.linear_qkv.weight", "qkv", *qkv)
    if architecture.qkv_bias:
        biases = [(f"self_attn.{letter}_proj.bias", (rows,)) for letter, rows in widths]
        yield slot("self_attention.linear_qkv.bias", "qkv", *biases)
    if architecture.qk_norm:
        for letter in "qk":
            norm = (f"self_attn.{letter}_norm.weight", (architecture.head_dim,))
            yield slot(f"self_attention.{letter}_layernorm.weight", "copy", norm)
    yield slot("self_attention.linear_proj.weight", "columns", ("self_attn.o_proj.weight", (hidden, width)))
    yield slot("pre_mlp_layernorm.weight", "copy", ("post_attention_layernorm.weight", (hidden,)))
    gate_up = [("mlp.gate_proj.weight", (ffn, hidden)), ("mlp.up_proj.weight", (ffn, hidden))]
    yield slot("mlp.linear_fc1.weight", "gate_up", *gate_up)
    yield slot("mlp.linear_fc2.weight", "columns", ("mlp.down_proj.weight", (hidden, ffn)))


def frozen_names(architecture: Architecture, patterns: Sequence[str], *, policy: str) -> set[str]:
    """The Hugging Face names that `patterns` (shell style) match.

    ConfigError: a pattern that matches nothing, a part of a parameter (query, key and value are one, gate and up are one), or
    all there is.
    """
    groups = [[name for name, _ in slot.tensors] for slot in slots(architecture)]
    names, key = [name for group in groups for name in group], f"policies.{policy}.freeze"
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"{key} has {pattern!r}, which matches no tensor; names are like {names[0]!r} and {names[-1]!r}")
    frozen = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    if len(frozen) == len(names):
        raise ConfigError(f"{key} matches every tensor; set policies.{policy}.trainable to false instead")
    for group in groups:
        if not frozen.isdisjoint(group) and not frozen.issuperset(group):
            raise ConfigError(f"{key} matches a part of {', '.join(group)}, which are one parameter; match all of them or none")
    return frozen


def entries(model: PolicyModel, architecture: Architecture, table: Table = slots) -> Iterator[Entry]:
    """The parameters of this rank's pipeline stage, in the order of `table`: Hugging Face's.

    The embedding is the first stage's, the final norm and the head are the last one's. The last stage's own copy of a tied
    embedding isn't among them (see `load_hf`).
    """
    for slot in table(architecture):
        parameter = _parameter(model, slot)
        if parameter is not None:
            yield Entry(parameter, slot.arrangement, slot.tensors)


def _parameter(model: PolicyModel, slot: Slot) -> torch.nn.Parameter | None:
    """The slot's parameter; None on the stages that don't hold it."""
    if slot.layer is None:
        first = slot.place.startswith("embedding")
        return attrgetter(slot.place)(model) if (model.pre_process if first else model.post_process) else None
    layers = model.decoder.layers
    index = slot.layer - (layers[0].layer_number - 1)  # Megatron counts the whole model's layers from 1
    if not 0 <= index < len(layers):
        return None
    layer, place = layers[index], slot.place
    if hasattr(layer.self_attention.linear_qkv, "layer_norm_weight"):
        place = _FUSED_NORMS.get(place, place)
    return attrgetter(place)(layer)


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
def load_hf(model: PolicyModel, architecture: Architecture, folder: Path, *, groups: PolicyGroups) -> None:
    """Fill this rank's part of `model` from `folder`, cast to the model's dtype. Call before the optimiser is built.

    Under a pipeline the last stage owns a copy of a tied embedding, its head; it is filled too. Nothing is communicated.
    """
    source = SafetensorsFolder(folder)
    held = list(entries(model, architecture))
    if architecture.tied and model.post_process and not model.pre_process:
        embedding = next(slots(architecture))
        held.append(Entry(model.output_layer.weight, embedding.arrangement, embedding.tensors))
    for entry in held:
        tensors = [source.read(name, shape) for name, shape in entry.tensors]
        entry.parameter.copy_(to_shard(entry, tensors, architecture, tp=groups.tp.size(), rank=groups.tp.rank()))


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A policy's weights as whole Hugging Face tensors, on every rank of the policy.

    Iterating is collective over the policy's ranks: the stage that holds a tensor joins it over its tensor-parallel ranks, then
    gives it to the other stages. `values` picks what is read of a parameter (its data, or its gradient); it is of one dtype.
    `table` says which parameters. Tensors may share memory with the model: use them before the next update, and don't write to
    them.
    """

    model: PolicyModel
    architecture: Architecture
    groups: PolicyGroups
    values: Callable[[torch.nn.Parameter], torch.Tensor] = torch.nn.Parameter.detach
    table: Table = slots
    before: Callable[[], None] | None = None
    """Called at the start of every iteration: where parameters arrive behind a step, to wait for them."""

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) in the order of iteration, on every rank, without communication."""
        dtype = self.model.config.params_dtype
        return [(name, dtype, shape) for slot in self.table(self.architecture) for name, shape in slot.tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.before is not None:
            self.before()
        with torch.no_grad():
            like = self.values(next(entries(self.model, self.architecture, self.table)).parameter)
        for slot in self.table(self.architecture):
            with torch.no_grad():
                whole = self._whole(slot, like)
            yield from ((name, tensor) for (name, _), tensor in zip(slot.tensors, whole, strict=True))

    def _whole(self, slot: Slot, like: torch.Tensor) -> list[torch.Tensor]:
        """The slot's tensors, on stages that don't hold them in memory made like `like`."""
        pp, parameter = self.groups.pp, _parameter(self.model, slot)
        if parameter is not None:
            entry = Entry(parameter, slot.arrangement, slot.tensors)
            whole = from_shards(entry, self._gather(entry), self.architecture)
        else:
            whole = [like.new_empty(shape) for _, shape in slot.tensors]
        if pp.size() > 1:
            whole = [tensor.contiguous() for tensor in whole]
            for tensor in whole:
                dist.broadcast(tensor, group=pp, group_src=self._stage(slot))
        return whole

    def _stage(self, slot: Slot) -> int:
        """The pipeline stage that holds the slot. Layers are cut evenly."""
        stages = self.groups.pp.size()
        if slot.layer is None:
            return 0 if slot.place.startswith("embedding") else stages - 1
        return slot.layer * stages // self.architecture.layers

    def _gather(self, entry: Entry) -> list[torch.Tensor]:
        shard, size = self.values(entry.parameter), self.groups.tp.size()
        if entry.arrangement == "copy" or size == 1:
            return [shard]
        gathered = shard.new_empty((size * shard.shape[0], *shard.shape[1:]))
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=self.groups.tp)
        return list(gathered.chunk(size))
