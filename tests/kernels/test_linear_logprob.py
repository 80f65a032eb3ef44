"""The head against float64 autograd, and its promises: exact zeros, one weighted sum, three products, no whole logits."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from drmas_kernels import _head_chunks, numerics
from drmas_kernels import linear_logprob as module
from drmas_kernels.backend import use
from drmas_kernels.linear_logprob import linear_logprob, linear_logprob_reference, linear_policy_loss
from drmas_kernels.policy_loss import PolicyLossOptions
from drmas_kernels.spec import KernelSpec

BONUS = PolicyLossOptions(clip_low=0.2, clip_high=0.28, dual_clip=3.0, entropy_bonus=0.05)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("vocabulary", [1000, 1001, 1280, 2432])
@pytest.mark.parametrize("options", [PolicyLossOptions(), BONUS], ids=["plain", "bonus"])
def test_loss_and_gradients_agree_with_float64_autograd(head, check, vocabulary, options):
    case = head(48, 64, vocabulary)
    _agree(case, check, options)


@pytest.mark.parametrize("vocabulary", [49152, 151936])
def test_vocabularies_of_real_models(head, check, vocabulary):
    _agree(head(30, 8, vocabulary), check, BONUS)


def _agree(case, check, options):
    result, dhidden, dweight = case.run(options, chunk=20)
    loss, logprob, _, expected_dhidden, expected_dweight = case.oracle(options)
    check(result.loss, loss, numerics.LOSS)
    check(result.logprob, logprob, numerics.LOGPROB)
    check(dhidden, expected_dhidden, numerics.GRADIENT)
    check(dweight, expected_dweight, numerics.GRADIENT)
    others = torch.ones(case.weight.shape[0], dtype=torch.bool)
    others[case.target] = False
    _norms_agree(dweight[others], expected_dweight[others], 1e-5)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("offset", [-200.0, 100.0])
def test_a_common_offset_of_the_logits_costs_no_digits(head, check, offset):
    case = head(32, 64, 1280, offset=offset)
    logprob, entropy = case.scored()
    _, expected, expected_entropy, dhidden, _ = case.oracle(BONUS)
    check(logprob, expected, numerics.LOGPROB)
    check(entropy, expected_entropy, numerics.ENTROPY)
    # The offset's own feature has a gradient that cancels to nothing; the others must be as good as ever.
    check(case.run(BONUS)[1][:, 1:], dhidden[:, 1:], numerics.GRADIENT)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("temperature", [0.5, 1.7, torch.linspace(0.3, 2.0, 40)], ids=["0.5", "1.7", "per-token"])
@pytest.mark.parametrize("options", [PolicyLossOptions(), BONUS], ids=["plain", "bonus"])
def test_temperature_divides_the_logits(head, check, temperature, options):
    case = head(40, 32, 1001)
    result, dhidden, dweight = case.run(options, temperature=temperature, chunk=16)
    loss, logprob, entropy, expected_dhidden, expected_dweight = case.oracle(options, temperature=temperature)
    check(result.loss, loss, numerics.LOSS)
    check(result.logprob, logprob, numerics.LOGPROB)
    check(case.scored(temperature=temperature)[1], entropy, numerics.ENTROPY)
    check(dhidden, expected_dhidden, numerics.GRADIENT)
    check(dweight, expected_dweight, numerics.GRADIENT)


@pytest.mark.usefixtures("backend")
def test_one_token(head, check):
    case = head(1, 16, 50)
    result, dhidden, dweight = case.run(BONUS)
    loss, _, _, expected_dhidden, expected_dweight = case.oracle(BONUS)
    check(result.loss, loss, numerics.LOSS)
    check(dhidden, expected_dhidden, numerics.GRADIENT)
    check(dweight, expected_dweight, numerics.GRADIENT)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [0, 6])
def test_I4_a_batch_without_weight_gives_exact_zeros(head, tokens):
    case = head(tokens, 16, 50)
    case = case.but(token_weight=torch.zeros(tokens), hidden=torch.full((tokens, 16), torch.nan))
    result, dhidden, dweight = case.run(BONUS)
    assert result.loss.item() == 0.0
    assert torch.equal(result.logprob, torch.zeros(tokens))
    assert torch.equal(dhidden, torch.zeros(tokens, 16))
    assert torch.equal(dweight, torch.zeros(50, 16))
    assert result.metrics.tokens.tolist() == [0.0, 0.0]
    assert result.metrics.per_token(["solver", "verifier"]) == {}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("options", [PolicyLossOptions(), BONUS], ids=["plain", "bonus"])
def test_I4_garbage_in_tokens_of_weight_zero_changes_no_bit(head, options):
    case = head(30, 16, 200)
    ignored = torch.zeros(30, dtype=torch.bool)
    ignored[[0, 7, 8, 29]] = True
    dirty = case.but(hidden=case.hidden.clone(), target=case.target.clone(), old_logprob=case.old_logprob.clone())
    dirty.hidden[0], dirty.hidden[7], dirty.hidden[8] = torch.nan, torch.inf, -torch.inf
    dirty.target[ignored], dirty.old_logprob[ignored] = -100, torch.nan
    dirty.token_weight = case.token_weight.masked_fill(ignored, 0.0)
    kept = case.but(
        **{name: getattr(case, name)[~ignored] for name in ("hidden", "target", "old_logprob", "row", "token_weight")}
    )

    result, dhidden, dweight = dirty.run(options, chunk=8)
    expected, expected_dhidden, expected_dweight = kept.run(options, chunk=8)
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(result.logprob[~ignored], expected.logprob)
    assert torch.equal(result.logprob[ignored], torch.zeros(4))
    assert torch.equal(dhidden[~ignored], expected_dhidden)
    assert torch.equal(dhidden[ignored], torch.zeros(4, 16))
    assert torch.equal(dweight, expected_dweight)
    assert torch.equal(result.metrics.loss, expected.metrics.loss)
    assert torch.equal(result.metrics.gap_max, expected.metrics.gap_max)


@pytest.mark.usefixtures("backend")
def test_a_hidden_row_that_is_not_finite_shows_in_the_loss(head):
    case = head(8, 16, 50)
    case.hidden[3, 2] = torch.nan
    assert case.run()[0].loss.isnan()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("options", [PolicyLossOptions(), BONUS], ids=["plain", "bonus"])
def test_I4_padded_columns_never_enter(head, options):
    case = head(20, 16, 1001)
    padding = torch.full((23, 16), torch.nan)
    padding[1:3] = torch.inf
    padded = case.but(weight=torch.cat([case.weight, padding]))
    result, dhidden, dweight = padded.run(options, vocab_size=1001)
    expected, expected_dhidden, expected_dweight = case.run(options)
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(result.logprob, expected.logprob)
    assert torch.equal(dhidden, expected_dhidden)
    assert torch.equal(dweight[:1001], expected_dweight)
    assert torch.equal(dweight[1001:], torch.zeros(23, 16))


@given(cuts=st.lists(st.integers(0, 40), max_size=4), chunk=st.integers(1, 41))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_I5_the_loss_is_one_sum_over_any_split(head, check, cuts, chunk):
    case = head(40, 16, 300)
    whole, dhidden, dweight = case.run(BONUS)
    loss, pieces, dweights, metrics = 0.0, [], torch.zeros_like(dweight), None
    edges = [0, *sorted(cuts), 40]
    names = ("hidden", "target", "old_logprob", "row", "token_weight")
    for start, end in pairwise(edges):
        part = case.but(**{name: getattr(case, name)[start:end] for name in names})
        result, piece, part_dweight = part.run(BONUS, chunk=chunk)
        loss, dweights = loss + result.loss, dweights + part_dweight
        pieces.append(piece)
        metrics = result.metrics if metrics is None else metrics.merge(result.metrics)
    check(loss, whole.loss, numerics.LOSS)
    check(torch.cat(pieces), dhidden, numerics.GRADIENT)
    check(dweights, dweight, numerics.GRADIENT)
    check(metrics.loss, whole.metrics.loss, numerics.LOSS)
    check(metrics.ratio_min, whole.metrics.ratio_min, numerics.LOGPROB)
    assert torch.equal(metrics.tokens, whole.metrics.tokens)
    assert torch.equal(metrics.clip_high, whole.metrics.clip_high)


@pytest.mark.usefixtures("backend")
def test_the_same_inputs_give_the_same_bits(head):
    case = head(40, 32, 700)
    first, second = case.run(BONUS, chunk=16), case.run(BONUS, chunk=16)
    assert torch.equal(first[0].loss, second[0].loss)
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("options", [PolicyLossOptions(), BONUS], ids=["plain", "bonus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_sure_token_keeps_its_digits(head, check, options, dtype):
    """p = 0.999 on the targets: formed from bf16 probabilities, their elements would be wrong by all of their size."""
    case = head(8, 16, 1001, scale=0.0, dtype=dtype).but(target=torch.arange(8), old_logprob=None)
    case.hidden[:, 0] = 1.0
    case.weight[:8] = torch.eye(8, 16, dtype=dtype)
    case.hidden[:, :8] = torch.eye(8, dtype=dtype) * 13.875
    _, _, dweight = case.but(token_weight=torch.ones(8)).run(options)
    _, logprob, _, _, expected = case.but(token_weight=torch.ones(8)).oracle(options)
    assert float(logprob.max()) > -2e-3
    rel = 1e-3 if dtype == torch.float32 else 2**-7
    relative = numerics.Tolerance(5e-5, rel, "the sum of e^u may be off by 8 ulp of 1, times a slope of 3 and a state of 14")
    check(dweight[:8].diagonal(), expected[:8].diagonal(), relative)


@pytest.mark.usefixtures("backend")
def test_on_policy_with_advantage_one_is_supervised_learning(head, check):
    case = head(30, 16, 200)
    case = case.but(old_logprob=None, advantage=torch.ones(5))
    result, dhidden, dweight = case.run()
    hidden, weight = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    nll = torch.nn.functional.cross_entropy(hidden @ weight.t(), case.target, reduction="none")
    (case.token_weight.double() * nll).sum().backward()
    check(dhidden, hidden.grad, numerics.GRADIENT)
    check(dweight, weight.grad, numerics.GRADIENT)
    check(result.loss, -case.token_weight.double().sum(), numerics.LOSS)
    assert result.metrics.ratio_min.tolist() == result.metrics.ratio_max.tolist() == [1.0, 1.0]
    assert result.metrics.gap_max.tolist() == [0.0, 0.0]


@pytest.mark.usefixtures("backend")
def test_bfloat16_inputs_are_widened_exactly(head, check):
    case = head(40, 64, 1280, dtype=torch.bfloat16)
    result, dhidden, dweight = case.run(BONUS, chunk=16)
    loss, logprob, _, expected_dhidden, expected_dweight = case.oracle(BONUS)
    assert dhidden.dtype == dweight.dtype == torch.bfloat16
    check(result.loss, loss, numerics.LOSS)
    check(result.logprob, logprob, numerics.LOGPROB)
    check(dhidden, expected_dhidden, numerics.GRADIENT_BF16)
    check(dweight, expected_dweight, numerics.GRADIENT_BF16)
    _norms_agree(dhidden, expected_dhidden, numerics.GRADIENT_BF16_NORM)
    others = torch.ones(1280, dtype=torch.bool)
    others[case.target] = False
    _norms_agree(dweight[~others], expected_dweight[~others], numerics.GRADIENT_BF16_NORM)
    _norms_agree(dweight[others], expected_dweight[others], numerics.GRADIENT_BF16_NORM)


def _norms_agree(actual, expected, share):
    """Whatever the size of the entries, unlike an absolute tolerance."""
    assert (actual - expected).norm() <= share * expected.norm()


def test_bfloat16_is_widened_in_blocks(head, check, monkeypatch):
    monkeypatch.setattr("drmas_kernels._head_chunks._WIDEN_BYTES", 4 * 64 * 300)
    case = head(24, 64, 1001, dtype=torch.bfloat16)
    result, dhidden, _ = case.run()
    loss, logprob, _, expected_dhidden, _ = case.oracle()
    check(result.loss, loss, numerics.LOSS)
    check(result.logprob, logprob, numerics.LOGPROB)
    check(dhidden, expected_dhidden, numerics.GRADIENT_BF16)


def test_sliced_and_transposed_inputs(head):
    case = head(20, 16, 300)
    wide = torch.zeros(20, 40)
    wide[:, 3:19] = case.hidden
    strided = case.but(hidden=wide[:, 3:19], weight=case.weight.t().contiguous().t())
    hidden, weight = strided.hidden.requires_grad_(), strided.weight.requires_grad_()
    arguments = [getattr(case, name) for name in ("target", "old_logprob", "row", "advantage", "token_weight", "agent")]
    result = linear_policy_loss(hidden, weight, *arguments, num_agents=2, options=BONUS)
    result.loss.backward()
    expected, _, dweight = case.run(BONUS)
    torch.testing.assert_close(result.loss, expected.loss)
    torch.testing.assert_close(weight.grad, dweight)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tied", [False, True])
def test_the_weight_gradient_goes_into_main_grad(head, check, device, tied):
    case = head(20, 16, 300)
    weight = case.weight.clone().to(device).requires_grad_()
    weight.main_grad = torch.full((300, 16), 0.25, device=device)
    weight.zero_out_wgrad = tied
    result = linear_policy_loss(case.hidden.to(device), weight, *case.arguments(), num_agents=2, options=BONUS, grad_scale=0.5)
    (result.loss * 0.5).backward(retain_graph=True)
    check(weight.main_grad.cpu() - 0.25, 0.5 * case.oracle(BONUS)[4], numerics.GRADIENT)
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    with pytest.raises(RuntimeError, match="a second backward of this loss"):
        (result.loss * 0.5).backward()
    if tied:
        assert not weight.grad.any()


def test_I4_a_vocabulary_of_any_size_takes_the_kernels_for_aligned_rows(head, triton_backend, monkeypatch):
    launched, launch = [], KernelSpec.launch
    monkeypatch.setattr(KernelSpec, "launch", lambda spec, *rest: launched.append(spec.name) or launch(spec, *rest))
    head(4, 16, 101, dtype=torch.bfloat16).run(BONUS)
    assert "logits_gradient_fp32_bf16_bonus_finite" in launched
    assert not [name for name in launched if "unaligned" in name]


def test_main_grad_must_be_float32(head):
    case = head(4, 16, 30)
    weight = case.weight.clone().requires_grad_()
    weight.main_grad = torch.zeros(30, 16, dtype=torch.bfloat16)
    arguments = [getattr(case, name) for name in ("target", "old_logprob", "row", "advantage", "token_weight", "agent")]
    with pytest.raises(ValueError, match=r"main_grad is torch\.bfloat16 \[30, 16\] on cpu; expected float32 \[30, 16\] on cpu"):
        linear_policy_loss(case.hidden, weight, *arguments, num_agents=2, options=BONUS)


@pytest.mark.usefixtures("backend")
def test_another_upstream_gradient_than_declared_is_refused(head, check, device):
    case = head(10, 16, 60)
    check(case.run(BONUS, grad_scale=0.25)[1], 0.25 * case.oracle(BONUS)[3], numerics.GRADIENT)
    if device != "cpu":
        return  # there the assertion on the device ends the process's use of it
    hidden = case.hidden.requires_grad_()
    result = linear_policy_loss(hidden, case.weight, *case.arguments(), num_agents=2, options=BONUS, grad_scale=0.5)
    with pytest.raises(ValueError, match=r"arriving at the policy loss is 1\.0.*grad_scale=0\.5"):
        result.loss.backward()
    assert hidden.grad is None


@pytest.fixture
def opened(monkeypatch):
    """Calls the functions behind the operators, which dispatch modes can't look into."""
    for name in ("_statistics", "_gradients", "_loss_and_gradients"):
        monkeypatch.setattr(module, name, getattr(module, name)._init_fn)


