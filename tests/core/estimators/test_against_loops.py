"""Every estimator against its formula in plain loops over Python floats, on ragged random steps."""

import math
from collections import defaultdict
from difflib import SequenceMatcher

import pytest

from drmas.core.estimators import resolve
from drmas.core.estimators.gigpo import alike, clustered

EPS = 1e-6
SEEDS = range(6)


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def included(rows):
    return [i for i, row in enumerate(rows) if row.status == "ok"]


def groups(rows, key):
    found = defaultdict(list)
    for i in included(rows):
        found[key(rows[i])].append(i)
    return list(found.values())


def by_agent(rows, values=None, scaled=True):
    """(x - mean) / std within (task, agent), 0 for equal or lone ones; x is the reward unless given."""
    x = values or [row.reward for row in rows]
    result = [None] * len(rows)
    for members in groups(rows, lambda row: (row.task, row.agent)):
        result = normalised(result, members, x, scaled)
    return result


def normalised(result, members, x, scaled):
    own = [x[i] for i in members]
    for i in members:
        result[i] = x[i] - mean(own) if len(own) > 1 else 0.0
        if scaled and len(own) > 1:
            result[i] = 0.0 if max(own) - min(own) < 1e-9 else result[i] / (deviation(own) + EPS)
    return result


def by_episode(rows, scaled):
    """The task's distinct episodes; every row of one gets its episode's."""
    result = [None] * len(rows)
    for members in groups(rows, lambda row: row.task):
        rewards = {rows[i].episode: rows[i].reward for i in members}
        own = list(rewards.values())
        for i in members:
            spread = len(own) > 1 and max(own) - min(own) > 1e-9
            result[i] = (rows[i].reward - mean(own)) / (deviation(own) + EPS if scaled else 1.0) if spread else 0.0
    return result


def whitened(rows, tokens, agents=False):
    """Per row a list of numbers, one per token, over all of them or those of each agent."""
    result = [None] * len(rows)
    for agent in {row.agent for row in rows} if agents else {None}:
        mine = [i for i in range(len(rows)) if tokens[i] is not None and agent in (None, rows[i].agent)]
        flat = [value for i in mine for value in tokens[i]]
        for i in mine:
            result[i] = [(value - mean(flat)) / (deviation(flat) + EPS) for value in tokens[i]]
    return result


def less_penalty(rows, values):
    return [None if value is None else value - row.penalty for row, value in zip(rows, values, strict=True)]


