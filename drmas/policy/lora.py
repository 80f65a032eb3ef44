"""Low-rank adapters (arXiv 2106.09685) on a frozen base: y = base(x) + alpha / rank * B (A x).

A third way to give each agent weights of its own: the base stands in memory once (`share_base`), and each policy trains its
adapters only. The base under them is also the policy's reference for a KL term (`without_adapters`), at no cost of memory.

How the two factors lie on tensor-parallel ranks. Where the base is cut by rows (query-key-value, gate-up), A is whole on every
rank and B cut like the base; where it is cut by columns (attention output, down), A is cut like the base and B whole. What is
communicated is A x, which is `rank` wide: under sequence parallelism each rank takes A x of its own tokens and these are
gathered, so the layer's input isn't gathered a second time. The whole factor then sees a rank's own tokens only, and is marked
`sequence_parallel`, so that Megatron sums its gradients like those of the norms.

Called by the trainer inside `PolicyGroups.active`, between loading the weights and building the optimiser. `drmas.policy.peft`
writes and reads adapters as PEFT's folders.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from drmas.config.schema import LoraConfig
from drmas.errors import ModelError
from drmas.policy.groups import PolicyGroups
from drmas.policy.layers import free_until_backward
from drmas.policy.model import PolicyModel


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer of Megatron's that can have an adapter, and how tensor parallelism cuts it."""

    module: str
    cut: Literal["rows", "columns"]


TARGETS = {
    "qkv": Target("self_attention.linear_qkv", "rows"),
    "proj": Target("self_attention.linear_proj", "columns"),
    "fc1": Target("mlp.linear_fc1", "rows"),
    "fc2": Target("mlp.linear_fc2", "columns"),
}
"""By the names of `policies.NAME.lora.targets`."""

_FACTORS = ("lora_a", "lora_b")


