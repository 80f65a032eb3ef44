"""The head beside its main path: gradients by computing the logits again, losses with more inputs, operators, memory."""

from dataclasses import replace

import pytest
import torch

from drmas_kernels import linear_logprob as module
from drmas_kernels import numerics
from drmas_kernels.backend import use
from drmas_kernels.linear_logprob import linear_logprob, linear_policy_loss
from drmas_kernels.policy_loss import PolicyLossOptions, policy_loss
from tests.kernels import interpreter

TEMPERATURES = [1.0, 0.5, torch.linspace(0.4, 2.0, 24)]


def upstream(tokens, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, generator=generator), torch.randn(tokens, generator=generator)


def gradients(case, dlogprob, dentropy, device, **settings):
    """(dH, dW) of sum dlogprob logprob + dentropy entropy, on the CPU."""
    hidden = case.hidden.detach().clone().to(device).requires_grad_()
    weight = case.weight.detach().clone().to(device).requires_grad_()
    logprob, entropy = linear_logprob(hidden, weight, case.target.to(device), **settings)
    (dlogprob.to(device) * logprob + dentropy.to(device) * entropy).sum().backward()
    return hidden.grad.cpu(), weight.grad.cpu()


def expected(case, dlogprob, dentropy, temperature=1.0, vocab_size=None):
    hidden, weight = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    temperature = torch.as_tensor(temperature).double().expand(hidden.shape[0])
    logprobs = (hidden @ weight[:vocab_size].t() / temperature[:, None]).log_softmax(-1)
    logprob, entropy = logprobs.gather(1, case.target[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)
    (dlogprob.double() * logprob + dentropy.double() * entropy).sum().backward()
    return hidden.grad, weight.grad


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["1", "0.5", "per-token"])
def test_any_upstream_gradient_per_token(head, check, device, temperature):
    case, dlogprob_dentropy = head(24, 16, 301), upstream(24)
    on_device = temperature.to(device) if isinstance(temperature, torch.Tensor) else temperature
    actual = gradients(case, *dlogprob_dentropy, device, temperature=on_device, chunk=10)
    for ours, theirs in zip(actual, expected(case, *dlogprob_dentropy, temperature), strict=True):
        check(ours, theirs, numerics.GRADIENT)


@pytest.mark.usefixtures("backend")
def test_bfloat16_and_padded_columns(head, device):
    case, dlogprob_dentropy = head(24, 16, 320, dtype=torch.bfloat16), upstream(24)
    case.target %= 301
    case.weight[301:] = torch.nan
    actual = gradients(case, *dlogprob_dentropy, device, vocab_size=301)
    for ours, theirs in zip(actual, expected(case, *dlogprob_dentropy, vocab_size=301), strict=True):
        difference = ours.double() - theirs.nan_to_num()
        assert difference.norm() <= numerics.GRADIENT_BF16_NORM * theirs.nan_to_num().norm()


@pytest.mark.usefixtures("backend")
def test_I4_tokens_without_upstream_gradient_are_dropped_first(head, device):
    case, (dlogprob, dentropy) = head(24, 16, 301), upstream(24)
    ignored = torch.zeros(24, dtype=torch.bool)
    ignored[[0, 9, 23]] = True
    dlogprob[ignored] = dentropy[ignored] = 0.0
    dirty = case.but(hidden=case.hidden.clone())
    dirty.hidden[0], dirty.hidden[9], dirty.hidden[23] = torch.nan, torch.inf, -torch.inf
    hidden = dirty.hidden.to(device).requires_grad_()
    weight = dirty.weight.to(device).requires_grad_()
    logprob, entropy = linear_logprob(hidden, weight, dirty.target.to(device))
    kept = (~ignored).to(device)
    ((dlogprob.to(device) * logprob)[kept].sum() + (dentropy.to(device) * entropy)[kept].sum()).backward()
    part = case.but(hidden=case.hidden[~ignored], target=case.target[~ignored])
    dhidden, dweight = gradients(part, dlogprob[~ignored], dentropy[~ignored], device)
    assert torch.equal(hidden.grad[kept].cpu(), dhidden)
    assert torch.equal(hidden.grad[~kept].cpu(), torch.zeros(3, 16))
    assert torch.equal(weight.grad.cpu(), dweight)


