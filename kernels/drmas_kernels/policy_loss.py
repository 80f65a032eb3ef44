"""The clipped policy loss: the scalar map from a token's log-prob to loss and slope, its weighted sum, metrics per agent.

Contract
  For a token with log-prob l, behaviour log-prob o, advantage A, entropy H and weight w (all fp32):
      d     = clamp(l - o, -20, 20),  rho = e^d                       (o absent: d = l - l = 0 and rho = 1, on-policy)
      loss  = sum_t w_t (omega_t pg_t + kl_coefficient kl_t - entropy_bonus H_t)
      slope = omega d pg / d l + kl_coefficient d kl / d l; where a clamp or clip is active, that part of it is 0
  The objective decides pg. "ppo":
      pg = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high));  A < 0 and dual_clip c: pg = min(pg, -A c)
      d pg / d l = -A rho where no clip is active and |l - o| < 20, else 0
  "gspo" is the same with d = clamp(mean of l - o over the row's tokens of non-zero weight, -20, 20), d pg / d l as above: with
      equal weights inside a row it is the derivative of the loss, with others that of GSPO-token. It needs whole rows in one
      call, whose tokens may stand in any order; the mean is formed in float64, token after token.
  "cispo": pg = -r A l with the constant r = clip(rho, 1 - clip_low, 1 + clip_high), d pg / d l = -r A. No dual clip.
  kl, with x = clamp(ref - l, -20, 20) for the reference's log-prob ref, estimates KL(policy || reference):
      "k1": -x, slope 1        "k2": x^2 / 2, slope -x        "k3": min(e^x - 1 - x, 10), slope 1 - e^x (0 at the bound)
  omega corrects for an engine that samples with other log-probs than the trainer's: e^clamp(o - rollout, -20, 20), o absent:
      l for o. "truncate": min(omega, mismatch_high). "mask": 0 outside mismatch_low..mismatch_high. "none": 1. A constant.

  The sum has no other normaliser: weights carry it (`aggregation_weights`), so the loss of a batch is the sum of the losses of
  its pieces. On-policy the slope is -A, hence A = 1 is supervised learning (the loss is then the constant -sum w A).
  Tokens of weight 0 count nothing: whatever their log-probs, advantage or row are (NaN included), loss, gradients and metrics
  don't see them; their slope is 0. No tokens left: loss 0. Another token's NaN
  advantage or log-prob, also of the policy that sampled it, the reference or the engine where the options use them, shows as a
  NaN loss and slope; on-policy an infinite log-prob does too.

  logprob, entropy, old_logprob, ref_logprob, rollout_logprob, token_weight [T] and advantage [R] floating; row [T] int64 in
  0..R-1; agent [R] int64 in 0..num_agents-1. The advantage is looked up by row: no vector over tokens is made of it. With
  `check_values=False` nothing waits for the device; a row or agent out of range then makes the loss NaN.

  Memory: 16 bytes per token (log-prob, weight, row) and 4 for each optional log-prob and the entropy are read, 4 are written;
  some 20 FLOP each for loss and slope, without the metrics.
  Deterministic, without atomics. The torch implementation sums in float64; the Triton kernels sum blocks of 1024 tokens in fp32
  and the blocks in order in float64.

The loss is PPO's (Schulman et al. 2017) with the dual clip of Ye et al. 2020, CISPO's (MiniMax-M1, 2025) or GSPO's (Zheng et
al. 2025); the KL estimators are Schulman's k1, k2 and k3; truncation is that of Yao et al. 2025, masking that of IcePop (2025).
`linear_logprob.linear_policy_loss` applies the same map to the head.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drmas_kernels import backend
from drmas_kernels._checks import check_device, check_range
from drmas_kernels.agent_metrics import ROWS, AgentMetrics
from drmas_kernels.loss_options import KL_LIMIT, LOG_RATIO_LIMIT, PolicyLossOptions

__all__ = [
    "AgentMetrics",
    "Evaluated",
    "PolicyLossOptions",
    "TokenInputs",
    "TokenTerms",
    "aggregation_weights",
    "evaluate",
    "policy_loss",
    "policy_loss_of",
    "select_tokens",
    "token_terms",
    "weighted_slope",
    "weighted_terms",
]


class TokenInputs(NamedTuple):
    """The inputs of the loss for the selected tokens; `index` None means all tokens. Advantage and agent are per row."""

    index: Tensor | None
    row: Tensor
    weight: Tensor
    old_logprob: Tensor | None
    ref_logprob: Tensor | None
    rollout_logprob: Tensor | None
    advantage: Tensor
    agent: Tensor

    def slice(self, part: slice) -> TokenInputs:
        """The same for a part of the selected tokens."""
        cut = [None if vector is None else vector[part] for vector in self[1:6]]
        return TokenInputs(None, *cut, self.advantage, self.agent)


class TokenTerms(NamedTuple):
    """What the scalar map gives per token, each [T]."""

    loss: Tensor
    """omega pg + kl_coefficient kl: all but the entropy."""
    slope: Tensor
    pg: Tensor
    ratio: Tensor
    log_ratio: Tensor
    """The token's own, unclamped."""
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor
    entropy: Tensor
    kl_ref: Tensor
    mismatch: Tensor
    mismatch_truncated: Tensor