class Adapted(torch.nn.Module):
    """A linear layer with an adapter: the layer itself, whose class became a subclass of this and of what it was.

    The names of its own parameters and their checkpoint keys stay, and so do the attributes that others look for, such as
    TransformerEngine's `layer_norm_weight`. `lora_a` [rank, inputs] and `lora_b` [outputs, rank] are this rank's shards.
    """

    def attach(self, name: str, config: LoraConfig, tp_group: dist.ProcessGroup, initial: torch.Tensor) -> None:
        """Add the factors: A from `initial` [rank, inputs], whole, and B = 0, so that the layer computes what it did."""
        self.adapts, self.lora_group, self.lora_scale, self.adapter_on = name, tp_group, config.alpha / config.rank, True
        by_rows = TARGETS[name].cut == "rows"
        if not by_rows:
            initial = initial.chunk(tp_group.size(), dim=1)[tp_group.rank()]
        like = {"dtype": self.config.params_dtype, "device": self.weight.device}
        self.register_parameter("lora_a", torch.nn.Parameter(initial.to(**like).contiguous()))
        self.register_parameter("lora_b", torch.nn.Parameter(torch.zeros(self.weight.shape[0], config.rank, **like)))
        set_tensor_model_parallel_attributes(self.lora_a, not by_rows, 1, 1)
        set_tensor_model_parallel_attributes(self.lora_b, by_rows, 0, 1)
        (self.lora_a if by_rows else self.lora_b).sequence_parallel = self.config.sequence_parallel

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(x, *args, **kwargs)
        if not self.adapter_on:
            return output, bias
        low = self._low(x).flatten(0, -2)
        added = torch.addmm(output.flatten(0, -2), low, self.lora_b.t(), alpha=self.lora_scale).view_as(output)
        free_until_backward(x, added, self.lora_a)
        return added, bias

    def _low(self, x: torch.Tensor) -> torch.Tensor:
        """A x, as B needs it on this rank; the backward pass undoes the communication."""
        norm = getattr(self, "layer_norm_weight", None)
        if norm is not None:  # TransformerEngine's layer takes what comes before the norm and keeps the normed to itself
            x = F.rms_norm(x, (x.shape[-1],), norm, self.config.layernorm_epsilon)
        low = F.linear(x, self.lora_a)
        if TARGETS[self.adapts].cut == "rows":
            if self.config.sequence_parallel:
                return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.lora_group)
            return copy_to_tensor_model_parallel_region(low, group=self.lora_group)
        if self.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.lora_group)
        return reduce_from_tensor_model_parallel_region(low, group=self.lora_group)

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """This rank's shard of W + alpha / rank * B A, added up in fp32 and rounded once to the weight's dtype."""
        product = self.lora_b.float() @ self.lora_a.float()
        return torch.add(self.weight.float(), product, alpha=self.lora_scale).to(self.weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The layer's own entries, and the factors with their cuts, of which the layer's own method knows nothing."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in _FACTORS},
            prefix,
            {"lora_b": 0} if TARGETS[self.adapts].cut == "rows" else {"lora_a": 1},
            sharded_offsets,
            tp_group=self.lora_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.adapts == "fc1":  # a rank holds its part of gate, then its part of up
            key = f"{prefix}lora_b"
            own[key] = apply_swiglu_sharded_factory(own[key], sharded_offsets, metadata.get("singleton_local_shards", False))
        return state | own


@functools.cache
def _adapted_class(kind: type[torch.nn.Module]) -> type[Adapted]:
    return type(f"Adapted{kind.__name__}", (Adapted, kind), {})


def add_adapters(model: PolicyModel, config: LoraConfig, groups: PolicyGroups, *, seed: int) -> None:
    """Freeze `model` and give the targets of every layer of this stage an adapter, the only parameters that train.

    The first values depend on `seed`, the layer and the target, not on the layout. Call before the optimiser is built.
    """
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for name in (each for each in TARGETS if each in config.targets):
            linear = layer.get_submodule(TARGETS[name].module)
            inputs = linear.weight.shape[1] * (groups.tp.size() if TARGETS[name].cut == "columns" else 1)
            linear.__class__ = _adapted_class(type(linear))
            linear.attach(name, config, groups.tp, _initial(seed, layer.layer_number, name, config.rank, inputs))
    if model.pre_process:
        model.embedding.register_forward_hook(ask_for_gradient)


def _initial(seed: int, layer: int, target: str, rank: int, inputs: int) -> torch.Tensor:
    """[rank, inputs] float32, uniform within 1 / sqrt(inputs): Kaiming's range for a = sqrt(5), which is PEFT's default."""
    digest = blake2b(json.dumps([seed, layer, target]).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    bound = 1.0 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


def ask_for_gradient(_module: torch.nn.Module, _arguments: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Let the first layer's input ask for a gradient: recomputed layers pass none on to their parameters without it."""
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded


@contextlib.contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Let `model` be its base: the reference for a KL term. For passes without gradient."""
    linears = [module for module in model.modules() if isinstance(module, Adapted)]
    for linear in linears:
        linear.adapter_on = False
    try:
        yield
    finally:
        for linear in linears:
            linear.adapter_on = True


def merged(model: PolicyModel) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    """A function from a parameter of `model` to its value with the adapters merged in, for `WeightSource`'s `values`.

    Of the model and not of the parameter, because several models may stand on the same base parameters.
    """
    linears = {id(module.weight): module for module in model.modules() if isinstance(module, Adapted)}

    def value(parameter: torch.nn.Parameter) -> torch.Tensor:
        linear = linears.get(id(parameter))
        return parameter.detach() if linear is None else linear.merged_weight()

    return value


class _Base:
    """Frozen parameters by name, alive as long as a model stands on them."""

    def __init__(self) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {}


_bases: weakref.WeakValueDictionary[Hashable, _Base] = weakref.WeakValueDictionary()


def share_base(model: PolicyModel, key: Hashable) -> None:
    """Let `model` hold its frozen parameters together with the models that came with an equal `key` and still live.

    An equal key promises equal values: it says which weights these are, in which dtype, and which shard of them. Call between
    `add_adapters` and the optimiser; this model's own copies are given back. ModelError: a shape or dtype differs.
    """
    base = _bases.setdefault(key, _Base())
    for name, parameter in list(model.named_parameters()):
        if parameter.requires_grad:
            continue
        common = base.parameters.setdefault(name, parameter)
        if (common.shape, common.dtype) != (parameter.shape, parameter.dtype):
            found, expected = ((tuple(each.shape), each.dtype) for each in (parameter, common))
            raise ModelError(f"{name} is {found} in a policy and {expected} in another one on the same base {key}")
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, common)
    model.shared_base = base