@contextmanager
def counted_flops():
    """The counter doesn't know the in-place product."""

    def addmm(out, first, second, **_):
        return 2 * first[0] * first[1] * second[1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm}) as counter:
        yield counter


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_flops_are_three_products_over_tokens_with_weight(head, share):
    case = head(40, 16, 300)
    kept = int(40 * share)
    case.token_weight[kept:] = 0.0
    with counted_flops() as counter:
        case.run(chunk=16)
    assert counter.get_total_flops() == numerics.linear_policy_loss_cost(kept, 16, 300).flops
    with counted_flops() as counter:
        linear_logprob(case.hidden, case.weight, case.target, chunk=16)
    assert counter.get_total_flops() == numerics.linear_logprob_cost(40, 16, 300).flops
    with counted_flops() as counter:
        linear_logprob(case.hidden.requires_grad_(), case.weight.requires_grad_(), case.target)[0].sum().backward()
    assert counter.get_total_flops() == 8 * 40 * 16 * 300  # computed again


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("options", [PolicyLossOptions(), BONUS], ids=["plain", "bonus"])
def test_no_tensor_is_larger_than_a_chunk_of_logits(head, options):
    case = head(400, 4, 500)
    with use("torch"), _Largest() as seen:
        case.run(options, chunk=32)
    assert seen.numel == 32 * 500


