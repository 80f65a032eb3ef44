"""The policy loss in Triton: the map per token with sums per agent and block, then the blocks' sums in order.

The contract and the specification are in `policy_loss`, which calls `evaluate` and `weighted_slope`. A program handles 1024
tokens; sums over them are fp32, one of the 16 metrics at a time, for 4 agents at a time by one-hot selection (more would spill
registers, and teams are small). The second kernel, one program, adds the blocks up in float64, 16 x agents numbers per block.
Optional inputs are flags at run time, so that few configurations cover all options; only the objective and whether metrics are
wanted are compiled in.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton import language as tl

from drmas_kernels.agent_metrics import ROWS
from drmas_kernels.loss_options import KL_ESTIMATORS, KL_LIMIT, LOG_RATIO_LIMIT, MISMATCH_RULES, OBJECTIVES, PolicyLossOptions
from drmas_kernels.policy_loss import TokenInputs
from drmas_kernels.spec import KernelSpec

_LIMIT = tl.constexpr(LOG_RATIO_LIMIT)
_KL_LIMIT = tl.constexpr(KL_LIMIT)
_LOG2_E = tl.constexpr(math.log2(math.e))
_CISPO = tl.constexpr(OBJECTIVES.index("cispo"))
_GSPO = tl.constexpr(OBJECTIVES.index("gspo"))
# Places in ROWS: the sums, then the minimum, then the maxima.
_TOKENS_ROW = tl.constexpr(ROWS.index("tokens"))
_LOSS_ROW = tl.constexpr(ROWS.index("loss"))
_PG_ROW = tl.constexpr(ROWS.index("pg"))
_CLIP_LOW_ROW = tl.constexpr(ROWS.index("clip_low"))
_CLIP_HIGH_ROW = tl.constexpr(ROWS.index("clip_high"))
_DUAL_CLIP_ROW = tl.constexpr(ROWS.index("dual_clip"))
_ENTROPY_ROW = tl.constexpr(ROWS.index("entropy"))
_KL_K1_ROW = tl.constexpr(ROWS.index("kl_k1"))
_KL_K3_ROW = tl.constexpr(ROWS.index("kl_k3"))
_GAP_SUM_ROW = tl.constexpr(ROWS.index("gap_sum"))
_KL_REF_ROW = tl.constexpr(ROWS.index("kl_ref"))
_MISMATCH_ROW = tl.constexpr(ROWS.index("mismatch"))
_MISMATCH_TRUNCATED_ROW = tl.constexpr(ROWS.index("mismatch_truncated"))
_RATIO_MIN_ROW = tl.constexpr(ROWS.index("ratio_min"))
_RATIO_MAX_ROW = tl.constexpr(ROWS.index("ratio_max"))
_GAP_MAX_ROW = tl.constexpr(ROWS.index("gap_max"))
_METRICS = tl.constexpr(len(ROWS))
_LANES = tl.constexpr(4)
"""Agents whose metrics are selected together."""
_TOTAL_LANES = tl.constexpr(16)

BLOCK = 1024
_NO_DUAL_CLIP = 2.0 * math.exp(LOG_RATIO_LIMIT)
"""More than any ratio is, so it bounds nothing."""


@triton.jit
def _bounded(x):
    """x within the limit of log-ratios; NaN stays, which the machine's minimum and maximum would drop."""
    return tl.where(x > _LIMIT, _LIMIT, tl.where(x < -_LIMIT, -_LIMIT, x))


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2_E)


@triton.jit
def _k3(x):
    """e^x - 1 - x: by its series where the difference would cancel."""
    series = 0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x * (1.0 / 5040)))))
    return tl.where(tl.abs(x) < 0.5, x * x * series, _exp(x) - 1.0 - x)


@triton.jit
def _objective(logprob, log_ratio, advantage, clip_from, clip_to, dual_clip, OBJECTIVE: tl.constexpr):
    """(pg, slope, ratio, clipped low, clipped high, dual-clipped); `log_ratio` is the token's, or its row's for "gspo"."""
    ratio = _exp(_bounded(log_ratio))
    below, above = ratio < clip_from, ratio > clip_to
    within = tl.where(below, clip_from, tl.where(above, clip_to, ratio))
    clipped = -advantage * within
    if OBJECTIVE == _CISPO:
        pg, slope, dual = clipped * logprob, clipped, tl.zeros_like(below)
    else:
        plain = -advantage * ratio
        bounded = clipped > plain
        pg = tl.where(bounded, clipped, plain)
        bound = -advantage * dual_clip
        dual = (advantage < 0.0) & (pg > bound)
        pg = tl.where(dual, bound, pg)
        slope = tl.where(bounded | dual | (tl.abs(log_ratio) >= _LIMIT), 0.0, plain)
        below, above = bounded & (ratio < 1.0), bounded & (ratio > 1.0)
    return pg, slope, ratio, below, above, dual


