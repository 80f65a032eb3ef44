"""The layers of our own model that are not attention: linear layers, RMSNorm, SwiGLU and the token embedding.

They compute what Megatron's and torch's do, with less memory and fewer passes over it:
- weight gradients are added to Megatron's `main_grad` where they are made, by the GEMM itself or, for the embedding, row by
  row, instead of being formed beside it and added;
- the outputs of RMSNorm and SwiGLU, which only the linear layer behind them reads, are freed after that layer's forward pass
  and computed again before its backward pass (`can_remake`), at the cost of one pass over them.

Plugged through the layer spec by `drmas.policy.model` where `drmas.core.stack` doesn't choose TransformerEngine. They run under
tensor and sequence parallelism, in pipelines, with recomputation, and with frozen weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from drmas.policy import host_platform


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) that may run under sequence parallelism, which Megatron's own refuses.

    Statistics are float32. The output can be made again.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=host_platform.device()))
        # Each rank sees its part of the sequence only; Megatron sums the gradients of parameters marked so.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()  # a view would keep all of what it is a view of
        inverse = _inverse_norm(x.detach(), self.eps)
        return can_remake(_RMSNorm.apply(x, self.weight, inverse), _normed, x.detach(), inverse, self.weight.detach())


class SwiGLU(torch.nn.Module):
    """silu(gate) * up of [..., 2 n] = (gate, up): [..., n]. The output can be made again."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save; Megatron's MLP asks each of its parts."""
        return {}

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return can_remake(_SwiGLU.apply(gate_up), _gated, gate_up.detach())


class ColumnLinear(ColumnParallelLinear):
    """Megatron's layer whose output features are cut over the tensor-parallel ranks."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(x, *args, **kwargs)
        free_until_backward(x, output, self.weight)
        return output, bias

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        return _linear(super()._forward_impl, input, weight, **options)


class RowLinear(RowParallelLinear):
    """Megatron's layer whose input features are cut over the tensor-parallel ranks."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(x)
        free_until_backward(x, output, self.weight)
        return output, bias

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        return _linear(super()._forward_impl, input, weight, **options)