@pytest.mark.usefixtures("opened")
def test_the_default_chunk_fits_its_buffer(head, monkeypatch):
    monkeypatch.setitem(_head_chunks.CHUNK_BYTES, "cpu", 4 * 500 * 50)
    case = head(120, 4, 500)
    with use("torch"), _Largest() as seen:
        case.run()
    assert seen.numel == 40 * 500  # 120 tokens in three even pieces of at most 50


@pytest.mark.usefixtures("opened")
def test_no_gradients_are_formed_where_none_are_wanted(head):
    case = head(20, 16, 300)
    arguments = [getattr(case, name) for name in ("target", "old_logprob", "row", "advantage", "token_weight", "agent")]
    hidden = case.hidden.requires_grad_()
    with torch.no_grad(), counted_flops() as counter:
        result = linear_policy_loss(hidden, case.weight, *arguments, num_agents=2, options=BONUS)
    assert counter.get_total_flops() == 2 * 20 * 16 * 300
    assert not result.loss.requires_grad
    with counted_flops() as counter:
        linear_policy_loss(hidden, case.weight, *arguments, num_agents=2, options=BONUS).loss.backward()
    assert counter.get_total_flops() == 4 * 20 * 16 * 300  # the weight is frozen


def test_the_reference_agrees_with_the_chunks(head, check):
    case = head(20, 16, 300)
    case.target %= 290
    logprob, entropy = linear_logprob(case.hidden, case.weight, case.target, vocab_size=290, chunk=7, temperature=0.7)
    expected = linear_logprob_reference(
        case.hidden.double(), case.weight.double(), case.target, vocab_size=290, temperature=0.7
    )
    check(logprob, expected[0], numerics.LOGPROB)
    check(entropy, expected[1], numerics.ENTROPY)
    assert float(logprob.max()) <= 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.tensor([0, 1, 60])}, "target runs from 0 to 60; expected 0 to 59"),
        ({"target": torch.tensor([0, -1, 5])}, "target runs from -1 to 5"),
        ({"target": torch.tensor([0, 1, 2], dtype=torch.int32)}, "target is torch.int32"),
        ({"row": torch.tensor([0, 1, 5])}, "row runs from 0 to 5; expected 0 to 4"),
        ({"agent": torch.tensor([0, 1, 2, 0, 0])}, "agent runs from 0 to 2; expected 0 to 1"),
        ({"old_logprob": torch.zeros(2)}, r"old_logprob has shape \[2\]; expected \[3\]"),
        ({"token_weight": torch.tensor([0.1, torch.nan, 0.1])}, "token_weight holds a value that is not finite"),
        ({"weight": torch.zeros(60, 8, dtype=torch.bfloat16)}, "expected both float32 or both bfloat16"),
        ({"weight": torch.zeros(60, 9)}, r"hidden \[3, 8\] and weight \[60, 9\]"),
    ],
)
def test_bad_arguments_are_named(head, change, message):
    case = head(3, 8, 60).but(row=torch.tensor([0, 1, 2])).but(**change)
    with pytest.raises(ValueError, match=message):
        case.run()


@pytest.mark.parametrize(
    "setting",
    [
        {"chunk": 0},
        {"grad_scale": float("nan")},
        {"temperature": 0.0},
        {"temperature": torch.tensor([1.0, -1.0, 1.0])},
        {"vocab_size": 0},
        {"vocab_size": 61},
        {"vocab_start": 5},
    ],
)
def test_bad_settings_are_named(head, setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        head(3, 8, 60).run(**setting)


def test_another_device_is_named(head):
    case = head(3, 8, 60)
    with pytest.raises(ValueError, match="target is on meta; expected the device of hidden, cpu"):
        linear_logprob(case.hidden, case.weight, torch.zeros(3, dtype=torch.int64, device="meta"))
