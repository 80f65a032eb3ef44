"""The loss on log-probs: against recorded values, against the formulas in float64 autograd, and its metrics."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drmas_kernels import agent_metrics, numerics
from drmas_kernels.backend import use
from drmas_kernels.policy_loss import (
    AgentMetrics,
    PolicyLossOptions,
    evaluate,
    policy_loss,
    select_tokens,
    token_terms,
    weighted_slope,
)
from tests.kernels.interpreter import DEVICE


def run(logprob, old, advantage, weight, *, row=None, agent=None, options=None, entropy=None, num_agents=1, **others):
    """(loss, metrics, gradient) on lists; a row per token and one agent by default."""
    tokens = len(logprob)
    logprob = torch.tensor(logprob, device=DEVICE, requires_grad=True)
    loss, metrics = policy_loss(
        logprob,
        None if old is None else torch.tensor(old, device=DEVICE),
        torch.tensor(row if row is not None else range(tokens), dtype=torch.int64, device=DEVICE),
        torch.tensor(advantage, device=DEVICE),
        torch.tensor(weight, device=DEVICE),
        torch.tensor(agent if agent is not None else [0] * len(advantage), dtype=torch.int64, device=DEVICE),
        num_agents=num_agents,
        options=options or PolicyLossOptions(),
        entropy=entropy,
        **others,
    )
    loss.backward()
    return loss.detach(), metrics, logprob.grad


@dataclass
class Case:
    """Arguments of `policy_loss`; tokens of weight 0 are garbage from end to end."""

    logprob: torch.Tensor
    entropy: torch.Tensor
    row: torch.Tensor
    weight: torch.Tensor
    old: torch.Tensor | None
    ref: torch.Tensor
    rollout: torch.Tensor
    advantage: torch.Tensor
    agent: torch.Tensor
    num_agents: int

    @classmethod
    def random(cls, tokens, seed, *, rows=5, num_agents=2, scale=0.4, on_policy=False, garbage=0.15):
        """Log-probs differ by about `scale`, some by 4 to 30; the tokens of a row are scattered over the batch."""
        generator = torch.Generator().manual_seed(seed)

        def normal(size=tokens):
            return torch.randn(size, generator=generator)

        logprob = -normal().abs() * 2
        size = 4.0 + 26.0 * torch.rand(tokens, generator=generator)
        far = (torch.rand(tokens, generator=generator) < 0.15) * size * normal().sign()
        ref, rollout = logprob + scale * normal() + far.roll(1), logprob + scale * normal() + far.roll(2)
        old = logprob + scale * normal() + far
        weight = (torch.rand(tokens, generator=generator) + 0.1) / max(tokens, 1)
        row = torch.randint(rows, (tokens,), generator=generator)
        ignored = torch.rand(tokens, generator=generator) < garbage
        for vector in (logprob, old, ref, rollout):
            vector[ignored] = math.nan
        weight[ignored], row[ignored] = 0.0, 10**12
        entropy = torch.where(ignored, math.inf, normal().abs())
        agent = torch.randint(num_agents, (rows,), generator=generator)
        parts = (logprob, entropy, row, weight, None if on_policy else old, ref, rollout, normal(rows) * 1.5, agent)
        return cls(*parts, num_agents)

    def but(self, **changes):
        return dataclasses.replace(self, **changes)

    def tensors(self):
        return {
            name: None if value is None else value.to(DEVICE).clone()
            for name, value in vars(self).items()
            if name != "num_agents"
        }

    def run(self, options, **others):
        """(loss, metrics, gradients by log-prob and entropy)."""
        given = self.tensors()
        logprob, entropy = given["logprob"].requires_grad_(), given["entropy"].requires_grad_()
        loss, metrics = policy_loss(
            *(logprob, given["old"], given["row"], given["advantage"], given["weight"], given["agent"]),
            num_agents=self.num_agents,
            options=options,
            entropy=entropy,
            ref_logprob=given["ref"],
            rollout_logprob=given["rollout"],
            **others,
        )
        loss.backward()
        return loss.detach(), metrics, logprob.grad, entropy.grad

    def inputs(self, **others):
        given = self.tensors()
        return select_tokens(
            *(len(self.logprob), given["old"], given["row"], given["advantage"], given["weight"], given["agent"]),
            self.num_agents,
            ref_logprob=given["ref"],
            rollout_logprob=given["rollout"],
            **others,
        )

    def oracle(self, options):
        """(parts of the loss by token, their derivatives by log-prob and entropy), float64 autograd of the formulas."""
        counted = self.weight != 0
        names = ("logprob", "entropy", "weight", "ref", "rollout")
        logprob, entropy, weight, ref, rollout = (getattr(self, name)[counted].double() for name in names)
        logprob.requires_grad_(), entropy.requires_grad_()
        old = logprob.detach() if self.old is None else self.old[counted].double()
        row = self.row[counted]
        advantage = self.advantage.double()[row]
        log_ratio = logprob - old
        if options.objective == "gspo":
            means = torch.stack([log_ratio.detach()[row == index].mean() for index in row]) if len(row) else log_ratio
            log_ratio = means.detach() + logprob - logprob.detach()
        pg = objective(log_ratio, logprob, advantage, options)
        omega = (old - rollout).clamp(-20, 20).exp().detach()
        if options.mismatch == "truncate":
            pg = omega.clamp(max=options.mismatch_high) * pg
        if options.mismatch == "mask":
            pg = torch.where((omega >= options.mismatch_low) & (omega <= options.mismatch_high), omega, 0.0) * pg
        kl = reference_kl((ref - logprob).clamp(-20, 20), options.kl)
        parts = weight * (pg + options.kl_coefficient * kl - options.entropy_bonus * entropy)
        gradients = torch.autograd.grad(parts.sum(), (logprob, entropy), allow_unused=True, materialize_grads=True)
        full = [torch.zeros(len(counted), dtype=torch.float64).masked_scatter(counted, part) for part in gradients]
        return parts.detach(), *full


def objective(log_ratio, logprob, advantage, options):
    """The pg term by the book."""
    ratio = log_ratio.clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.objective == "cispo":
        return -clipped.detach() * advantage * logprob
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if options.dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * options.dual_clip), loss)


def reference_kl(x, estimator):
    return {
        None: torch.zeros_like(x),
        "k1": -x,
        "k2": x**2 / 2,
        "k3": (x.exp() - 1 - x).clamp(max=10.0),
    }[estimator]


def metrics_by_hand(case, options):
    """Per agent a dict of sums and extremes, token after token in Python floats."""
    found = []
    for agent in range(case.num_agents):
        mine = dict.fromkeys(agent_metrics.ROWS, 0.0) | {"ratio_min": math.inf}
        for t in range(len(case.logprob)):
            weight, row = float(case.weight[t]), int(case.row[t])
            if weight == 0 or int(case.agent[row]) != agent:
                continue
            new, advantage, ref = float(case.logprob[t]), float(case.advantage[row]), float(case.ref[t])
            old = new if case.old is None else float(case.old[t])
            bounded = min(max(new - old, -20.0), 20.0)
            ratio, x = math.exp(bounded), min(max(ref - new, -20.0), 20.0)
            kl = {"k1": -x, "k2": x * x / 2, "k3": min(math.exp(x) - 1 - x, 10.0)}[options.kl or "k3"]
            raw = math.exp(min(max(old - float(case.rollout[t]), -20.0), 20.0))
            pg = float(objective(torch.tensor(bounded).double(), torch.tensor(new), torch.tensor(advantage).double(), options))
            low, high = 1 - options.clip_low, 1 + options.clip_high
            changed = raw > options.mismatch_high or (options.mismatch == "mask" and raw < options.mismatch_low)
            omega = {"none": 1.0, "truncate": min(raw, options.mismatch_high), "mask": 0.0 if changed else raw}[
                options.mismatch
            ]
            dual = options.dual_clip is not None and advantage < 0 and ratio > options.dual_clip
            either = options.objective == "cispo"
            mine["tokens"] += 1
            mine["pg"] += pg
            mine["loss"] += weight * (omega * pg + options.kl_coefficient * kl - options.entropy_bonus * float(case.entropy[t]))
            mine["clip_low"] += ratio < low and (either or advantage < 0)
            mine["clip_high"] += ratio > high and (either or advantage > 0)
            mine["dual_clip"] += dual and not either
            mine["entropy"] += float(case.entropy[t])
            mine["kl_k1"] += old - new
            mine["kl_k3"] += ratio - 1 - bounded
            mine["gap_sum"] += abs(new - old)
            mine["kl_ref"] += kl
            mine["mismatch"] += raw
            mine["mismatch_truncated"] += changed and options.mismatch != "none"
            mine["ratio_min"], mine["ratio_max"] = min(mine["ratio_min"], ratio), max(mine["ratio_max"], ratio)
            mine["gap_max"] = max(mine["gap_max"], abs(new - old))
        found.append(mine)
    return found


FULL = PolicyLossOptions(0.2, 0.28, 3.0, 0.05, "k3", 0.1, "truncate")
MASKED = PolicyLossOptions(0.3, 0.3, None, 0.01, "k2", 0.2, "mask", 0.6, 1.7, "cispo")
SEQUENCES = PolicyLossOptions(0.02, 0.05, 1.1, 0.05, "k1", 0.1, "mask", objective="gspo")


@pytest.mark.parametrize("index", range(3))
def test_recorded_losses(golden, backend, index):
    """The aggregations of the recording are token weights here."""
    vector = golden["auxiliary"]["policy_loss"][index]
    params, expected, mask = vector["params"], vector["expected"], vector["mask"]
    tokens = sum(map(sum, mask))
    shares = {"token-mean": [1 / tokens] * 2, "seq-mean-token-mean": [1 / (2 * sum(row)) for row in mask]}
    weight = [share * bit for share, row in zip(shares[params["loss_agg_mode"]], mask, strict=True) for bit in row]
    options = PolicyLossOptions(params["cliprange_low"], params["cliprange_high"], params["clip_ratio_c"])
    flat = {name: [x for row in vector[name] for x in row] for name in ("logp", "old_logp", "advantages")}
    loss, metrics, gradient = run(flat["logp"], flat["old_logp"], flat["advantages"], weight, options=options)
    tolerance = golden["tolerance"]["abs"]
    shown = metrics.per_token(["all"])["all"]
    assert loss.item() == pytest.approx(expected["pg_loss"], abs=tolerance)
    assert shown["loss"] == pytest.approx(expected["pg_loss"], abs=tolerance)
    assert shown["clip_low_share"] + shown["clip_high_share"] == pytest.approx(expected["clipfrac"], abs=tolerance)
    assert shown["dual_clip_share"] == pytest.approx(expected["clipfrac_lower"], abs=tolerance)
    assert shown["kl_k1"] == pytest.approx(expected["ppo_kl"], abs=tolerance)
    assert shown["tokens"] == tokens
    assert gradient[2] == 0.0  # masked


def test_recorded_kl(golden, backend):
    """KL of the behaviour from the new distribution: the recording's logp is our old one, its reference our new one."""
    vectors = {vector["estimator"]: vector for vector in golden["auxiliary"]["kl"]}
    k1, k2 = vectors["k1"], vectors["k2"]
    _, metrics, _ = run(k1["ref_logp"], k1["logp"], [0.0] * 4, [1.0] * 4, agent=range(4), num_agents=4)
    assert metrics.kl_k1.tolist() == pytest.approx(k1["expected"], abs=2e-5)
    assert (metrics.gap_sum.square() / 2).tolist() == pytest.approx(k2["expected"], abs=2e-5)
    d = [new - old for new, old in zip(k1["ref_logp"], k1["logp"], strict=True)]
    assert metrics.kl_k3.tolist() == pytest.approx([math.exp(x) - 1 - x for x in d], rel=1e-5)