def test_an_expanded_upstream_gradient(head, check):
    """A sum hands down one number for all tokens, as a tensor of stride 0."""
    case = head(24, 16, 301)
    hidden = case.hidden.clone().requires_grad_()
    linear_logprob(hidden, case.weight, case.target)[0].sum().backward()
    check(hidden.grad, expected(case, torch.ones(24), torch.zeros(24))[0], numerics.GRADIENT)


def test_the_gradient_by_recomputation_goes_into_main_grad(head, check):
    case, (dlogprob, dentropy) = head(24, 16, 301), upstream(24)
    weight = case.weight.clone().requires_grad_()
    weight.main_grad = torch.full((301, 16), 0.25)
    weight.zero_out_wgrad = True
    logprob, entropy = linear_logprob(case.hidden, weight, case.target)
    assert torch.equal(weight.main_grad, torch.full((301, 16), 0.25))
    (dlogprob * logprob + dentropy * entropy).sum().backward()
    check(weight.main_grad - 0.25, expected(case, dlogprob, dentropy)[1], numerics.GRADIENT)
    assert weight.grad_added_to_main_grad
    assert not weight.grad.any()


def test_the_backward_pass_computes_the_logits_again_and_keeps_none(head):
    case = head(400, 4, 500)
    hidden = case.hidden.clone().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor):
        linear_logprob(hidden, case.weight, case.target)
    assert max(saved) == 500 * 4  # the weight


