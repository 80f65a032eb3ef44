from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from drmas.config.tasks import CurriculumConfig
from drmas.envs.curriculum import BySuccess, appeal


def on(**settings) -> CurriculumConfig:
    return CurriculumConfig(enabled=True, **settings)


def run(draws: BySuccess, count: int, success) -> list[int]:
    """Draw and report at once."""
    found = []
    for _ in range(count):
        index, _ = draws.next()
        draws.report(index, success(index))
        found.append(index)
    return found


@pytest.mark.parametrize("target", [0.1, 0.5, 0.8])
def test_the_appeal_peaks_at_the_target_and_is_nothing_at_both_ends(target: float) -> None:
    values = {rate / 100: appeal(rate / 100, target) for rate in range(101)}
    assert max(values, key=values.get) == target
    assert values[target] == pytest.approx(1.0)
    assert (values[0.0], values[1.0]) == (0.0, 0.0)
    rates = sorted(values)
    below = [values[rate] for rate in rates if rate <= target]
    above = [values[rate] for rate in rates if rate >= target]
    assert below == sorted(below)
    assert above == sorted(above, reverse=True)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_at_the_target_one_half_the_appeal_is_four_times_the_variance(rate: float) -> None:
    assert appeal(rate, 0.5) == pytest.approx(4 * rate * (1 - rate))


def test_tasks_come_in_proportion_to_their_appeal() -> None:
    rates = {0: 0.5, 1: 0.25, 2: 0.0, 3: 1.0}
    draws = BySuccess(4, "seed", on(explore=0.0, smoothing=1.0))
    for index in rates:
        draws.report(index, rates[index])
    counts = Counter(run(draws, 8000, rates.get))
    assert set(counts) == {0, 1}  # never what is always or never solved
    assert counts[1] / counts[0] == pytest.approx(0.75, rel=0.06)


def test_tasks_that_never_came_are_drawn_like_those_at_the_target() -> None:
    draws = BySuccess(1000, "seed", on(explore=0.0, smoothing=1.0))
    for index in range(500):
        draws.report(index, 0.0 if index % 2 else 0.5)
    found = run(draws, 300, lambda index: 0.5)
    assert all(index >= 500 or index % 2 == 0 for index in found)
    assert len(set(found)) > 200


def test_exploring_draws_go_through_all_tasks_in_order_whatever_their_rates() -> None:
    draws = BySuccess(50, "seed", on(explore=1.0))
    assert sorted(run(draws, 50, lambda index: 0.0)) == list(range(50))
    assert sorted(run(draws, 50, lambda index: 1.0)) == list(range(50))
    some = BySuccess(50, "seed", on(explore=0.3, smoothing=1.0))
    assert set(run(some, 400, lambda index: 0.0)) == set(range(50))


def test_a_source_without_appeal_is_read_in_order() -> None:
    draws = BySuccess(20, "seed", on(explore=0.0, smoothing=1.0))
    for index in range(20):
        draws.report(index, 1.0)
    assert sorted(run(draws, 20, lambda index: 1.0)) == list(range(20))


def test_each_report_moves_the_rate_from_the_target_by_the_smoothing() -> None:
    draws = BySuccess(3, "seed", on(target=0.4, smoothing=0.25, explore=1.0))
    index, _ = draws.next()
    draws.report(index, 1.0)
    draws.report(index, 0.0)
    draws.report(index, None)
    assert draws.state()["drawn"] == [[index, 1, pytest.approx(0.75 * (0.4 + 0.25 * 0.6))]]


@pytest.mark.parametrize("explore", [0.0, 0.5, 1.0])
def test_a_task_that_is_out_is_not_drawn_again_unless_all_are(explore: float) -> None:
    draws = BySuccess(9, "seed", on(explore=explore))
    first = [draws.next() for _ in range(9)]
    assert sorted(index for index, _ in first) == list(range(9))
    assert {times for _, times in first} == {0}
    again = [draws.next() for _ in range(4)]
    assert all(times >= 1 for _, times in again)


def test_a_group_that_failed_whole_sets_its_task_free_and_keeps_its_rate() -> None:
    draws = BySuccess(2, "seed", on(explore=0.0))
    (first, _), (second, _) = draws.next(), draws.next()
    draws.report(first, None)
    assert {first, second} == {0, 1}
    assert [draws.next()[0]] == [first]
    assert [rate for _, _, rate in draws.state()["drawn"]] == [None, None]


def test_I9_draws_are_a_function_of_seed_and_history() -> None:
    def success(index: int) -> float:
        return (index % 5) / 4

    config = on()
    sequences = [run(BySuccess(40, seed, config), 100, success) for seed in ("1", "1", "2")]
    assert sequences[0] == sequences[1] != sequences[2]
    assert run(BySuccess(40, "1", config), 100, lambda index: 0.0) != sequences[0]


def test_I9_a_restored_curriculum_goes_on_as_if_nothing_had_happened() -> None:
    chance = random.Random(0)
    whole = BySuccess(30, "seed", on())
    out: list[int] = []
    state, after = None, []
    for step in range(300):
        if out and chance.random() < 0.5:
            index, success = out.pop(0), chance.choice([0.0, 0.25, 0.5, 1.0, None])
            whole.report(index, success)
            after.append(("report", index, success))
        else:
            drawn = whole.next()
            out.append(drawn[0])
            after.append(("next", *drawn))
        if step == 120:
            state, after = json.dumps(whole.state()), []
    resumed = BySuccess(30, "seed", on())
    resumed.restore(json.loads(state))
    for kind, *values in after:
        if kind == "report":
            resumed.report(*values)
        else:
            assert resumed.next() == tuple(values)
    assert resumed.state() == whole.state()


def test_the_state_grows_with_the_tasks_that_came_and_not_with_the_draws() -> None:
    draws = BySuccess(10, "seed", on())
    run(draws, 20, lambda index: 0.5)
    before = len(json.dumps(draws.state()))
    run(draws, 2000, lambda index: 0.5)
    assert len(draws.state()["drawn"]) == 10
    assert len(json.dumps(draws.state())) < before + 60