settings_of_the_loss = st.builds(
    lambda kl, coefficient, **rest: PolicyLossOptions(kl=kl, kl_coefficient=coefficient if kl else 0.0, **rest),
    kl=st.sampled_from([None, "k1", "k2", "k3"]),
    coefficient=st.sampled_from([0.0, 0.3]),
    clip_low=st.sampled_from([0.0, 0.2]),
    clip_high=st.sampled_from([0.1, 0.28]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    entropy_bonus=st.sampled_from([0.0, 0.05]),
    mismatch=st.sampled_from(["none", "truncate", "mask"]),
    objective=st.sampled_from(["ppo", "cispo", "gspo"]),
)


@pytest.mark.parametrize(("name", "examples"), [("torch", 120), ("triton", 16)])
def test_value_and_slopes_agree_with_float64_autograd(check, name, examples):
    """Every option alone, then combinations. The draws stay off the kinks, where the choice of subgradient is free."""

    @settings(derandomize=True, deadline=None, max_examples=examples, database=None)
    @given(settings_of_the_loss, st.integers(0, 64), st.booleans(), st.integers(0, 10**6))
    @example(PolicyLossOptions(), 64, False, 1)
    @example(PolicyLossOptions(kl="k1", kl_coefficient=0.5), 63, False, 2)
    @example(PolicyLossOptions(kl="k2", kl_coefficient=0.5), 63, True, 3)
    @example(PolicyLossOptions(kl="k3", kl_coefficient=0.5), 64, False, 4)
    @example(PolicyLossOptions(mismatch="truncate"), 64, False, 5)
    @example(PolicyLossOptions(mismatch="mask"), 64, True, 6)
    @example(PolicyLossOptions(objective="cispo"), 64, False, 7)
    @example(PolicyLossOptions(objective="gspo", clip_low=0.01), 64, False, 8)
    @example(PolicyLossOptions(dual_clip=1.5, entropy_bonus=0.1), 1, False, 9)
    @example(FULL, 64, False, 10)
    @example(MASKED, 64, False, 11)
    @example(SEQUENCES, 64, False, 12)
    def agrees(options, tokens, on_policy, seed):
        case = Case.random(tokens, seed, on_policy=on_policy)
        parts, dlogprob, dentropy = case.oracle(options)
        with use(name):
            loss, metrics, slope, entropy_slope = case.run(options)
        tolerance = numerics.policy_loss_tolerance(float(parts.abs().sum()))
        check(loss.cpu(), parts.sum(), tolerance)
        check(slope.cpu(), dlogprob, numerics.POLICY_TERM)
        check(entropy_slope.cpu(), dentropy, numerics.POLICY_TERM)
        assert float(metrics.loss.sum()) == pytest.approx(float(parts.sum()), abs=tolerance.abs)

    agrees()


@pytest.mark.parametrize("options", [FULL, MASKED, PolicyLossOptions()], ids=["full", "masked", "plain"])
def test_I8_metrics_agree_with_a_loop_over_tokens(backend, options):
    """Twenty agents, which the kernels take in several turns, and more tokens than a block holds."""
    case = Case.random(1500, 3, rows=40, num_agents=20, scale=0.7)
    _, metrics, _, _ = case.run(options)
    expected = metrics_by_hand(case, options)
    for name in agent_metrics.ROWS:
        column = [mine[name] for mine in expected]
        assert getattr(metrics, name).tolist() == pytest.approx(column, rel=2e-5, abs=1e-5), name
    assert metrics.ref_tokens.tolist() == metrics.rollout_tokens.tolist() == metrics.tokens.tolist()


def test_gspo_is_the_objective_of_whole_sequences(check, backend):
    """Weights equal inside rows: value and gradient are those of the clipped ratio of sequences, by autograd."""
    case = Case.random(60, 5, rows=6, garbage=0.0, scale=0.1)
    case = case.but(weight=torch.tensor([0.05, 0.1, 0.01, 0.2, 0.03, 0.02])[case.row])
    options = PolicyLossOptions(0.03, 0.04, 1.2, objective="gspo")
    logprob = case.logprob.double().requires_grad_()
    total, clipped_rows = torch.zeros((), dtype=torch.float64), 0
    for index in range(6):
        mine = case.row == index
        ratio = ((logprob[mine].sum() - case.old[mine].double().sum()) / mine.sum()).exp()
        bounded = ratio.clamp(0.97, 1.04)
        advantage = case.advantage[index].double()
        loss = torch.maximum(-advantage * ratio, -advantage * bounded)
        if advantage < 0:
            loss = torch.minimum(loss, -advantage * 1.2)
        total = total + case.weight[mine].double().sum() * loss
        clipped_rows += int(ratio != bounded)
    total.backward()
    assert 0 < clipped_rows < 6
    loss, metrics, slope, _ = case.run(options)
    check(loss.cpu(), total.detach(), numerics.POLICY_TERM)
    check(slope.cpu(), logprob.grad, numerics.POLICY_TERM)
    assert float(metrics.ratio_max.max()) <= math.exp(float((case.logprob - case.old).abs().max()))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    vectors = {name: getattr(case, name)[order] for name in ("logprob", "entropy", "row", "weight", "old", "ref", "rollout")}
    check(case.but(**vectors).run(options)[2].cpu(), slope.cpu()[order], numerics.POLICY_TERM)


def test_the_ratio_is_bounded_and_flat_far_away(backend):
    loss, metrics, gradient = run(
        [-500.0, 30.0], [0.0, 0.0], [1.0, -1.0], [1.0, 1.0], options=PolicyLossOptions(dual_clip=None)
    )
    assert loss.item() == pytest.approx(-math.exp(-20) + math.exp(20), rel=1e-6)
    assert gradient.tolist() == [0.0, 0.0]
    assert metrics.gap_max.tolist() == [500.0]
    assert metrics.kl_k3.isfinite().all()


@pytest.mark.parametrize("objective", ["ppo", "gspo"])
def test_on_policy_has_ratio_one_and_slope_minus_advantage(backend, objective):
    options = PolicyLossOptions(0.0, 0.0, 1.1, objective=objective)
    loss, metrics, gradient = run([-1.0, -2.0], None, [0.5, -2.0], [0.25, 0.75], options=options)
    assert loss.item() == -0.125 + 1.5
    assert gradient.tolist() == [-0.125, 1.5]
    assert metrics.ratio_max.tolist() == metrics.ratio_min.tolist() == [1.0]
    assert metrics.kl_k3.tolist() == metrics.gap_max.tolist() == metrics.clip_low.tolist() == [0.0]


def test_the_correction_is_a_constant_factor_of_the_pg_term_alone(backend):
    """On-policy the trainer's own log-prob stands for the old one, without a gradient."""
    options = PolicyLossOptions(mismatch="truncate", mismatch_high=1.5, kl="k1", kl_coefficient=1.0)
    other = {"rollout_logprob": torch.tensor([-1.5, -1.0], device=DEVICE), "ref_logprob": torch.zeros(2, device=DEVICE)}
    loss, metrics, gradient = run([-1.0, -1.2], None, [1.0, -1.0], [0.5, 0.25], options=options, **other)
    assert loss.item() == pytest.approx(0.5 * (-1.5 - 1.0) + 0.25 * (math.exp(-0.2) - 1.2))
    assert gradient.tolist() == pytest.approx([0.5 * (-1.5 + 1.0), 0.25 * (math.exp(-0.2) + 1.0)])
    assert metrics.pg.tolist() == [0.0]
    assert metrics.mismatch.tolist() == pytest.approx([math.exp(0.5) + math.exp(-0.2)])
    assert metrics.mismatch_truncated.tolist() == [1.0]


def test_small_kl_keeps_its_digits(check, backend):
    """e^x - 1 - x for x down to 1e-4, where the plain difference in fp32 has no digit left."""
    x = torch.tensor([1e-4, -1e-3, 0.02, -0.3, 0.49, 0.51, -0.6], dtype=torch.float64)
    zeros, options = [0.0] * 7, PolicyLossOptions(kl="k3", kl_coefficient=1.0)
    reference = x.float().to(DEVICE)
    _, metrics, gradient = run(
        zeros, None, zeros, [1.0] * 7, agent=range(7), num_agents=7, options=options, ref_logprob=reference
    )
    exact = x.float().double()
    check(
        metrics.kl_ref.cpu(), torch.expm1(exact) - exact, numerics.Tolerance(0.0, 1e-3 if backend == "torch" else 2e-6, "fp32")
    )
    check(gradient.cpu(), -torch.expm1(exact), numerics.Tolerance(0.0, 1e-6, "as above"))


@pytest.mark.parametrize("options", [FULL, MASKED, SEQUENCES], ids=lambda options: options.objective)
def test_I4_tokens_of_weight_zero_change_no_bit(backend, options):
    """They may be anything, dropped by the index or left for the loss to pass over."""
    dirty = Case.random(40, 7)
    counted = dirty.weight != 0
    vectors = ("logprob", "entropy", "row", "weight", "old", "ref", "rollout")
    clean = dirty.but(**{name: getattr(dirty, name)[counted] for name in vectors})
    loss, metrics, slope, entropy_slope = clean.run(options)
    everything = torch.arange(40, device=DEVICE)
    for found in (dirty.run(options), dirty.run(options, index=everything, check_values=False)):
        torch.testing.assert_close(found[0], loss, rtol=5e-6, atol=0)
        for whole, part in ((found[2], slope), (found[3], entropy_slope)):
            assert torch.equal(whole[counted], part)
            assert torch.count_nonzero(whole[~counted]) == 0
        assert found[1].tokens.tolist() == metrics.tokens.tolist()
        # Sums with other gaps between the tokens: the kernels' are rounded to fp32 in another order.
        torch.testing.assert_close(found[1].matrix(), metrics.matrix(), rtol=1e-5, atol=1e-5)
    assert torch.equal(dirty.run(options)[0], loss)


@pytest.mark.parametrize("tokens", [0, 7])
def test_without_weights_all_is_zero(backend, tokens):
    case = Case.random(tokens, 1, garbage=2.0)
    for others in ({}, {"index": torch.arange(tokens, device=DEVICE), "check_values": False}):
        loss, metrics, slope, _ = case.run(FULL, **others)
        assert loss.item() == 0.0
        assert torch.count_nonzero(slope) == 0
        assert metrics.matrix().tolist() == AgentMetrics.zeros(2).matrix().tolist()
    assert metrics.per_token(["solver", "verifier"]) == {}


@pytest.mark.parametrize("where", ["logprob", "old", "ref", "rollout", "entropy", "advantage", "weight", "row", "agent"])
@pytest.mark.parametrize("options", [FULL, MASKED, SEQUENCES], ids=lambda options: options.objective)
def test_what_is_broken_shows_in_the_loss_and_the_slope(where, options):
    """Without a check of values: NaN, or a row or agent that there isn't."""
    for name in ("torch", "triton") if options is not MASKED or where in ("row", "rollout") else ("torch",):
        case = Case.random(20, 2, garbage=0.0)
        bad = {"row": 77, "agent": -3}.get(where, math.nan)
        vector = getattr(case, where).clone()
        place = int(case.row[4]) if where in ("advantage", "agent") else 4
        vector[place] = bad
        with use(name):
            index = torch.arange(20, device=DEVICE)
            loss, metrics, slope, _ = case.but(**{where: vector}).run(options, index=index, check_values=False)
        assert loss.isnan(), name
        assert metrics.loss.isnan().any(), name
        if where not in ("entropy", "agent"):
            assert slope[4].isnan(), name
        if where in ("logprob", "old") and options.objective != "gspo":
            assert slope[:4].isfinite().all(), name
            assert metrics.ratio_max.isnan().sum() == metrics.gap_max.isnan().sum() == 1, name


@pytest.mark.filterwarnings("ignore:invalid value")
def test_on_policy_a_broken_log_prob_shows(backend):
    for broken in (math.nan, -math.inf):
        loss, metrics, gradient = run([-1.0, broken], None, [1.0, 1.0], [0.5, 0.5])
        assert loss.isnan()
        assert gradient.isnan().tolist() == [False, True]
        assert metrics.ratio_min.isnan().all()


def test_the_entropy_bonus_and_its_gradient(backend):
    entropy = torch.tensor([2.0, 3.0], device=DEVICE, requires_grad=True)
    options = PolicyLossOptions(entropy_bonus=0.1)
    loss, metrics, _ = run([-1.0, -1.0], None, [1.0, 1.0], [0.25, 0.5], options=options, entropy=entropy)
    assert loss.item() == pytest.approx(-0.75 - 0.1 * (0.25 * 2 + 0.5 * 3))
    assert entropy.grad.tolist() == pytest.approx([-0.025, -0.05])
    assert metrics.entropy.tolist() == [5.0]


def test_I8_metrics_split_by_agent_and_merge_without_loss(backend):
    logprob, old = [-1.0, -0.2, -2.0, -0.5, -3.0], [-1.5, -0.3, -1.0, -0.5, -1.0]
    advantage, weight, agent = [1.0, 1.0, -1.0, 2.0, -0.5], [0.1, 0.2, 0.3, 0.2, 0.2], [0, 2, 0, 2, 2]
    loss, whole, _ = run(logprob, old, advantage, weight, agent=agent, num_agents=3)
    assert whole.tokens.tolist() == [2.0, 0.0, 3.0]
    assert whole.loss.sum().item() == pytest.approx(loss.item(), abs=1e-7)
    assert whole.clip_high.tolist() == [1.0, 0.0, 0.0]
    assert whole.clip_low.tolist() == [1.0, 0.0, 1.0]
    assert whole.gap_max.tolist() == pytest.approx([1.0, 0.0, 2.0])
    assert whole.ratio_min.tolist() == pytest.approx([math.exp(-1.0), math.inf, math.exp(-2.0)])
    merged = AgentMetrics.zeros(3, DEVICE)
    for piece in (slice(0, 2), slice(2, 5)):
        columns = (column[piece] for column in (logprob, old, advantage, weight))
        merged = merged.merge(run(*columns, agent=agent[piece], num_agents=3)[1])
    rounding = 1e-15 if backend == "torch" else 2e-7  # the kernels' sums over a block are fp32
    for name in AgentMetrics.__dataclass_fields__:
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=rounding, atol=rounding)
    shown = whole.per_token(["solver", "reader", "verifier"])
    assert list(shown) == ["solver", "verifier"]
    assert shown["verifier"]["logprob_gap_mean"] == pytest.approx((0.1 + 0.0 + 2.0) / 3)
    assert shown["verifier"]["ratio_max"] == pytest.approx(math.exp(0.1))
    assert not {"kl_ref", "mismatch_mean", "mismatch_truncated_share"} & set(shown["solver"])


