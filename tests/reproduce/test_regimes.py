"""Regimes: their exact factors by formula, and samples of the product within their standard error."""

import json
import math

import numpy as np
import pytest

from drmas.core.advantages import advantages
from drmas.reproduce.bandit_moments import finite, population
from drmas.reproduce.regimes import RULES, at_success, measure, regimes, rescue_loop, sample
from tests.reproduce.test_bandit_team import RESCUE, RESCUE_POLICIES

REGIMES = {regime.name: regime for regime in regimes()}
GROUPS = {4: 400, 8: 400, 64: 12}


@pytest.fixture(scope="module")
def tables():
    return {name: measure(regime, GROUPS, seed=77) for name, regime in REGIMES.items()}


def factor(p, own):
    return own * (1 - p) / p + (1 - own) * p / (1 - p)


@pytest.mark.parametrize("success", [0.5, 0.7, 0.9, 0.97])
def test_the_loops_factor_is_the_formula_of_success_and_own_success(success):
    """f = 1/5 in each of two calls: rows succeed with (f + 2 (1 - f) f) / (f + 2 (1 - f)) = 0.52 / 1.8."""
    team = at_success(success, (0.4, 0.15, 0.05))
    fixer = population(team, team.logits(), RULES["grpo"])["fixer"]
    assert fixer.mean == pytest.approx(success, abs=1e-12)
    assert fixer.own_mean == pytest.approx(0.52 / 1.8, abs=1e-12)
    assert fixer.factor == pytest.approx(factor(success, 0.52 / 1.8), rel=1e-11)


def test_the_factor_is_one_where_it_should_be(tables):
    for name in ("two agents that always speak", "success one half"):
        assert [agent["inflation"] for agent in tables[name]["agents"]] == pytest.approx([1, 1], abs=1e-12)
    for table in tables.values():
        for agent in table["agents"]:
            assert agent["rules"]["dr-mas"]["factor"] == pytest.approx(1, abs=1e-12)
            assert agent["rules"]["dr-mas"]["row_mean"] == pytest.approx(0, abs=1e-12)


def test_the_rare_agents_factor_by_hand(tables):
    """p = 0.95 0.85 + 0.05 0.2 = 0.8175; the specialist succeeds with 0.25 0.5 + 0.75 0.1 = 0.2."""
    specialist = tables["rare agent"]["agents"][2]
    assert specialist["calls"] == pytest.approx(0.05)
    assert specialist["inflation"] == pytest.approx(factor(0.8175, 0.2), rel=1e-12)
    answerer = tables["rare agent"]["agents"][1]
    assert answerer["inflation"] == pytest.approx(factor(0.8175, 0.85), rel=1e-12)


def test_most_rows_of_a_rare_agent_are_compared_with_nothing_under_its_own_statistics(tables):
    """A row of the specialist is alone among 8 with 0.95^7 = 70 %, and without spread in the rest of 0.9 zero rows."""
    rules = tables["rare agent"]["agents"][2]["rules"]
    assert 0.95**7 < rules["dr-mas"]["sizes"]["8"]["exact"]["zero_share"] < 0.95
    assert rules["grpo"]["sizes"]["8"]["exact"]["zero_share"] < 0.1
    ratio = rules["dr-mas"]["sizes"]["8"]["exact"]["groups_needed"] / rules["grpo"]["sizes"]["8"]["exact"]["groups_needed"]
    assert ratio > 2


def test_the_factor_does_not_say_whether_own_statistics_help(tables):
    """At success one half it is 1 and grpo needs over three times the groups; at 0.97 it is 23 and dr-mas needs more."""
    needed = {}
    for name in ("success one half", "verifier loop at success 0.97"):
        rules = tables[name]["agents"][1]["rules"]
        needed[name] = [rules[rule]["sizes"]["8"]["exact"]["groups_needed"] for rule in ("grpo", "dr-mas")]
    assert needed["success one half"][0] > 3 * needed["success one half"][1]
    assert needed["verifier loop at success 0.97"][0] < 0.6 * needed["verifier loop at success 0.97"][1]


