"""The advantages by the Triton kernel: every rule against the row-by-row oracle, promises to the bit, the fixed point's edges.

What holds for both implementations alike runs with both.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from drmas_kernels import numerics
from drmas_kernels.backend import use
from drmas_kernels.segment_advantage import segment_advantage
from tests.kernels import interpreter
from tests.kernels.advantage_cases import oracle, run

FIELDS = ("mean", "std", "weight", "count", "minimum", "maximum")
SEGMENTATIONS = {
    "none": ("none", "none"),
    "mean": ([0, 0, 1, 0, 2, 2, 3, 0, 2], "none"),
    "std": ("none", [0, 0, 1, 0, 2, 2, 3, 0, 2]),
    "shared": ([0, 0, 1, 0, 2, 2, 3, 0, 2],) * 2,
    "both": ([0, 0, 0, 0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 2, 2, 1, 3, 2]),
}
"""Among them: a segment with spread, one of equal rewards, lone rows, lone episodes, one that holds an excluded row only."""
REWARD = [1.0, 0.25, 0.5, -0.75, 0.7, 0.7, math.nan, 0.0, 0.7]
PENALTY = [0.0, 0.125, 0.0, 0.0, 0.0, 0.25, math.nan, 0.125, 0.0]
EPISODE = [0, 0, 0, 1, 2, 3, 3, 1, 2]
INCLUDED = [True] * 6 + [False, True, True]


@pytest.fixture
def run32(device):
    def run32(*args, **options):
        return run(*args, dtype=torch.float32, device=device, **options)

    return run32


def bits(result):
    """Everything that came out, NaN made comparable."""
    stats = [getattr(s, name) for s in (result.mean_stats, result.std_stats) if s is not None for name in FIELDS]
    return [t.cpu().double().nan_to_num(nan=7e300) for t in (result.advantage, *stats)]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def bound(expected, exact, mean, std, eps):
    """numerics.advantage_bound by the statistics that torch has in float64."""
    largest, divisor = torch.zeros_like(expected), torch.ones_like(expected)
    if exact.mean_stats is not None:
        largest = exact.mean_stats.mean[torch.tensor(mean)].abs()
    if exact.std_stats is not None:
        segment = torch.tensor(std)
        largest = torch.maximum(largest, exact.std_stats.mean[segment].abs())
        divisor = torch.where(exact.std_stats.weight[segment] > 1, exact.std_stats.std[segment] + eps, 1.0)
    return numerics.advantage_bound(expected, largest, divisor).nan_to_num(nan=0.0, posinf=0.0)


@pytest.mark.parametrize("weighting", ["turn", "episode"])
@pytest.mark.parametrize("which", SEGMENTATIONS)
def test_every_rule_agrees_with_the_row_by_row_oracle(triton_backend, run32, which, weighting):
    mean, std = SEGMENTATIONS[which]
    reward = torch.tensor(REWARD).tolist()  # as fp32 holds them
    batch = (PENALTY, mean, std, EPISODE, INCLUDED)
    names = ("penalty", "mean", "std", "episode", "included")
    for number, (ddof, singleton, inside, leave_one_out) in enumerate(
        itertools.product((0, 1), ("zero", "raw"), (False, True), (False, True))
    ):
        options = {
            "weighting": weighting,
            "ddof": ddof,
            "singleton": singleton,
            "penalty_inside": inside,
            "leave_one_out": leave_one_out and mean != "none",
            "eps": (1e-6, 0.0, 0.1)[number % 3],
            "min_std": (0.0, 0.3)[number % 5 == 4],
        }
        if leave_one_out and mean == "none":
            continue
        columns = dict(zip(names, batch, strict=True))
        expected = oracle(reward, *batch, **options)
        allowed = bound(expected, run(reward, **columns, **options), mean, std, options["eps"])
        error = (run32(reward, **columns, **options).advantage.cpu().double() - expected).abs()
        assert (error <= allowed).all(), f"{options}: error {error.tolist()}, allowed {allowed.tolist()}"


def many(rows, *, seed=0, offset=0.0, scale=1.0):
    """Columns for `run`: rewards as fp32 holds them, two segmentations, episodes of several rows, some rows excluded."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most):
        return torch.randint(most, (rows,), generator=generator).tolist()

    reward = ((torch.randn(rows, generator=generator) + offset) * scale).tolist()
    return {
        "reward": reward,
        "penalty": (torch.rand(rows, generator=generator) * 0.1 * scale).tolist(),
        "mean": ids(2),
        "std": ids(3),
        "episode": ids(6),
        "included": [i % 7 != 5 for i in range(rows)],
    }


