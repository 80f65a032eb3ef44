import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.core.batching import TokenCost, plan_microbatches, split_updates, token_weights
from drmas.core.prefixes import PrefixOrder
from tests.core.plain_plan import plain_plan

PROPERTY = settings(derandomize=True, deadline=None, max_examples=80)
COST = TokenCost(token=810_000_000, pair=210_000, response=170_000_000)
"""Of a model of about 135 million parameters."""


def rows_that_start_alike():
    """Lists of token ids, made of pieces of a few common texts, some equal, some the start of others."""
    piece = st.tuples(st.integers(0, 2), st.sampled_from([1, 7, 16, 17, 40])).map(lambda cell: [cell[0]] * cell[1])
    ids = st.lists(piece, min_size=1, max_size=4).map(lambda pieces: [0, *(token for piece in pieces for token in piece)])
    return st.lists(ids, max_size=16)


def computed(rows, share):
    """Tokens and attended pairs that a microbatch of `rows` computes, counted on its prefix tree."""
    inputs = [row.prompt_ids + row.response_ids[:-1] for row in rows]
    order = PrefixOrder.of(inputs) if share else PrefixOrder.apart(list(map(len, inputs)))
    tokens = pairs = 0
    for segment in order.tree().segments:
        tokens += segment.length
        pairs += sum(range(segment.position + 1, segment.position + segment.length + 1))
    return tokens, pairs


def cost_of(rows, share):
    tokens, pairs = computed(rows, share)
    responses = sum(len(row.response_ids) for row in rows)
    return tokens * COST.token + pairs * COST.pair + responses * COST.response


def of_lengths(make_row, lengths):
    """Rows of that many computed tokens, no two of which share a start."""
    return [replace(make_row(), prompt_ids=[i] * length, response_ids=[7]) for i, length in enumerate(lengths)]


def long_tailed(make_row, *, seed, groups=50, size=8, prompt=150, response=300):
    """Groups with one prompt each; the longest responses are some twenty times the median."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        length = int(generator.lognormal(np.log(prompt), 0.5)) + 1
        ids = generator.integers(0, 49152, length).tolist()
        for _ in range(size):
            tokens = int(generator.lognormal(np.log(response), 1.0)) + 1
            rows.append(replace(make_row(), prompt_ids=ids, response_ids=generator.integers(0, 49152, tokens).tolist()))
    return rows


@given(rows_that_start_alike(), st.integers(1, 200), st.integers(1, 5), st.booleans())
@PROPERTY
def test_every_row_once_within_the_budget_and_as_many_microbatches_on_every_rank(make_row, ids, budget, num_ranks, share):
    rows = [replace(make_row(), prompt_ids=each[:1], response_ids=each[1:]) for each in ids]
    plan = plan_microbatches(rows, budget=budget, num_ranks=num_ranks, cost=COST, share_prefixes=share)
    assert len(plan) == num_ranks
    assert sorted(row for rank in plan for microbatch in rank for row in microbatch) == list(range(len(rows)))
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        for microbatch in rank:
            assert len(microbatch) < 2 or computed([rows[i] for i in microbatch], share)[0] <= budget


@given(rows_that_start_alike(), st.integers(1, 300), st.integers(1, 5), st.booleans(), st.sampled_from([1, 2**55]), st.data())
@PROPERTY
def test_the_plan_is_the_one_that_plain_loops_make(make_row, ids, budget, num_ranks, share, scale, data):
    ends = [data.draw(st.integers(1, len(each) - 1)) for each in ids]
    rows = [
        replace(make_row(), prompt_ids=each[:end], response_ids=each[end:]) for each, end in zip(ids, ends, strict=True)
    ] or [make_row()]
    options = {"budget": budget, "num_ranks": num_ranks, "cost": TokenCost(*(scale * part for part in COST))}
    plan = plan_microbatches(rows, **options, share_prefixes=share)
    assert plan == plain_plan(rows, **options, share_prefixes=share)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("num_ranks", "budget"), [(1, 8192), (4, 2048), (64, 16384)])
def test_the_plan_of_many_rows_is_the_one_that_plain_loops_make(make_row, num_ranks, budget, share):
    """Groups under two system prompts, every episode a second turn that goes on where the first ended."""
    rows = []
    for i, row in enumerate(long_tailed(make_row, seed=num_ranks, groups=60)):
        first = replace(row, prompt_ids=[i % 16 // 8] * 40 + row.prompt_ids)
        second = replace(row, prompt_ids=first.prompt_ids + first.response_ids, response_ids=row.response_ids[:50])
        rows += [first, second]
    options = {"budget": budget, "num_ranks": num_ranks, "cost": COST, "share_prefixes": share}
    assert plan_microbatches(rows, **options) == plain_plan(rows, **options)


@given(rows_that_start_alike(), st.randoms(use_true_random=False), st.booleans())
@PROPERTY
def test_the_order_in_which_rows_are_given_changes_nothing_but_ties(make_row, ids, random, share):
    rows = [replace(make_row(), prompt_ids=each[:1], response_ids=each[1:]) for each in ids]
    shuffled = random.sample(rows, len(rows))

    def planned(rows):
        """Contents of each microbatch. Ties: equal rows but for the last token; without sharing, rows of one length."""
        plan = plan_microbatches(rows, budget=90, num_ranks=3, cost=COST, share_prefixes=share)
        what = (lambda row: row.prompt_ids + row.response_ids[:-1]) if share else (lambda row: row.num_tokens)
        return [[sorted(what(rows[i]) for i in microbatch) for microbatch in rank] for rank in plan]

    assert planned(rows) == planned(shuffled)


def spread(rows, plan, share):
    """The slowest rank's cost over the mean."""
    costs = [sum(cost_of([rows[i] for i in microbatch], share) for microbatch in rank) for rank in plan]
    return max(costs) * len(plan) / sum(costs)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_the_slowest_rank_is_within_5_percent_of_the_mean(make_row, seed, num_ranks, share):
    rows = long_tailed(make_row, seed=seed)
    plan = plan_microbatches(rows, budget=16384, num_ranks=num_ranks, cost=COST, share_prefixes=share)
    assert spread(rows, plan, share) <= 1.05


