"""Advantages of rows that are compared within segments: (score - mean) / (std + eps), one routine for all rules.

Contract
  Row i has reward r_i, penalty p_i, an episode id, a segment for the mean and a segment for the std (either may be absent), and
  a flag `included`. Its score is s_i = r_i - p_i with `penalty_inside`, else s_i = r_i.

  Values      weighting "turn": every included row is one unit with value s_i. Weighting "episode": a unit is a (segment,
              episode) pair, its value is the mean of its rows' scores, and every row of the pair takes that value. The
              numerator uses the pairs of the mean segment, else of the std segment; with neither, rows keep their own score.
  Statistics  per segment over its units: mean m, std sqrt(sum (x - m)^2 / (n - ddof)), n units, extremes. Two passes, float64.
  Advantage   A_i = f (x_i - m) / (std + eps), f = n / (n - 1) with `leave_one_out`, else 1. Absent mean: m = 0. Absent std: the
              divisor is 1, without eps. Then A_i - p_i, unless the penalty is inside.

  Constant    a segment whose units are all equal but for rounding (std <= 4 ulp of max |x| in the reward's dtype: 0.3 and
              0.1 + 0.2 are), or whose std is below `min_std`, gives exactly 0 before the penalty, whether it is the row's mean
              or its std segment (a vanishing divisor must never blow a difference of means up).
  Singleton   a segment of one unit. "zero": exactly 0, again for either segment. "raw": a singleton mean segment subtracts 0, a
              singleton std segment divides by 1, so where both are the same the advantage is the score itself. In mixed scopes
              each side follows its own segment: a lone call of an agent, with the std of its task, gives score / (std + eps).
  Excluded    rows take part in nothing and have advantage 0; their reward may be NaN. A reward or penalty of an included row
              that is NaN or infinite is refused. N = 0 works.

  Order       the result doesn't depend on the order of rows, bit for bit, nor on how segments and episodes are numbered: rows
              are sorted by (segment, episode, score) and units by (segment, value) before they are summed, and segments are
              reduced one by one, so that rows of one segment never change another.

  reward, penalty [N] floating; mean_segment, std_segment, episode [N] int64 (segments in 0..S-1); included [N] bool.
  fp32 reads 33 N bytes and writes 4 N: launch-bound at any size that occurs. There is no gradient.

  Triton      computes what is fp32 in reward and penalty; other dtypes are computed by torch, whatever the backend. One
              launch after an integer plan made from the ids. Sums are 64-bit fixed point (`_segment_advantage_triton`), so the
              promise of order holds there too; a segment may be of any length, a call has at most 2^22 rows. Scores are rounded
              to fp32 and below 2^127 in size. Statistics are off by fp32's rounding and 2^-39 of the segment's largest score,
              advantages by `numerics.advantage_bound`; a std that near to the threshold of "constant" or to `min_std` may fall
              on either side. The work is the lengths of both segments, summed over the pairs of them that occur.

The per-agent rule is Dr. MAS (segments are (task, agent)); the pooled one is GRPO (segments are tasks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from drmas_kernels._checks import check_device
from drmas_kernels.backend import choose

ROUNDING_ULPS = 4
"""A spread of so many units in the last place is how the values were added up, not a difference between them."""

Weighting = Literal["turn", "episode"]
Singleton = Literal["zero", "raw"]


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """Per segment, each [S] and float64 except `count`. Without included rows: weight and count 0, NaN elsewhere."""

    mean: Tensor
    std: Tensor
    """Exactly 0 for a segment whose units are equal but for rounding, and for a segment of one unit."""
    weight: Tensor
    """Units in the statistics: rows or episodes, by the weighting."""
    count: Tensor
    """Included rows, int64."""
    minimum: Tensor
    maximum: Tensor

    def packed(self) -> Tensor:
        """[6, S] float64."""
        return torch.stack([self.mean, self.std, self.weight, self.count.double(), self.minimum, self.maximum])

    @classmethod
    def unpacked(cls, packed: Tensor) -> SegmentStats:
        mean, std, weight, count, minimum, maximum = packed.unbind()
        return cls(mean, std, weight, count.long(), minimum, maximum)

    def constant(self, min_std: float) -> Tensor:
        """[S] bool: more than one unit, and no spread worth the name."""
        return (self.weight > 1) & ((self.std == 0.0) | (self.std < min_std))


@dataclass(frozen=True, slots=True)
class SegmentAdvantage:
    """`advantage` [N] in the reward's dtype, 0 where excluded; the statistics of both segmentations, None where absent."""

    advantage: Tensor
    mean_stats: SegmentStats | None
    std_stats: SegmentStats | None