@pytest.mark.parametrize("weighting", ["turn", "episode"])
def test_I4_order_and_numbering_change_no_bit_of_fp32(triton_backend, run32, weighting):
    columns = many(20, offset=3.0)
    result = run32(**columns, weighting=weighting)
    assert equal(run32(**columns, weighting=weighting), result)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = {name: [column[i] for i in order] for name, column in columns.items()}
    shuffled["episode"] = [2**62 - e for e in shuffled["episode"]]
    assert equal(run32(**shuffled, weighting=weighting), unordered(result, order))
    shuffled["mean"] = [1 - s for s in shuffled["mean"]]
    shuffled["std"] = [2 - s for s in shuffled["std"]]
    assert torch.equal(run32(**shuffled, weighting=weighting).advantage, result.advantage[order])


def unordered(result, order):
    return type(result)(result.advantage[order], result.mean_stats, result.std_stats)


def test_I3_I4_excluded_rows_and_other_segments_change_no_bit_of_fp32(triton_backend, run32):
    columns, extra = many(12), many(6, seed=1, scale=1e20)
    added = {
        "reward": [math.nan, math.inf, *extra["reward"]],
        "penalty": [math.nan, 0.0, *extra["penalty"]],
        "mean": [0, 1] + [5] * 6,
        "std": [0, 1] + [4] * 6,
        "episode": [0, 0, *extra["episode"]],
        "included": [False, False] + [True] * 6,
    }
    longer = run32(**{name: column + added[name] for name, column in columns.items()}, weighting="episode").advantage
    assert torch.equal(longer[:12], run32(**columns, weighting="episode").advantage)
    assert longer[12:14].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("weighting", ["turn", "episode"])
@pytest.mark.parametrize("split", [False, True])
def test_a_segment_longer_than_a_block(triton_backend, device, check, weighting, split):
    """Both configurations give the same bits, because sums of integers don't depend on the block."""
    from drmas_kernels._segment_advantage_triton import SPECS, segment_advantage_triton

    rows = max(spec.constants["BLOCK"] for spec in SPECS) + 70
    columns = many(rows, offset=100.0)
    reward, penalty = torch.tensor(columns["reward"]), torch.tensor(columns["penalty"])
    one = torch.zeros(rows, dtype=torch.int64)
    rule = {
        "mean_segment": one,
        "std_segment": torch.arange(rows) % 2 if split else one,
        "episode": torch.arange(rows) // 2,
        "included": torch.ones(rows, dtype=torch.bool),
        "weighting": weighting,
    }
    exact = segment_advantage(reward.double(), penalty.double(), **rule)
    fixed = {"num_mean": 1, "num_std": 1 + split, "ddof": 1, "eps": 1e-6, "min_std": 0.0, "singleton": "zero"}
    fixed |= {"penalty_inside": False, "leave_one_out": False}
    on_device = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in rule.items()}
    narrow, wide = (
        segment_advantage_triton(reward.to(device), penalty.to(device), **on_device, **fixed, wide=wide)
        for wide in (False, True)
    )
    assert torch.equal(narrow[0], wide[0])
    assert torch.equal(narrow[1], wide[1])
    allowed = bound(exact.advantage, exact, one.tolist(), rule["std_segment"].tolist(), 1e-6)
    assert ((narrow[0].cpu().double() - exact.advantage).abs() <= allowed).all()
    packed = torch.cat([exact.mean_stats.packed(), exact.std_stats.packed()], dim=1)
    check(narrow[1].cpu(), packed, numerics.SEGMENT_STATISTICS)