def test_means_over_the_inputs_that_were_given():
    given = {"ref_logprob": torch.tensor([-1.0, -1.5]), "rollout_logprob": torch.tensor([-2.0, -1.0])}
    arguments = ([-1.0, -1.0], None, [1.0, 1.0], [0.5, 0.5])
    options = PolicyLossOptions(mismatch="truncate")
    with use("torch"):
        with_both = run(*arguments, options=options, **{name: value.to(DEVICE) for name, value in given.items()})[1]
        with_none = run(*arguments)[1]
    merged = with_both.merge(with_none).per_token(["all"])["all"]
    assert merged["tokens"] == 4
    assert merged["kl_ref"] == pytest.approx((math.exp(-0.5) - 0.5) / 2)
    assert merged["mismatch_mean"] == pytest.approx((math.e + 1) / 2)
    assert merged["mismatch_truncated_share"] == 0.5


def test_ranks_reduce_in_one_sum_and_one_maximum(monkeypatch):
    """The other rank has the same sums, and extremes that are larger by 1, the negated minimum among them."""
    calls = []

    def all_reduce(tensor, op, group):
        calls.append(op)
        tensor.copy_(2 * tensor if op == torch.distributed.ReduceOp.SUM else tensor + 1)

    monkeypatch.setattr("drmas_kernels.agent_metrics.dist.all_reduce", all_reduce)
    case = Case.random(30, 4)
    with use("torch"):
        mine = case.run(FULL)[1]
    both = mine.all_reduce(None)
    assert calls == [torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.MAX]
    for name in AgentMetrics.__dataclass_fields__:
        change = {"ratio_min": lambda x: x - 1, "ratio_max": lambda x: x + 1, "gap_max": lambda x: x + 1}
        assert torch.equal(getattr(both, name), change.get(name, lambda x: 2 * x)(getattr(mine, name))), name


