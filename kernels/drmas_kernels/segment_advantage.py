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
  Reads about 33 N bytes and writes 8 N: launch-bound at any size that occurs.

The per-agent rule is Dr. MAS (segments are (task, agent)); the pooled one is GRPO (segments are tasks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
    weighting: Weighting,
    ddof: int,
    eps: float,
    min_std: float,
    singleton: Singleton,
    penalty_inside: bool,
    leave_one_out: bool,
) -> SegmentAdvantage:
    """The contract above in plain torch; arguments are already checked."""
    rows = included.nonzero().squeeze(1)
    penalty64 = penalty[rows].double()
    rounding = ROUNDING_ULPS * torch.finfo(reward.dtype).eps
    score = reward[rows].double()
    if penalty_inside:
        score = score - penalty64
    per_episode = episode[rows] if weighting == "episode" else None

    value, mean_stats, std_stats = score, None, None
    zero = torch.zeros_like(score, dtype=torch.bool)
    divisor = torch.ones_like(score)
    if std_segment is not None:
        segment = std_segment[rows]
        value, std_stats = _statistics(score, segment, per_episode, _num_segments(std_segment), ddof, rounding)
        lone = std_stats.weight[segment] == 1
        constant = std_stats.constant(min_std)[segment]
        divisor = torch.where(lone, 1.0, std_stats.std[segment] + eps)
        zero |= constant | lone if singleton == "zero" else constant
    if mean_segment is not None:
        segment = mean_segment[rows]
        value, mean_stats = _statistics(score, segment, per_episode, _num_segments(mean_segment), ddof, rounding)
        units = mean_stats.weight[segment]
        lone = units == 1
        constant = mean_stats.constant(min_std)[segment]
        zero |= constant | lone if singleton == "zero" else constant
        value = torch.where(lone, value, value - mean_stats.mean[segment])
        if leave_one_out:
            value = torch.where(lone, value, value * (units / (units - 1)))

    normalised = torch.where(zero, 0.0, value / divisor)
    if not penalty_inside:
        normalised = normalised - penalty64
    advantage = torch.zeros_like(reward)
    advantage[rows] = normalised.to(reward.dtype)
    return SegmentAdvantage(advantage, mean_stats, std_stats)


def _statistics(
    score: Tensor, segment: Tensor, episode: Tensor | None, num_segments: int, ddof: int, rounding: float
) -> tuple[Tensor, SegmentStats]:
    """Each row's value under the weighting, and the statistics of every segment. All inputs are over included rows.

    A std of at most `rounding` times the largest magnitude is 0.
    """
    value, unit_value, unit_segment = score, score, segment
    if episode is not None:
        pairs, unit = torch.unique(torch.stack([segment, episode], dim=1), dim=0, return_inverse=True)
        unit_value = _Grouped(score, unit, pairs.shape[0]).mean
        unit_segment = pairs[:, 0]
        value = unit_value[unit]
    units = _Grouped(unit_value, unit_segment, num_segments)
    weight = units.lengths.double()
    variance = units.squared_deviations() / (weight - ddof).clamp(min=1.0)
    std = variance.sqrt()
    std = torch.where(std <= rounding * torch.maximum(units.lowest.abs(), units.highest.abs()), 0.0, std)
    count = torch.bincount(segment, minlength=num_segments)
    return value, SegmentStats(units.mean, std.masked_fill(weight == 0, torch.nan), weight, count, units.lowest, units.highest)


class _Grouped:
    """Values sorted by (group, value), so that no sum over a group depends on the order in which rows came.

    The mean of equal values is that value exactly (three times 0.1 over 3 is not 0.1 in floating point). Empty groups have
    mean, lowest and highest NaN.
    """

    def __init__(self, value: Tensor, group: Tensor, num_groups: int) -> None:
        order = torch.argsort(value, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        self.lengths = torch.bincount(group, minlength=num_groups)
        self._value, self._group = value[order], group[order]
        empty = self.lengths == 0
        self.lowest = self._reduce(self._value, "min").masked_fill(empty, torch.nan)
        self.highest = self._reduce(self._value, "max").masked_fill(empty, torch.nan)
        total = self._reduce(self._value, "sum")
        self.mean = torch.where(self.lowest == self.highest, self.lowest, total / self.lengths)

    def squared_deviations(self) -> Tensor:
        """Sum of squared distances to the group's mean."""
        return self._reduce((self._value - self.mean[self._group]).square(), "sum")

    def _reduce(self, value: Tensor, how: str) -> Tensor:
        if not self.lengths.numel():  # segment_reduce doesn't take "no groups"
            return value
        return torch.segment_reduce(value, how, lengths=self.lengths, initial=0.0 if how == "sum" else None)


def _num_segments(segment: Tensor) -> int:
    return int(segment.max()) + 1 if segment.numel() else 0


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
) -> SegmentAdvantage:
    """Advantages of N rows; the contract is on top of this file. ValueError names the argument that breaks it."""
    for name, choice, choices in (("weighting", weighting, ("turn", "episode")), ("singleton", singleton, ("zero", "raw"))):
        if choice not in choices:
            raise ValueError(f"{name} is {choice!r}; expected one of {', '.join(choices)}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}; expected 0 (population) or 1 (sample)")
    if leave_one_out and mean_segment is None:
        raise ValueError("leave_one_out needs mean_segment: there is no mean to leave a row out of")
    if reward.ndim != 1 or not reward.is_floating_point():
        raise ValueError(f"reward is {reward.dtype} {list(reward.shape)}; expected a floating vector")
    vectors = {"penalty": penalty, "mean_segment": mean_segment, "std_segment": std_segment}
    vectors |= {"episode": episode, "included": included}
    for name, tensor in vectors.items():
        if tensor is not None and tensor.shape != reward.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected that of reward, {list(reward.shape)}")
    if included.dtype != torch.bool:
        raise ValueError(f"included is {included.dtype}; expected bool")
    for name in ("mean_segment", "std_segment", "episode"):
        tensor = vectors[name]
        if tensor is not None and (tensor.dtype != torch.int64 or (tensor.numel() and int(tensor.min()) < 0)):
            raise ValueError(f"{name} must be int64 and at least 0")
    for name, tensor in (("reward", reward), ("penalty", penalty)):
        wrong = (included & ~tensor.isfinite()).nonzero().flatten()
        if wrong.numel():
            row = int(wrong[0])
            raise ValueError(
                f"{name}[{row}] is {float(tensor[row])}; an included row needs a finite one (exclude the row instead)"
            )
    return segment_advantage_reference(
        reward,
        penalty,
        mean_segment=mean_segment,
        std_segment=std_segment,
        episode=episode,
        included=included,
        weighting=weighting,
        ddof=ddof,
        eps=eps,
        min_std=min_std,
        singleton=singleton,
        penalty_inside=penalty_inside,
        leave_one_out=leave_one_out,
    )
