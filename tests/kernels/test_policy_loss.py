"""The loss on log-probs: against recorded values, against the formula in float64 autograd, and its metrics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas_kernels import numerics
from drmas_kernels.policy_loss import AgentMetrics, PolicyLossOptions, policy_loss


def run(logprob, old, advantage, weight, *, row=None, agent=None, options=None, entropy=None, num_agents=1):
    """(loss, metrics, gradient) on lists; a row per token and one agent by default."""
    tokens = len(logprob)
    logprob = torch.tensor(logprob, requires_grad=True)
    loss, metrics = policy_loss(
        logprob,
        None if old is None else torch.tensor(old),
        torch.tensor(row if row is not None else range(tokens), dtype=torch.int64),
        torch.tensor(advantage),
        torch.tensor(weight),
        torch.tensor(agent if agent is not None else [0] * len(advantage), dtype=torch.int64),
        num_agents=num_agents,
        options=options or PolicyLossOptions(),
        entropy=entropy,
    )
    loss.backward()
    return loss.detach(), metrics, logprob.grad


@pytest.mark.parametrize("index", range(3))
def test_recorded_losses(golden, index):
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


def test_recorded_kl(golden):
    """KL of the behaviour from the new distribution: the recording's logp is our old one, its reference our new one."""
    vectors = {vector["estimator"]: vector for vector in golden["auxiliary"]["kl"]}
    k1, k2 = vectors["k1"], vectors["k2"]
    _, metrics, _ = run(k1["ref_logp"], k1["logp"], [0.0] * 4, [1.0] * 4, agent=range(4), num_agents=4)
    assert metrics.kl_k1.tolist() == pytest.approx(k1["expected"], abs=2e-5)
    assert (metrics.gap_sum.square() / 2).tolist() == pytest.approx(k2["expected"], abs=2e-5)
    d = [new - old for new, old in zip(k1["ref_logp"], k1["logp"], strict=True)]
    assert metrics.kl_k3.tolist() == pytest.approx([math.exp(x) - 1 - x for x in d], rel=1e-5)


tokens = st.lists(
    st.tuples(st.floats(-2.5, 2.5, width=32), st.floats(-3, 3, width=32), st.floats(0.0, 1.0, width=32)),
    min_size=1,
    max_size=12,
)


@given(tokens, st.sampled_from([None, 1.5, 3.0]), st.sampled_from([0.0, 0.1, 0.28]))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_value_and_slope_agree_with_float64_autograd(check, loss_by_the_book, batch, dual_clip, clip_high):
    options = PolicyLossOptions(0.2, clip_high, dual_clip)
    gap, advantage, weight = ([float(row[i]) for row in batch] for i in range(3))
    # Off the kinks, where autograd's choice of subgradient is its own.
    edges = [math.log(0.8), math.log1p(clip_high), math.log(dual_clip or 1.0)]
    gap = [g + 1e-3 if min(abs(g - edge) for edge in edges) < 1e-4 else g for g in gap]
    loss, metrics, gradient = run(gap, [0.0] * len(gap), advantage, weight, options=options)
    exact = torch.tensor(gap).double().requires_grad_()
    zero, weights = torch.zeros_like(exact), torch.tensor(weight).double()
    pg = loss_by_the_book(exact, zero, torch.tensor(advantage).double(), options)
    (weights * pg).sum().backward()
    check(loss, (weights * pg).sum().detach(), numerics.Tolerance(1e-5, 1e-6, "a dozen fp32 terms of size up to 30"))
    check(gradient, exact.grad, numerics.Tolerance(1e-5, 1e-6, "one fp32 exponential"))
    counted = weights != 0
    check(metrics.pg.sum(), pg[counted].sum().detach(), numerics.Tolerance(1e-4, 1e-6, "as above"))


def test_the_ratio_is_bounded_and_flat_far_away():
    loss, metrics, gradient = run(
        [-500.0, 30.0], [0.0, 0.0], [1.0, -1.0], [1.0, 1.0], options=PolicyLossOptions(dual_clip=None)
    )
    assert loss.item() == pytest.approx(-math.exp(-20) + math.exp(20))
    assert gradient.tolist() == [0.0, 0.0]
    assert metrics.gap_max.tolist() == [500.0]
    assert metrics.kl_k3.isfinite().all()


