"""What every estimator keeps: order, failed episodes, duplicates, any number of rows, equal groups, penalties."""

import random
from dataclasses import replace

import pytest

from drmas.core.estimators import ESTIMATORS, resolve
from drmas.errors import DataError

TEAM = ("solver", "verifier", "writer")
NOT_BY_TASK = ("reinforce++", "reinforce++-baseline", "ema", "ppo")
"""Other tasks have a say in their mean or their scale."""
BY_TASK = [preset for preset in ESTIMATORS if preset not in NOT_BY_TASK]
COMPARING = [*(preset for preset in BY_TASK if preset not in ("remax", "difference", "dr-mas-paper")), "reinforce++-baseline"]


def by_row(found, rows):
    return {id(row): found.of(i) for i, row in enumerate(rows)}


@pytest.mark.parametrize("seed", range(4))
def test_I4_the_order_of_rows_changes_no_bit(estimator, make_step, know, seed):
    rows = make_step(seed)
    kept = estimator.state()
    straight = by_row(estimator(rows, know(rows)), rows)
    shuffled = rows[:]
    random.Random(seed).shuffle(shuffled)
    estimator.restore(kept)
    assert by_row(estimator(shuffled, know(shuffled)), shuffled) == straight


@pytest.mark.parametrize("seed", range(4))
def test_I3_failed_episodes_have_no_advantage_and_change_no_bit(estimator, make_step, know, seed):
    rows = make_step(seed)
    found = estimator(rows, know(rows))
    assert all(found.values[i] is None and found.of(i) is None for i, row in enumerate(rows) if row.status != "ok")
    without = [row for row in rows if row.status != "engine"]
    estimator.restore({})
    alone = by_row(estimator(without, know(without)), without)
    assert by_row(found, rows) == alone | {id(row): None for row in rows if row.status == "engine"}


@pytest.mark.parametrize("preset", BY_TASK)
def test_I4_the_same_task_under_another_name_changes_no_bit(preset, make_step, know):
    rows = make_step(0)
    twins = [replace(row, task=f"{row.task}'") for row in rows]
    estimator = resolve(preset, team=TEAM)
    both = [*rows, *twins]
    evidence = know(both)
    evidence.baselines.update({f"{task}'": evidence.baselines[task] for task in {row.task for row in rows}})
    alone, found = estimator(rows, know(rows)), estimator(both, evidence)
    assert found.values == alone.values * 2


@pytest.mark.parametrize("number", [0, 1, 3])
def test_I4_any_number_of_rows(estimator, make_step, know, number):
    rows = [row for row in make_step(1) if row.status == "ok"][:number]
    found = estimator(rows, know(rows))
    assert len(found.values) == number
    assert all(value is not None and abs(value) < 10 for value in found.values)


def test_I6_a_step_of_equal_rewards_is_exactly_zero(estimator, make_step, know):
    """0.1, whose sums round; baselines earn the same, critics expect it."""
    rows = [replace(row, reward=None if row.status == "engine" else 0.1, penalty=0.0) for row in make_step(2)]
    evidence = know(rows, [[0.1] * len(row.response_ids) for row in rows])
    for probes in evidence.baselines.values():
        probes.update({name: [0.1, 0.1] for name in probes})
    found = estimator(rows, evidence)
    discounted = getattr(estimator, "gamma", 1.0) != 1.0  # what is further away is worth less, and so not equal
    for i, value in enumerate(found.values):
        assert value in (None, 0.0, 0.1 if "raw" in repr(estimator) else 0.0) or discounted, rows[i]


@pytest.mark.parametrize(
    "preset", [p for p in BY_TASK if p not in ("remax", "difference", "dr-mas-paper")] + ["reinforce++-baseline"]
)
@pytest.mark.parametrize("whiten", [None, "pooled", "agent"])
def test_I6_an_equal_group_among_others_is_exactly_zero(preset, whiten, make_step, know):
    rows = make_step(3, penalties=False)
    found = resolve(preset, whiten=whiten)(rows)
    quiet = [i for i, row in enumerate(rows) if row.task in ("equal", "lone") and row.status == "ok"]
    assert len(quiet) > 5
    assert [found.values[i] for i in quiet] == [0.0] * len(quiet)
    assert any(found.values[i] for i in range(len(rows)))


def test_I7_a_penalty_is_taken_off_its_own_row_alone(estimator, make_step, know):
    """Where it is normalised with the rewards (dr-mas-paper), its segment may change, but no other."""
    rows = make_step(3, penalties=False)
    first = next(i for i, row in enumerate(rows) if row.status == "ok" and row.task == "equal")
    punished = [replace(row, penalty=0.01 * (i == first)) for i, row in enumerate(rows)]
    kept = estimator.state()
    before = estimator(rows, know(rows))
    estimator.restore(kept)
    after = estimator(punished, know(punished))
    for i in range(len(rows)):
        if "inside" in repr(estimator):
            pooled = "mean='task'" in repr(estimator)
            same = rows[i].task == rows[first].task and (pooled or rows[i].agent == rows[first].agent)
            assert after.of(i) == before.of(i) or same
        elif i == first:
            assert after.values[i] == pytest.approx(before.values[i] - 0.01, abs=1e-12)
        else:
            assert after.of(i) == before.of(i)


def test_an_included_row_needs_a_finite_reward(estimator, make_step, know):
    rows = [replace(row, reward=float("nan")) if row.status == "ok" else row for row in make_step(0)]
    with pytest.raises(DataError, match=r"has reward nan and status 'ok'"):
        estimator(rows, know(rows))


def test_tokens_and_values_agree(estimator, make_step, know):
    rows = make_step(1)
    found = estimator(rows, know(rows))
    for i, row in enumerate(rows):
        value = found.of(i)
        if isinstance(value, list):
            assert len(value) == len(row.response_ids)
            assert found.values[i] == pytest.approx(sum(value) / len(value))