def segment_advantage_reference(
    reward: Tensor,
    penalty: Tensor,
    *,
    mean_segment: Tensor | None,
    std_segment: Tensor | None,
    episode: Tensor,
    included: Tensor,
    num_mean: int,
    num_std: int,
    weighting: str,
    ddof: int,
    eps: float,
    min_std: float,
    singleton: str,
    penalty_inside: bool,
    leave_one_out: bool,
) -> SegmentAdvantage:
    """The contract above in plain torch; arguments are already checked."""
    rows = slice(None) if bool(included.all()) else included.nonzero().squeeze(1)
    penalty64 = penalty[rows].double()
    rounding = ROUNDING_ULPS * torch.finfo(reward.dtype).eps
    score = reward[rows].double()
    if penalty_inside:
        score = score - penalty64
    per_episode = episode[rows] if weighting == "episode" else None

    value, mean_stats, std_stats = score, None, None
    zero, divisor = torch.zeros_like(included[rows]), 1.0
    if std_segment is not None:
        segment = std_segment[rows]
        value, std_stats = _statistics(score, segment, per_episode, num_std, ddof, rounding)
        zero |= _gives_zero(std_stats, min_std, singleton)[segment]
        divisor = torch.where(std_stats.weight == 1, 1.0, std_stats.std + eps)[segment]
    if mean_segment is not None:
        if std_segment is not None and num_mean == num_std and torch.equal(mean_segment, std_segment):
            mean_stats = std_stats
        else:
            segment = mean_segment[rows]
            value, mean_stats = _statistics(score, segment, per_episode, num_mean, ddof, rounding)
            zero |= _gives_zero(mean_stats, min_std, singleton)[segment]
        units = mean_stats.weight
        value = value - torch.where(units == 1, 0.0, mean_stats.mean)[segment]
        if leave_one_out:
            value = value * torch.where(units == 1, 1.0, units / (units - 1))[segment]

    normalised = torch.where(zero, 0.0, value / divisor)
    if not penalty_inside:
        normalised = normalised - penalty64
    advantage = torch.zeros_like(reward)
    advantage[rows] = normalised.to(reward.dtype)
    return SegmentAdvantage(advantage, mean_stats, std_stats)


def _gives_zero(stats: SegmentStats, min_std: float, singleton: str) -> Tensor:
    """[S] bool: the segments whose rows have advantage 0."""
    constant = stats.constant(min_std)
    return constant | (stats.weight == 1) if singleton == "zero" else constant


def _statistics(
    score: Tensor, segment: Tensor, episode: Tensor | None, num_segments: int, ddof: int, rounding: float
) -> tuple[Tensor, SegmentStats]:
    """Each row's value under the weighting, and the statistics of every segment. All inputs are over included rows.

    A std of at most `rounding` times the largest magnitude is 0.
    """
    value, unit_value, unit_segment = score, score, segment
    if episode is not None:
        key = pair_key(segment, num_segments, episode)
        order = _order(score, key)
        unit = numbered(key[order])
        pairs = _Grouped(score[order], unit, int(unit[-1]) + 1 if len(unit) else 0)
        value = torch.empty_like(score).index_copy_(0, order, pairs.mean[unit])
        unit_value, unit_segment = pairs.mean, segment[order][pairs.lengths.cumsum(0) - 1]
    order = _order(unit_value, unit_segment)
    units = _Grouped(unit_value[order], unit_segment[order], num_segments)
    weight = units.lengths.double()
    variance = units.squared_deviations() / (weight - ddof).clamp(min=1.0)
    std = variance.sqrt()
    std = torch.where(std <= rounding * torch.maximum(units.lowest.abs(), units.highest.abs()), 0.0, std)
    std = std.masked_fill(weight == 0, torch.nan)
    count = units.lengths if episode is None else torch.bincount(segment, minlength=num_segments)
    return value, SegmentStats(units.mean, std, weight, count, units.lowest, units.highest)