@pytest.mark.parametrize("weighting", ["turn", "episode"])
def test_no_rows_one_row_and_only_excluded_rows(backend, run32, weighting):
    empty = run32([], weighting=weighting)
    assert empty.advantage.shape == empty.mean_stats.mean.shape == (0,)
    assert run32([], weighting=weighting, num_mean_segments=2).mean_stats.weight.tolist() == [0.0, 0.0]
    assert run32([0.7], weighting=weighting).advantage.tolist() == [0.0]
    one = run32([0.75], [0.25], weighting=weighting, singleton="raw", penalty_inside=True)
    assert one.advantage.tolist() == [0.5]
    assert one.mean_stats.mean.tolist() == [0.5]
    for std in (None, [1, 0]):
        result = run32([math.nan, 1.0], included=[False, False], std=std, weighting=weighting)
        assert result.advantage.tolist() == [0.0, 0.0]
        assert result.mean_stats.weight.tolist() == [0.0]
        assert result.mean_stats.mean.isnan().all()


def test_statistics_of_segments_with_and_without_rows(backend, run32):
    for std in ("none", [0, 1, 2, 1]):
        columns = {"mean": [0, 0, 2, 1], "included": [True, True, True, False]}
        stats = run32([1.0, 0.0, 0.25, math.nan], std=std, num_mean_segments=5, **columns).mean_stats
        assert stats.count.tolist() == [2, 0, 1, 0, 0]
        assert stats.count.dtype == torch.int64
        assert stats.weight.tolist() == [2.0, 0.0, 1.0, 0.0, 0.0]
        for field, expected in (("mean", [0.5, 0.25]), ("minimum", [0.0, 0.25]), ("maximum", [1.0, 0.25])):
            assert getattr(stats, field)[[0, 2]].tolist() == expected
            assert getattr(stats, field)[[1, 3, 4]].isnan().all()
        assert stats.std[[0, 2]].tolist() == [pytest.approx(math.sqrt(0.5), rel=1e-6), 0.0]
        assert stats.std[[1, 3, 4]].isnan().all()
        assert stats.mean.dtype == torch.float64


@pytest.mark.parametrize("reward", [[0.1] * 5, [0.3, 0.3 + 3e-8, 0.3, 0.3, 0.3], [-7e-30] * 5, [1e-41] * 5, [0.0] * 5], ids=str)
def test_I6_a_constant_segment_of_fp32_gives_exactly_zero(backend, run32, reward):
    for weighting in ("turn", "episode"):
        result = run32(reward, episode=[0, 0, 0, 1, 2], weighting=weighting, eps=0.0)
        assert result.advantage.tolist() == [0.0] * 5
        assert result.std_stats.std.tolist() == [0.0]
        assert result.std_stats.constant(0.0).tolist() == [True]
        if min(reward) == max(reward):
            assert result.mean_stats.mean.tolist() == torch.tensor(reward[:1]).tolist()


def test_the_mean_of_equal_fp32_rewards_is_that_reward(backend, run32):
    """13 times 0.1 by 13, each rounded to fp32, isn't 0.1."""
    assert run32([0.1] * 13).mean_stats.mean.tolist() == torch.tensor([0.1]).tolist()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