class Evaluated(NamedTuple):
    """The loss, a scalar in fp32; its derivative by the log-probs [T] fp32, weights included; the metrics."""

    loss: Tensor
    slope: Tensor
    metrics: AgentMetrics


def token_terms(logprob: Tensor, entropy: Tensor | None, inputs: TokenInputs, options: PolicyLossOptions) -> TokenTerms:
    """The map of the contract, for the selected tokens: the specification of loss and derivative."""
    counted = inputs.weight != 0

    def known(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(counted, values, 0.0)

    logprob, old = known(logprob), known(inputs.old_logprob)
    advantage = known(_by_row(inputs.advantage, inputs.row, torch.nan))
    log_ratio = logprob - (logprob if old is None else old)
    shared = _row_means(log_ratio, inputs) if options.objective == "gspo" else log_ratio
    how = _cispo if options.objective == "cispo" else _clipped
    pg, slope, ratio, low, high, dual = how(logprob, shared, advantage, options)
    loss = pg
    zero = torch.zeros_like(logprob)
    mismatch, truncated, kl = zero, zero, zero
    if inputs.rollout_logprob is not None:
        before = logprob if old is None else old
        mismatch = (before - known(inputs.rollout_logprob)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        if options.mismatch != "none":
            truncated, omega = _corrected(mismatch, options)
            loss, slope = omega * loss, omega * slope
    if inputs.ref_logprob is not None:
        kl, kl_slope = _reference_kl(known(inputs.ref_logprob) - logprob, options.kl or "k3")
        if options.kl_coefficient:
            loss, slope = loss + options.kl_coefficient * kl, slope + options.kl_coefficient * kl_slope
    entropy = zero if entropy is None else known(entropy)
    return TokenTerms(loss, slope, pg, ratio, log_ratio, low, high, dual, entropy, kl, mismatch, truncated)


def _by_row(values: Tensor, row: Tensor, missing: float) -> Tensor:
    """The entry of each token's row, `missing` where there is no such row; waits for nothing."""
    size = values.shape[0]
    return pad(values, (0, 1), value=missing)[torch.where((row >= 0) & (row < size), row, size)]


def _row_means(values: Tensor, inputs: TokenInputs) -> Tensor:
    """For each token the mean over the tokens of non-zero weight of its row."""
    rows = inputs.advantage.shape[0]
    inside = (inputs.weight != 0) & (inputs.row >= 0) & (inputs.row < rows)
    row = torch.where(inside, inputs.row, rows)
    ordered, order = row.sort(stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(rows + 2, device=row.device))
    sums = torch.segment_reduce(values.double()[order], "sum", offsets=offsets, unsafe=True)
    return (sums / offsets.diff().clamp(min=1)).to(values.dtype)[row]


def _clipped(logprob: Tensor, log_ratio: Tensor, advantage: Tensor, options: PolicyLossOptions) -> tuple[Tensor, ...]:
    """(pg, slope, ratio, clipped low, clipped high, dual-clipped) of "ppo" and, with the row's ratio, of "gspo"."""
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    loss = torch.maximum(plain, clipped)
    bounded = clipped > plain
    dual = torch.zeros_like(bounded)
    if options.dual_clip is not None:
        bound = -advantage * options.dual_clip
        dual = (advantage < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    # Written so that a NaN log-prob keeps a NaN slope: a broken model must show, not train on zeros.
    flat = bounded | dual | (log_ratio.abs() >= LOG_RATIO_LIMIT)
    return loss, torch.where(flat, 0.0, plain), ratio, bounded & (ratio < 1.0), bounded & (ratio > 1.0), dual


def _cispo(logprob: Tensor, log_ratio: Tensor, advantage: Tensor, options: PolicyLossOptions) -> tuple[Tensor, ...]:
    """The same of "cispo"."""
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    slope = -advantage * ratio.clamp(low, high)
    below, above = ratio < low, ratio > high
    return slope * logprob, slope, ratio, below, above, torch.zeros_like(below)


def _corrected(mismatch: Tensor, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
    """Which ratios the rule changes, and what it makes of them; NaN stays."""
    above = mismatch > options.mismatch_high
    if options.mismatch == "truncate":
        return above, torch.where(above, options.mismatch_high, mismatch)
    outside = above | (mismatch < options.mismatch_low)
    return outside, torch.where(outside, 0.0, mismatch)


def _reference_kl(distance: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """The estimate of the KL to the reference and its derivative by the log-prob, from ref - logprob."""
    x = distance.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    flat = distance.abs() >= LOG_RATIO_LIMIT
    if estimator == "k1":
        value, slope = -x, 1.0 + 0.0 * x
    elif estimator == "k2":
        value, slope = x.square() / 2, -x
    else:
        grown = torch.expm1(x)
        value, slope = (grown - x).clamp(max=KL_LIMIT), -grown
        flat = flat | (value >= KL_LIMIT)
    return value, torch.where(flat, 0.0, slope)


def weighted_terms(terms: TokenTerms, inputs: TokenInputs, entropy_bonus: float) -> Tensor:
    """Each token's part of the loss, float64; its sum is the loss."""
    return inputs.weight.double() * (terms.loss.double() - entropy_bonus * terms.entropy.double())


def policy_loss_reference(
    logprob: Tensor, entropy: Tensor | None, inputs: TokenInputs, options: PolicyLossOptions, num_agents: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, slope, metrics matrix): the specification of `_policy_loss_triton.evaluate`."""
    terms = token_terms(logprob, entropy, inputs, options)
    counted = inputs.weight != 0
    agent = _by_row(inputs.agent, inputs.row, -1)
    lost = counted & ((agent < 0) | (agent >= num_agents))
    weighted = torch.where(lost, torch.nan, weighted_terms(terms, inputs, options.entropy_bonus))
    member = counted & (torch.where(lost, 0, agent) == torch.arange(num_agents, device=agent.device)[:, None])
    bounded = terms.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    gap = terms.log_ratio.abs().double()
    columns = {
        "tokens": torch.ones_like(terms.loss),
        "loss": weighted,
        "pg": terms.pg,
        "clip_low": terms.clipped_low,
        "clip_high": terms.clipped_high,
        "dual_clip": terms.dual_clipped,
        "entropy": terms.entropy,
        "kl_k1": -terms.log_ratio,
        "kl_k3": torch.expm1(bounded) - bounded,
        "gap_sum": gap,
        "kl_ref": terms.kl_ref,
        "mismatch": terms.mismatch,
        "mismatch_truncated": terms.mismatch_truncated,
    }
    sums = {name: torch.where(member, column.double(), 0.0).sum(1) for name, column in columns.items()}
    if weighted.numel():
        ratio = terms.ratio.double()
        sums["ratio_min"] = torch.where(member, ratio, torch.inf).amin(1)
        sums["ratio_max"] = torch.where(member, ratio, 0.0).amax(1)
        sums["gap_max"] = torch.where(member, gap, 0.0).amax(1)
    else:
        sums |= {"ratio_min": sums["loss"] + torch.inf, "ratio_max": sums["loss"], "gap_max": sums["loss"]}
    return weighted.sum().float(), inputs.weight * terms.slope, torch.stack([sums[name] for name in ROWS])


def _on_triton(tensor: Tensor) -> bool:
    return backend.choose("policy_loss", tensor.device).name == "triton"


def _evaluate(
    logprob: Tensor, entropy: Tensor | None, inputs: TokenInputs, options: PolicyLossOptions, num_agents: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, slope, metrics matrix) by the chosen implementation."""
    if not _on_triton(logprob):
        return policy_loss_reference(logprob, entropy, inputs, options, num_agents)
    from drmas_kernels import _policy_loss_triton

    means = None
    if options.objective == "gspo":
        means = _row_means(logprob - (logprob if inputs.old_logprob is None else inputs.old_logprob), inputs)
    return _policy_loss_triton.evaluate(logprob, entropy, inputs, options, num_agents, means)


@torch.no_grad()
def evaluate(
    logprob: Tensor, entropy: Tensor | None, inputs: TokenInputs, options: PolicyLossOptions, num_agents: int
) -> Evaluated:
    """Loss, weighted slopes and metrics of the selected tokens, whose fp32 log-probs and entropies are given. No gradient."""
    _check_needed(options, inputs, entropy)
    loss, slope, matrix = _evaluate(logprob, entropy, inputs, options, num_agents)
    return Evaluated(loss, slope, _metrics(matrix, inputs))


@torch.no_grad()
def weighted_slope(logprob: Tensor, entropy: Tensor | None, inputs: TokenInputs, options: PolicyLossOptions) -> Tensor:
    """`evaluate`'s slope [T] alone, for a part of the selected tokens. ValueError: objective "gspo", which needs whole rows."""
    if options.objective == "gspo":
        raise ValueError("objective is 'gspo'; expected ppo or cispo here, since a row's ratio needs all of its tokens")
    _check_needed(options, inputs, entropy)
    if _on_triton(logprob):
        from drmas_kernels import _policy_loss_triton

        return _policy_loss_triton.weighted_slope(logprob, inputs, options)
    return inputs.weight * token_terms(logprob, entropy, inputs, options).slope


def _metrics(matrix: Tensor, inputs: TokenInputs) -> AgentMetrics:
    given = {"reference": inputs.ref_logprob is not None, "rollout": inputs.rollout_logprob is not None}
    return AgentMetrics.from_matrix(matrix, **given)


def _check_needed(options: PolicyLossOptions, inputs: TokenInputs, entropy: Tensor | None) -> None:
    if entropy is None and options.entropy_bonus:
        raise ValueError(f"entropy_bonus is {options.entropy_bonus} but entropy is missing; pass the entropy of every token")
    if options.kl is not None and inputs.ref_logprob is None:
        raise ValueError(f"kl is {options.kl!r} but ref_logprob is missing; pass the reference's log-prob of every token")
    if options.mismatch != "none" and inputs.rollout_logprob is None:
        raise ValueError(
            f"mismatch is {options.mismatch!r} but rollout_logprob is missing; pass the engine's log-prob of every token"
        )


def select_tokens(
    num_tokens: int,
    old_logprob: Tensor | None,
    row: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    agent: Tensor,
    num_agents: int,
    *,
    ref_logprob: Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    index: Tensor | None = None,
    check_values: bool = True,
) -> TokenInputs:
    """Check the shared arguments and drop the tokens of weight 0. ValueError names the argument that is wrong.

    `index` [S] int64 is where the tokens of non-zero weight are, ascending; without it they are looked for, which waits for the
    device. `check_values=False` checks shapes and dtypes only; with `index` given nothing waits then. A token of weight 0 that
    the index has all the same counts nothing, one that it leaves out is lost.
    """
    logprobs = {"old_logprob": old_logprob, "ref_logprob": ref_logprob, "rollout_logprob": rollout_logprob}
    _check_vectors(num_tokens, logprobs, row, advantage, token_weight, agent, index)
    if num_agents < 1:
        raise ValueError(f"num_agents is {num_agents}; expected at least 1")
    if check_values and not bool(token_weight.isfinite().all()):
        raise ValueError("token_weight holds a value that is not finite; use 0 for tokens to ignore")
    if check_values or index is None:
        counted = token_weight != 0
        found = None if bool(counted.all()) else counted.nonzero().squeeze(1)
        if index is not None and not torch.equal(index, _positions(found, counted)):
            raise ValueError(
                "index is not where token_weight differs from 0, in ascending order; pass those positions, or None"
            )
        index = found

    def chosen(vector: Tensor | None) -> Tensor | None:
        return vector if vector is None or index is None else vector[index]

    row = chosen(row)
    if check_values:
        check_range("row", row, advantage.shape[0])
        check_range("agent", agent[row], num_agents)
    floats = [None if vector is None else chosen(vector).float() for vector in (token_weight, *logprobs.values())]
    return TokenInputs(index, row, *floats, advantage.float(), agent)


def _positions(found: Tensor | None, counted: Tensor) -> Tensor:
    return torch.arange(counted.shape[0], device=counted.device) if found is None else found


def _check_vectors(
    num_tokens: int,
    logprobs: dict[str, Tensor | None],
    row: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    agent: Tensor,
    index: Tensor | None,
) -> None:
    """ValueError unless shapes and dtypes are those of the contract."""
    for name, tensor in {**logprobs, "row": row, "token_weight": token_weight}.items():
        if tensor is not None and tensor.shape != (num_tokens,):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{num_tokens}], one entry per token")
    if advantage.ndim != 1 or agent.shape != advantage.shape:
        raise ValueError(f"advantage {list(advantage.shape)} and agent {list(agent.shape)} must be vectors over the same rows")
    if index is not None and index.ndim != 1:
        raise ValueError(f"index has shape {list(index.shape)}; expected a vector of positions")
    for name, tensor in {**logprobs, "advantage": advantage, "token_weight": token_weight}.items():
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}; expected floating point")
    for name, tensor in {**logprobs, "row": row, "advantage": advantage, "agent": agent, "index": index}.items():
        check_device(name, tensor, token_weight, "token_weight")
    for name, tensor in (("row", row), ("agent", agent), ("index", index)):
        if tensor is not None and tensor.dtype != torch.int64:
            raise ValueError(f"{name} is {tensor.dtype}; expected int64")


def aggregation_weights(
    row: Tensor,
    episode_of_row: Tensor,
    agent_of_row: Tensor,
    mask: Tensor | None = None,
    how: Literal["token", "turn", "episode", "agent"] = "token",
) -> Tensor:
    """The weight of each token [T] fp32, known before the launch; over the tokens that count they sum to 1.

    "token": all weigh the same. "turn", "episode", "agent": all rows, episodes or agents with tokens do, each shared by its
    tokens. Tokens where `mask` [T] bool is False weigh 0 and count nowhere. row [T] int64 in 0..R-1; episode_of_row and
    agent_of_row [R] int64, any numbers. ValueError names the argument that is wrong.

    For callers that hold tensors: what they hand to `policy_loss` or the output head as `token_weight`. The trainer of drmas
    holds rows and forms the same weights in `drmas.core.batching`.

    Example: rows of 1 and 3 tokens by "turn" weigh [1/2, 1/6, 1/6, 1/6]
    """
    if how not in ("token", "turn", "episode", "agent"):
        raise ValueError(f"how is {how!r}; expected token, turn, episode or agent")
    for name, tensor in (("row", row), ("episode_of_row", episode_of_row), ("agent_of_row", agent_of_row)):
        if tensor.ndim != 1 or tensor.dtype != torch.int64:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected an int64 vector")
    if agent_of_row.shape != episode_of_row.shape:
        raise ValueError(f"agent_of_row has {len(agent_of_row)} rows; expected those of episode_of_row, {len(episode_of_row)}")
    if mask is not None and (mask.shape != row.shape or mask.dtype != torch.bool):
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}; expected bool {list(row.shape)}")
    for name, tensor in (("episode_of_row", episode_of_row), ("agent_of_row", agent_of_row), ("mask", mask)):
        check_device(name, tensor, row, "row")
    counted = torch.ones_like(row, dtype=torch.bool) if mask is None else mask
    chosen = row[counted]
    check_range("row", chosen, episode_of_row.shape[0])
    group = {"token": torch.zeros_like(chosen), "turn": chosen}.get(how)
    if group is None:
        group = {"episode": episode_of_row, "agent": agent_of_row}[how][chosen]
    _, member, sizes = group.unique(return_inverse=True, return_counts=True)
    weight = torch.zeros(row.shape, dtype=torch.float32, device=row.device)
    weight[counted] = (1.0 / (sizes.shape[0] * sizes[member].double())).float()
    return weight


@torch.library.custom_op("drmas::policy_loss", mutates_args=())
def _policy_loss(
    logprob: Tensor,
    entropy: Tensor | None,
    index: Tensor | None,
    row: Tensor,
    weight: Tensor,
    old_logprob: Tensor | None,
    ref_logprob: Tensor | None,
    rollout_logprob: Tensor | None,
    advantage: Tensor,
    agent: Tensor,
    num_agents: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    entropy_bonus: float,
    kl: str | None,
    kl_coefficient: float,
    mismatch: str,
    mismatch_low: float,
    mismatch_high: float,
    objective: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, slope, entropy slope, metrics matrix); logprob, entropy and their slopes over all tokens, the rest selected."""
    options = PolicyLossOptions(
        clip_low, clip_high, dual_clip, entropy_bonus, kl, kl_coefficient, mismatch, mismatch_low, mismatch_high, objective
    )
    inputs = TokenInputs(index, row, weight, old_logprob, ref_logprob, rollout_logprob, advantage, agent)
    everything = slice(None) if index is None else index
    chosen_entropy = None if entropy is None else entropy[everything].float()
    loss, chosen_slope, matrix = _evaluate(logprob[everything].float(), chosen_entropy, inputs, options, num_agents)
    slope, entropy_slope = torch.zeros_like(logprob), torch.zeros_like(logprob)
    slope[everything] = chosen_slope.to(slope.dtype)
    entropy_slope[everything] = (-entropy_bonus * weight).to(slope.dtype)
    return loss, slope, entropy_slope, matrix


@_policy_loss.register_fake
def _(
    logprob, entropy, index, row, weight, old_logprob, ref_logprob, rollout_logprob, advantage, agent, num_agents, *options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = logprob.new_empty((), dtype=torch.float32)
    matrix = logprob.new_empty((len(ROWS), num_agents), dtype=torch.float64)
    return loss, torch.empty_like(logprob), torch.empty_like(logprob), matrix


def _keep_slopes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[2])
    ctx.has_entropy, ctx.others = inputs[1] is not None, len(inputs) - 2


def _hand_out_slopes(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """The slopes formed in the forward pass, times the upstream scalar."""
    if torch.is_grad_enabled():
        raise RuntimeError("policy_loss has no second derivative; expected a backward pass without create_graph=True")
    slope, entropy_slope = ctx.saved_tensors
    return upstream * slope, upstream * entropy_slope if ctx.has_entropy else None, *[None] * ctx.others


_policy_loss.register_autograd(_hand_out_slopes, setup_context=_keep_slopes)


def policy_loss_of(
    logprob: Tensor, entropy: Tensor | None, inputs: TokenInputs, options: PolicyLossOptions, num_agents: int
) -> tuple[Tensor, AgentMetrics]:
    """`policy_loss` of selected tokens, log-prob and entropy among them."""
    return _with_gradient(logprob, entropy, inputs._replace(index=None), options, num_agents)


def _with_gradient(
    logprob: Tensor, entropy: Tensor | None, inputs: TokenInputs, options: PolicyLossOptions, num_agents: int
) -> tuple[Tensor, AgentMetrics]:
    _check_needed(options, inputs, entropy)
    loss, _, _, matrix = _policy_loss(logprob, entropy, *inputs, num_agents, *astuple(options))
    return loss, _metrics(matrix.detach(), inputs)


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor | None,
    row: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    agent: Tensor,
    *,
    num_agents: int,
    options: PolicyLossOptions,
    entropy: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    index: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, AgentMetrics]:
    """The loss (a scalar with gradient to `logprob` and `entropy`) and the metrics; the contract is on top of this file.

    `index` and `check_values` are those of `select_tokens`. ValueError names the argument that is wrong.
    """
    if logprob.ndim != 1 or not logprob.is_floating_point():
        raise ValueError(f"logprob is {logprob.dtype} {list(logprob.shape)}; expected a floating vector over tokens")
    if entropy is not None and entropy.shape != logprob.shape:
        raise ValueError(f"entropy has shape {list(entropy.shape)}; expected that of logprob, {list(logprob.shape)}")
    inputs = select_tokens(
        *(logprob.shape[0], old_logprob, row, advantage, token_weight, agent, num_agents),
        ref_logprob=ref_logprob,
        rollout_logprob=rollout_logprob,
        index=index,
        check_values=check_values,
    )
    for name, tensor in (("logprob", logprob), ("entropy", entropy)):
        check_device(name, tensor, token_weight, "token_weight")
    return _with_gradient(logprob, entropy, inputs, options, num_agents)
