"""The output head a chunk of tokens at a time: products, statistics and the way back, under `linear_logprob`.

One [chunk, v] buffer holds the logits of a chunk; what is wanted of them is taken before the next chunk overwrites them. The
products are torch's. What happens to the logits between them has two implementations with the same methods: `TorchSteps`, made
for the caches of a CPU, and `TritonSteps`, kernels that read the logits once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from drmas_kernels.vocab_statistics import merge, moment, no_columns, row_blocks

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 2 * 2**30}  # other devices: as a CPU
"""Of a buffer of logits. A GPU reads the weight, and reads and writes its gradient, once per chunk: few large ones hide it."""
_TILE_ROWS = {"cuda": 128}
"""Rows of a chunk come in multiples of it: what a tile of the products takes."""
_WIDEN_BYTES = 16 * 2**20


class Shard:
    """The local columns of the vocabulary: which they are, their products with hidden rows, and how ranks merge."""

    def __init__(self, weight: Tensor, vocab_start: int, vocab_size: int | None, group: Any) -> None:
        self.group, self.start = group, vocab_start
        self.world = 1 if group is None else dist.get_world_size(group)
        self.vocab_size = weight.shape[0] * self.world if vocab_size is None else vocab_size
        self.size = min(max(self.vocab_size - vocab_start, 0), weight.shape[0])
        self.weight = weight.detach()[: self.size]

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """out [Tc, size] fp32 = hidden W^T."""
        if self._tensor_cores(hidden):
            torch.mm(hidden, self.weight.t(), out_dtype=torch.float32, out=out)
            return
        hidden = hidden.float()
        for part in self._blocks():
            torch.mm(hidden, self.weight[part].float().t(), out=out[:, part])

    def hidden_grad(self, dlogits: Tensor, out: Tensor) -> None:
        """out [Tc, H] fp32 = dlogits W."""
        if self._tensor_cores(dlogits):
            torch.mm(dlogits, self.weight, out_dtype=torch.float32, out=out)
            return
        out.zero_()
        dlogits = dlogits.float()
        for part in self._blocks():
            out.addmm_(dlogits[:, part], self.weight[part].float())

    def add_weight_grad(self, dlogits: Tensor, hidden: Tensor, out: Tensor) -> None:
        """out [v, H] fp32 += dlogits^T hidden; rows of padding columns stay as they are."""
        out = out[: self.size]
        if self._tensor_cores(dlogits):
            torch.addmm(out, dlogits.t(), hidden, out_dtype=torch.float32, out=out)
        else:
            out.addmm_(dlogits.float().t(), hidden.float())

    def column(self, target: Tensor) -> Tensor:
        """Where each target lies in this shard, outside 0..size-1 if it belongs to another rank."""
        return target - self.start

    def merge(self, statistics: Tensor) -> Tensor:
        return merge(statistics, self.group)

    def chunk_rows(self, tokens: int, chunk: int) -> int:
        """Rows per chunk: as asked, else (0) what fills the buffer, spread evenly. The same on all ranks."""
        if chunk:
            return chunk
        device = self.weight.device.type
        tile = _TILE_ROWS.get(device, 1)
        fit = max(16, CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (4 * -(-self.vocab_size // self.world)))
        even = -(-tokens // max(1, -(-tokens // fit)))
        return max(1, min(-(-even // tile) * tile, max(fit // tile * tile, tile)))

    def _tensor_cores(self, operand: Tensor) -> bool:
        """bf16 products with fp32 results exist on GPUs; elsewhere bf16 is widened, which is exact."""
        return operand.is_cuda and operand.dtype == self.weight.dtype == torch.bfloat16

    def _blocks(self) -> list[slice]:
        """Pieces of the shard that are widened to fp32 at a time; fp32 needs no widening and is one piece."""
        rows = self.size
        if self.weight.dtype != torch.float32:
            rows = max(1, _WIDEN_BYTES // (4 * self.weight.shape[1]))
        return [slice(first, min(first + rows, self.size)) for first in range(0, self.size, max(rows, 1))]


class Chunk(NamedTuple):
    """Some tokens on their way through the head: what the statistics left behind for the gradients."""

    part: slice
    hidden: Tensor
    """[Tc, H] as the products took it."""
    inverse_temperature: Tensor | None
    """[Tc] fp32, None for 1."""
    logits: Tensor
    """[Tc, size] fp32: e^u or u (`TorchSteps`), or the logits still (`TritonSteps`)."""
    column: Tensor
    """[Tc] int64: the target's column in this shard, outside 0..size-1 if it isn't here."""
    local: Tensor
    """[Tc, 4]: the statistics of this shard's columns."""
    merged: Tensor
    """[Tc, 4]: those of all shards; the same tensor as `local` where this is the only one."""