@pytest.mark.parametrize("shape", [{"groups": 12, "size": 16}, {"groups": 1, "size": 200}], ids=["few groups", "one group"])
@pytest.mark.parametrize("seed", range(3))
def test_groups_are_cut_where_balance_asks_for_it(make_row, seed, shape):
    """Whole groups over 8 ranks would leave one with half as much again as the mean, or all of it."""
    rows = long_tailed(make_row, seed=seed, **shape)
    plan = plan_microbatches(rows, budget=16384, num_ranks=8, cost=COST, share_prefixes=True)
    assert spread(rows, plan, True) <= 1.05


@given(st.lists(st.integers(1, 600), max_size=60), st.integers(1, 5))
@PROPERTY
def test_without_sharing_no_rank_is_ahead_of_another_by_more_than_one_row(make_row, lengths, num_ranks):
    rows = of_lengths(make_row, lengths)
    plan = plan_microbatches(rows, budget=700, num_ranks=num_ranks, cost=COST, share_prefixes=False)
    costs = [sum(cost_of([rows[i]], False) for microbatch in rank for i in microbatch) for rank in plan]
    assert max(costs) - min(costs) <= max((cost_of([row], False) for row in rows), default=0)


def test_shared_starts_stay_together(make_row):
    """Prompts are computed hardly more often than once each, in microbatches that are full but for a tenth or so."""
    rows = long_tailed(make_row, seed=0, prompt=400)
    least, _ = computed(rows, True)
    (plan,) = plan_microbatches(rows, budget=16384, num_ranks=1, cost=COST, share_prefixes=True)
    tokens = [computed([rows[i] for i in microbatch], True)[0] for microbatch in plan]
    assert sum(tokens) <= 1.02 * least
    assert len(plan) <= -(-least // 16384) + 1
    assert min(tokens) >= 0.85 * max(tokens)


def test_one_prompt_for_all_rows_is_computed_once_per_microbatch(make_row):
    prompt = list(range(1000))
    rows = [replace(make_row(), prompt_ids=prompt, response_ids=[i] * 101) for i in range(60)]
    plan = plan_microbatches(rows, budget=2000, num_ranks=2, cost=COST, share_prefixes=True)
    tokens = [computed([rows[i] for i in microbatch], True)[0] for rank in plan for microbatch in rank]
    assert tokens == [2000] * 6  # ten rows of 100 tokens each after the prompt
    assert [len(rank) for rank in plan] == [3, 3]


def test_groups_stay_whole_where_cutting_would_cost_more_than_it_evens_out(make_row):
    """Five groups over four ranks: a rank with two is the slowest, but a prompt weighs forty times as much as a response."""
    rows = [replace(make_row(), prompt_ids=[i] * 2000, response_ids=[100 + j] * 51) for i in range(5) for j in range(2)]
    plan = plan_microbatches(rows, budget=8192, num_ranks=4, cost=COST, share_prefixes=True)
    assert sum(computed([rows[i] for i in microbatch], True)[0] for rank in plan for microbatch in rank) == 5 * 2100


def test_cuts_go_where_the_shared_start_is_shortest(make_row):
    """Two groups under one system prompt: one microbatch each, though four rows of six would fit."""
    rows = [replace(make_row(), prompt_ids=[1] * 20 + [2 + i % 2] * 200, response_ids=[10 + i] * 51) for i in range(6)]
    plan = plan_microbatches(rows, budget=480, num_ranks=1, cost=COST, share_prefixes=True)
    assert sorted(plan[0]) == [[0, 2, 4], [1, 3, 5]]


def test_groups_are_cut_where_microbatches_are_filled_better(make_row):
    """Each group takes 612 tokens of 1000; whole they need ten microbatches, cut into three rows and one they need seven."""
    rows = [replace(make_row(), prompt_ids=[i] * 20, response_ids=[100 + j] * 149) for i in range(10) for j in range(4)]
    plan = plan_microbatches(rows, budget=1000, num_ranks=1, cost=COST, share_prefixes=True)
    assert len(plan[0]) == 7


def test_rows_that_share_less_by_themselves_stay_within_the_budget(make_row):
    """Beside row 0, rows 1 to 3 split at 16 and 34 tokens; without it at 20 only, where they compute ten tokens more."""
    start = list(range(16))
    ids = [
        [*start, *[50] * 200],
        [*start, *[60] * 4, *[61] * 30],
        [*start, *[60] * 4, *[62] * 14, *[63] * 30],
        [*start, *[60] * 4, *[62] * 14, *[64] * 30],
        [70] * 50_000,
    ]
    rows = [replace(make_row(), prompt_ids=each, response_ids=[9]) for each in ids]
    budget = 50 + 64 + 64 - 16 - 34
    plan = plan_microbatches(rows, budget=budget, num_ranks=2, cost=COST, share_prefixes=True)
    assert sorted(i for rank in plan for microbatch in rank for i in microbatch) == [0, 1, 2, 3, 4]
    assert len(plan[0]) == len(plan[1]) == 3
    for rank in plan:
        for microbatch in rank:
            assert len(microbatch) < 2 or computed([rows[i] for i in microbatch], True)[0] <= budget


def test_a_plan_by_hand(make_row):
    rows = of_lengths(make_row, [30, 200, 50, 40, 60])
    plan = plan_microbatches(rows, budget=100, num_ranks=2, cost=COST, share_prefixes=True)
    assert plan == [[[1], []], [[0, 4], [2, 3]]]  # one row longer than the budget; the others from the largest to the smallest
    assert plan_microbatches([], budget=100, num_ranks=3, cost=COST, share_prefixes=True) == [[], [], []]
    assert plan_microbatches(rows[:1], budget=5, num_ranks=2, cost=COST, share_prefixes=False) == [[[0]], [[]]]


def test_a_plan_counts_in_integers_of_any_size(make_row):
    """FLOPs of a large model and batch pass 2^63."""
    rows = of_lengths(make_row, [3000, 2000, 1000] * 5)
    large = TokenCost(*(2**55 * part for part in COST))
    plans = [plan_microbatches(rows, budget=8000, num_ranks=4, cost=cost, share_prefixes=True) for cost in (COST, large)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("lengths", "budget", "ranks", "message"),
    [
        ([1], 0, 1, "budget is 0"),
        ([1], 1, 0, "num_ranks is 0"),
        ([3, 0], 1, 1, "row 1 has 0 prompt and 1 response tokens"),
    ],
)
def test_bad_plans_are_refused(make_row, lengths, budget, ranks, message):
    with pytest.raises(ValueError, match=message):
        plan_microbatches(of_lengths(make_row, lengths), budget=budget, num_ranks=ranks, cost=COST, share_prefixes=True)


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
