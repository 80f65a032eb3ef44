"""Second moments against the lemma as an identity, against numpy, and the choice of the rows that are measured."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from drmas.core.advantages import AdvantageRule, Advantages, TokenAdvantages, advantages
from drmas.core.diagnostics import inflation_factors
from drmas.core.moments import PER_AGENT, POOLED, second_moments, spread

DR_MAS = AdvantageRule()
GRPO = AdvantageRule(mean="task", std="task", weighting="episode")


@pytest.fixture
def ragged(make_row):
    """ragged(seed): 12 tasks of 6 episodes, agents with 1 to 3 calls each and rewards of their own in every third task;
    penalties, a failed episode, and every fourth task without spread."""

    def build(seed: int):
        draw, rows = random.Random(seed), []
        for task in range(12):
            for episode in range(6):
                shared = 1.0 if task % 4 == 0 else float(draw.random() < 0.4)
                failed = "engine" if (task, episode) == (5, 2) else "ok"
                for agent in ("solver", "verifier"):
                    own = shared if task % 3 or task % 4 == 0 else shared + 10.0 * draw.random() * (agent == "verifier")
                    for turn in range(draw.randint(1, 3)):
                        made = make_row(
                            f"t{task}", f"t{task}#{episode}", agent, own, turn=turn, penalty=draw.choice([0.0, 0.1])
                        )
                        rows.append(replace(made, status=failed, reward=own if failed == "ok" else None))
        return rows

    return build


def included(rows):
    return [i for i, row in enumerate(rows) if row.status == "ok"]


def differs(rows, task):
    episodes = {row.episode for row in rows if row.task == task and row.status == "ok"}
    means = [np.mean([row.reward for row in rows if row.episode == each]) for each in episodes]
    return np.std(means) > 1e-9


def drawn_squares(rows, chosen, seed=1):
    """|z|^2 that depends on the reward, so that the covariance is far from 0."""
    draw = random.Random(seed)
    return {i: draw.expovariate(1.0) * (1.0 + 2.0 * rows[i].reward) for i in chosen}


@pytest.mark.parametrize("seed", range(3))
def test_with_equal_norms_the_moment_is_the_lemmas_factor(ragged, seed):
    rows = ragged(seed)
    found = second_moments(rows, dict.fromkeys(included(rows), 2.5), advantages(rows, GRPO))
    factors = inflation_factors(rows)
    assert list(found) == ["solver", "verifier"]
    for agent, moments in found.items():
        assert moments.score == 2.5
        assert moments.pooled == pytest.approx(moments.predicted, rel=1e-12)
        assert moments.predicted == pytest.approx(factors[agent], rel=1e-12)
        assert moments.covariance == pytest.approx(0.0, abs=1e-12)
        assert abs(moments.predicted - 1.0) > 0.01  # there is something to see


@pytest.mark.parametrize("share", [1, 3])
def test_moments_by_numpy(ragged, share):
    """All rows and every third row: mean and covariance as numpy has them, over the rows of tasks that differ."""
    rows = ragged(0)
    values = advantages(rows, DR_MAS)
    squares = drawn_squares(rows, included(rows)[::share])
    plain = [replace(row, penalty=0.0) for row in rows]
    rules = {"pooled": advantages(plain, POOLED).values, "per_agent": advantages(plain, PER_AGENT).values}
    for agent, moments in second_moments(rows, squares, values).items():
        own = [i for i in squares if rows[i].agent == agent]
        compared = [i for i in own if differs(rows, rows[i].task)]
        assert 0 < len(compared) < len(own) == moments.rows
        z = np.array([squares[i] for i in compared])
        for name, advantage in rules.items():
            a = np.array([advantage[i] for i in compared]) ** 2
            assert getattr(moments, name) == pytest.approx(np.mean(a * z) / np.mean(z), rel=1e-12)
        a = np.array([rules["pooled"][i] for i in compared]) ** 2
        assert moments.covariance == pytest.approx(np.cov(a, z, ddof=0)[0, 1] / np.mean(z), rel=1e-9)
        assert moments.pooled == pytest.approx(np.mean(a) + moments.covariance, rel=1e-12)  # E|z|^2 E[A^2] + Cov
        assert abs(moments.covariance) > 0.01
        assert moments.score == pytest.approx(np.mean([squares[i] for i in own]), rel=1e-12)
        trained = np.array([values.values[i] for i in own]) ** 2
        assert moments.own == pytest.approx(np.mean(trained * [squares[i] for i in own]) / moments.score, rel=1e-12)


def test_with_all_rows_measured_the_moment_is_prediction_and_covariance(ragged):
    rows = ragged(2)
    for moments in second_moments(rows, drawn_squares(rows, included(rows)), advantages(rows, POOLED)).values():
        assert moments.pooled == pytest.approx(moments.predicted + moments.covariance, rel=1e-12)


def test_moments_by_hand(make_row):
    """Episodes of t: 1, 0, 0, 0 (mean 1/4, variance 3/16); a speaks in all of them, b in the first two, twice in the second."""
    rows = [make_row("t", str(i), "a", float(i == 0), penalty=0.5) for i in range(4)]
    rows += [make_row("t", "0", "b", 1.0), make_row("t", "1", "b", 0.0), make_row("t", "1", "b", 0.0, turn=1)]
    rows += [make_row("u", "0", "b", 1.0), make_row("u", "1", "b", 1.0)]
    squares = dict(zip(range(9), [4.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 100.0, 100.0], strict=True))
    found = second_moments(rows, squares, Advantages([1.0] * 7 + [0.0] * 2, []))
    # A^2 of a success is 9/16 * 16/3 = 3, of a failure 1/16 * 16/3 = 1/3
    assert found["a"].pooled == pytest.approx((3 * 4 + 3 * 1 / 3) / 7)
    assert found["a"].predicted == pytest.approx(1.0)
    assert found["b"].pooled == pytest.approx((3 * 3 + 2 * 1 / 3) / 5)
    assert found["b"].predicted == pytest.approx((3 + 1 / 3 + 1 / 3) / 3)
    # b's own: 1, 0, 0 (mean 1/3, variance 2/9): A^2 is 2, 1/2, 1/2; task u has no spread
    assert found["b"].per_agent == pytest.approx((2 * 3 + 2 / 2) / 5)
    assert (found["b"].rows, found["b"].score) == (5, 41.0)
    assert found["b"].own == pytest.approx(5 / 205)


def test_an_agent_without_spread_where_the_others_have_some_counts_as_0(make_row):
    rows = [make_row("t", str(i), "a", float(i)) for i in range(3)] + [make_row("t", "2", "b", 2.0)] * 2
    moments = second_moments(rows, dict.fromkeys(range(5), 1.0), advantages(rows, DR_MAS))["b"]
    assert moments.per_agent == 0.0
    assert (moments.pooled, moments.predicted) == pytest.approx((1.5, 1.5))  # (2 - 1)^2 / (2 / 3)


def test_without_spread_or_gradient_there_is_no_ratio(make_row):
    rows = [make_row("t", str(i), "a", 1.0) for i in range(2)] + [make_row("u", str(i), "b", float(i)) for i in range(2)]
    found = second_moments(rows, {0: 2.0, 1: 4.0, 2: 0.0}, advantages(rows, DR_MAS))
    nothing = (None, None, None, None)
    assert (found["a"].pooled, found["a"].predicted, found["a"].per_agent, found["a"].covariance) == nothing
    assert (found["a"].rows, found["a"].score, found["a"].own) == (2, 3.0, 0.0)
    assert (found["b"].score, found["b"].pooled, found["b"].own, found["b"].covariance) == (0.0, None, None, None)
    assert found["b"].predicted == pytest.approx(1.0)
    assert second_moments(rows, {}, advantages(rows, DR_MAS)) == {}


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_shows(make_row, broken):
    rows = [make_row("t", str(i), "a", float(i % 2)) for i in range(4)]
    found = second_moments(rows, {0: 1.0, 1: broken, 2: broken, 3: 1.0}, advantages(rows, GRPO))["a"]
    assert not any(math.isfinite(each) for each in (found.score, found.pooled, found.own, found.covariance))
    assert found.predicted == pytest.approx(1.0)


def test_advantages_that_differ_from_token_to_token_have_no_moment(make_row):
    """As a critic's do; those of b are the same for all tokens of a row."""
    rows = [make_row("t", str(i // 2), "ab"[i % 2], float(i // 2)) for i in range(4)]
    tokens = TokenAdvantages([[0.5, 1.5], [-2.0, -2.0], [0.0, 1.0], [1.0, 1.0]])
    found = second_moments(rows, dict.fromkeys(range(4), 3.0), Advantages(tokens.row_means(), [], tokens))
    assert (found["a"].own, found["b"].own) == (None, 2.5)
    assert found["a"].pooled == pytest.approx(1.0)


def test_I4_the_order_of_rows_changes_nothing(ragged):
    rows = ragged(1)
    squares = drawn_squares(rows, included(rows))
    found = second_moments(rows, squares, advantages(rows, GRPO))
    last = len(rows) - 1
    turned = second_moments(rows[::-1], {last - i: squares[i] for i in reversed(squares)}, advantages(rows[::-1], GRPO))
    assert turned.keys() == found.keys()
    for agent, moments in found.items():
        assert [getattr(turned[agent], name) for name in moments.__slots__] == pytest.approx(
            [getattr(moments, name) for name in moments.__slots__], rel=1e-12
        )


def test_rows_are_spread_over_each_agents_rows(make_row):
    """256 episodes of solver, verifier, solver: at most 32 rows each, one from every stretch, of both of the solver's turns."""
    rows = [make_row("t", str(i // 3), "sv"[turn % 2], turn=turn) for i in range(0, 768, 3) for turn in range(3)]
    trained = [i for i in range(len(rows)) if rows[i].episode != "7"]
    chosen = spread(rows, trained, 32)
    assert chosen == sorted(set(chosen)) == spread(rows, trained, 32)
    assert set(chosen) <= set(trained)
    for agent, turns in (("s", [0, 2]), ("v", [1])):
        own = [i for i in trained if rows[i].agent == agent]
        places = [own.index(i) for i in chosen if rows[i].agent == agent]
        assert [place * 32 // len(own) for place in places] == pytest.approx(range(32), abs=1)
        counts = [sum(rows[own[place]].turn == turn for place in places) for turn in turns]
        assert min(counts) >= 12


@pytest.mark.parametrize("count", [0, 1, 5, 31, 32])
def test_few_rows_are_all_measured(make_row, count):
    rows = [make_row("t", str(i), "a") for i in range(count)] + [make_row("t", "0", "b")]
    assert spread(rows, range(len(rows)), 32) == list(range(len(rows)))
    assert spread(rows, [], 32) == []


@pytest.mark.parametrize("count", range(33, 70, 3))
def test_no_row_is_taken_twice(make_row, count):
    rows = [make_row("t", str(i), "a") for i in range(count)]
    assert len(set(spread(rows, range(count), 32))) == 32
