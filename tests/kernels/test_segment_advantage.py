"""Advantages against a row-by-row oracle, and their promises: order, constants, singletons, exclusion, penalties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas_kernels import numerics
from drmas_kernels.segment_advantage import segment_advantage
from tests.kernels.advantage_cases import oracle, run

PROPERTY = settings(derandomize=True, deadline=None, max_examples=80)


@st.composite
def batches(draw):
    rows = draw(st.integers(1, 24))

    def ids(most):
        return draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))

    values = st.sampled_from([0.0, 0.1, 1.0, -0.25, 0.7])
    reward = draw(st.lists(values, min_size=rows, max_size=rows))
    penalty = draw(st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1]), min_size=rows, max_size=rows))
    mean, std = draw(st.sampled_from([ids(2), "none"])), draw(st.sampled_from([ids(3), "none"]))
    included = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=rows, max_size=rows))
    options = {
        "weighting": draw(st.sampled_from(["turn", "episode"])),
        "ddof": draw(st.sampled_from([0, 1])),
        "eps": draw(st.sampled_from([0.0, 1e-6, 0.1])),
        "singleton": draw(st.sampled_from(["zero", "raw"])),
        "penalty_inside": draw(st.booleans()),
        "leave_one_out": mean != "none" and draw(st.booleans()),
    }
    return (reward, penalty, mean, std, ids(5), included), options


def shown(batch):
    _, penalty, mean, std, episode, included = batch
    return {"penalty": penalty, "mean": mean, "std": std, "episode": episode, "included": included}


@given(batches())
@PROPERTY
def test_agrees_with_the_row_by_row_oracle(check, case):
    batch, options = case
    check(run(batch[0], **shown(batch), **options).advantage, oracle(*batch, **options), numerics.ADVANTAGE)


@given(batches(), st.randoms(use_true_random=False))
@PROPERTY
def test_I4_order_and_numbering_change_no_bit(case, random):
    batch, options = case
    order = list(range(len(batch[0])))
    random.shuffle(order)
    shuffled = [column if column == "none" else [column[i] for i in order] for column in batch]
    shuffled[4] = [7 - e for e in shuffled[4]]
    for scope in (2, 3):
        if shuffled[scope] != "none":
            shuffled[scope] = [3 - s for s in shuffled[scope]]
    expected = run(batch[0], **shown(batch), **options).advantage[order]
    assert torch.equal(run(shuffled[0], **shown(shuffled), **options).advantage, expected)


@given(batches(), batches())
@PROPERTY
def test_I3_I4_excluded_rows_and_other_segments_change_no_bit(case, more):
    (batch, options), (extra, _) = case, more
    rows, added = len(batch[0]), len(extra[0])
    joined = {
        "penalty": batch[1] + [math.nan] * added + extra[1],
        "episode": batch[4] + [0] * added + extra[4],
        "included": batch[5] + [False] * added + extra[5],
    }
    for name, column in (("mean", batch[2]), ("std", batch[3])):
        joined[name] = column if column == "none" else column + [0] * added + [9] * added
    longer = run(batch[0] + [math.nan] * added + extra[0], **joined, **options).advantage
    assert torch.equal(longer[:rows], run(batch[0], **shown(batch), **options).advantage)
    assert torch.equal(longer[rows : rows + added], torch.zeros(added, dtype=torch.float64))


@pytest.mark.parametrize("weighting", ["turn", "episode"])
@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_I6_a_constant_segment_gives_exactly_zero(weighting, singleton):
    """Three times 0.1 doesn't sum to 0.3: the mean of equal rewards must still be that reward."""
    result = run([0.1] * 4, episode=[0, 0, 0, 1], weighting=weighting, singleton=singleton)
    assert result.advantage.tolist() == [0.0] * 4
    assert result.mean_stats.std.tolist() == [0.0]
    assert result.mean_stats.mean.tolist() == [0.1]
    assert result.mean_stats.constant(0.0).tolist() == [True]


@pytest.mark.parametrize(
    "reward", [[0.3, 0.1 + 0.2], [0.3, 0.1 + 0.2, 0.3], [-0.3, -(0.1 + 0.2)], [1e9 * 0.3, 1e9 * (0.1 + 0.2)]], ids=str
)
@pytest.mark.parametrize("weighting", ["turn", "episode"])
def test_I6_rewards_that_differ_by_rounding_are_constant(reward, weighting):
    """With eps 0 the rounding of a sum would be an advantage of 0.7."""
    result = run(reward, eps=0.0, weighting=weighting)
    assert result.advantage.tolist() == [0.0] * len(reward)
    assert result.std_stats.std.tolist() == [0.0]
    assert result.std_stats.constant(0.0).tolist() == [True]
    assert run([1.0, 0.0, *reward], mean="none", std=[0, 0] + [1] * len(reward), eps=0.0).advantage[2:].tolist() == [0.0] * len(
        reward
    )


