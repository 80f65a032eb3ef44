"""The kernel that takes the logits' statistics from hidden states and weights, against float64 of the same bf16 inputs."""

import pytest
import torch

from drmas_kernels import numerics
from tests.kernels import interpreter

kernel = interpreter.load("drmas_kernels._head_triton")

SMALL = kernel.statistics_spec("head_small", "sm_90", (16, 16, 16), num_warps=4, num_stages=2, tma=True, halve=True)
"""Small enough to interpret many tiles, splits and groups of row tiles."""
COMPARING = kernel.statistics_spec("head_comparing", "sm_100", (16, 32, 16), num_warps=4, num_stages=2, tma=True, halve=False)
POINTERS = kernel.statistics_spec("head_pointers", "sm_80", (16, 64, 16), num_warps=4, num_stages=2, tma=False, halve=True)
SHIPPED = {spec.name: spec for spec in kernel.SPECS if spec.name != "head_merge"}


def expected(hidden, weight, column, inverse=1.0):
    """(m, s, q, z_y) in float64 by the formulas."""
    inverse = torch.as_tensor(inverse, dtype=torch.float64, device=hidden.device).expand(hidden.shape[0])
    logits = (hidden.double() @ weight.double().t()) * inverse[:, None]
    top = logits.max(1).values
    shifted = logits - top[:, None]
    inside = (column >= 0) & (column < weight.shape[0])
    chosen = logits.gather(1, column.long().clamp(0, weight.shape[0] - 1)[:, None]).squeeze(1)
    chosen = torch.where(inside, chosen, -torch.inf)
    return torch.stack([top, shifted.exp().sum(1), (shifted.exp() * shifted).sum(1), chosen], 1)


def finished(statistics):
    """Log-prob and entropy."""
    top, total, moment, chosen = statistics.double().unbind(1)
    return chosen - top - total.log(), total.log() - moment / total


@pytest.fixture
def agree(check):
    def agree(statistics, hidden, weight, column, inverse=1.0):
        oracle = expected(hidden, weight, column, inverse)
        inside = oracle[:, 3] > -torch.inf
        tolerance = numerics.logprob_tolerance(float(oracle[inside][:, [0, 3]].abs().amax()), hidden.shape[1])
        logprob, entropy = finished(statistics)
        assert statistics.shape == (hidden.shape[0], 4)
        assert statistics.dtype == torch.float32
        check(statistics[:, 0], oracle[:, 0], tolerance)
        check(logprob[inside], finished(oracle)[0][inside], tolerance)
        check(entropy, finished(oracle)[1], numerics.ENTROPY)
        assert torch.equal(statistics[~inside, 3], torch.full_like(statistics[~inside, 3], -torch.inf))
        assert (statistics[:, 3] <= statistics[:, 0]).all()
        assert (statistics[:, 1] >= 1).all()
        assert (logprob <= 1e-6).all()

    return agree


@pytest.fixture
def case(head, device):
    """Hidden, weight and target of a random head in bf16."""

    def case(tokens, width, vocabulary, **settings):
        made = head(tokens, width, vocabulary, dtype=torch.bfloat16, **settings)
        return made.hidden.to(device), made.weight.to(device), made.target.to(device)

    return case


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_agrees_with_float64(name, case, agree):
    if interpreter.DEVICE == "cuda" and SHIPPED[name] is not kernel._spec_for(torch.device("cuda")):
        pytest.skip("made for another generation")
    hidden, weight, target = case(48, 128, 1000, scale=0.15)
    agree(kernel.head_statistics(hidden, weight, target, spec=SHIPPED[name]), hidden, weight, target)


@pytest.mark.parametrize("columns", [1001, 1280, 2432])
@pytest.mark.parametrize("offset", [None, -200.0, 100.0])
def test_offsets_and_ragged_vocabularies_agree_with_float64(columns, offset, case, agree):
    hidden, weight, target = case(20, 40, columns, offset=offset)
    target[:3] = torch.tensor([0, columns - 1, columns - 17])
    agree(kernel.head_statistics(hidden, weight, target, spec=SMALL), hidden, weight, target)


@pytest.mark.parametrize("spec", [SMALL, COMPARING, POINTERS], ids=lambda spec: spec.name)
def test_every_column_can_be_the_target(spec, case, device):
    """The logit of a column is its number."""
    columns = 75
    hidden = torch.ones(columns, 8, dtype=torch.bfloat16, device=device)
    steps = torch.arange(columns, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(columns, 8, dtype=torch.bfloat16, device=device)
    weight[:, 3] = steps
    got = kernel.head_statistics(hidden, weight, torch.arange(columns, device=device), spec=spec)
    assert torch.equal(got[:, 3], steps.float())
    assert torch.equal(got[:, 0], torch.full_like(got[:, 0], columns - 1.0))


@pytest.mark.parametrize("spec", [SMALL, COMPARING, POINTERS], ids=lambda spec: spec.name)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (17, 8), (33, 72)])
def test_no_size_is_a_multiple_of_a_tile(spec, tokens, width, case, agree):
    hidden, weight, target = case(tokens, width, 131)
    agree(kernel.head_statistics(hidden, weight, target, spec=spec), hidden, weight, target)