def pair_key(segment: Tensor, num_segments: int, episode: Tensor) -> Tensor:
    """[N] int64, equal where segment and episode are, in the order of segments."""
    episodes = int(episode.max()) + 1 if episode.numel() else 1
    if episodes > torch.iinfo(torch.int64).max // max(num_segments, 1):
        episode, episodes = torch.unique(episode, return_inverse=True)[1], len(episode)
    return segment * episodes + episode


def numbered(key: Tensor) -> Tensor:
    """The index of each value of a sorted vector among the distinct ones."""
    return torch.cat([key.new_zeros(min(len(key), 1)), (key[1:] != key[:-1]).cumsum(0)])


def _order(value: Tensor, group: Tensor) -> Tensor:
    """Indices by (group, value): no sum over a group then depends on the order in which rows came."""
    order = torch.argsort(value, stable=True)
    return order[torch.argsort(group[order], stable=True)]


class _Grouped:
    """Values in `_order`, with the group of each.

    The mean of equal values is that value exactly (three times 0.1 over 3 is not 0.1 in floating point). Empty groups have
    mean, lowest and highest NaN.
    """

    def __init__(self, value: Tensor, group: Tensor, num_groups: int) -> None:
        self.lengths = torch.bincount(group, minlength=num_groups)
        self._value, self._group = value, group
        empty = self.lengths == 0
        self.lowest = self._reduce(value, "min").masked_fill(empty, torch.nan)
        self.highest = self._reduce(value, "max").masked_fill(empty, torch.nan)
        total = self._reduce(value, "sum")
        self.mean = torch.where(self.lowest == self.highest, self.lowest, total / self.lengths)

    def squared_deviations(self) -> Tensor:
        """Sum of squared distances to the group's mean."""
        return self._reduce((self._value - self.mean[self._group]).square(), "sum")

    def _reduce(self, value: Tensor, how: str) -> Tensor:
        if not self.lengths.numel():  # segment_reduce doesn't take "no groups"
            return value
        return torch.segment_reduce(value, how, lengths=self.lengths, initial=0.0 if how == "sum" else None)


@torch.library.custom_op("drmas::segment_advantage", mutates_args=())
def _op(
    reward: Tensor,
    penalty: Tensor,
    mean_segment: Tensor | None,
    std_segment: Tensor | None,
    episode: Tensor,
    included: Tensor,
    num_mean: int,
    num_std: int,
    weighting: str,
    ddof: int,
    eps: float,
    min_std: float,
    singleton: str,
    penalty_inside: bool,
    leave_one_out: bool,
) -> tuple[Tensor, Tensor]:
    """(advantage [N], float64 statistics [6, num_mean + num_std] in the order of `SegmentStats`)."""
    arguments = {
        "mean_segment": mean_segment,
        "std_segment": std_segment,
        "episode": episode,
        "included": included,
        "num_mean": num_mean,
        "num_std": num_std,
        "weighting": weighting,
        "ddof": ddof,
        "eps": eps,
        "min_std": min_std,
        "singleton": singleton,
        "penalty_inside": penalty_inside,
        "leave_one_out": leave_one_out,
    }
    if reward.dtype == penalty.dtype == torch.float32 and choose("segment_advantage", reward.device).name == "triton":
        from drmas_kernels._segment_advantage_triton import segment_advantage_triton

        advantage, statistics = segment_advantage_triton(reward, penalty, **arguments)
        return advantage, statistics.double()
    result = segment_advantage_reference(reward, penalty, **arguments)
    present = [stats.packed() for stats in (result.mean_stats, result.std_stats) if stats is not None]
    return result.advantage, torch.cat(present, dim=1) if present else reward.new_zeros((6, 0), dtype=torch.float64)


@_op.register_fake
def _(reward, penalty, mean_segment, std_segment, episode, included, num_mean, num_std, *rule):
    return torch.empty_like(reward), reward.new_empty((6, num_mean + num_std), dtype=torch.float64)


