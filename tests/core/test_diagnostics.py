import math
import random
from dataclasses import replace

import pytest

from drmas.core.advantages import AdvantageRule, Advantages, advantages
from drmas.core.diagnostics import agent_summary, inflation_factors, pooled_factors

DR_MAS = AdvantageRule()
GRPO = AdvantageRule(mean="task", std="task", weighting="episode")


def test_inflation_of_binary_rewards_as_recorded(golden, make_row):
    """Agent k succeeds in the share p_agent of its calls, the group in `successes` of `group_size` episodes."""
    for case in golden["auxiliary"]["binary_inflation_factor"]["cases"]:
        size, successes = case["group_size"], case["successes"]
        rows = [make_row("t", str(i), "other", float(i < successes)) for i in range(size)]
        calls = round(4 * case["p_agent"])
        rows += [make_row("t", "0", "k", 1.0)] * calls + [make_row("t", str(size - 1), "k", 0.0)] * (4 - calls)
        assert inflation_factors(rows)["k"] == pytest.approx(case["factor"], rel=1e-6), case


def test_inflation_by_hand(make_row):
    """Episodes of t: 1, 0, 0.5 (mean 1/2, variance 1/6). Agent a has rewards 1, 1, 0.5: mean 5/6, variance 1/18."""
    rows = [
        make_row("t", "0", "a", 1.0),
        make_row("t", "0", "a", 1.0, turn=1),
        make_row("t", "1", "b", 0.0),
        make_row("t", "2", "a", 0.5),
        make_row("u", "0", "a", 1.0),
        make_row("u", "1", "a", 0.0),
        make_row("u", "1", "a", 0.0, turn=1),
    ]
    in_t = (1 / 18 + 1 / 9) * 6
    in_u = (2 / 9 + 1 / 36) * 4
    factors = inflation_factors(rows)
    assert factors["a"] == pytest.approx((3 * in_t + 3 * in_u) / 6)
    assert factors["b"] == pytest.approx(0.25 * 6)


def test_an_episode_of_agents_with_own_rewards_counts_with_the_mean_of_its_rows(make_row):
    """A game of zero sum: every episode's mean is 0 and nothing is pooled. With a third episode that breaks it, by hand."""
    game = [
        make_row("t", "0", "a", 1.0),
        make_row("t", "0", "b", -1.0, turn=1),
        make_row("t", "1", "a", -1.0),
        make_row("t", "1", "b", 1.0, turn=1),
    ]
    assert inflation_factors(game) == {"a": None, "b": None}
    rows = [*game, make_row("t", "2", "a", -1.0), make_row("t", "2", "a", -1.0, turn=1), make_row("t", "2", "b", -1.0, turn=2)]
    # episodes: 0, 0, -1: mean -1/3, variance 2/9. a: 0, 0, -1, -1: mean -1/2, variance 1/4. b: once in each
    assert inflation_factors(rows) == pytest.approx({"a": (1 / 4 + 1 / 36) * 9 / 2, "b": 1.0})
    assert pooled_factors(rows) == pytest.approx({("t", "a"): 1.25, ("t", "b"): 1.0})
    assert inflation_factors(rows[::-1]) == pytest.approx(inflation_factors(rows))


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_factor_is_the_mean_square_of_the_pooled_rules_advantages(make_row, scale):
    """Agents with rewards of their own on different scales: what grpo compares, but for its ddof and eps, rows of tasks that
    differ."""
    draw = random.Random(3)
    rows = [make_row("equal", str(i), "ab"[i % 2], 0.5) for i in range(4)]
    for task in range(5):
        for episode in range(4):
            for turn, agent in enumerate("abab"[: draw.randint(2, 4)]):
                reward = draw.random() if agent == "a" else scale * draw.random() - 3.0
                rows.append(make_row(f"t{task}", str(episode), agent, reward, turn=turn))
    found = advantages(rows, replace(GRPO, ddof=0, eps=0.0)).values
    for agent, factor in inflation_factors(rows).items():
        squares = [a * a for a, row in zip(found, rows, strict=True) if row.agent == agent and row.task != "equal"]
        assert factor == pytest.approx(math.fsum(squares) / len(squares), rel=1e-12)


def test_inflation_needs_spread_and_included_rows(make_row):
    rows = [make_row("t", "0", "a", 0.1), make_row("t", "1", "a", 0.1), make_row("u", "0", "b", None, status="engine")]
    assert inflation_factors(rows) == {"a": None, "b": None}
    assert inflation_factors([]) == {}


def test_I3_a_failed_episode_does_not_count_in_the_inflation(team_rows):
    assert inflation_factors(team_rows) == inflation_factors([row for row in team_rows if row.status == "ok"])