def test_groups_of_row_tiles_cover_every_token_once(case, agree):
    hidden, weight, target = case(150, 16, 70)
    agree(kernel.head_statistics(hidden, weight, target, spec=SMALL), hidden, weight, target)


def test_temperatures(case, agree, device):
    hidden, weight, target = case(20, 40, 300)
    halved = kernel.head_statistics(hidden, weight, target, 2.0, spec=SMALL)
    agree(halved, hidden, weight, target, 2.0)
    assert torch.equal(
        halved, kernel.head_statistics(hidden, weight, target, torch.full((20,), 2.0, device=device), spec=SMALL)
    )
    each = torch.rand(20, generator=torch.Generator().manual_seed(1)).to(device) * 2 + 0.25
    agree(kernel.head_statistics(hidden, weight, target, each, spec=SMALL), hidden, weight, target, each)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rest", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("spec", [SMALL, COMPARING, POINTERS], ids=lambda spec: spec.name)
def test_columns_past_the_bound_never_enter(spec, rest, case, agree):
    """Logits of about -200: a column that entered with 0 would take all the probability."""
    hidden, weight, target = case(20, 16, 160, offset=-200.0)
    target = target % 137
    weight[137:] = rest
    got = kernel.head_statistics(hidden, weight, target, columns=137, spec=spec)
    agree(got, hidden, weight[:137], target)
    assert torch.equal(got, kernel.head_statistics(hidden, weight[:137].clone(), target, spec=spec))


@pytest.mark.parametrize("spec", [SMALL, COMPARING, POINTERS], ids=lambda spec: spec.name)
def test_columns_elsewhere_give_minus_infinity(spec, case, agree):
    hidden, weight, target = case(20, 16, 160)
    column = torch.tensor([-1, -7, -137, 137, 140, 159, 160, 10**12, -(2**32) + 5, 2**32 + 5], device=target.device)
    got = kernel.head_statistics(hidden[:10], weight, column, columns=137, spec=spec)
    assert torch.equal(got[:, 3], torch.full_like(got[:, 3], -torch.inf))
    assert torch.equal(got[:, :3], kernel.head_statistics(hidden[:10], weight, target[:10], columns=137, spec=spec)[:, :3])


def test_shards_merge_to_the_whole(case, check):
    """As ranks merge them: the second shard is padded, one shard has the target."""
    hidden, weight, target = case(20, 40, 500, scale=0.2)
    padded = torch.cat([weight, torch.full((76, 40), torch.nan, dtype=weight.dtype, device=weight.device)])
    parts = [
        kernel.head_statistics(
            hidden, padded[start : start + 288], target - start, columns=min(288, 500 - start), spec=SMALL
        ).double()
        for start in (0, 288)
    ]
    top = torch.maximum(parts[0][:, 0], parts[1][:, 0])
    total = sum((part[:, 0] - top).exp() * part[:, 1] for part in parts)
    moment = sum((part[:, 0] - top).exp() * (part[:, 2] + (part[:, 0] - top) * part[:, 1]) for part in parts)
    chosen = torch.maximum(parts[0][:, 3], parts[1][:, 3])
    assert all(bool((part[:, 3] == -torch.inf).any()) for part in parts)
    got, want = finished(torch.stack([top, total, moment, chosen], 1)), finished(expected(hidden, weight, target))
    check(got[0], want[0], numerics.logprob_tolerance(20.0, 40))
    check(got[1], want[1], numerics.ENTROPY)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("spec", [SMALL, COMPARING, POINTERS], ids=lambda spec: spec.name)
def test_a_token_has_the_same_bits_in_any_batch(spec, case):
    """Interpreted, products are numpy's, where a row's rounding depends on its place: there they are exact."""
    hidden, weight, target = case(40, 48, 200, offset=None if interpreter.DEVICE == "cuda" else 3.0)
    whole = kernel.head_statistics(hidden, weight, target, spec=spec)
    assert torch.equal(whole, kernel.head_statistics(hidden, weight, target, spec=spec))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2)).to(target.device)
    assert torch.equal(whole[order], kernel.head_statistics(hidden[order], weight, target[order], spec=spec))
    assert torch.equal(whole[5:6], kernel.head_statistics(hidden[5:6], weight, target[5:6], spec=spec))
    others = hidden.clone()
    others[:7], others[8:] = torch.nan, 3.0
    assert torch.equal(whole[7], kernel.head_statistics(others, weight, target, spec=spec)[7])


def test_the_splits_follow_from_the_columns_and_cover_them_once():
    for spec in SHIPPED.values():
        pair = 2 * spec.constants["BLOCK_V"]
        for columns in [1, pair, pair + 1, 1000, 16 * pair, 16 * pair + 1, 18992, 37984, 75968, 151936, 262144]:
            splits, each = kernel.splits_of(columns, spec)
            assert 1 <= splits <= 16
            assert (splits - 1) * each * pair < columns <= splits * each * pair