def check(found, rows, expected):
    """`expected`: a number or a list of one per token, with the penalties still in."""
    assert [value is None for value in found.values] == [value is None for value in expected]
    for i, value in enumerate(expected):
        if value is not None:
            width = len(rows[i].response_ids)
            got = found.of(i) if isinstance(found.of(i), list) else [found.of(i)] * width
            wanted = value if isinstance(value, list) else [value] * width
            assert got == pytest.approx([each - rows[i].penalty for each in wanted], abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_comparisons_of_rows(make_step, seed):
    rows = make_step(seed)
    check(resolve("dr-mas")(rows), rows, by_agent(rows))
    for estimator in (resolve("grpo"), resolve("dapo", penalty="outside")):
        check(estimator(rows), rows, by_episode(rows, scaled=True))
    factor = {
        task: len({rows[i].episode for i in included(rows) if rows[i].task == task}) for task in {row.task for row in rows}
    }
    centred = by_episode(rows, scaled=False)
    others = [
        None if value is None else value * factor[row.task] / max(factor[row.task] - 1, 1)
        for row, value in zip(rows, centred, strict=True)
    ]
    check(resolve("rloo")(rows), rows, others)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("whiten", ["pooled", "agent"])
def test_reinforce_pp(make_step, seed, gamma, whiten):
    rows = make_step(seed)
    to_come = [None] * len(rows)
    for i in included(rows):
        carried, found = 0.0, []
        for t in reversed(range(len(rows[i].response_ids))):
            carried = (rows[i].reward if t == len(rows[i].response_ids) - 1 else 0.0) + gamma * carried
            found.insert(0, carried)
        to_come[i] = found
    check(resolve("reinforce++", gamma=gamma, whiten=whiten)(rows), rows, whitened(rows, to_come, whiten == "agent"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("whiten", ["pooled", "agent"])
def test_whitening_leaves_rows_without_comparison_at_zero_and_out(make_step, seed, whiten):
    """Here drmas differs from the first implementation, which lets them in."""
    rows = make_step(seed)
    for found, centred in (
        (resolve("reinforce++-baseline", whiten=whiten), by_episode(rows, scaled=False)),
        (resolve("dr-mas", whiten=whiten), by_agent(rows)),
    ):
        quiet = {i for i in included(rows) if rows[i].task in ("equal", "lone") or centred[i] == 0.0}
        tokens = [
            None if value is None or i in quiet else [value] * len(rows[i].response_ids) for i, value in enumerate(centred)
        ]
        expected = whitened(rows, tokens, whiten == "agent")
        check(found(rows), rows, [0.0 if i in quiet else value for i, value in enumerate(expected)])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("anchor_norm", ["mean", "mean_std"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gigpo(make_step, seed, gamma, anchor_norm):
    rows = make_step(seed)
    last = defaultdict(int)
    for row in rows:
        last[row.task, row.episode] = max(last[row.task, row.episode], row.turn)
    returns = [None if row.reward is None else gamma ** (last[row.task, row.episode] - row.turn) * row.reward for row in rows]
    steps = [None] * len(rows)
    for members in groups(rows, lambda row: (row.task, row.agent, tuple(row.prompt_ids))):
        steps = normalised(steps, members, returns, anchor_norm == "mean_std")
    expected = [None if e is None else e + 0.5 * q for e, q in zip(by_agent(rows), steps, strict=True)]
    found = resolve("gigpo", gamma=gamma, anchor_norm=anchor_norm, step_weight=0.5)(rows)
    check(found, rows, expected)
    anchors = [sorted(anchor.rows) for anchor in found.anchors]
    assert sorted(anchors) == sorted(groups(rows, lambda row: (row.task, row.agent, tuple(row.prompt_ids))))
    assert {anchor.scope for anchor in found.anchors} == {"anchor"}
    assert all(anchor.key[:2] == (rows[anchor.rows[0]].task, rows[anchor.rows[0]].agent) for anchor in found.anchors)


@pytest.mark.parametrize("similarity", [0.3, 0.6, 0.79, 0.8, 0.81, 0.95])
def test_prompts_are_alike_as_difflib_says(similarity):
    """Without a common start and end, which are matched first here, it is difflib's ratio to the number."""
    prompts = [(1, 2, 3, 4, 5), (9, 2, 3, 4, 8), (7, 1, 2, 3, 4), (5, 4, 3, 2, 1), (2, 3, 4, 5, 6), (6,), (1, 1, 2, 2, 3, 3, 9)]
    for a in prompts:
        for b in prompts:
            if a == b or (a[0] != b[0] and a[-1] != b[-1]):
                assert alike(a, b, similarity) == (SequenceMatcher(None, a, b).ratio() >= similarity), (a, b)


def test_prompts_with_a_common_start_and_end():
    """18 of the 20 tokens of each are equal in place: 2 x 18 / 40."""
    a, b = (*range(10), 100, 101, *range(20, 28)), (*range(10), 200, 201, *range(20, 28))
    assert alike(a, b, 0.9)
    assert not alike(a, b, 0.91)
    assert alike((), (), 0.9)
    assert not alike((), (1,), 0.1)


def test_a_cluster_is_what_is_alike_to_its_first_member():
    """b is alike to a, c to b but not to a; in another order of prompts it is the same, since they are sorted."""
    a, b, c = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 9, 9), (1, 2, 3, 4, 9, 9, 9, 9)
    assert clustered({c, a, b}, 0.7) == {a: 0, b: 0, c: 1}
    assert clustered({a, b, c}, None) == {a: 0, b: 1, c: 2}
    assert clustered(set(), 0.7) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_baselines_of_probes(make_step, know, seed):
    rows = make_step(seed)
    evidence = know(rows)
    greedy = [None] * len(rows)
    without = [None] * len(rows)
    for i in included(rows):
        greedy[i] = rows[i].reward - mean(evidence.baselines[rows[i].task]["greedy"])
        known = evidence.baselines[rows[i].task].get(f"without {rows[i].agent}")
        without[i] = None if known is None else rows[i].reward - mean(known)
    check(resolve("remax")(rows, evidence), rows, greedy)
    assert [i for i in included(rows) if without[i] is None] == [
        i for i in included(rows) if (rows[i].task, rows[i].agent) == ("lone", "writer")
    ]
    check(resolve("difference", team=["solver", "verifier", "writer"])(rows, evidence), rows, without)


@pytest.mark.parametrize("seed", SEEDS)
def test_ema_over_three_steps(make_step, seed):
    estimator, past = resolve("ema", ema_decay=0.7), {}
    for number in range(3):
        rows = make_step(seed + 10 * number)
        expected = [None] * len(rows)
        for members in groups(rows, lambda row: row.agent):
            agent, now = rows[members[0]].agent, mean([rows[i].reward for i in members])
            past[agent] = 0.7 * past[agent] + 0.3 * now if agent in past else now
            for i in members:
                expected[i] = rows[i].reward - past[agent]
        check(estimator(rows), rows, expected)
        assert estimator.state()["baselines"] == pytest.approx(past)