def test_on_policy_has_ratio_one_and_slope_minus_advantage():
    loss, metrics, gradient = run([-1.0, -2.0], None, [0.5, -2.0], [0.25, 0.75], options=PolicyLossOptions(0.0, 0.0, 1.1))
    assert loss.item() == -0.125 + 1.5
    assert gradient.tolist() == [-0.125, 1.5]
    assert metrics.ratio_max.tolist() == metrics.ratio_min.tolist() == [1.0]
    assert metrics.kl_k3.tolist() == metrics.gap_max.tolist() == metrics.clip_low.tolist() == [0.0]


def test_I4_tokens_of_weight_zero_change_no_bit():
    clean = run([-1.0, -2.0], [-1.1, -1.5], [1.0, -1.0], [0.5, 0.5], agent=[0, 1], num_agents=2)
    padded = run(
        [math.nan, -1.0, -2.0, math.inf],
        [-1.0, -1.1, -1.5, math.nan],
        [1.0, -1.0, math.nan],
        [0.0, 0.5, 0.5, 0.0],
        row=[99, 0, 1, 2],
        agent=[0, 1, 1],
        num_agents=2,
    )
    assert torch.equal(padded[0], clean[0])
    assert padded[2].tolist() == [0.0, *clean[2].tolist(), 0.0]
    assert torch.equal(padded[1].gap_sum, clean[1].gap_sum)
    assert padded[1].tokens.tolist() == [1.0, 1.0]


def test_the_entropy_bonus_and_its_gradient():
    entropy = torch.tensor([2.0, 3.0], requires_grad=True)
    options = PolicyLossOptions(entropy_bonus=0.1)
    loss, metrics, _ = run([-1.0, -1.0], None, [1.0, 1.0], [0.25, 0.5], options=options, entropy=entropy)
    assert loss.item() == pytest.approx(-0.75 - 0.1 * (0.25 * 2 + 0.5 * 3))
    assert entropy.grad.tolist() == pytest.approx([-0.025, -0.05])
    assert metrics.entropy.tolist() == [5.0]
    with pytest.raises(ValueError, match=r"entropy_bonus is 0\.1 but entropy is missing"):
        run([-1.0], None, [1.0], [1.0], options=options)


def test_I8_metrics_split_by_agent_and_merge_without_loss():
    logprob, old = [-1.0, -0.2, -2.0, -0.5, -3.0], [-1.5, -0.3, -1.0, -0.5, -1.0]
    advantage, weight, agent = [1.0, 1.0, -1.0, 2.0, -0.5], [0.1, 0.2, 0.3, 0.2, 0.2], [0, 2, 0, 2, 2]
    loss, whole, _ = run(logprob, old, advantage, weight, agent=agent, num_agents=3)
    assert whole.tokens.tolist() == [2.0, 0.0, 3.0]
    assert whole.loss.sum().item() == pytest.approx(loss.item(), abs=1e-7)
    assert whole.clip_high.tolist() == [1.0, 0.0, 0.0]
    assert whole.clip_low.tolist() == [1.0, 0.0, 1.0]
    assert whole.gap_max.tolist() == pytest.approx([1.0, 0.0, 2.0])
    assert whole.ratio_min.tolist() == pytest.approx([math.exp(-1.0), math.inf, math.exp(-2.0)])
    merged = AgentMetrics.zeros(3)
    for piece in (slice(0, 2), slice(2, 5)):
        columns = (column[piece] for column in (logprob, old, advantage, weight))
        merged = merged.merge(run(*columns, agent=agent[piece], num_agents=3)[1])
    for name in AgentMetrics.__dataclass_fields__:
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-15, atol=1e-15)
    shown = whole.per_token(["solver", "reader", "verifier"])
    assert list(shown) == ["solver", "verifier"]
    assert shown["verifier"]["logprob_gap_mean"] == pytest.approx((0.1 + 0.0 + 2.0) / 3)
    assert shown["verifier"]["ratio_max"] == pytest.approx(math.exp(0.1))


def test_an_upstream_gradient_scales_the_slopes():
    logprob = torch.tensor([-1.0, -1.0], requires_grad=True)
    row, one = torch.tensor([0, 0]), torch.ones(1)
    loss, _ = policy_loss(logprob, None, row, one, torch.tensor([0.5, 0.5]), row[:1], num_agents=1, options=PolicyLossOptions())
    (3.0 * loss).backward()
    assert logprob.grad.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, "clip_low is -0.1"),
        ({"clip_high": math.nan}, "clip_high is nan"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0; expected more than 1, or None for off"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyLossOptions(**options)