@triton.jit
def _reference_kl(distance, estimator):
    """(estimate, derivative by the log-prob) from ref - logprob; 1: k1, 2: k2, 3: k3."""
    x = _bounded(distance)
    flat = tl.abs(distance) >= _LIMIT
    value = -x
    slope = 1.0 + 0.0 * x
    if estimator == 2:
        value = 0.5 * x * x
        slope = -x
    if estimator == 3:
        value = _k3(x)
        slope = -(value + x)
        flat = flat | (value >= _KL_LIMIT)
        value = tl.where(value > _KL_LIMIT, _KL_LIMIT, value)
    return value, tl.where(flat, 0.0, slope)


@triton.jit
def _correction(mismatch, rule, low, high):
    """(factor of the pg term, whether the rule changed the ratio); 0: no change, 1: truncate, 2: mask."""
    above = mismatch > high
    outside = tl.zeros_like(above)
    omega = tl.zeros_like(mismatch) + 1.0
    if rule == 1:
        outside = above
        omega = tl.where(above, high, mismatch)
    if rule == 2:
        outside = above | (mismatch < low)
        omega = tl.where(outside, 0.0, mismatch)
    return omega, outside


@triton.jit
def _keep(pointer, value, member):
    """Sums of value [SIZE] over the members [agents, SIZE]."""
    tl.store(pointer, tl.sum(tl.where(member, value.to(tl.float32)[None, :], 0.0), axis=1))


@triton.jit
def _keep_metrics(
    out, term, pg, below, above, dual, uncertainty, log_ratio, kl, mismatch, changed, ratio, agent, agents, padded
):
    """One block's `ROWS` for every agent, at out [16, padded]; agent is -1 for tokens that count nothing."""
    gap = tl.abs(log_ratio)
    k3 = _k3(_bounded(log_ratio))
    for first in range(0, agents, _LANES):
        lane = first + tl.arange(0, _LANES)
        member = agent[None, :] == lane[:, None]
        _keep(out + _TOKENS_ROW * padded + lane, tl.zeros_like(term) + 1.0, member)
        _keep(out + _LOSS_ROW * padded + lane, term, member)
        _keep(out + _PG_ROW * padded + lane, pg, member)
        _keep(out + _CLIP_LOW_ROW * padded + lane, below, member)
        _keep(out + _CLIP_HIGH_ROW * padded + lane, above, member)
        _keep(out + _DUAL_CLIP_ROW * padded + lane, dual, member)
        _keep(out + _ENTROPY_ROW * padded + lane, uncertainty, member)
        _keep(out + _KL_K1_ROW * padded + lane, -log_ratio, member)
        _keep(out + _KL_K3_ROW * padded + lane, k3, member)
        _keep(out + _GAP_SUM_ROW * padded + lane, gap, member)
        _keep(out + _KL_REF_ROW * padded + lane, kl, member)
        _keep(out + _MISMATCH_ROW * padded + lane, mismatch, member)
        _keep(out + _MISMATCH_TRUNCATED_ROW * padded + lane, changed, member)
        tl.store(out + _RATIO_MIN_ROW * padded + lane, tl.min(tl.where(member, ratio[None, :], float("inf")), axis=1))
        tl.store(out + _RATIO_MAX_ROW * padded + lane, tl.max(tl.where(member, ratio[None, :], 0.0), axis=1))
        tl.store(out + _GAP_MAX_ROW * padded + lane, tl.max(tl.where(member, gap[None, :], 0.0), axis=1))