class Way(NamedTuple):
    """The loss's derivative by a chunk's logits, and the factors that are left for the small operands of the products.

    dW += dlogits^T (row hidden) and dH = back (dlogits W); `row` and `back` are [Tc, 1], None for 1.
    """

    dlogits: Tensor
    row: Tensor | None
    back: Tensor | None


class TorchSteps:
    """Plain torch. The temperature goes into the hidden rows, and e^u stays where the logits were."""

    def __init__(self, keep_shifted: bool) -> None:
        self._keep_shifted = keep_shifted
        """Leave u and not e^u in the buffer: the gradient of the entropy needs it."""

    def buffer(self, rows: int, columns: int, device: torch.device) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.float32, device=device)

    def operand(self, hidden: Tensor, inverse_temperature: Tensor | None) -> Tensor:
        hidden = hidden.float()
        return hidden if inverse_temperature is None else hidden * inverse_temperature[:, None]

    def statistics(self, logits: Tensor, column: Tensor, inverse_temperature: Tensor | None) -> Tensor:
        """The shard's (m, s, q, z_y) per token [Tc, 4]."""
        tokens, columns = logits.shape
        result = logits.new_zeros(tokens, 4)
        if columns == 0:
            return no_columns(result)
        chosen = logits.gather(1, column.clamp(0, columns - 1)[:, None]).squeeze(1)
        result[:, 3] = torch.where(_inside(column, columns), chosen, -torch.inf)
        for rows in row_blocks(logits):
            block, row = logits[rows], result[rows]
            row[:, 0] = block.amax(1)
            shifted = block.sub_(row[:, :1]) if self._keep_shifted else block - row[:, :1]
            exponential = shifted.exp() if self._keep_shifted else torch.exp(shifted, out=block)
            row[:, 1] = exponential.sum(1)
            row[:, 2] = moment(exponential, shifted)
        return result

    def way_back(self, chunk: Chunk, entropy: Tensor, slope: Tensor, bonus: Tensor | None) -> Way:
        """Without an entropy bonus dz is e^u times a number per token: the buffer is then touched at the targets only."""
        logits, slope = chunk.logits, slope[:, None]
        largest, total = chunk.merged[:, :1], chunk.merged[:, 1:2]
        inverse = None if chunk.inverse_temperature is None else chunk.inverse_temperature[:, None]
        behind = chunk.local[:, :1] - largest
        if bonus is None:
            if chunk.local is not chunk.merged:  # other shards: e^u is still relative to this shard's own maximum
                logits.mul_(behind.exp())
            _add_at(logits, chunk.column, -total)
            factor = -slope / total
            return Way(logits, factor, factor if inverse is None else factor * inverse)
        bonus = bonus[:, None]
        offset = bonus * entropy[:, None] - slope
        logits.add_(behind - total.log())
        for rows in row_blocks(logits):
            probability = logits[rows].exp()
            logits[rows].mul_(bonus[rows]).add_(offset[rows]).mul_(probability)
        _add_at(logits, chunk.column, slope)
        return Way(logits, None, inverse)


