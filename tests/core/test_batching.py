import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.core.batching import plan_microbatches, split_updates, token_weights

PROPERTY = settings(derandomize=True, deadline=None, max_examples=80)
LENGTHS = st.lists(st.integers(1, 600), max_size=60)


@given(LENGTHS, st.integers(1, 500), st.integers(1, 5))
@PROPERTY
def test_every_row_once_within_the_budget_and_as_many_microbatches_on_every_rank(lengths, budget, num_ranks):
    plan = plan_microbatches(lengths, budget=budget, num_ranks=num_ranks)
    assert len(plan) == num_ranks
    assert sorted(row for rank in plan for rows in rank for row in rows) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        for rows in rank:
            assert sum(lengths[row] for row in rows) <= budget or len(rows) == 1


@given(LENGTHS, st.integers(1, 5))
@PROPERTY
def test_ranks_are_balanced(lengths, num_ranks):
    """Greedy longest-first: no rank is ahead of another by more than one row's cost."""
    plan = plan_microbatches(lengths, budget=700, num_ranks=num_ranks)
    cost = [sum(lengths[row] * (8192 + lengths[row]) for rows in rank for row in rows) for rank in plan]
    largest = max((length * (8192 + length) for length in lengths), default=0)
    assert max(cost) - min(cost) <= largest


@given(LENGTHS)
@PROPERTY
def test_microbatches_are_filled(lengths):
    """First fit: two microbatches of one rank never fit into one."""
    (rank,) = plan_microbatches(lengths, budget=500, num_ranks=1)
    used = sorted(sum(lengths[row] for row in rows) for rows in rank)
    assert len(used) < 2 or used[0] + used[1] > 500


def test_a_plan_by_hand():
    plan = plan_microbatches([30, 200, 50, 40, 60], budget=100, num_ranks=2)
    assert plan == [[[1], []], [[3, 4], [0, 2]]]
    assert plan_microbatches([], budget=100, num_ranks=3) == [[], [], []]
    assert plan_microbatches([7], budget=5, num_ranks=2) == [[[0]], [[]]]


@pytest.mark.parametrize(
    ("lengths", "budget", "ranks", "message"),
    [([1], 0, 1, "budget is 0"), ([1], 1, 0, "num_ranks is 0"), ([3, 0], 1, 1, "a row has 0 tokens")],
)
def test_bad_plans_are_refused(lengths, budget, ranks, message):
    with pytest.raises(ValueError, match=message):
        plan_microbatches(lengths, budget=budget, num_ranks=ranks)


def test_token_weights_by_hand(team_rows):
    """Included tokens: t#0 has 3 + 1 + 2, t#1 has 5, t#3 has 4 + 4, u#0 has 7."""
    assert token_weights(team_rows, "token") == [1 / 26] * 4 + [0.0] * 2 + [1 / 26] * 3
    turn = token_weights(team_rows, "turn")
    assert turn == pytest.approx([1 / (7 * n) if n else 0.0 for n in (3, 1, 2, 5, 0, 0, 4, 4, 7)])
    episode = token_weights(team_rows, "episode")
    assert episode == pytest.approx([1 / (4 * n) if n else 0.0 for n in (6, 6, 6, 5, 0, 0, 8, 8, 7)])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans(), st.booleans()), max_size=20),
    st.sampled_from(["token", "turn", "episode"]),
)
@PROPERTY
def test_I5_the_weights_of_all_tokens_sum_to_one(make_row, cells, aggregation):
    rows = [make_row(episode=str(e), tokens=n, status="ok" if ok else "engine") for e, n, ok, _ in cells]
    values = [0.0 if known else None for *_, known in cells]
    weights = token_weights(rows, aggregation, values)
    counted = [row.status == "ok" and value is not None and row.response_ids for row, value in zip(rows, values, strict=True)]
    total = math.fsum(weight * len(row.response_ids) for weight, row in zip(weights, rows, strict=True))
    assert total == pytest.approx(1.0 if any(counted) else 0.0)
    assert all((weight > 0) == bool(counts) for weight, counts in zip(weights, counted, strict=True))
    kept = [row for row, counts in zip(rows, counted, strict=True) if counts]
    assert token_weights(kept, aggregation) == [weight for weight in weights if weight]


def test_episodes_of_different_tasks_may_share_a_name(make_row):
    assert token_weights([make_row("t", "0", tokens=2), make_row("u", "0", tokens=4)], "episode") == [1 / 4, 1 / 8]


def test_an_unknown_aggregation_is_refused(make_row):
    with pytest.raises(ValueError, match="aggregation is 'seq'; expected token, turn or episode"):
        token_weights([make_row()], "seq")


def test_updates_take_tasks_evenly_and_in_order():
    tasks = [f"t{i}" for i in range(7)]
    assert [len(part) for part in split_updates(tasks, 3)] == [3, 2, 2]
    assert [task for part in split_updates(tasks, 3) for task in part] == tasks
    assert split_updates(["a"], 2) == [["a"], []]
    with pytest.raises(ValueError, match="n is 0"):
        split_updates(tasks, 0)