def test_the_same_bits_again_and_in_pieces(backend):
    """Slopes of pieces, at any offset, are those of the whole; the same call gives the same bits."""
    case = Case.random(1100, 6, rows=30, num_agents=3, garbage=0.0)
    for options in (FULL, MASKED):
        inputs, given = case.inputs(), case.tensors()
        first = evaluate(given["logprob"], given["entropy"], inputs, options, 3)
        again = evaluate(given["logprob"], given["entropy"], inputs, options, 3)
        assert torch.equal(first.loss, again.loss)
        assert torch.equal(first.slope, again.slope)
        assert torch.equal(first.metrics.matrix(), again.metrics.matrix())
        parts = [slice(0, 1), slice(1, 1030), slice(1030, 1100)]
        slopes = [weighted_slope(given["logprob"][p], given["entropy"][p], inputs.slice(p), options) for p in parts]
        assert torch.equal(torch.cat(slopes), first.slope)
        with use("torch"):
            terms = token_terms(given["logprob"], given["entropy"], inputs, options)
        torch.testing.assert_close(first.slope, inputs.weight * terms.slope, rtol=5e-6, atol=1e-7)


def test_an_upstream_gradient_scales_the_slopes(backend):
    logprob = torch.tensor([-1.0, -1.0], device=DEVICE, requires_grad=True)
    row, one = torch.tensor([0, 0], device=DEVICE), torch.ones(1, device=DEVICE)
    weight = torch.tensor([0.5, 0.5], device=DEVICE)
    loss, _ = policy_loss(logprob, None, row, one, weight, row[:1], num_agents=1, options=PolicyLossOptions())
    (3.0 * loss).backward()
    assert logprob.grad.tolist() == [-1.5, -1.5]