def test_a_peaked_token_has_no_positive_log_prob(case, agree, device):
    """The target has nearly all the probability, at logits whose spacing in fp32 is far above the bound."""
    hidden, weight, _ = case(16, 16, 100, offset=200.0)
    target = (hidden.double() @ weight.double().t()).argmax(1)
    cold = torch.linspace(0.7, 60, 16, device=device)
    got = kernel.head_statistics(hidden, weight, target, cold, spec=SMALL)
    agree(got, hidden, weight, target, cold)
    assert torch.equal(got[:, 3], got[:, 0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_token_spoils_itself_only(case, agree):
    hidden, weight, target = case(20, 16, 100)
    hidden[4, 2], hidden[9, 1], hidden[11, 0] = torch.nan, torch.inf, -torch.inf
    got = kernel.head_statistics(hidden, weight, target, spec=SMALL)
    good = torch.ones(20, dtype=torch.bool, device=target.device)
    good[[4, 9, 11]] = False
    agree(got[good], hidden[good], weight, target[good])
    assert got[~good, 1].isnan().all()


def test_no_tokens_and_no_columns(case, device):
    hidden, weight, target = case(5, 16, 100)
    assert kernel.head_statistics(hidden[:0], weight, target[:0]).shape == (0, 4)
    empty = torch.tensor([[-1e30, 0.0, 0.0, -torch.inf]], device=device).expand(5, 4)
    assert torch.equal(kernel.head_statistics(hidden, weight, target, columns=0), empty)
    assert torch.equal(kernel.head_statistics(hidden, weight[:0], target), empty)


@pytest.mark.parametrize("spec", [SMALL, POINTERS], ids=lambda spec: spec.name)
def test_views_and_slices_are_read_where_they_are(spec, case, agree):
    hidden, weight, target = case(37, 64, 140)
    parts = (hidden[3::2, 8:32], weight[5:, 16:40])
    column = torch.arange(74, device=target.device, dtype=torch.int32)[3:71:4]
    inverse = torch.linspace(0.5, 2, 34, device=target.device)[::2]
    agree(kernel.head_statistics(*parts, column, inverse, spec=spec), *parts, column, inverse)


def test_what_the_kernel_cannot_read_is_named(device):
    def made(rows, width, dtype=torch.bfloat16):
        return torch.zeros(rows, width, dtype=dtype, device=device)

    assert kernel.unsupported(made(3, 24), made(5, 24)) is None
    for hidden, weight, word in [
        (made(3, 16, torch.float32), made(5, 16, torch.float32), "hidden is torch.float32"),
        (made(3, 16), made(5, 16, torch.float16), "weight is torch.float16"),
        (made(3, 100), made(5, 100), "hidden's rows of 100 elements"),
        (made(3, 16), made(5, 20)[:, :16], "weight's rows of 16 elements"),
        (made(16, 3).t(), made(5, 16), "hidden .* strides"),
        (made(3, 0), made(5, 0), "hidden .* strides"),
    ]:
        with pytest.raises(ValueError, match=word):
            kernel.head_statistics(hidden, weight, torch.zeros(3, dtype=torch.int64, device=device))


def test_a_matrix_that_begins_between_multiples_of_16_bytes_is_copied(device):
    """Not refused: tensor-parallel ranks must take the same path, whatever their addresses."""
    wide = torch.randn(3, 24, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    column = torch.tensor([0, 4, 2], device=device)
    shifted = kernel.head_statistics(wide[:, 4:20], weight, column)
    assert torch.equal(shifted, kernel.head_statistics(wide[:, 4:20].contiguous(), weight, column))


def test_wrong_arguments_are_named(device):
    hidden, weight = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(5, 16, dtype=torch.bfloat16)
    column = torch.zeros(3, dtype=torch.int64)
    good = {"hidden": hidden, "weight": weight, "column": column}
    for changes, word in [
        ({"weight": weight[:, :8]}, "weight \\[5, 8\\]"),
        ({"hidden": hidden[0]}, "hidden \\[16\\]"),
        ({"column": column[:2]}, "column is torch.int64 \\[2\\]"),
        ({"column": column.float()}, "column is torch.float32"),
        ({"columns": 6}, "columns is 6"),
        ({"columns": -1}, "columns is -1"),
        ({"inverse_temperature": 0.0}, "inverse_temperature is 0"),
        ({"inverse_temperature": float("nan")}, "inverse_temperature is nan"),
        ({"inverse_temperature": torch.ones(4)}, "inverse_temperature is torch.float32 \\[4\\]"),
        ({"inverse_temperature": torch.ones(3).double()}, "inverse_temperature is torch.float64"),
        ({"column": column.to("meta")}, "column is on meta"),
        ({"weight": weight.to("meta")}, "weight is on meta"),
    ]:
        with pytest.raises(ValueError, match=word):
            kernel.head_statistics(**good | changes)
