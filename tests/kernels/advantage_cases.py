"""Advantages on lists, by the kernel and by an oracle that takes the contract row by row."""

from __future__ import annotations

import math
import statistics
import sys
from statistics import fmean

import torch

from drmas_kernels.segment_advantage import segment_advantage


def run(
    reward, penalty=None, *, mean=None, std=None, episode=None, included=None, dtype=torch.float64, device="cpu", **options
):
    """The kernel on lists; segments default to one for all rows, "none" leaves a statistic out."""
    rows = len(reward)

    def ids(value):
        return None if value == "none" else torch.tensor([0] * rows if value is None else value, device=device).long()

    return segment_advantage(
        torch.tensor(reward, dtype=dtype, device=device),
        torch.tensor(penalty if penalty is not None else [0.0] * rows, dtype=dtype, device=device),
        mean_segment=ids(mean),
        std_segment=ids(std),
        episode=torch.tensor(list(episode if episode is not None else range(rows)), dtype=torch.int64, device=device),
        included=torch.tensor(included if included is not None else [True] * rows, dtype=torch.bool, device=device),
        **options,
    )


def oracle(
    reward,
    penalty,
    mean,
    std,
    episode,
    included,
    *,
    weighting,
    ddof,
    eps,
    singleton,
    penalty_inside,
    leave_one_out,
    min_std=0.0,
):
    """The contract, one row at a time, on Python floats."""

    def constant(x):
        return statistics.pstdev(x) <= 4 * sys.float_info.epsilon * max(map(abs, x)) or spread(x) < min_std

    def spread(x):
        return math.sqrt(sum((v - fmean(x)) ** 2 for v in x) / (len(x) - ddof))

    score = [r - p if penalty_inside else r for r, p in zip(reward, penalty, strict=True)]
    rows = [i for i in range(len(reward)) if included[i]]

    def units(segments, segment):
        members = [i for i in rows if segments[i] == segment]
        if weighting == "turn":
            return [score[i] for i in members]
        return [average(segments, segment, e) for e in {episode[i] for i in members}]

    def average(segments, segment, chosen):
        scores = [score[i] for i in rows if segments[i] == segment and episode[i] == chosen]
        return scores[0] if min(scores) == max(scores) else fmean(scores)

    def value(i):
        segments = mean if mean != "none" else std
        if weighting == "turn" or segments == "none":
            return score[i]
        return average(segments, segments[i], episode[i])

    result = [0.0] * len(reward)
    for i in rows:
        numerator, divisor, zero = value(i), 1.0, False
        if std != "none":
            x = units(std, std[i])
            if len(x) > 1:
                divisor = spread(x) + eps
            zero |= (len(x) > 1 and constant(x)) or (len(x) == 1 and singleton == "zero")
        if mean != "none":
            x = units(mean, mean[i])
            if len(x) > 1:
                numerator = (numerator - fmean(x)) * (len(x) / (len(x) - 1) if leave_one_out else 1.0)
            zero |= (len(x) > 1 and constant(x)) or (len(x) == 1 and singleton == "zero")
        result[i] = (0.0 if zero else numerator / divisor) - (0.0 if penalty_inside else penalty[i])
    return torch.tensor(result, dtype=torch.float64)