def segment_advantage(
    reward: Tensor,
    penalty: Tensor,
    *,
    mean_segment: Tensor | None,
    std_segment: Tensor | None,
    episode: Tensor,
    included: Tensor,
    weighting: Weighting = "turn",
    ddof: int = 1,
    eps: float = 1e-6,
    min_std: float = 0.0,
    singleton: Singleton = "zero",
    penalty_inside: bool = False,
    leave_one_out: bool = False,
    num_mean_segments: int | None = None,
    num_std_segments: int | None = None,
) -> SegmentAdvantage:
    """Advantages of N rows; the contract is on top of this file. ValueError names the argument that breaks it.

    The numbers of segments are by default what the ids need.
    """
    for name, choice, choices in (("weighting", weighting, ("turn", "episode")), ("singleton", singleton, ("zero", "raw"))):
        if choice not in choices:
            raise ValueError(f"{name} is {choice!r}; expected one of {', '.join(choices)}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}; expected 0 (population) or 1 (sample)")
    for name, number in (("eps", eps), ("min_std", min_std)):
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} is {number}; expected a finite number, 0 or more")
    if leave_one_out and mean_segment is None:
        raise ValueError("leave_one_out needs mean_segment: there is no mean to leave a row out of")
    _check_rows(reward, penalty, mean_segment, std_segment, episode, included)
    num_mean = _num_segments("mean_segment", mean_segment, num_mean_segments)
    num_std = _num_segments("std_segment", std_segment, num_std_segments)
    advantage, statistics = _op(
        reward,
        penalty,
        mean_segment,
        std_segment,
        episode,
        included,
        num_mean,
        num_std,
        weighting,
        ddof,
        eps,
        min_std,
        singleton,
        penalty_inside,
        leave_one_out,
    )
    return SegmentAdvantage(
        advantage,
        None if mean_segment is None else SegmentStats.unpacked(statistics[:, :num_mean]),
        None if std_segment is None else SegmentStats.unpacked(statistics[:, num_mean:]),
    )


def _check_rows(
    reward: Tensor,
    penalty: Tensor,
    mean_segment: Tensor | None,
    std_segment: Tensor | None,
    episode: Tensor,
    included: Tensor,
) -> None:
    if reward.ndim != 1 or not reward.is_floating_point():
        raise ValueError(f"reward is {reward.dtype} {list(reward.shape)}; expected a floating vector")
    vectors = {"penalty": penalty, "mean_segment": mean_segment, "std_segment": std_segment}
    vectors |= {"episode": episode, "included": included}
    for name, tensor in vectors.items():
        if tensor is not None and tensor.shape != reward.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected that of reward, {list(reward.shape)}")
        check_device(name, tensor, reward, "reward")
    if included.dtype != torch.bool:
        raise ValueError(f"included is {included.dtype}; expected bool")
    if not penalty.is_floating_point():
        raise ValueError(f"penalty is {penalty.dtype}; expected floating point")
    for name in ("mean_segment", "std_segment", "episode"):
        tensor = vectors[name]
        if tensor is not None and tensor.dtype != torch.int64:
            raise ValueError(f"{name} is {tensor.dtype}; expected int64")
        if tensor is not None and tensor.numel() and int(tensor.min()) < 0:
            raise ValueError(f"{name} holds {int(tensor.min())}; expected 0 or more")
    for name, tensor in (("reward", reward), ("penalty", penalty)):
        wrong = (included & ~tensor.isfinite()).nonzero().flatten()
        if wrong.numel():
            row = int(wrong[0])
            raise ValueError(
                f"{name}[{row}] is {float(tensor[row])}; an included row needs a finite one (exclude the row instead)"
            )


def _num_segments(name: str, segment: Tensor | None, given: int | None) -> int:
    if segment is None:
        if given is not None:
            raise ValueError(f"num_{name}s is {given} but {name} is None; expected ids of segments, or no number of them")
        return 0
    needed = int(segment.max()) + 1 if segment.numel() else 0
    if given is not None and given < needed:
        raise ValueError(f"{name} holds the id {needed - 1}, but the number of segments is {given}")
    return needed if given is None else given
