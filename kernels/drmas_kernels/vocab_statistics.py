"""Four numbers per token stand for all its logits: how they are formed, merged over ranks and turned back, in plain torch.

With z = logit / temperature over some columns of the vocabulary and u = z - m, a token's statistics are (m, s, q, z_y), fp32:
    m = max z,   s = sum e^u,   q = sum e^u u,   z_y = z of the target, -inf where another rank holds it
Shifted sums cost no digits where all logits share an offset. A column -inf adds nothing; no column at all is m = -1e30 and
s = q = 0: finite, so that differences of maxima times 0 stay 0. NaN gives NaN, +inf something that is not finite.

Merging is in rank order from one all-gather: the same bits on all ranks. This is the specification of `_logits_triton`, which
`logprob` and the output head use where Triton runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOWEST = -1e30
_DEEPEST = -1e4
"""An exponent whose power is 0, and which times 0 is 0: stands in for -inf."""
_BLOCK_BYTES = {"cpu": 2 * 2**20}
_OTHER_BLOCK_BYTES = 64 * 2**20


def row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Rows whose fp32 copy stays small: on a CPU it fits the cache, so that several operations read and write memory once."""
    rows, columns = matrix.shape
    step = max(1, _BLOCK_BYTES.get(matrix.device.type, _OTHER_BLOCK_BYTES) // (4 * max(columns, 1)))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def statistics(logits: Tensor, column: Tensor, inverse_temperature: float | Tensor | None) -> Tensor:
    """(m, s, q, z_y) of every row of logits [T, v], [T, 4] fp32, through fp32 blocks of `row_blocks`.

    `column` [T]: the target's column, outside 0..v-1 where another rank has it.
    """
    rows, columns = logits.shape
    out = torch.empty(rows, 4, dtype=torch.float32, device=logits.device)
    if columns == 0:
        return no_columns(out)
    for part in row_blocks(logits):
        block, row = _scaled(logits, inverse_temperature, part), out[part]
        chosen = column[part].long()
        picked = block.gather(1, chosen.clamp(0, columns - 1)[:, None]).squeeze(1)
        row[:, 3] = torch.where((chosen >= 0) & (chosen < columns), picked, -torch.inf)
        row[:, 0] = block.amax(1).clamp_(min=LOWEST)
        shifted = (block - row[:, :1]).clamp_(min=_DEEPEST)
        power = shifted.exp()
        row[:, 1] = power.sum(1)
        row[:, 2] = moment(power, shifted)
    return out


def no_columns(out: Tensor) -> Tensor:
    """Fill [T, 4] with the statistics of no columns; waits for nothing."""
    out[:, 0], out[:, 1:3], out[:, 3] = LOWEST, 0.0, -torch.inf
    return out


def moment(power: Tensor, shifted: Tensor) -> Tensor:
    """sum e^u u per row, in fp32: under autocast torch would round both factors to bf16."""
    with torch.autocast(power.device.type, enabled=False):
        return torch.linalg.vecdot(power, shifted)


def merge(statistics: Tensor, group: Any) -> Tensor:
    """The statistics of the whole vocabulary from those of every rank's columns, the same bits on all ranks of `group`.

    None is one rank alone. ONE collective, an all-gather of [T, 4].
    """
    if group is None or dist.get_world_size(group) == 1:
        return statistics
    parts = [torch.empty_like(statistics) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, statistics, group=group)
    return merge_parts(parts)


def merge_parts(parts: list[Tensor]) -> Tensor:
    """One [T, 4] from those of disjoint columns, added up in the order given."""
    largest, chosen = parts[0][:, 0], parts[0][:, 3]
    for part in parts[1:]:
        largest, chosen = torch.maximum(largest, part[:, 0]), torch.maximum(chosen, part[:, 3])
    total, moment = torch.zeros_like(largest), torch.zeros_like(largest)
    for part in parts:
        shift = part[:, 0] - largest
        factor = shift.exp()
        total += factor * part[:, 1]
        moment += factor * (part[:, 2] + shift * part[:, 1])
    return torch.stack((largest, total, moment, chosen), 1)


def logprob_and_entropy(merged: Tensor) -> tuple[Tensor, Tensor]:
    """Per token, [T] each: (z_y - m) - ln s and ln s - q / s. A target that no rank holds has log-prob -inf."""
    largest, total, moment, chosen = merged.unbind(1)
    log_total = total.log()
    return (chosen - largest) - log_total, log_total - moment / total


def to_dlogits(
    logits: Tensor,
    merged: Tensor,
    column: Tensor,
    slope: Tensor,
    bonus: float | Tensor | None,
    inverse_temperature: float | Tensor | None,
    out: Tensor,
) -> Tensor:
    """Write d loss / d logit to `out` [T, v], which may be `logits`, and return it.

    `slope` [T] is the loss's derivative by the log-prob and `bonus` [T] minus that by the entropy H: with ln p = z - m - ln s,
        d z_v = p_v (bonus (ln p_v + H) - slope) + slope [v = y]
    times 1 / temperature. At the target slope (1 - p_y) is formed from fp32 statistics, without cancellation. Rows of slope and
    bonus 0 have gradient exactly 0, whatever their logits. Works through fp32 blocks of `row_blocks`.
    """
    if logits.shape[1] == 0:
        return out
    logprob, entropy = logprob_and_entropy(merged)
    log_total = merged[:, 1].log()
    factor = _per_row(1.0 if inverse_temperature is None else inverse_temperature, slope)
    bonus = None if bonus is None else _per_row(bonus, slope)
    dead = slope == 0
    if bonus is not None:
        dead &= bonus == 0
    at_target = -slope * torch.expm1(logprob)
    if bonus is not None:
        at_target += bonus * logprob.exp() * (logprob.clamp(min=_DEEPEST) + entropy)
    constant = -slope if bonus is None else bonus * entropy - slope
    for part in row_blocks(logits):
        block = _scaled(logits, inverse_temperature, part) - merged[part, :1]
        log_p = block.sub_(log_total[part, None]).clamp_(min=_DEEPEST)
        if bonus is None:
            block = log_p.exp_().mul_((constant * factor)[part, None])
        else:
            power = log_p.exp()
            block = log_p.mul_(bonus[part, None]).add_(constant[part, None]).mul_(power).mul_(factor[part, None])
        out[part] = block.masked_fill_(dead[part, None], 0.0)
    here = ((column >= 0) & (column < logits.shape[1])).nonzero().squeeze(1)
    out[here, column[here].long()] = (at_target * factor).masked_fill(dead, 0.0)[here].to(out.dtype)
    return out


def _per_row(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value)


def _scaled(logits: Tensor, inverse_temperature: float | Tensor | None, part: slice) -> Tensor:
    """z of some rows in fp32: a copy, or the logits themselves if there is nothing to do."""
    block = logits[part].float()
    if inverse_temperature is None:
        return block
    return block * (inverse_temperature[part, None] if isinstance(inverse_temperature, Tensor) else inverse_temperature)