def test_I6_rounding_is_counted_in_the_reward_s_dtype():
    ids = torch.zeros(2, dtype=torch.int64)
    for dtype, expected in (
        (torch.float32, [0.0, 0.0]),
        (torch.float64, [pytest.approx(-math.sqrt(0.5)), pytest.approx(math.sqrt(0.5))]),
    ):
        reward = torch.tensor([0.3, 0.3 + 3e-8], dtype=dtype)
        result = segment_advantage(
            reward, reward * 0, mean_segment=ids, std_segment=ids, episode=torch.arange(2), included=ids == 0, eps=0.0
        )
        assert result.advantage.tolist() == expected


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e6])
def test_a_small_difference_that_is_not_rounding_counts(offset):
    low, high = run([offset, offset + 1e-8 * max(1.0, offset)], eps=0.0).advantage.tolist()
    assert (low, high) == (pytest.approx(-math.sqrt(0.5)), pytest.approx(math.sqrt(0.5)))


def test_I6_a_constant_std_segment_never_blows_up_a_difference_of_means():
    result = run([1.0, 1.0, 0.0], mean=[0, 0, 0], std=[0, 0, 1])
    assert result.advantage.tolist() == [0.0, 0.0, 0.0]
    raw = run([1.0, 1.0, 0.0], mean=[0, 0, 0], std=[0, 0, 1], singleton="raw")
    assert raw.advantage.tolist() == [0.0, 0.0, pytest.approx(-2 / 3)]


def test_I6_singletons():
    assert run([0.7]).advantage.tolist() == [0.0]
    assert run([0.7], singleton="raw").advantage.tolist() == [0.7]
    assert run([0.7, 0.7], episode=[4, 4], weighting="episode").advantage.tolist() == [0.0, 0.0]
    assert run([0.75, 0.25], episode=[4, 4], weighting="episode", singleton="raw").advantage.tolist() == [0.5, 0.5]
    assert run([0.7], mean="none").advantage.tolist() == [0.0]
    mixed = run([0.7, 0.1], mean=[0, 1], std=[0, 0], singleton="raw", eps=0.0)
    assert mixed.advantage.tolist() == pytest.approx([0.7 / 0.6 * math.sqrt(2), 0.1 / 0.6 * math.sqrt(2)])


def test_I7_a_penalty_outside_keeps_its_size():
    assert run([1.0] * 5, [0.0, 0.0, 0.0, 0.0, 0.01]).advantage.tolist() == [0.0, 0.0, 0.0, 0.0, -0.01]
    assert run([1.0], [0.01]).advantage.tolist() == [-0.01]
    inside = run([1.0] * 5, [0.0, 0.0, 0.0, 0.0, 0.01], penalty_inside=True).advantage
    assert inside.tolist() == pytest.approx([0.4471, 0.4471, 0.4471, 0.4471, -1.7885], abs=1e-3)
    episodes = run([1.0, 1.0, 0.0], [0.2, 0.0, 0.0], episode=[0, 0, 1], weighting="episode").advantage
    assert episodes[1] - episodes[0] == pytest.approx(0.2)


def test_no_mean_and_no_std():
    assert run([0.5, 0.1], mean="none", std="none").advantage.tolist() == [0.5, 0.1]
    assert run([3.0, 1.0], std="none").advantage.tolist() == [1.0, -1.0]
    assert run([3.0, 1.0], mean="none", eps=0.0).advantage.tolist() == pytest.approx([3 / math.sqrt(2), 1 / math.sqrt(2)])


def test_leave_one_out_compares_with_the_others():
    """n/(n-1) (x - mean) is x minus the mean of the other rows."""
    assert run([1.0, 0.0, 0.5], std="none", leave_one_out=True).advantage.tolist() == pytest.approx([0.75, -0.75, 0.0])


def test_a_small_std_counts_as_constant():
    reward = [0.50, 0.51, 0.49]
    assert run(reward, min_std=0.02).advantage.tolist() == [0.0] * 3
    assert run(reward, min_std=0.009).advantage.tolist() == pytest.approx([0.0, 1.0, -1.0], abs=1e-3)