@pytest.mark.parametrize("name", REGIMES)
def test_samples_through_the_product_are_within_four_standard_errors(tables, name):
    """The seed is fixed. The errors are the exact ones; those of the sample itself agree with them."""
    compared = 0
    for agent in tables[name]["agents"]:
        for rule in agent["rules"].values():
            for cell in rule["sizes"].values():
                if cell["exact"] is None or "sampled" not in cell:
                    continue
                error = cell["exact"]["deviation"] / math.sqrt(cell["groups"])
                assert abs(cell["sampled"] - cell["exact"]["second"]) <= 4 * error
                compared += 1
                if cell["exact"]["zero_share"] < 0.5:
                    assert cell["stderr"] == pytest.approx(error, rel=0.5, abs=0.01)
    assert compared >= 2 * len(RULES) * len(tables[name]["agents"])


@pytest.mark.parametrize("wrong", ["unpooled", "without the distance", "episodes for rows"])
def test_a_wrong_lemma_would_be_found(wrong):
    """What four standard errors must tell apart: sigma_k alone, a factor of 1, mu_k over episodes instead of rows."""
    team = at_success(0.7, (0.4, 0.15, 0.05))
    logits = team.logits()
    exact = finite(team, logits, RULES["grpo"], 8)["fixer"]
    rows = team.play(logits, groups=400, size=8, seed=5)
    second, stderr, _ = sample(team, logits, rows, RULES["grpo"])["fixer"]
    assert abs(second - exact.second) < 4 * stderr
    moments = population(team, logits, RULES["grpo"])["fixer"]
    shrunk = exact.second / moments.second  # what a group of eight does to the right one
    by_episode = 1 - 0.8**2
    others = {
        "unpooled": moments.score,
        "without the distance": moments.score * moments.own_std**2 / moments.std**2,
        "episodes for rows": moments.score * factor(moments.mean, by_episode),
    }
    assert abs(second - others[wrong] * shrunk) > 4 * stderr


def test_a_samples_standard_error_by_hand():
    """Groups with sums x and row counts n: mean X / N, error sqrt(G / (G - 1) sum (x - mean n)^2) / N."""
    rows = RESCUE.play(RESCUE.logits(RESCUE_POLICIES), groups=30, size=4, seed=8)
    values = advantages(rows, RULES["grpo"]).values
    groups = 30
    x, n = np.zeros(groups), np.zeros(groups)
    for row, value in zip(rows, values, strict=True):
        if row.agent == "fixer":
            x[int(row.task)] += value**2 * 0.5
            n[int(row.task)] += 1
    mean = x.sum() / n.sum()
    used = n > 0
    expected = math.sqrt(((x - mean * n)[used] ** 2).sum() * groups / (groups - 1)) / n.sum()
    found = sample(RESCUE, RESCUE.logits(RESCUE_POLICIES), rows, RULES["grpo"])["fixer"]
    assert found == pytest.approx((mean, expected, n.sum()), rel=1e-12)


def test_an_agent_that_was_never_called_has_no_sample():
    team = rescue_loop((1.0, 1.0), (0.5, 0.5))
    assert set(sample(team, team.logits(), team.play(team.logits(), groups=3, size=2, seed=0), RULES["grpo"])) == {"solver"}


def test_a_regimes_table_is_json_and_says_the_same_again(tables):
    name = "shaped rewards per agent"
    assert json.loads(json.dumps(tables[name])) == tables[name]
    assert measure(REGIMES[name], {4: 50}, seed=3) == measure(REGIMES[name], {4: 50}, seed=3)


def test_names_are_unique_and_every_regime_is_explained():
    assert len(REGIMES) == len(regimes())
    assert all(regime.words.endswith((".", ".")) and len(regime.words) > 40 for regime in regimes())
