"""How exact results must be, with reasons, and what operations cost: formulas that tests and benchmarks share.

Tolerances are against float64 on the same inputs. Costs count the work that the maths needs, not what an implementation does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """|actual - expected| <= abs + rel |expected|, elementwise."""

    abs: float
    rel: float
    reason: str

    def mismatch(self, actual: Tensor, expected: Tensor) -> str | None:
        """None if every element is within the tolerance, else the worst one. Shapes must agree; NaN equals nothing."""
        if actual.shape != expected.shape:
            return f"shape is {list(actual.shape)}, expected {list(expected.shape)}"
        if expected.numel() == 0:
            return None
        actual, expected = actual.detach().double(), expected.detach().double()
        error = (actual - expected).abs()
        excess = (error - self.abs - self.rel * expected.abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).flatten()
        worst = int(excess.argmax())
        if excess[worst] <= 0:
            return None
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), expected.shape))
        return (
            f"at {index}: {float(actual.flatten()[worst])!r}, expected {float(expected.flatten()[worst])!r} "
            f"(largest error {float(error.max()):.2e}, allowed {self.abs:g} + {self.rel:g} |expected|: {self.reason})"
        )


ADVANTAGE = Tolerance(1e-12, 1e-12, "float64 throughout")
SEGMENT_STATISTICS = Tolerance(1e-6, 1e-6, "scores of order 1 rounded to fp32, sums exact; a few roundings of each result")
LOGPROB = Tolerance(2e-5, 2e-7, "fp32 products over H and one fp32 sum over the vocabulary; shifted by the maximum")
ENTROPY = Tolerance(1e-5, 1e-6, "the shifted moment keeps the digits that a common offset of the logits would cost")
GRADIENT = Tolerance(2e-6, 2e-5, "fp32 products over the vocabulary (dH) or the tokens (dW); entries of order 1")
GRADIENT_BF16 = Tolerance(1e-3, 2**-8, "inputs are widened exactly; one rounding of dH and dW to bf16")
DLOGITS = Tolerance(2e-6, 3e-5, "z of size 400 is rounded by 3e-5 at most before its exponential is taken; entries of order 1")
DLOGITS_BF16 = DLOGITS._replace(rel=2**-8, reason="that, and one rounding to bf16: 2^-9 of the entry")
GRADIENT_BF16_NORM = 4e-3
"""Of |actual - expected| / |expected| over all elements, where d loss / d logits is rounded to bf16 before the products: each
factor is off by up to 2^-9, and the sum once more where it is handed out in bf16. It doesn't grow with the number of chunks."""
LOSS = Tolerance(2e-6, 2e-6, "log-probs within LOGPROB averaged over tokens; the sum is float64")
POLICY_TERM = Tolerance(
    2e-6, 5e-6, "a log-ratio of up to 20 rounded to fp32 moves e^it by 1e-6, its exponent in base 2 as much"
)
SQUARED_NORM = Tolerance(
    0.0, 1e-6, "fp32 inside a tile: sums of 256 squares in torch, in Triton of 8 per lane and then a tree; tiles in float64"
)
ADAMW = Tolerance(1e-7, 1e-6, "a few fp32 roundings per element and step")
ADAMW_STEP = Tolerance(
    4 * 2**-23, 0.0, "4 ulp for one step on the same state; both sides over the sum of the terms' magnitudes"
)


def logprob_tolerance(largest_logit: float, hidden: int) -> Tolerance:
    """LOGPROB for logits up to this size: each of `hidden` additions rounds a partial sum that large, as a random walk."""
    return LOGPROB._replace(abs=LOGPROB.abs + 6e-8 * hidden**0.5 * largest_logit)


def policy_loss_tolerance(magnitude: float) -> Tolerance:
    """For a loss whose tokens' parts have this sum of magnitudes: each part is off as POLICY_TERM says, and they may cancel."""
    reason = "5e-6 of what is added up, as POLICY_TERM, and fp32 sums and the loss rounded to fp32"
    return Tolerance(1e-6 + POLICY_TERM.rel * magnitude, POLICY_TERM.rel, reason)


def advantage_bound(advantage: Tensor, mean: Tensor, divisor: Tensor) -> Tensor:
    """By how much an fp32 advantage may differ from float64 on the same inputs, elementwise, for penalties of order 1.

    About nine roundings in numerator and std, each relative to the advantage; `mean` over `divisor` (of a row: the larger mean
    of its two segments) is what rounding reward - penalty once costs.
    """
    eps = torch.finfo(torch.float32).eps
    return 4 * eps * (1 + advantage.abs()) * (1 + mean.abs() / divisor)


class Cost(NamedTuple):
    """Floating point operations and bytes to and from memory that an operation can't do without."""

    flops: int
    bytes: int

    def floor_seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The roofline: the larger of the two times."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def linear_logprob_cost(tokens: int, hidden: int, vocabulary: int, itemsize: int = 4) -> Cost:
    """One product; reads hidden and weight once, writes log-prob and entropy."""
    return Cost(2 * tokens * hidden * vocabulary, itemsize * hidden * (tokens + vocabulary) + 8 * tokens)


def linear_policy_loss_cost(tokens: int, hidden: int, vocabulary: int, itemsize: int = 4) -> Cost:
    """Three products; reads hidden and weight, writes dH, adds to the fp32 dW."""
    moved = itemsize * hidden * (2 * tokens + vocabulary) + 8 * hidden * vocabulary + 4 * tokens
    return Cost(6 * tokens * hidden * vocabulary, moved)


def squared_norm_cost(elements: int) -> Cost:
    return Cost(2 * elements, 4 * elements)


def adamw_cost(elements: int, copy: bool = False) -> Cost:
    """Reads gradient, parameter and both moments, writes the last three and, where asked for, a bf16 copy."""
    return Cost(14 * elements, (28 + 2 * copy) * elements)


def logprob_cost(tokens: int, vocabulary: int, itemsize: int = 4, backward: bool = False) -> Cost:
    """From logits: a difference, an exponential and three more per logit in one read; backward reads and writes once more."""
    logits = tokens * vocabulary
    moved = itemsize * logits * (3 if backward else 1) + 8 * tokens
    return Cost(logits * (9 if backward else 5), moved)


def policy_loss_cost(tokens: int) -> Cost:
    """Reads both log-probs, the weight and the row number (int64), writes the slope; about 20 operations per token."""
    return Cost(20 * tokens, 24 * tokens)


def segment_advantage_cost(rows: int, itemsize: int = 4) -> Cost:
    """Reads reward, penalty, three int64 numbers and a flag per row, writes the advantage; mean, spread and quotient."""
    return Cost(8 * rows, (3 * itemsize + 25) * rows)