def test_the_size_of_rewards_costs_no_digits(backend, run32, scale):
    """Fixed point follows the largest score of the segment; a reward 2^-50 of it is lost in the mean, not in itself."""
    reward = torch.tensor([3.0, -1.0, 2.0, 1e-15, 0.0, 7.0]) * scale
    result = run32(reward.tolist(), eps=0.0)
    exact = run(reward.tolist(), eps=0.0)
    torch.testing.assert_close(result.advantage.cpu().double(), exact.advantage, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(result.std_stats.std.cpu(), exact.std_stats.std, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rows", [511, 512, 513])
def test_sums_of_the_largest_values_have_headroom(triton_backend, run32, rows):
    """Just below a power of two, around the number of rows at which the fixed point moves; squares are at their largest."""
    largest = float(2**20) - 2**-4
    same = run32([largest] * rows)
    assert same.mean_stats.mean.tolist() == [largest]
    assert same.advantage.unique().tolist() == [0.0]
    half = rows // 2
    either = run32([largest] * half + [-largest] * (rows - half), ddof=0, eps=0.0)
    mean = largest * (2 * half - rows) / rows
    std = math.sqrt(largest**2 - mean**2)
    assert either.std_stats.std.item() == pytest.approx(std, rel=3e-7)
    assert either.advantage[0].item() == pytest.approx((largest - mean) / std, rel=5e-7)
    assert either.advantage[-1].item() == pytest.approx((-largest - mean) / std, rel=5e-7)


@pytest.mark.skipif(interpreter.DEVICE != "cpu", reason="the block is too long for a GPU")
def test_a_very_long_segment_keeps_its_digits(triton_backend, monkeypatch):
    """One outlier in 2^20 rows whose squared deviations are each below the resolution of the first sum, but not together."""
    from drmas_kernels import _segment_advantage_triton as kernels

    for key, spec in kernels._TABLE.items():
        long = replace(spec, constants={**spec.constants, "BLOCK": 2**18})
        monkeypatch.setitem(kernels._TABLE, key, long)
    rows, small = 2**20, 2.0**-19.6
    reward = torch.where(torch.arange(rows) % 2 == 0, small, -small)
    reward[0] = 1.01
    one = torch.zeros(rows, dtype=torch.int64)
    rule = {"mean_segment": one, "std_segment": one, "episode": one, "included": one == 0}
    result = segment_advantage(reward, one.float(), **rule)
    exact = segment_advantage(reward.double(), one.double(), **rule)
    assert result.std_stats.std.item() == pytest.approx(exact.std_stats.std.item(), rel=2e-7)
    assert result.mean_stats.mean.item() == pytest.approx(exact.mean_stats.mean.item(), rel=1e-6)
    allowed = numerics.advantage_bound(exact.advantage, exact.mean_stats.mean, exact.std_stats.std)
    assert ((result.advantage.double() - exact.advantage).abs() <= allowed).all()


def test_close_rewards_on_a_large_offset_keep_their_variance_in_fp32(backend, run32):
    reward = torch.tensor([1000.0 + 0.01 * (i % 2) for i in range(8)])
    result = run32(reward.tolist(), ddof=0, eps=0.0)
    step = float(reward[1].double() - reward[0].double())
    assert result.std_stats.std.item() == pytest.approx(step / 2, rel=2e-7)
    assert result.advantage.tolist() == pytest.approx([-1.0, 1.0] * 4, rel=5e-7)


def test_float64_rewards_are_computed_by_torch_whatever_the_backend(triton_backend):
    columns = many(20)
    result = run(**columns)
    with use("torch"):
        assert equal(run(**columns), result)
    assert result.advantage.dtype == torch.float64


def test_more_rows_than_the_fixed_point_is_meant_for_are_refused(triton_backend, device):
    from drmas_kernels._segment_advantage_triton import MOST_ROWS, segment_advantage_triton

    many_rows = torch.zeros(1, device=device).expand(MOST_ROWS + 1)
    with pytest.raises(ValueError, match=r"reward has 4194305 rows; expected at most 4194304, or the torch backend"):
        segment_advantage_triton(
            many_rows,
            many_rows,
            mean_segment=None,
            std_segment=None,
            episode=many_rows,
            included=many_rows,
            num_mean=0,
            num_std=0,
            weighting="turn",
            ddof=1,
            eps=1e-6,
            min_std=0.0,
            singleton="zero",
            penalty_inside=False,
            leave_one_out=False,
        )


@pytest.mark.parametrize("segments", ["both", "none"])
def test_the_op_is_registered_as_it_behaves(backend, device, segments):
    mean, std = (None if s == "none" else torch.tensor(s, device=device) for s in SEGMENTATIONS[segments])
    vectors = (torch.tensor(REWARD), torch.tensor(PENALTY), torch.tensor(EPISODE), torch.tensor(INCLUDED))
    reward, penalty, episode, included = (vector.to(device) for vector in vectors)
    sizes = (0 if mean is None else 2, 0 if std is None else 4)
    rule = ("episode", 1, 1e-6, 0.0, "zero", False, False)
    torch.library.opcheck(
        torch.ops.drmas.segment_advantage.default, (reward, penalty, mean, std, episode, included, *sizes, *rule)
    )
