"""Statistics of logits and the way back, by torch and by Triton, against float64 from the formulas."""

import math
from itertools import pairwise

import pytest
import torch

from drmas_kernels import numerics, vocab_statistics
from drmas_kernels.vocab_statistics import LOWEST, logprob_and_entropy, merge_parts
from tests.kernels import interpreter

_logits_triton = interpreter.load("drmas_kernels._logits_triton")

VOCABULARIES = [1000, 1001, 1280, 2432]
PAIRS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]


@pytest.fixture(params=[vocab_statistics, _logits_triton], ids=["torch", "triton"])
def kernels(request):
    return request.param


def random_logits(device, rows, columns, dtype=torch.float32, offset=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, columns, generator=generator) * 3 + offset).to(dtype)
    column = torch.randint(columns, (rows,), generator=generator)
    return logits.to(device), column.to(device)


def random_slopes(device, rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, generator=generator).to(device), torch.randn(rows, generator=generator).to(device)


def temperatures(device, rows):
    return {"one": None, "half": 2.0, "per row": torch.linspace(0.5, 2.0, rows, device=device).reciprocal()}


def scores(logits, column, inverse=None):
    """(log-prob, entropy) in float64."""
    inverse = torch.as_tensor(1.0 if inverse is None else inverse, dtype=torch.float64, device=logits.device)
    logprobs = (logits.double() * inverse.reshape(-1, 1)).log_softmax(1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(1)
    return logprobs.gather(1, column.long()[:, None]).squeeze(1), entropy


def gradient(logits, column, slope, bonus, inverse=None):
    """Of sum(slope log-prob - bonus entropy) by the logits, in float64."""
    leaf = logits.double().requires_grad_()
    logprob, entropy = scores(leaf, column, inverse)
    loss = (slope.double() * logprob).sum()
    if bonus is not None:
        loss = loss - (torch.as_tensor(bonus).double() * entropy).sum()
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", VOCABULARIES)
@pytest.mark.parametrize("offset", [0.0, 100.0, -200.0])
def test_statistics_agree_with_float64(kernels, device, check, dtype, columns, offset):
    logits, column = random_logits(device, 5, columns, dtype, offset)
    found = kernels.statistics(logits, column, None)
    logprob, entropy = logprob_and_entropy(found)
    expected, expected_entropy = scores(logits, column)
    check(logprob, expected, numerics.LOGPROB)
    check(entropy, expected_entropy, numerics.ENTROPY)
    assert torch.equal(found[:, 0], logits.float().amax(1))
    assert torch.equal(found[:, 3], logits.float().gather(1, column[:, None]).squeeze(1))
    assert float(logprob.max()) <= 1e-6


@pytest.mark.parametrize("kind", ["half", "per row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperatures(kernels, device, check, kind, dtype):
    logits, column = random_logits(device, 6, 1001, dtype, offset=30.0)
    inverse = temperatures(device, 6)[kind]
    logprob, entropy = logprob_and_entropy(kernels.statistics(logits, column.int(), inverse))
    expected, expected_entropy = scores(logits, column, inverse)
    check(logprob, expected, numerics.LOGPROB)
    check(entropy, expected_entropy, numerics.ENTROPY)


@pytest.mark.parametrize("pair", PAIRS, ids=["fp32", "fp32 to bf16", "bf16"])
@pytest.mark.parametrize("bonus", ["none", "number", "per row"])
def test_rows_of_several_blocks(kernels, device, check, pair, bonus):
    """Four tiles of 4096 columns are one block of the gradient's grid; the last tile is neither full nor whole groups."""
    logits, column = random_logits(device, 3, 20483, pair[0])
    column[0], column[1] = 20482, 16384
    slope, per_row = random_slopes(device, 3)
    bonus = {"none": None, "number": 0.3, "per row": per_row}[bonus]
    found = kernels.statistics(logits, column, None)
    logprob, entropy = logprob_and_entropy(found)
    expected, expected_entropy = scores(logits, column)
    check(logprob, expected, numerics.LOGPROB)
    check(entropy, expected_entropy, numerics.ENTROPY)
    out = kernels.to_dlogits(logits, found, column, slope, bonus, None, torch.empty_like(logits, dtype=pair[1]))
    tolerance = numerics.DLOGITS if pair[1] == torch.float32 else numerics.DLOGITS_BF16
    check(out, gradient(logits, column, slope, bonus), tolerance)


def test_a_target_elsewhere_has_no_logit_here(kernels, device):
    logits, _ = random_logits(device, 4, 1000)
    column = torch.tensor([-1, 1000, 2**40, 999], device=device)
    chosen = kernels.statistics(logits, column, None)[:, 3]
    assert torch.equal(chosen[:3], torch.full((3,), -torch.inf, device=device))
    assert chosen[3] == logits[3, 999]


def test_a_target_elsewhere_has_no_gradient_here(kernels, device, check):
    """Its columns are -slope p, and nothing is written where it would lie."""
    logits, _ = random_logits(device, 3, 1000)
    slope, _ = random_slopes(device, 3)
    column = torch.tensor([-1, 1000, 1003], device=device)
    found = kernels.statistics(logits, column, None)
    wide = torch.full((3, 1010), 7.0, device=device)
    out = kernels.to_dlogits(logits, found, column, slope, None, None, wide[:, :1000])
    check(out, -slope.double()[:, None] * logits.double().softmax(1), numerics.DLOGITS)
    assert (wide[:, 1000:] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_without_probability_add_nothing(kernels, device, check, dtype):
    logits, column = random_logits(device, 4, 1001, dtype)
    logits[0, 5:900] = -torch.inf
    logits[1, :] = -torch.inf
    logits[1, 7] = -3.0
    logits[2, 8:16] = -torch.inf
    column = torch.tensor([0, 7, 8, 3], device=device)
    found = kernels.statistics(logits, column, None)
    assert not found.isnan().any()
    logprob, entropy = logprob_and_entropy(found)
    expected, expected_entropy = scores(logits, column)
    here = torch.tensor([0, 1, 3], device=device)
    check(logprob[here], expected[here], numerics.LOGPROB)
    check(entropy, expected_entropy, numerics.ENTROPY)
    assert logprob[2] == -torch.inf
    slope, bonus = random_slopes(device, 4)
    out = kernels.to_dlogits(logits, found, column, slope, bonus, None, torch.empty_like(logits))
    assert not out.isnan().any()
    assert not out[logits.isneginf() & (torch.arange(1001, device=device) != column[:, None])].any()
    assert out[2, 8] == slope[2].to(dtype)
    found = kernels.statistics(torch.full((1, 1001), -torch.inf, dtype=dtype, device=device), column[:1], None)
    assert found.tolist() == [[torch.tensor(LOWEST).item(), 0.0, 0.0, -torch.inf]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_no_numbers_show(kernels, device, dtype):
    logits, column = random_logits(device, 3, 1000, dtype)
    logits[0, 17], logits[1, 999] = torch.nan, torch.inf
    logprob, entropy = logprob_and_entropy(kernels.statistics(logits, column, None))
    assert logprob.isfinite().tolist() == entropy.isfinite().tolist() == [False, False, True]
    assert logprob[0].isnan()


def layouts(device, rows, columns, dtype):
    """Name -> logits with column stride 1, each at other distances and addresses."""
    wide, _ = random_logits(device, rows, columns + 24, dtype)
    padded = torch.empty(rows, columns + 1, dtype=dtype, device=device)
    padded[:, :columns] = wide[:, :columns]
    return {
        "wide rows": wide[:, :columns],
        "from column 8": wide[:, 8 : columns + 8],
        "from column 1": wide[:, 1 : columns + 1],
        "odd distance": padded[:, :columns],
        "every other row": wide[::2, :columns],
        "expanded": wide[1:2, :columns].expand(rows, columns),
        "one row": wide[1:2, 3 : columns + 3],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(layouts("cpu", 2, 8, torch.float32)))
@pytest.mark.parametrize("columns", [1000, 1001])
def test_rows_at_any_distance_and_address(kernels, device, check, dtype, name, columns):
    logits = layouts(device, 4, columns, dtype)[name]
    rows = logits.shape[0]
    column = torch.arange(rows, device=device) * 300
    found = kernels.statistics(logits, column, None)
    check(logprob_and_entropy(found)[0], scores(logits, column)[0], numerics.LOGPROB)
    slope, bonus = random_slopes(device, rows)
    wide = torch.full((rows, columns + 9), 7.0, dtype=dtype, device=device)
    expected = gradient(logits, column, slope, bonus)
    tolerance = numerics.DLOGITS if dtype == torch.float32 else numerics.DLOGITS_BF16
    for first in (0, 8):
        out = wide[:, first : first + columns]
        check(kernels.to_dlogits(logits, found, column, slope, bonus, None, out), expected, tolerance)
    wide[:, 8 : columns + 8] = 7.0
    assert (wide[:, columns + 8 :] == 7.0).all()  # nothing was written beside the rows


def test_offsets_past_two_to_the_31(kernels, device, tmp_path, check):
    """Three rows at a distance of 2^30 + 8: a sparse file, of which only the pages that are used exist."""
    if device != "cpu":
        pytest.skip("the storage is a sparse file")
    distance, columns = 2**30 + 8, 1000
    size = 2 * distance + columns
    sparse = torch.from_file(str(tmp_path / "logits"), shared=True, size=size, dtype=torch.bfloat16)
    logits = sparse.as_strided((3, columns), (distance, 1))
    logits.copy_(random_logits(device, 3, columns, torch.bfloat16)[0])
    column = torch.tensor([5, 6, 7])
    slope, bonus = random_slopes(device, 3)
    expected, expected_gradient = scores(logits, column)[0], gradient(logits, column, slope, bonus)
    found = kernels.statistics(logits, column, None)
    check(logprob_and_entropy(found)[0], expected, numerics.LOGPROB)
    check(kernels.to_dlogits(logits, found, column, slope, bonus, None, logits), expected_gradient, numerics.DLOGITS_BF16)


def test_no_columns_and_no_rows(kernels, device):
    column = torch.tensor([0, 3], device=device)
    found = kernels.statistics(torch.empty(2, 0, device=device), column, None)
    assert found.tolist() == [[torch.tensor(LOWEST).item(), 0.0, 0.0, -torch.inf]] * 2
    empty = torch.empty(2, 0, device=device)
    assert kernels.to_dlogits(empty, found, column, found[:, 1], None, None, empty) is empty
    none = torch.empty(0, 1000, device=device)
    found = kernels.statistics(none, column[:0], None)
    assert found.shape == (0, 4)
    assert kernels.to_dlogits(none, found, column[:0], found[:, 1], None, None, none).shape == (0, 1000)


@pytest.mark.parametrize("pair", PAIRS, ids=["fp32", "fp32 to bf16", "bf16"])
@pytest.mark.parametrize("columns", [1000, 1001, 2432])
@pytest.mark.parametrize("with_bonus", [False, True])
@pytest.mark.parametrize("kind", ["one", "per row"])
def test_gradients_agree_with_float64_autograd(kernels, device, check, pair, columns, with_bonus, kind):
    logits, column = random_logits(device, 5, columns, pair[0], offset=-50.0)
    slope, bonus = random_slopes(device, 5)
    bonus, inverse = bonus if with_bonus else None, temperatures(device, 5)[kind]
    found = kernels.statistics(logits, column, inverse)
    out = torch.empty_like(logits, dtype=pair[1])
    assert kernels.to_dlogits(logits, found, column, slope, bonus, inverse, out) is out
    tolerance = numerics.DLOGITS if pair[1] == torch.float32 else numerics.DLOGITS_BF16
    check(out, gradient(logits, column, slope, bonus, inverse), tolerance)
    total = out.double().sum(1).abs()
    assert (total <= 2**-8 * out.double().abs().sum(1) + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bonus", [False, True])
def test_written_over_the_logits_the_bits_are_the_same(kernels, device, dtype, with_bonus):
    logits, column = random_logits(device, 4, 1001, dtype)
    slope, bonus = random_slopes(device, 4)
    bonus = bonus if with_bonus else None
    found = kernels.statistics(logits, column, None)
    assert torch.equal(found, kernels.statistics(logits, column, None))
    beside = kernels.to_dlogits(logits, found, column, slope, bonus, None, torch.empty_like(logits))
    again = kernels.to_dlogits(logits, found, column, slope, bonus, None, torch.empty_like(logits))
    assert torch.equal(beside, again)
    assert torch.equal(kernels.to_dlogits(logits, found, column, slope, bonus, None, logits), beside)


def test_a_row_does_not_depend_on_the_others(kernels, device):
    logits, column = random_logits(device, 6, 1000)
    whole = kernels.statistics(logits, column, None)
    assert torch.equal(kernels.statistics(logits[2:5], column[2:5], None), whole[2:5])


@pytest.mark.parametrize("with_bonus", [False, True])
def test_rows_without_slope_and_bonus_have_gradient_zero(kernels, device, with_bonus):
    logits, column = random_logits(device, 5, 1001)
    slope, bonus = random_slopes(device, 5)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    slope[:3], bonus[:3] = 0.0, 0.0
    bonus = bonus if with_bonus else None
    found = kernels.statistics(logits, column, None)
    out = kernels.to_dlogits(logits, found, column, slope, bonus, None, torch.full_like(logits, 7.0))
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert out[3:].all()


def test_the_gradient_of_sure_and_of_hopeless_tokens(kernels, device):
    """p = 0.999999 and p = 1e-30: 1 - p up to some ulp of the fp32 sum, where bf16 would leave nothing of it, and 1."""
    sure, hopeless = math.log(999 * 0.999999 / 1e-6), math.log(999 * 1e-30)
    logits = torch.zeros(2, 1000, device=device)
    logits[0, 4], logits[1, 4] = sure, hopeless
    column, slope = torch.tensor([4, 4], device=device), torch.ones(2, device=device)
    found = kernels.statistics(logits, column, None)
    expected = gradient(logits, column, slope, None)
    for bonus in (None, torch.zeros(2, device=device)):
        out = kernels.to_dlogits(logits, found, column, slope, bonus, None, torch.empty_like(logits))
        assert abs(float(out[0, 4] - expected[0, 4])) < 5e-7
        assert out[1, 4] == 1.0
        assert abs(float(out[1, 5] / expected[1, 5] - 1)) < 1e-5
        assert 0 > float(out[0, 5]) > -1.1e-9


def test_one_minus_p_is_exact_to_its_last_digits(kernels, device, check):
    """For the statistics as they are in fp32, also where ln p is 1e-7 or -80."""
    total = torch.tensor([1 + 2.0**-23, 1 + 2.0**-20, 1.001, 1.1, 1.4999, 1.5, 1.7, 3.0, 1e3, 1e6])
    below = torch.tensor([0.0, -1e-7, -1e-3, -0.2, -0.49, -0.51, -3.0, -80.0])
    total, below = torch.cartesian_prod(total, below).to(device).unbind(1)
    merged = torch.stack((torch.zeros_like(total), total, torch.zeros_like(total), below), 1)
    column, slope = torch.zeros_like(total, dtype=torch.int64), torch.ones_like(total)
    out = kernels.to_dlogits(below[:, None], merged, column, slope, None, None, torch.empty_like(below)[:, None])
    expected = -torch.expm1(below.double() - total.double().log())
    check(out.squeeze(1), expected, numerics.Tolerance(0.0, 1e-6, "a few ulp: nothing cancels"))


@pytest.mark.parametrize("cuts", [[0, 500, 1000], [0, 250, 500, 750, 1000], [0, 1000, 1000], [0, 0, 1000]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_merge_to_the_whole(kernels, device, check, cuts, dtype):
    logits, column = random_logits(device, 6, 1000, dtype)
    logits[3, :500], logits[4, 500:] = -torch.inf, -torch.inf
    logits[2, 500:] -= 300.0
    column[:5] = torch.tensor([0, 999, 500, 750, 250])
    slope, bonus = random_slopes(device, 6)
    edges = list(pairwise(cuts))
    parts = [kernels.statistics(logits[:, low:high], column - low, 0.5) for low, high in edges]
    merged = merge_parts(parts)
    logprob, entropy = logprob_and_entropy(merged)
    expected, expected_entropy = scores(logits, column, 0.5)
    check(logprob, expected, numerics.LOGPROB)
    check(entropy, expected_entropy, numerics.ENTROPY)
    out = torch.empty_like(logits)
    for low, high in edges:
        kernels.to_dlogits(logits[:, low:high], merged, column - low, slope, bonus, 0.5, out[:, low:high])
    tolerance = numerics.DLOGITS if dtype == torch.float32 else numerics.DLOGITS_BF16
    check(out, gradient(logits, column, slope, bonus, 0.5), tolerance)


def test_a_target_on_no_shard_has_log_prob_minus_infinity(kernels, device):
    logits, _ = random_logits(device, 1, 1000)
    column = torch.tensor([1000], device=device)
    merged = merge_parts(
        [kernels.statistics(logits[:, part], column - part.start, None) for part in (slice(0, 500), slice(500, 1000))]
    )
    assert logprob_and_entropy(merged)[0].tolist() == [-torch.inf]


@pytest.mark.triton
@pytest.mark.parametrize(
    ("logits", "out", "column", "message"),
    [
        (torch.zeros(8, 4).t(), torch.zeros(4, 8), torch.zeros(4), r"logits is torch\.float32 \[4, 8\] with strides \(1, 4\)"),
        (torch.zeros(4, 8).half(), torch.zeros(4, 8), torch.zeros(4), r"logits is torch\.float16"),
        (torch.zeros(4, 8), torch.zeros(8, 4).t(), torch.zeros(4), r"out is torch\.float32 \[4, 8\] with strides"),
        (
            torch.zeros(4, 8),
            torch.zeros(4, 9),
            torch.zeros(4),
            r"out is torch\.float32 \[4, 9\] for logits torch\.float32 \[4, 8\]",
        ),
        (
            torch.zeros(4, 8).bfloat16(),
            torch.zeros(4, 8),
            torch.zeros(4),
            r"out is torch\.float32 .* for logits torch\.bfloat16",
        ),
        (torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(3), r"column has shape \[3\]; expected \[4\]"),
    ],
)
def test_what_the_kernels_do_not_take_is_named(device, logits, out, column, message):
    rows = torch.zeros(4, device=device)
    with pytest.raises(ValueError, match=message):
        _logits_triton.to_dlogits(logits.to(device), rows, column.to(device).long(), rows, None, None, out.to(device))


@pytest.mark.triton
@pytest.mark.parametrize("pair", PAIRS[:2], ids=["fp32", "fp32-bf16"])
def test_a_caller_who_has_finite_logits_gets_the_same_bits(pair, device):
    logits, column = random_logits(device, 6, 5001)
    slope, bonus = random_slopes(device, 6)
    found = _logits_triton.statistics(logits, column, None)
    outs = [torch.empty_like(logits, dtype=pair[1]) for _ in range(2)]
    for finite, out in enumerate(outs):
        _logits_triton.to_dlogits(logits, found, column, slope, bonus, None, out, finite=bool(finite))
    assert torch.equal(*outs)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 0.9, 1.0, 1.1, 2.0])
def test_a_row_without_a_finite_logit_is_empty_at_any_temperature(kernels, device, temperature):
    """As a shard may be whose columns are all masked: what other ranks hold must survive the merge."""
    logits = torch.full((1, 1000), -torch.inf, device=device)
    largest, total, moment, chosen = kernels.statistics(logits, torch.tensor([3], device=device), 1 / temperature)[0].tolist()
    assert largest <= -1e29
    assert (total, moment, chosen) == (0.0, 0.0, -math.inf)
