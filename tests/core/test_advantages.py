"""Rules and their presets against the recorded numbers and by hand; segments; I3, I4, I6, I7 on rows."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.core.advantages import AdvantageRule, advantages
from drmas.core.estimators import resolve
from drmas.errors import DataError

NAMES = ("dr-mas", "grpo", "dr-mas-paper", "mean=agent,std=task", "mean=task,std=agent", "grpo-turns", "rloo", "dapo")
PRESETS = {name: resolve(name).rule for name in NAMES}
RLOO = {"L01": ("task", "episode"), "L03": ("agent", "turn")}


def recorded(make_row, vector):
    """Rows of a recorded vector; its score has the penalty in it already."""
    return [
        make_row(
            row["task"],
            row["episode"],
            row["agent"],
            row["score"] if "score" in row else sum(row["token_rewards"]),
            turn=row["turn"],
            tokens=row["response_len"],
        )
        for row in vector["rows"]
    ]


def test_recorded_advantages(golden, make_row):
    seen = []
    for vector in golden["vectors"]:
        if "advantage" not in vector:
            continue
        rule = AdvantageRule(**vector["advantage"])
        values = advantages(recorded(make_row, vector), rule).values
        assert values == pytest.approx(vector["expected"]["row_advantage"], **golden["tolerance"]), vector["id"]
        seen.append(vector["id"])
        if (rule.mean, rule.std) == ("agent", "agent"):
            assert rule == PRESETS["dr-mas-paper"], vector["id"]
    assert len(seen) == 16


@pytest.mark.parametrize("name", RLOO)
def test_recorded_rloo(golden, make_row, name):
    (vector,) = [vector for vector in golden["vectors"] if vector["id"] == name]
    mean, weighting = RLOO[name]
    assert vector["settings"]["group_by_agent_id"] == (mean == "agent")
    values = resolve("rloo", mean=mean, weighting=weighting)(recorded(make_row, vector)).values
    assert values == pytest.approx(vector["expected"]["row_advantage"], **golden["tolerance"])


def test_presets_by_hand(team_rows):
    """The task's included rewards: solver 1, 1, 0, 0 and verifier 1, 0 over episodes 1, 0, 0."""

    def check(preset, expected):
        assert resolve(preset)(team_rows).values == pytest.approx(expected, abs=2e-6), preset

    half, one, turn = math.sqrt(3) / 2, 1 / math.sqrt(2), 0.5 / math.sqrt(6 * 0.25 / 5)
    high, low = 2 / math.sqrt(3), -1 / math.sqrt(3)
    per_agent = [half, one, half, -half, None, None, -half, -one]
    pooled_turns = [turn, turn, turn, -turn, None, None, -turn, -turn]
    check("dr-mas", [*per_agent, 0.0])
    check("dr-mas-paper", [*per_agent, 1.0])
    check("grpo", [high, high, high, low, None, None, low, low, 0.0])
    check("rloo", [1.0, 1.0, 1.0, -0.5, None, None, -0.5, -0.5, 0.0])
    check("grpo-turns", [*pooled_turns, 0.0])
    # Both means are one half here, so the mixed ablations show their std alone.
    check("mean=agent,std=task", [*pooled_turns, 0.0])
    check("mean=task,std=agent", [*per_agent, 0.0])


def test_mixed_ablations_change_the_source_of_one_statistic_each():
    steps = ["dr-mas", "mean=agent,std=task", "grpo-turns", "mean=task,std=agent", "dr-mas"]
    for one, other in pairwise(steps):
        changed = {name for name in AdvantageRule.__slots__ if getattr(PRESETS[one], name) != getattr(PRESETS[other], name)}
        assert changed in ({"mean"}, {"std"})


def test_the_default_rule_is_dr_mas():
    assert PRESETS["dr-mas"] == AdvantageRule(
        mean="agent", std="agent", weighting="turn", ddof=1, eps=1e-6, singleton="zero", penalty="outside"
    )


def test_segments_show_who_is_compared(team_rows):
    segments = {(s.scope, s.key): s for s in advantages(team_rows, PRESETS["dr-mas"]).segments}
    assert list(segments)[:3] == [("mean", ("t", "solver")), ("mean", ("t", "verifier")), ("mean", ("u", "solver"))]
    assert len(segments) == 6
    solver = segments["std", ("t", "solver")]
    assert solver.rows == [0, 2, 3, 6]
    assert (solver.num_episodes, solver.weight, solver.num_excluded) == (3, 4.0, 1)
    assert (solver.mean, solver.std) == (0.5, pytest.approx(math.sqrt(1 / 3)))
    assert not solver.singleton
    assert not solver.constant
    lone = segments["mean", ("u", "solver")]
    assert (lone.singleton, lone.constant, lone.rows, lone.mean, lone.std) == (True, False, [8], 1.0, 0.0)
    pooled = advantages(team_rows, PRESETS["rloo"]).segments
    assert [(s.scope, s.key, s.weight) for s in pooled] == [("mean", ("t",), 3.0), ("mean", ("u",), 1.0)]
    one_episode = advantages(team_rows[:3], PRESETS["rloo"]).segments[0]
    assert (one_episode.rows, one_episode.weight, one_episode.singleton) == ([0, 1, 2], 1.0, True)