class TokenEmbedding(VocabParallelEmbedding):
    """Megatron's embedding whose backward pass touches the rows of the tokens it saw, not the whole table."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[1, T] int64 -> [1, T, hidden]; [T / tp, 1, hidden] where the sequence is to be cut."""
        if self.tp_group.size() == 1:
            return _Embedding.apply(ids, self.weight)
        local = ids - self.vocab_start_index
        elsewhere = (local < 0) | (local >= self.num_embeddings_per_partition)
        part = _Embedding.apply(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(part.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(part, group=self.tp_group)


def can_remake(output: torch.Tensor, formula: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """`output`, marked: formula(*arguments, out=...) makes it again. The arguments must be detached, and kept by others."""
    output.remake = lambda out: formula(*arguments, out=out)
    return output


def free_until_backward(x: torch.Tensor, output: torch.Tensor, weight: torch.Tensor) -> None:
    """Give back the memory of `x`, which made `output`, if it can be made again; a hook does so when the gradient arrives.

    With a frozen weight nothing of `x` was kept, and somebody else, such as an adapter, may still read it (and then calls this
    with a weight of its own).
    """
    if not (hasattr(x, "remake") and output.requires_grad and weight.requires_grad):
        return
    storage, size, kept = x.untyped_storage(), x.untyped_storage().nbytes(), [x]

    @torch.no_grad()
    def refill(_: torch.Tensor) -> None:
        x = kept.pop()  # the hook lives as long as the graph
        storage.resize_(size)
        x.remake(x.data)  # .data, since autograd must not take it for a change

    storage.resize_(0)
    output.register_hook(refill)


def _empty(like: torch.Tensor, features: int) -> torch.Tensor:
    """Uninitialised [..., features] for the tokens of `like`, with a little room behind it.

    torch asks the C library for aligned blocks, and glibc finds a place for one only where there is more room than it needs:
    a freed block fits no other of its size. Without the room, the holes that freed activations leave between the kept ones
    stayed empty, and were half as large as those.
    """
    shape = (*like.shape[:-1], features)
    return like.new_empty(math.prod(shape) + 256)[:-256].view(shape)


def _inverse_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., 1] float32: 1 / sqrt(mean(x^2) + eps)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, inverse, out=out).mul_(weight)  # rounded in between, as in transformers


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps). With u = x r: dx = r (dy w - u mean(dy w u)), dw = sum of dy u."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, inverse)
        return _normed(x, inverse, weight, out=_empty(x, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        product = grad * unit
        mean = torch.matmul(product, weight.float()).unsqueeze_(-1).div_(x.shape[-1])
        dweight = product.flatten(0, -2).sum(0).to(weight.dtype)
        dx = torch.mul(grad, weight, out=product).addcmul_(unit, mean, value=-1).mul_(inverse)
        return dx.to(x.dtype), dweight, None


def _gated(gate_up: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.ops.aten.silu.out(gate, out=out).mul_(up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up, out=_empty(gate_up, gate_up.shape[-1] // 2))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        dgate, dup = result.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=dup).mul_(grad)
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad, up, out=dgate), gate, grad_input=dgate)
        return result


def _linear(
    frozen: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **options: Any,
) -> torch.Tensor:
    """x W^T + b by `_Linear`; with a frozen weight by Megatron's function `frozen`, which keeps no activations."""
    if weight.requires_grad:
        return _Linear.apply(x, weight, bias, tp_group if sequence_parallel or allreduce_dgrad else None, sequence_parallel)
    options |= {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel, "tp_group": tp_group}
    return frozen(input=x, weight=weight, bias=bias, **options)


class _Linear(torch.autograd.Function):
    """x W^T + b over [T, 1, in].

    With a group, each rank holds some of the outputs, so the input's gradient is a sum over the ranks. `scattered`: each rank
    also holds some of the tokens only; it gathers them for the product, forward and backward, and keeps its own. The
    collectives of the backward pass run beside its GEMMs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        scattered: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.scattered, ctx.has_bias = group, scattered, bias is not None
        if scattered:
            x, arrival = _gathered(x, group)
            arrival.wait()
        out = _empty(x, weight.shape[0])
        torch.mm(x.flatten(0, -2), weight.t(), out=out.flatten(0, -2))
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.scattered:
            x, arrival = _gathered(x, ctx.group)
        dx = pending = None
        if ctx.needs_input_grad[0]:
            dx = grad.matmul(weight)
            if ctx.scattered:
                whole, dx = dx, torch.empty_like(ctx.saved_tensors[0])
                pending = dist.reduce_scatter_tensor(dx, whole, group=ctx.group, async_op=True)
            elif ctx.group is not None:
                pending = dist.all_reduce(dx, group=ctx.group, async_op=True)
        if ctx.scattered:
            arrival.wait()
        rows = grad.flatten(0, -2)
        dbias = rows.sum(0) if ctx.has_bias else None
        dweight = _weight_gradient(weight, rows, x.flatten(0, -2))
        if pending is not None:
            pending.wait()
        return dx, dweight, dbias, None, None


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """All ranks' tokens, there once the work is done."""
    whole = torch.empty((x.shape[0] * group.size(), *x.shape[1:]), dtype=x.dtype, device=x.device)
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True)


def _weight_gradient(weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """grad^T x, added to `weight.main_grad` where that exists; what is returned then stands in for it, see `_stand_in`."""
    main = getattr(weight, "main_grad", None)
    if main is None:
        return grad.t() @ x
    if main.dtype == grad.dtype:
        main.addmm_(grad.t(), x)
    else:
        main.add_(grad.t() @ x)
    return _stand_in(weight)


def _stand_in(weight: torch.Tensor) -> torch.Tensor:
    """A gradient that Megatron's hooks ask for and don't read, because `main_grad` has it; its memory is never touched."""
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        ids, weight = ctx.saved_tensors
        main = getattr(weight, "main_grad", None)
        target = torch.zeros_like(weight) if main is None else main
        ids, rows = ids.flatten(), grad.flatten(0, -2).to(target.dtype)
        if target.is_cuda:  # each of the two adds up in a fixed order on its device
            target.index_put_((ids,), rows, accumulate=True)
        else:
            target.index_add_(0, ids, rows)
        if main is None:
            return None, target
        return None, None if getattr(weight, "head_stands_in", False) else _stand_in(weight)