def test_close_rewards_on_a_large_offset_keep_their_variance():
    """Mean of squares minus square of the mean would be negative here in fp32."""
    reward = [1000.0 + 0.01 * (i % 2) for i in range(8)]
    stats = run(reward, ddof=0).std_stats
    assert stats.std.item() == pytest.approx(0.005, rel=1e-8)


def test_statistics_per_segment():
    stats = run([1.0, 0.0, 0.25, math.nan], mean=[0, 0, 2, 1], included=[True, True, True, False]).mean_stats
    assert stats.count.tolist() == [2, 0, 1]
    assert stats.weight.tolist() == [2.0, 0.0, 1.0]
    assert stats.mean[[0, 2]].tolist() == [0.5, 0.25]
    assert stats.minimum[[0, 2]].tolist() == [0.0, 0.25]
    assert stats.maximum[[0, 2]].tolist() == [1.0, 0.25]
    assert stats.std.tolist()[::2] == [pytest.approx(math.sqrt(0.5)), 0.0]
    assert stats.mean[1].isnan()


@pytest.mark.parametrize("weighting", ["turn", "episode"])
def test_no_rows_and_only_excluded_rows(weighting):
    assert run([], weighting=weighting).advantage.shape == (0,)
    result = run([math.nan, 1.0], included=[False, False], weighting=weighting)
    assert result.advantage.tolist() == [0.0, 0.0]
    assert result.std_stats.weight.tolist() == [0.0]


def test_the_result_has_the_dtype_of_the_reward():
    rows = torch.tensor([1.0, 0.0])
    ids = torch.zeros(2, dtype=torch.int64)
    result = segment_advantage(rows, rows * 0, mean_segment=ids, std_segment=ids, episode=ids, included=ids == 0)
    assert result.advantage.dtype == torch.float32
    assert result.mean_stats.mean.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": [1.0, math.nan]}, r"reward\[1\] is nan; an included row needs a finite one"),
        ({"reward": [math.inf, 1.0]}, r"reward\[0\] is inf"),
        ({"reward": [1.0, 0.0], "penalty": [math.nan, 0.0]}, r"penalty\[0\] is nan"),
        ({"reward": [1.0, 0.0], "mean": [0]}, r"mean_segment has shape \[1\]; expected that of reward"),
        ({"reward": [1.0, 0.0], "std": [0, -1]}, "std_segment holds -1; expected 0 or more"),
        ({"reward": [1.0, 0.0], "eps": math.nan}, "eps is nan; expected a finite number, 0 or more"),
        ({"reward": [1.0, 0.0], "eps": -1e-6}, "eps is -1e-06"),
        ({"reward": [1.0, 0.0], "min_std": math.nan}, "min_std is nan; expected a finite number, 0 or more"),
        ({"reward": [1.0, 0.0], "min_std": math.inf}, "min_std is inf"),
        ({"reward": [1.0], "mean": "none", "num_mean_segments": 3}, "num_mean_segments is 3 but mean_segment is None"),
        ({"reward": [1.0, 0.0], "ddof": 2}, "ddof is 2"),
        ({"reward": [1.0, 0.0], "weighting": "row"}, "weighting is 'row'; expected one of turn, episode"),
        ({"reward": [1.0, 0.0], "singleton": "one"}, "singleton is 'one'; expected one of zero, raw"),
        ({"reward": [1.0, 0.0], "mean": "none", "leave_one_out": True}, "leave_one_out needs mean_segment"),
        ({"reward": [1.0], "std": [3], "num_std_segments": 3}, "std_segment holds the id 3, but the number of segments is 3"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(arguments.pop("reward"), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"penalty": torch.zeros(2, dtype=torch.int64)}, "penalty is torch.int64; expected floating point"),
        ({"episode": torch.zeros(2)}, "episode is torch.float32; expected int64"),
        ({"included": torch.ones(2)}, "included is torch.float32; expected bool"),
        ({"penalty": torch.zeros(2, device="meta")}, "penalty is on meta; expected the device of reward, cpu"),
        ({"std_segment": torch.zeros(2, device="meta").long()}, "std_segment is on meta; expected the device of reward, cpu"),
        ({"included": torch.ones(2, device="meta").bool()}, "included is on meta; expected the device of reward, cpu"),
    ],
)
def test_bad_vectors_are_named(change, message):
    ids = torch.zeros(2, dtype=torch.int64)
    good = {"reward": torch.zeros(2), "penalty": torch.zeros(2), "mean_segment": ids, "std_segment": ids}
    with pytest.raises(ValueError, match=message):
        segment_advantage(**good | {"episode": ids, "included": ids == 0} | change)