def test_summary_by_agent(team_rows):
    summary = agent_summary(team_rows, advantages(team_rows, DR_MAS))
    solver, verifier = summary["solver"], summary["verifier"]
    assert solver["rows"] == 5
    assert solver["calls_per_episode"] == 5 / 4
    assert solver["reward_mean"] == 3 / 5
    assert solver["advantage_mean"] == pytest.approx(0.0, abs=1e-12)
    assert solver["advantage_rms"] == pytest.approx(math.sqrt(4 * 0.75 / 5), rel=1e-5)
    assert solver["row_sum"] == pytest.approx(0.0, abs=1e-12)
    assert solver["singleton_share"] == 1 / 5
    assert solver["constant_share"] == 0.0
    assert solver["response_tokens_mean"] == (3 + 2 + 5 + 4 + 7) / 5
    assert verifier["rows"] == 2
    assert verifier["calls_per_episode"] == 2 / 4


def test_a_pooled_baseline_leaves_a_push_on_the_agent_that_fails_more(make_row):
    """The search group of the first implementation: 2 calls in a success, 4 in failures."""
    rows = [make_row("t", str(i), "answer", float(i < 2)) for i in range(5)]
    rows += (
        [make_row("t", "0", "search", 1.0)] * 2 + [make_row("t", "2", "search", 0.0)] * 3 + [make_row("t", "3", "search", 0.0)]
    )
    pooled = agent_summary(rows, advantages(rows, GRPO))
    assert pooled["search"]["row_sum"] == pytest.approx(2 * 1.0954431 - 4 * 0.73029536, abs=1e-5)
    own = agent_summary(rows, advantages(rows, DR_MAS))
    assert own["search"]["row_sum"] == pytest.approx(0.0, abs=1e-12)


def test_shares_of_rows_without_spread(make_row):
    rows = [make_row("t", str(i), "a", 1.0) for i in range(3)] + [make_row("u", str(i), "a", float(i)) for i in range(2)]
    assert agent_summary(rows, advantages(rows, DR_MAS))["a"]["constant_share"] == 3 / 5


def test_a_row_that_is_in_a_singleton_and_in_a_constant_segment_is_uncompared_once(make_row):
    """Mean over the agent, std over the task: b is alone in t, where all rewards are equal; a is alone in u."""
    rows = [make_row("t", "0", "a", 1.0), make_row("t", "1", "a", 1.0), make_row("t", "1", "b", 1.0)]
    rows += [make_row("u", "0", "a", 1.0), make_row("u", "1", "c", 0.0), make_row("u", "2", "c", 1.0)]
    summary = agent_summary(rows, advantages(rows, AdvantageRule(std="task")))
    shares = {
        agent: [each[f"{name}_share"] for name in ("constant", "singleton", "uncompared")] for agent, each in summary.items()
    }
    assert shares == {"a": [2 / 3, 1 / 3, 1.0], "b": [1.0, 1.0, 1.0], "c": [0.0, 0.0, 0.0]}


def test_an_agent_whose_rows_all_failed_has_no_means(make_row):
    rows = [make_row("t", "0", "a", None, status="timeout")]
    summary = agent_summary(rows, advantages(rows, DR_MAS))["a"]
    assert summary["rows"] == 0.0
    assert summary["row_sum"] == 0.0
    assert summary["without_baseline"] == 0.0
    assert {name for name, value in summary.items() if value is None} == set(summary) - {"rows", "row_sum", "without_baseline"}


def test_I3_rows_without_a_baseline_are_conduct_and_no_advantage(make_row):
    rows = [make_row("t", "0", "a", 1.0), make_row("u", "0", "a", 0.0, turn=0), make_row("u", "0", "a", 0.0, turn=1)]
    summary = agent_summary(rows, Advantages([0.5, None, None], []))["a"]
    conduct = [summary[name] for name in ("rows", "calls_per_episode", "reward_mean", "without_baseline")]
    assert conduct == [3.0, 3 / 2, 1 / 3, 2.0]
    assert [summary[name] for name in ("advantage_mean", "row_sum", "constant_share")] == [0.5, 0.5, 0.0]


def test_rewards_that_differ_by_rounding_have_no_inflation(make_row):
    rows = [make_row("t", "0", "a", 0.3), make_row("t", "1", "a", 0.1 + 0.2)]
    assert inflation_factors(rows) == {"a": None}
    assert inflation_factors([*rows, make_row("u", "0", "a", 1.0), make_row("u", "1", "a", 0.0)])["a"] == 1.0