class TritonSteps:
    """The kernels of `_logits_triton`. Hidden rows stay as they are, the temperature goes into the kernels."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        """Of the products' operands, and so of the derivative by the logits."""
        self._narrow: Tensor | None = None
        """Where the derivative goes if it isn't fp32."""

    def buffer(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Rows begin at multiples of 64 bytes, whatever the vocabulary: else accesses could be no wider than an element."""
        return torch.empty(rows, -(-columns // 16) * 16, dtype=torch.float32, device=device)[:, :columns]

    def operand(self, hidden: Tensor, inverse_temperature: Tensor | None) -> Tensor:
        return hidden

    def statistics(self, logits: Tensor, column: Tensor, inverse_temperature: Tensor | None) -> Tensor:
        from drmas_kernels import _logits_triton

        return _logits_triton.statistics(logits, column, inverse_temperature)

    def way_back(self, chunk: Chunk, entropy: Tensor, slope: Tensor, bonus: Tensor | None) -> Way:
        from drmas_kernels import _logits_triton

        out = chunk.logits
        if self._dtype != torch.float32:
            if self._narrow is None:  # the first chunk is the largest
                rows, columns = out.shape
                self._narrow = torch.empty(rows, out.stride(0), dtype=self._dtype, device=out.device)[:, :columns]
            out = self._narrow[: out.shape[0]]
        inputs = (chunk.logits, chunk.merged, chunk.column, slope, bonus, chunk.inverse_temperature, out)
        return Way(_logits_triton.to_dlogits(*inputs, finite=True), None, None)


def chunks(
    hidden: Tensor,
    target: Tensor,
    inverse_temperature: Tensor | None,
    shard: Shard,
    chunk: int,
    steps: TorchSteps | TritonSteps,
    merged: Tensor | None = None,
) -> Iterator[Chunk]:
    """Statistics of all tokens, a chunk at a time, in one buffer: a chunk is gone when the next one is asked for.

    `merged` [T, 4], where it is known from an earlier pass, stands for the collective.
    """
    tokens = hidden.shape[0]
    rows = shard.chunk_rows(tokens, chunk)
    buffer = steps.buffer(min(rows, tokens), shard.size, hidden.device)
    for first in range(0, tokens, rows):
        part = slice(first, min(first + rows, tokens))
        inverse = None if inverse_temperature is None else inverse_temperature[part]
        operand = steps.operand(hidden[part], inverse)
        logits = buffer[: operand.shape[0]]
        shard.logits(operand, logits)
        column = shard.column(target[part])
        local = steps.statistics(logits, column, inverse)
        yield Chunk(part, operand, inverse, logits, column, local, shard.merge(local) if merged is None else merged[part])


class Sink:
    """Where gradients gather: dH [T, H] and dW [v, H], both fp32, each None where it isn't wanted."""

    def __init__(self, dhidden: Tensor | None, dweight: Tensor | None) -> None:
        self.dhidden, self.dweight = dhidden, dweight

    def add(self, chunk: Chunk, way: Way, shard: Shard) -> None:
        """The products of the chunk's derivative with the weight and with the hidden rows."""
        if self.dweight is not None:
            hidden = chunk.hidden if way.row is None else way.row * chunk.hidden
            shard.add_weight_grad(way.dlogits, hidden, self.dweight)
        if self.dhidden is not None:
            out = self.dhidden[chunk.part]
            shard.hidden_grad(way.dlogits, out)
            if way.back is not None:
                out.mul_(way.back)


def _inside(column: Tensor, columns: int) -> Tensor:
    return (column >= 0) & (column < columns)


def _add_at(logits: Tensor, column: Tensor, value: Tensor) -> None:
    """logits[t, column[t]] += value[t] for the tokens whose target is here; `value` is [Tc, 1]."""
    if logits.shape[1]:
        here = _inside(column, logits.shape[1])[:, None]
        logits.scatter_add_(1, column.clamp(0, logits.shape[1] - 1)[:, None], torch.where(here, value, 0.0))
