"""The schedules that the collector is compared with, by hand, and a small run of the comparison itself."""

import asyncio

import pytest

from bench.rollout import Line, search_step
from bench.schedules import Call, barriers, critical_seconds, lockstep_seconds, plan, run_lockstep

BY_HAND = {
    "a": [Call("a/000/router", 0, "router", 1.0), Call("a/001/answerer", 0, "answerer", 2.0)],
    "b": [
        Call("b/000/router", 0, "router", 3.0),
        Call("b/001/searcher", 0, "searcher", 0.5),
        Call("b/002/router", 1, "router", 4.0),
        Call("b/003/answerer", 1, "answerer", 0.25),
    ],
    "c": [Call("c/000/router", 0, "router", 2.5), Call("c/001/answerer", 0, "answerer", 6.0)],
}


def test_lockstep_waits_for_the_slowest_of_each_agent_in_each_round():
    # round 0: router 3, searcher 0.5, answerer 6; round 1: router 4, answerer 0.25
    assert lockstep_seconds(BY_HAND) == 3 + 0.5 + 6 + 4 + 0.25
    assert [sorted(call.key for call in group) for group in barriers(BY_HAND)] == [
        ["a/000/router", "b/000/router", "c/000/router"],
        ["b/001/searcher"],
        ["a/001/answerer", "c/001/answerer"],
        ["b/002/router"],
        ["b/003/answerer"],
    ]


def test_without_barriers_the_longest_episode_is_the_bound():
    assert critical_seconds(BY_HAND) == 2.5 + 6  # c; b takes 7.75
    assert critical_seconds({"b": BY_HAND["b"]}) == lockstep_seconds({"b": BY_HAND["b"]}) == 7.75


def test_no_episodes_take_no_time():
    assert (lockstep_seconds({}), critical_seconds({}), barriers({})) == (0.0, 0.0, [])


def test_the_loop_with_barriers_makes_every_call():
    quick = {
        name: [Call(call.key, call.round, call.agent, call.seconds / 1000) for call in calls] for name, calls in BY_HAND.items()
    }
    assert asyncio.run(run_lockstep(quick)) == 8


def test_a_plan_is_the_search_teams_and_a_function_of_its_seed():
    names = [f"e{i}" for i in range(200)]
    plans = plan(names, rounds=4, median=1.0, sigma=0.5, seed=3)
    assert plans == plan(names, rounds=4, median=1.0, sigma=0.5, seed=3)
    assert plans != plan(names, rounds=4, median=1.0, sigma=0.5, seed=4)
    spoken = {" ".join(call.agent[0] for call in calls) for calls in plans.values()}
    assert spoken == {"r a", "r s r a", "r s r s r a", "r s r s r s a"}
    for name, calls in plans.items():
        assert [call.key for call in calls] == [f"{name}/{i:03d}/{call.agent}" for i, call in enumerate(calls)]
    seconds = sorted(call.seconds for calls in plans.values() for call in calls)
    assert 0.9 < seconds[len(seconds) // 2] < 1.1


def test_both_loops_make_the_calls_of_the_plan(byte_tokenizer):
    lines, calls = search_step(byte_tokenizer, 3, 2, median=0.001, sigma=0.5, seed=0)
    planned = plan([f"t{i}#{k}" for i in range(3) for k in range(2)], rounds=4, median=0.001, sigma=0.5, seed=0)
    assert calls == sum(map(len, planned.values()))
    values = {line.name: line.value for line in lines}
    assert values["longest episode, computed"] == critical_seconds(planned)
    assert values["loop with barriers, computed"] == lockstep_seconds(planned)


@pytest.mark.parametrize(
    ("value", "bound", "at_least", "missed"),
    [
        (0.5, None, False, False),
        (0.5, 0.5, False, False),
        (0.6, 0.5, False, True),
        (0.9, 0.9, True, False),
        (0.8, 0.9, True, True),
    ],
)
def test_a_line_says_whether_its_bound_was_missed(value, bound, at_least, missed):
    line = Line("ratio", value, "", bound, at_least)
    assert line.missed == missed
    assert ("missed" in str(line), "reached" in str(line)) == (missed, bound is not None and not missed)