_SCALARS = ("tokens", "rows", "agents", "padded", "has_old", "has_entropy", "has_rollout", "estimator", "rule")
_VECTORS = ("logprob", "entropy", "old", "reference", "rollout", "means", "weight", "row", "advantage", "agent", "slope_out")


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=(*_VECTORS, "partial"))
def _loss_kernel(
    logprob,
    entropy,
    old,
    reference,
    rollout,
    means,
    weight,
    row,
    advantage,
    agent,
    slope_out,
    partial,
    tokens,
    rows,
    agents,
    padded,
    has_old,
    has_entropy,
    has_rollout,
    estimator,
    rule,
    clip_from,
    clip_to,
    dual_clip,
    entropy_bonus,
    kl_coefficient,
    mismatch_low,
    mismatch_high,
    OBJECTIVE: tl.constexpr,
    METRICS: tl.constexpr,
    SIZE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    at = block * SIZE + tl.arange(0, SIZE)
    inside = at < tokens
    w = tl.load(weight + at, mask=inside, other=0.0)
    counted = w != 0.0
    of_row = tl.load(row + at, mask=counted, other=0)
    known = counted & (of_row >= 0) & (of_row < rows)
    gain = tl.load(advantage + of_row, mask=known, other=float("nan"))
    gain = tl.where(counted, gain, 0.0)
    new = tl.load(logprob + at, mask=counted, other=0.0)
    before = new
    if has_old != 0:
        before = tl.load(old + at, mask=counted, other=0.0)
    log_ratio = new - before
    shared = log_ratio
    if OBJECTIVE == _GSPO:
        shared = tl.load(means + at, mask=counted, other=0.0)
    pg, slope, ratio, below, above, dual = _objective(new, shared, gain, clip_from, clip_to, dual_clip, OBJECTIVE)
    term = pg
    mismatch = tl.zeros_like(new)
    changed = tl.zeros_like(counted)
    if has_rollout != 0:
        mismatch = _exp(_bounded(before - tl.load(rollout + at, mask=counted, other=0.0)))
        omega, changed = _correction(mismatch, rule, mismatch_low, mismatch_high)
        term = omega * term
        slope = omega * slope
    kl = tl.zeros_like(new)
    if estimator != 0:
        kl, kl_slope = _reference_kl(tl.load(reference + at, mask=counted, other=0.0) - new, estimator)
        if kl_coefficient > 0.0:
            term += kl_coefficient * kl
            slope += kl_coefficient * kl_slope
    tl.store(slope_out + at, tl.where(counted, w * slope, 0.0), mask=inside)
    if METRICS:
        uncertainty = tl.zeros_like(new)
        if has_entropy != 0:
            uncertainty = tl.load(entropy + at, mask=counted, other=0.0)
        term = w * (term - entropy_bonus * uncertainty)
        of_agent = tl.load(agent + of_row, mask=known, other=-1)
        lost = (of_agent < 0) | (of_agent >= agents)
        term = tl.where(lost, float("nan"), term)
        of_agent = tl.where(counted, tl.where(lost, 0, of_agent), -1)
        _keep_metrics(
            *(partial + block * _METRICS * padded, term, pg, below, above, dual, uncertainty, log_ratio),
            *(kl, mismatch, changed, ratio, of_agent, agents, padded),
        )


@triton.jit(do_not_specialize=("blocks", "agents", "padded"), do_not_specialize_on_alignment=("partial", "metrics", "loss"))
def _totals_kernel(partial, metrics, loss, blocks, agents, padded):
    """partial [blocks, 16, padded] -> metrics [16, agents] and the loss, the agents' together: float64, in order."""
    metric = tl.arange(0, _METRICS)[:, None]
    lane = tl.arange(0, _TOTAL_LANES)[None, :]
    total = tl.sum(tl.zeros([_TOTAL_LANES], tl.float64))
    for first in range(0, agents, _TOTAL_LANES):
        kept = tl.where((metric == _RATIO_MIN_ROW) & (lane >= 0), float("inf"), 0.0).to(tl.float64)
        pointer = partial + metric * padded + first + lane
        for _ in tl.range(0, blocks, loop_unroll_factor=8):
            found = tl.load(pointer, mask=first + lane < agents, other=0.0).to(tl.float64)
            pointer += _METRICS * padded
            extreme = tl.where(metric == _RATIO_MIN_ROW, tl.minimum(kept, found), tl.maximum(kept, found))
            kept = tl.where(metric < _RATIO_MIN_ROW, kept + found, extreme)
        # Minimum and maximum pass over NaN; a NaN log-ratio is in the sum of gaps too.
        gap = tl.sum(tl.where(metric == _GAP_SUM_ROW, kept, 0.0), axis=0)
        kept = tl.where((metric >= _RATIO_MIN_ROW) & (gap != gap)[None, :], float("nan"), kept)
        total += tl.sum(tl.where(metric == _LOSS_ROW, kept, 0.0))
        tl.store(metrics + metric * agents + first + lane, kept, mask=first + lane < agents)
    tl.store(loss, total.to(tl.float32))


_SIGNATURE = {
    **dict.fromkeys(("logprob", "entropy", "old", "reference", "rollout", "means", "weight"), "*fp32"),
    **{"row": "*i64", "advantage": "*fp32", "agent": "*i64", "slope_out": "*fp32", "partial": "*fp32"},
    **dict.fromkeys(_SCALARS, "i32"),
    **dict.fromkeys(("clip_from", "clip_to", "dual_clip", "entropy_bonus", "kl_coefficient"), "fp32"),
    **dict.fromkeys(("mismatch_low", "mismatch_high"), "fp32"),
}


def _spec(name: str, objective: str, metrics: bool) -> KernelSpec:
    constants = {"OBJECTIVE": OBJECTIVES.index(objective), "METRICS": metrics, "SIZE": BLOCK}
    return KernelSpec(name, _loss_kernel, _SIGNATURE, constants, num_warps=8, num_stages=1, elements=BLOCK)


_LOSS = {objective: _spec(f"policy_loss_{objective}", objective, True) for objective in OBJECTIVES}
_SLOPE = {objective: _spec(f"policy_slope_{objective}", objective, False) for objective in OBJECTIVES if objective != "gspo"}
_TOTALS = KernelSpec(
    "policy_loss_totals",
    _totals_kernel,
    {"partial": "*fp32", "metrics": "*fp64", "loss": "*fp32", "blocks": "i32", "agents": "i32", "padded": "i32"},
    {},
    num_warps=4,
    num_stages=1,
    expects=frozenset(("fp64",)),
)
SPECS = (*_LOSS.values(), *_SLOPE.values(), _TOTALS)


def evaluate(
    logprob: Tensor,
    entropy: Tensor | None,
    inputs: TokenInputs,
    options: PolicyLossOptions,
    num_agents: int,
    means: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, slope, metrics matrix); `means` [T]: the mean log-ratio of each token's row, for "gspo"."""
    blocks, padded = -(-logprob.shape[0] // BLOCK), -(-num_agents // _LANES.value) * _LANES.value
    partial = logprob.new_empty(blocks, len(ROWS), padded)
    metrics = logprob.new_empty(len(ROWS), num_agents, dtype=torch.float64)
    loss = logprob.new_empty(())
    slope = _launch(_LOSS[options.objective], logprob, entropy, inputs, options, (num_agents, padded), means, partial)
    _TOTALS.launch((1,), partial, metrics, loss, blocks, num_agents, padded)
    return loss, slope, metrics


def weighted_slope(logprob: Tensor, inputs: TokenInputs, options: PolicyLossOptions) -> Tensor:
    return _launch(_SLOPE[options.objective], logprob, None, inputs, options, (0, 0), None, None)


def _launch(
    spec: KernelSpec,
    logprob: Tensor,
    entropy: Tensor | None,
    inputs: TokenInputs,
    options: PolicyLossOptions,
    agents: tuple[int, int],
    means: Tensor | None,
    partial: Tensor | None,
) -> Tensor:
    """The slopes, with the blocks' metrics in `partial`. What is absent is a flag, and a pointer that isn't followed."""
    logprob = logprob.contiguous()
    slope = torch.empty_like(logprob)
    optional = (entropy, inputs.old_logprob, inputs.ref_logprob, inputs.rollout_logprob, means)
    spec.launch(
        (-(-logprob.shape[0] // BLOCK),),
        logprob,
        *(logprob if vector is None else vector.contiguous() for vector in optional),
        *(vector.contiguous() for vector in (inputs.weight, inputs.row, inputs.advantage, inputs.agent)),
        *(slope, slope if partial is None else partial),
        *(logprob.shape[0], inputs.advantage.shape[0], *agents),
        *(int(vector is not None) for vector in (inputs.old_logprob, entropy, inputs.rollout_logprob)),
        0 if inputs.ref_logprob is None else 1 + KL_ESTIMATORS.index(options.kl or "k3"),
        MISMATCH_RULES.index(options.mismatch),
        *(1.0 - options.clip_low, 1.0 + options.clip_high),
        _NO_DUAL_CLIP if options.dual_clip is None else options.dual_clip,
        *(options.entropy_bonus, options.kl_coefficient, options.mismatch_low, options.mismatch_high),
    )
    return slope