def test_a_half_precision_log_prob_gets_its_gradient_in_its_own_dtype(backend):
    case = Case.random(10, 8, garbage=0.0)
    loss, _, slope, _ = case.but(logprob=case.logprob.bfloat16()).run(FULL)
    assert slope.dtype == torch.bfloat16
    expected = case.but(logprob=case.logprob.bfloat16().float()).run(FULL)
    assert torch.equal(loss, expected[0])
    torch.testing.assert_close(slope.float(), expected[2], rtol=2**-8, atol=1e-6)


def test_with_an_index_nothing_waits_for_the_device():
    """On the meta device whatever asks for a value fails."""
    case = Case.random(12, 0)
    given = {name: value.to("meta") for name, value in case.tensors().items()}
    arguments = (given["logprob"], given["old"], given["row"], given["advantage"], given["weight"], given["agent"])
    others = {"num_agents": 2, "options": FULL, "entropy": given["entropy"], "ref_logprob": given["ref"]}
    others |= {"rollout_logprob": given["rollout"], "index": torch.arange(9, device="meta")}
    loss, metrics = policy_loss(*arguments, **others, check_values=False)
    assert loss.shape == ()
    assert metrics.matrix().shape == (16, 2)
    with pytest.raises((NotImplementedError, RuntimeError)):
        policy_loss(*arguments, **others)


def test_the_operator_is_what_torch_expects(backend):
    case = Case.random(12, 9)
    for options, old in ((FULL, case.old), (SEQUENCES, None)):
        inputs, given = case.but(old=old).inputs(), case.tensors()
        logprob, entropy = given["logprob"].requires_grad_(), given["entropy"].requires_grad_()
        arguments = (logprob, entropy, *inputs, 2, *dataclasses.astuple(options))
        names = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.drmas.policy_loss, arguments, test_utils=names)


def test_a_part_of_the_tokens_has_no_slope_of_whole_rows():
    case = Case.random(4, 0, garbage=0.0)
    with pytest.raises(ValueError, match="objective is 'gspo'; expected ppo or cispo here"):
        weighted_slope(case.tensors()["logprob"], None, case.inputs(), PolicyLossOptions(objective="gspo"))


def test_no_second_derivative_is_invented():
    logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
    row, one = torch.tensor([0, 0]), torch.ones(1)
    loss, _ = policy_loss(logprob, None, row, one, torch.tensor([0.5, 0.5]), row[:1], num_agents=1, options=PolicyLossOptions())
    with pytest.raises(RuntimeError, match="policy_loss has no second derivative"):
        torch.autograd.grad(loss, logprob, create_graph=True)