def test_I3_a_failed_episode_is_counted_and_never_a_zero(make_row):
    rows = [make_row("t", "0", reward=1.0), make_row("t", "1", reward=0.0), make_row("t", "2", reward=None, status="grader")]
    result = advantages(rows, PRESETS["dr-mas"])
    assert result.values == [*advantages(rows[:2], PRESETS["dr-mas"]).values, None]
    assert [s.num_excluded for s in result.segments] == [1, 1]


def test_I3_a_segment_of_failed_rows_has_no_statistics(make_row):
    result = advantages([make_row("t", "0", reward=None, status="timeout")], PRESETS["grpo"])
    assert result.values == [None]
    first = result.segments[0]
    assert (first.mean, first.std, first.weight, first.rows, first.num_excluded) == (None, None, 0.0, [], 1)
    assert not first.singleton
    assert not first.constant


@pytest.mark.parametrize("preset", PRESETS)
def test_I6_constant_and_single_segments_are_exactly_zero(preset, make_row):
    rows = [make_row("t", str(i % 3), agent, 0.1) for i, agent in enumerate("aabab")]
    assert resolve(preset)(rows).values == [0.0] * 5
    lone = resolve(preset)([make_row(reward=0.7)])
    assert lone.values == [0.7 if preset == "dr-mas-paper" else 0.0]
    assert all(segment.singleton for segment in lone.segments)


@pytest.mark.parametrize("preset", PRESETS)
def test_I7_a_penalty_in_an_equal_group_keeps_its_size(preset, make_row):
    rows = [make_row("t", str(i), reward=1.0, penalty=0.01 * (i == 4)) for i in range(5)]
    values = resolve(preset)(rows).values
    if preset in ("dr-mas-paper", "dapo"):
        assert values[4] == pytest.approx(-1.7884465, abs=2e-5)
    else:
        assert values == [0.0, 0.0, 0.0, 0.0, -0.01]


def test_names_with_separators_do_not_collide(make_row):
    rows = [make_row("a:b", "0", "c", 1.0), make_row("a", "1", "b:c", 0.0)]
    result = advantages(rows, PRESETS["dr-mas"])
    assert {segment.key for segment in result.segments} == {("a:b", "c"), ("a", "b:c")}
    assert result.values == [0.0, 0.0]


def test_episodes_of_different_tasks_may_share_a_name(make_row):
    rows = [
        make_row(task, episode, "a", reward) for task, episode, reward in [("t", "0", 1.0), ("t", "1", 0.0), ("u", "0", 0.0)]
    ]
    alone = advantages(rows[:2], PRESETS["grpo"]).values
    assert advantages(rows, PRESETS["grpo"]).values == [*alone, 0.0]


@st.composite
def row_sets(draw):
    cell = st.tuples(
        st.sampled_from("tu"), st.integers(0, 3), st.sampled_from("abc"), st.sampled_from([0.0, 0.01, 0.3]), st.booleans()
    )
    cells = draw(st.lists(cell, min_size=1, max_size=20))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0]), min_size=8, max_size=8))
    failed = draw(st.sets(st.integers(0, 7), max_size=2))
    return cells, rewards, failed


def rows_from(make_row, case):
    cells, rewards, failed = case
    rows = []
    for task, episode, agent, penalty, penalised in cells:
        index = episode + 4 * (task == "u")
        status = "team" if index in failed else "ok"
        reward = rewards[index] if status == "ok" else None
        rows.append(make_row(task, f"{task}#{episode}", agent, reward, penalty=penalty * penalised, status=status))
    return rows


@given(row_sets(), st.sampled_from(sorted(PRESETS)), st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_I4_the_order_of_rows_changes_no_bit(make_row, case, preset, random):
    rows = rows_from(make_row, case)
    order = list(range(len(rows)))
    random.shuffle(order)
    values = advantages(rows, PRESETS[preset]).values
    assert advantages([rows[i] for i in order], PRESETS[preset]).values == [values[i] for i in order]


@given(row_sets(), st.sampled_from(sorted(PRESETS)))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_I3_I4_failed_episodes_and_other_tasks_change_no_bit(make_row, case, preset):
    rows = rows_from(make_row, case)
    values = advantages(rows, PRESETS[preset]).values
    extra = [make_row(row.task, "failed", row.agent, None, status="engine") for row in rows]
    extra += [make_row("v", "v#0", "a", 1.0), make_row("v", "v#1", "a", 0.0)]
    assert advantages(rows + extra, PRESETS[preset]).values[: len(rows)] == values


@given(row_sets())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_per_agent_advantages_sum_to_zero_in_every_segment(make_row, case):
    """What a pooled baseline does not give: no push on an agent for being called more often in failing episodes."""
    rows = [replace(row, penalty=0.0) for row in rows_from(make_row, case)]
    result = advantages(rows, PRESETS["dr-mas"])
    for segment in result.segments:
        assert sum(result.values[row] for row in segment.rows) == pytest.approx(0.0, abs=1e-9)


def test_no_rows():
    assert advantages([], PRESETS["dr-mas"]).values == []
    assert advantages([], PRESETS["grpo"]).segments == []


@pytest.mark.parametrize(("field", "value"), [("reward", None), ("reward", math.nan), ("penalty", math.inf)])
def test_an_included_row_needs_a_finite_reward_and_penalty(make_row, field, value):
    rows = [make_row(), replace(make_row(episode="7"), **{field: value})]
    with pytest.raises(DataError, match=rf"row 1 \(episode '7', agent 'a'\) has {field} {value} and status 'ok'"):
        advantages(rows, PRESETS["dr-mas"])