OPTIONS = {
    "reference": PolicyLossOptions(kl="k3", kl_coefficient=0.3, entropy_bonus=0.05),
    "mismatch": PolicyLossOptions(mismatch="truncate", mismatch_high=1.2),
    "cispo": PolicyLossOptions(objective="cispo", kl="k2", kl_coefficient=0.1, mismatch="mask"),
    "gspo": PolicyLossOptions(objective="gspo", clip_low=0.05, clip_high=0.05, entropy_bonus=0.02),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_fused_loss_is_the_loss_of_the_log_probs(head, check, device, name):
    """Against autograd through the reference and `policy_loss`, which has its own tests."""
    case = head(40, 16, 301)
    generator = torch.Generator().manual_seed(5)
    extra = {f"{kind}_logprob": (case.old_logprob + 0.3 * torch.randn(40, generator=generator)) for kind in ("ref", "rollout")}
    hidden, weight = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    logprob, entropy = module.linear_logprob_reference(hidden, weight, case.target)
    arguments = (case.old_logprob, case.row, case.advantage, case.token_weight, case.agent)
    with use("torch"):
        book, metrics = policy_loss(logprob, *arguments, num_agents=2, options=OPTIONS[name], entropy=entropy, **extra)
    book.backward()
    result, dhidden, dweight = case.run(OPTIONS[name], chunk=16, **extra)
    check(result.loss, book.detach(), numerics.LOSS)
    check(result.logprob, logprob.detach(), numerics.LOGPROB)
    check(dhidden, hidden.grad, numerics.GRADIENT)
    check(dweight, weight.grad, numerics.GRADIENT)
    assert torch.equal(result.metrics.tokens, metrics.tokens)
    assert torch.equal(result.metrics.mismatch_truncated, metrics.mismatch_truncated)


@pytest.mark.usefixtures("backend")
def test_positions_that_the_caller_knows_change_nothing(head, device):
    case = head(30, 16, 200)
    case.token_weight[[0, 7, 29]] = 0.0
    index = case.token_weight.nonzero().squeeze(1)
    found, *grads = case.run()
    given, *same = case.run(index=index, check_values=False)
    assert torch.equal(given.loss, found.loss)
    assert torch.equal(given.logprob, found.logprob)
    for ours, theirs in zip(same, grads, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("on_policy", [True, False])
def test_an_unchecked_target_out_of_range_shows(head, on_policy):
    case = head(8, 16, 50)
    case.target[3] = 50
    case = case.but(old_logprob=None if on_policy else case.old_logprob)
    assert case.run(check_values=False)[0].loss.isnan()
    assert case.scored(check_values=False)[0].isnan().tolist() == [index == 3 for index in range(8)]


def test_the_operators_keep_torchs_rules(head):
    """torch.library.opcheck: schema, autograd registration, fake tensors and tracing."""
    case = head(6, 8, 50)
    common = (case.hidden, case.weight, case.target, None)
    where = (0, 50, "", 0)
    torch.library.opcheck(module._statistics, (*common, *where))
    merged = module._statistics(*common, *where)
    slope, bonus = upstream(6)
    torch.library.opcheck(module._gradients, (*common, merged, slope, bonus, torch.zeros(50, 8), True, *where))
    options = replace(PolicyLossOptions(), entropy_bonus=0.1)
    names = ("row", "token_weight", "old_logprob")
    inputs = [*(getattr(case, name) for name in names), None, None, case.advantage, case.agent]
    settings = [getattr(options, name) for name in PolicyLossOptions.__dataclass_fields__]
    for dweight, want_hidden in ((torch.zeros(50, 8), True), (None, False)):
        torch.library.opcheck(module._loss_and_gradients, (*common, *inputs, dweight, want_hidden, 1.0, 2, *where, *settings))


def test_the_head_compiles(head, check):
    """The operators are opaque to torch.compile, so a compiled step gives the same numbers."""
    case = head(20, 16, 100)
    hidden = case.hidden.clone().requires_grad_()

    def step(hidden):
        return linear_logprob(hidden * 1.5, case.weight, case.target, check_values=False)[0].sum()

    torch.compile(step, backend="aot_eager")(hidden).backward()
    check(
        hidden.grad, 1.5 * expected(case.but(hidden=case.hidden * 1.5), torch.ones(20), torch.zeros(20))[0], numerics.GRADIENT
    )


@pytest.mark.skipif(interpreter.DEVICE != "cpu", reason="counts the allocations of the CPU")
def test_memory_beside_inputs_and_gradients_is_one_chunk(head):
    """Counted by torch's own allocator hooks: what lives at the same time while a loss and its gradients are formed."""
    case = head(4096, 8, 2048)
    peak = {}
    for tokens in (1024, 4096):
        part = case.but(
            **{name: getattr(case, name)[:tokens] for name in ("hidden", "target", "old_logprob", "row", "token_weight")}
        )
        hidden, weight = part.hidden.clone().requires_grad_(), part.weight.clone().requires_grad_()
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            linear_policy_loss(
                hidden, weight, *part.arguments(), num_agents=2, options=PolicyLossOptions(), chunk=64
            ).loss.backward()
        live = highest = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                highest = max(highest, live)
        peak[tokens] = highest
    chunk, weight, per_token = 64 * 2048 * 4, 2048 * 8 * 4, 8 * 4 * 3 + 300
    assert peak[1024] < 2 * chunk + 4 * weight + 1024 * per_token
    assert peak[4096] - peak[1024] < 3072 * per_token


@pytest.mark.usefixtures("backend")
def test_autocast_changes_no_bit(head, device):
    case, (dlogprob, dentropy) = head(12, 16, 301), upstream(12)
    expected = [case.run(OPTIONS["reference"], ref_logprob=case.old_logprob), gradients(case, dlogprob, dentropy, device)]
    with torch.autocast(device, dtype=torch.bfloat16):
        found = [case.run(OPTIONS["reference"], ref_logprob=case.old_logprob), gradients(case, dlogprob, dentropy, device)]
    assert torch.equal(found[0][0].loss, expected[0][0].loss)
    assert torch.equal(found[0][0].metrics.entropy, expected[0][0].metrics.entropy)
    for ours, theirs in zip((*found[0][1:], *found[1]), (*expected[0][1:], *expected[1]), strict=True):
        assert torch.equal(ours, theirs)


def test_no_second_derivative_is_invented(head):
    case = head(6, 8, 50)
    hidden = case.hidden.clone().requires_grad_()
    arguments = [getattr(case, name) for name in ("target", "old_logprob", "row", "advantage", "token_weight", "agent")]
    result = linear_policy_loss(hidden, case.weight, *arguments, num_agents=2, options=PolicyLossOptions())
    logprob, _ = linear_logprob(hidden, case.weight, case.target)
    one = torch.ones((), requires_grad=True)
    for loss in (result.loss, logprob.sum()):
        (first,) = torch.autograd.grad(loss * one, hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.square().sum().backward()


def test_checkpointing_around_main_grad_is_refused(head):
    case = head(6, 8, 50)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    weight.main_grad = torch.zeros(50, 8)
    arguments = [getattr(case, name) for name in ("target", "old_logprob", "row", "advantage", "token_weight", "agent")]

    def loss(hidden):
        return linear_policy_loss(hidden, weight, *arguments, num_agents=2, options=PolicyLossOptions()).loss

    formed = torch.utils.checkpoint.checkpoint(loss, hidden, use_reentrant=False)
    with pytest.raises(RuntimeError, match="formed again in a backward pass"):
        formed.backward()
