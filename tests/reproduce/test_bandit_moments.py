"""Lemma 4.2 on paper, by brute force over whole groups, and in its limits."""

import math
from itertools import product

import numpy as np
import pytest

from drmas.core.advantages import AdvantageRule, advantages
from drmas.core.diagnostics import inflation_factors
from drmas.reproduce.bandit_moments import binary_factor, cell_advantages, finite, population
from drmas.reproduce.bandit_team import BanditTeam, Chance, Outcome
from drmas.reproduce.regimes import RULES, own_scales, regimes, rescue_loop, shaped
from drmas.types import Row
from tests.reproduce.test_bandit_team import RESCUE, RESCUE_POLICIES

LOGITS = RESCUE.logits(RESCUE_POLICIES)
UNEVEN = {"solver": (0.5, 0.3, 0.2), "fixer": (0.7, 0.1, 0.2)}


def test_the_rescue_under_grpo_by_hand():
    """p = 3/4 + 1/4 1/2 = 7/8, variance 7/64, A = 1 / sqrt 7 of a success and - sqrt 7 of a failure.

    fixer, pi = (1/2, 1/2): own mean 1/2, own variance 1/4, factor (1/4 + (3/8)^2) 64/7 = 25/7; |z|^2 = 1/2 always,
    so that Delta = 0. g = (1/2, -1/2) / sqrt 7 or (1/2, -1/2) sqrt 7: E g = 2 / sqrt 7 (1, -1).
    solver, pi = (3/4, 1/4): factor 1; |z|^2 = 1/8 and 9/8, E|z|^2 = 3/8; E|g|^2 = 3/4 1/8 1/7 + 1/8 9/8 1/7 + 1/8 9/8 7 = 57/56
    and Delta = 57/56 - 3/8 = 9/14.
    """
    moments = population(RESCUE, LOGITS, RULES["grpo"])
    fixer, solver = moments["fixer"], moments["solver"]
    assert (fixer.calls, fixer.mean, fixer.own_mean) == pytest.approx((0.25, 7 / 8, 0.5), abs=1e-15)
    assert (fixer.std**2, fixer.own_std**2) == pytest.approx((7 / 64, 0.25), abs=1e-15)
    assert (fixer.score, fixer.factor, fixer.second) == pytest.approx((0.5, 25 / 7, 25 / 14), rel=1e-14)
    assert fixer.covariance == pytest.approx(0, abs=1e-14)
    assert fixer.row_mean == pytest.approx(-3 / math.sqrt(7))
    assert fixer.gradient == pytest.approx(2 * math.sqrt(2 / 7))
    assert fixer.rows_needed == pytest.approx(25 / 14 / (8 / 7))
    assert (solver.score, solver.factor) == pytest.approx((3 / 8, 1.0), rel=1e-14)
    assert (solver.second, solver.covariance) == pytest.approx((57 / 56, 9 / 14), rel=1e-13)


def test_the_rescue_under_the_other_rules_by_hand():
    """Rows: solver's 7/8 succeed, 1/8 fail; fixer's 1/8, 1/8. Over turns (5/4 of them) the mean is 4/5, the variance 4/25."""
    of_fixer = {name: population(RESCUE, LOGITS, rule)["fixer"] for name, rule in RULES.items()}
    expected = {
        "grpo": 25 / 7,
        "grpo-turns": (1 / 4 + (3 / 10) ** 2) * 25 / 4,
        "dr-mas": 1,
        "mean=agent,std=task": (1 / 4) * 25 / 4,
        "mean=task,std=agent": (1 / 4 + (3 / 10) ** 2) * 4,
        "rloo": 1 / 4 + (3 / 8) ** 2,
    }
    assert {name: moments.factor for name, moments in of_fixer.items()} == pytest.approx(expected, rel=1e-13)
    assert of_fixer["dr-mas"].row_mean == pytest.approx(0, abs=1e-15)
    assert of_fixer["dr-mas"].gradient == pytest.approx(math.sqrt(0.5))
    assert of_fixer["mean=task,std=agent"].row_mean == pytest.approx(-0.3 / 0.5)


def test_the_rescue_in_groups_of_two_by_hand():
    """A group of two has spread where one succeeds and one fails; then A^2 = (1/2)^2 / (1/2) = 1/2.

    grpo, fixer: a success meets a failure in 1/8 of the groups, a failure a success in 7/8: E A^2 = 1/2 (1/16 + 7/16). Row sum:
    two episodes, each 1/8 1/8 up and 1/8 7/8 down, times sqrt(1/2). dr-mas, fixer: the other episode calls it as well in 1/4 of
    the groups and ends otherwise in half of those.
    """
    pooled = finite(RESCUE, LOGITS, RULES["grpo"], 2)["fixer"]
    own = finite(RESCUE, LOGITS, RULES["dr-mas"], 2)["fixer"]
    assert (pooled.second, own.second) == pytest.approx((0.5 * 0.25, 0.5 / 16), rel=1e-5)
    assert (pooled.zero_share, own.zero_share) == pytest.approx((0.5, 7 / 8), rel=1e-12)
    assert pooled.row_sum == pytest.approx(-2 * (6 / 64) * math.sqrt(0.5), rel=1e-5)
    assert own.row_sum == pytest.approx(0, abs=1e-14)
    assert binary_factor(7 / 8, 0.5, 2) == pytest.approx(0.25)


PI = {"a": np.array([0.6, 0.4]), "b": np.array([0.2, 0.8])}


def loop():
    """a, whose action 0 mostly succeeds; then b up to twice, whose action 0 succeeds and who earns 3 for success."""
    success = (yield "a") == 0 and (yield Chance(0.8))
    for _ in range(2):
        if not success:
            success = (yield "b") == 0
    return Outcome(float(success), {"b": 3.0 * success})


def loops() -> list[tuple[list[tuple[str, int]], float, float]]:
    """Its turns, success and probability, written out."""
    found = [([("a", 0)], 1.0, 0.6 * 0.8)]
    for action, weight in ((0, 0.6 * 0.2), (1, 0.4)):
        found.append(([("a", action), ("b", 0)], 1.0, weight * 0.2))
        found.append(([("a", action), ("b", 1), ("b", 0)], 1.0, weight * 0.8 * 0.2))
        found.append(([("a", action), ("b", 1), ("b", 1)], 0.0, weight * 0.8 * 0.8))
    return found


def group_rows(group) -> list[Row]:
    return [
        Row("t", str(i), agent, agent, turn, [], [action], [0.0], [0], success * (3.0 if agent == "b" else 1.0))
        for i, (turns, success, _) in enumerate(group)
        for turn, (agent, action) in enumerate(turns)
    ]


@pytest.mark.parametrize("name", RULES)
def test_a_group_of_three_by_brute_force(name):
    """Every group of three episodes one by one: no counts, no kinds, no formula."""
    team = BanditTeam(loop, {"a": 2, "b": 2})
    found = finite(team, team.logits({agent: tuple(pi) for agent, pi in PI.items()}), RULES[name], 3)
    for agent, pi in PI.items():
        cases = []
        for group in product(loops(), repeat=3):
            rows = group_rows(group)
            values = advantages(rows, RULES[name]).values
            own = [
                (value, np.eye(2)[row.response_ids[0]] - pi)
                for row, value in zip(rows, values, strict=True)
                if row.agent == agent
            ]
            gradient = sum((value * z for value, z in own), np.zeros(2))
            square = sum(value**2 * (z @ z) for value, z in own)
            zeros = sum(value == 0 for value, _ in own)
            cases.append(
                (math.prod(each[2] for each in group), len(own), square, sum(value for value, _ in own), zeros, *gradient)
            )
        chance, number, square, row_sum, zeros, *gradient = np.array(cases).T
        assert chance.sum() == pytest.approx(1, abs=1e-12)
        ratio, mean = chance @ square / (chance @ number), np.array(gradient) @ chance
        power = chance @ (np.array(gradient) ** 2).sum(0)
        assert found[agent].second == pytest.approx(ratio, rel=1e-12)
        assert found[agent].row_sum == pytest.approx(chance @ row_sum, abs=1e-12)
        assert found[agent].zero_share == pytest.approx(chance @ zeros / (chance @ number), abs=1e-12)
        assert found[agent].groups_needed == pytest.approx((power - mean @ mean) / (mean @ mean), rel=1e-9)
        deviation = math.sqrt(chance @ (square - ratio * number) ** 2) / (chance @ number)
        assert found[agent].deviation == pytest.approx(deviation, rel=1e-12)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("regime", regimes(), ids=lambda regime: regime.name)
def test_lemma_4_2_is_an_identity(regime, name):
    for moments in population(regime.team, regime.logits, RULES[name]).values():
        assert moments.second == pytest.approx(moments.lemma, rel=1e-12, abs=1e-12)


def test_without_its_covariance_the_lemma_would_be_wrong():
    """The test above can fail: Delta is far from 0 where actions that fail are rare."""
    solver = population(RESCUE, LOGITS, RULES["grpo"])["solver"]
    assert abs(solver.second - solver.score * solver.factor) > 0.6


def test_proposition_4_3_the_second_moment_is_their_sum_and_diverges():
    """A fixer of two equal actions has |z|^2 = 1/2: E|g|^2 = ((mu_k - mu)^2 + sigma_k^2) / (2 sigma^2), without a limit."""
    seconds = []
    for alone in (0.9, 0.99, 0.999, 0.9999):
        team = rescue_loop((alone, alone), (0.5, 0.1), tries=1)
        fixer = population(team, team.logits(), RULES["grpo"])["fixer"]
        p, own = alone + 0.3 * (1 - alone), 0.3
        expected = own * (1 - p) / p + (1 - own) * p / (1 - p)
        assert fixer.second == pytest.approx(expected / 2, rel=1e-9)
        assert fixer.second == pytest.approx((fixer.row_mean**2 + own * (1 - own) / (p * (1 - p))) / 2, rel=1e-9)
        seconds.append(fixer.second)
    assert np.diff(np.log10(seconds)) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", ["dr-mas", "mean=agent,std=task"])
@pytest.mark.parametrize("size", [3, 5])
def test_rows_of_an_agent_sum_to_zero_under_its_own_mean(name, size):
    team = rescue_loop((0.7, 0.5, 0.2), (0.5, 0.1, 0.3))
    rows = team.play(team.logits(UNEVEN), groups=50, size=size, seed=2)
    sums: dict = {}
    for row, value in zip(rows, advantages(rows, RULES[name]).values, strict=True):
        sums[row.task, row.agent] = sums.get((row.task, row.agent), 0.0) + value
    assert max(map(abs, sums.values())) < 1e-12
    pooled = advantages(rows, RULES["grpo"]).values
    assert abs(sum(value for row, value in zip(rows, pooled, strict=True) if row.agent == "fixer")) > 10


def test_the_pooled_row_sum_in_large_groups_is_the_populations():
    """Per episode: calls (mu_k - mu) / sigma, and what a finite group loses goes like 1 / N."""
    exact = population(RESCUE, LOGITS, RULES["grpo"])["fixer"]
    per_episode = exact.calls * exact.row_mean
    gaps = [
        abs(finite(RESCUE, LOGITS, RULES["grpo"], size)["fixer"].row_sum / size / per_episode - 1) for size in (16, 32, 64, 128)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.06


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_pooled_advantages_are_bounded_in_finite_groups(size):
    """Samuelson: no value is further from the mean than (N - 1) / sqrt N sample deviations, whatever the rewards."""
    largest = finite(RESCUE, LOGITS, RULES["grpo"], size)["fixer"].largest
    assert largest == pytest.approx((size - 1) ** 2 / size, rel=1e-4)
    assert largest <= size - 1
    unequal = own_scales((0.7, 0.4), (0.6, 0.2), 10.0)
    if size <= 8:
        assert finite(unequal, unequal.logits(), RULES["grpo"], size)["judge"].largest <= (size - 1) ** 2 / size


def test_only_the_mean_of_the_task_with_the_std_of_the_agent_has_no_such_bound():
    """Judge far from solver: the solver's own deviation is small beside the distance of the means."""
    unequal = own_scales((0.7, 0.4), (0.6, 0.2), 10.0)
    assert finite(unequal, unequal.logits(), RULES["mean=task,std=agent"], 8)["solver"].largest > 200


def test_own_statistics_of_a_loop_are_bounded_by_its_rows_and_not_by_its_episodes():
    """Four episodes of two calls are eight rows: one success among them is further off than N = 4 allows a pooled rule."""
    team = rescue_loop((0.1, 0.1), (0.5, 0.1), tries=3)
    assert finite(team, team.logits(), RULES["grpo"], 4)["fixer"].largest <= 9 / 4
    assert finite(team, team.logits(), RULES["dr-mas"], 4)["fixer"].largest > 9 / 4


@pytest.mark.parametrize("success", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_the_closed_form_for_binary_rewards_is_the_enumerations(success, size):
    """A solver and a fixer of one call each: two kinds of episodes of one call, one of two."""
    team = rescue_loop((success, success), (0.4, 0.2), tries=1)
    fixer = population(team, team.logits(), RULES["grpo"])["fixer"]
    found = finite(team, team.logits(), RULES["grpo"], size)["fixer"]
    assert found.second / fixer.score == pytest.approx(binary_factor(fixer.mean, fixer.own_mean, size), rel=1e-4)
    assert binary_factor(fixer.mean, fixer.own_mean, 900) == pytest.approx(fixer.factor, rel=0.02)


def test_at_success_one_half_the_factor_is_one_whatever_the_agent_earns():
    for fix in (0.02, 0.3, 0.45):
        alone = (0.5 - fix) / (1 - fix)
        team = rescue_loop((alone, alone), (fix, fix), tries=1)
        fixer = population(team, team.logits(), RULES["grpo"])["fixer"]
        assert fixer.own_mean == pytest.approx(fix)
        assert fixer.factor == pytest.approx(1, abs=1e-12)


def test_pooled_over_turns_the_factors_average_to_one():
    """The law of total variance: what one agent gains in second moment another loses."""
    team = shaped((0.7, 0.5), 0.3, 0.2)
    moments = population(team, team.logits(), RULES["grpo-turns"]).values()
    assert sum(each.calls * each.factor for each in moments) == pytest.approx(sum(each.calls for each in moments), rel=1e-12)


@pytest.mark.parametrize("team", [shaped((0.7, 0.5), 0.3, 0.2), rescue_loop((0.7, 0.5), (0.3, 0.1))], ids=["own", "common"])
def test_the_runs_metric_is_the_factor_of_grpo(team):
    """One group of 20,000 episodes, rewards of agents' own included."""
    rows = team.play(team.logits(), groups=1, size=20_000, seed=1)
    expected = {agent: moments.factor for agent, moments in population(team, team.logits(), RULES["grpo"]).items()}
    assert inflation_factors(rows) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    "rule",
    [
        *RULES.values(),
        AdvantageRule(weighting="episode"),
        AdvantageRule(mean="none", std="agent"),
        AdvantageRule(mean="none", std="none"),
    ],
    ids=str,
)
def test_cells_have_the_products_advantages(rule):
    team = shaped((0.7, 0.5), 0.3, 0.2)
    rows = team.play(team.logits(), groups=40, size=5, seed=9)
    calls, rewards = np.zeros((40, 5, 2), dtype=np.int64), np.zeros((40, 5, 2))
    places = [(int(row.task), int(row.episode.split("#")[1]), team.agents.index(row.agent)) for row in rows]
    for place, row in zip(places, rows, strict=True):
        calls[place] += 1
        rewards[place] = row.reward
    found = cell_advantages(rule, calls, rewards)
    assert [found[place] for place in places] == advantages(rows, rule).values
    assert not found[calls == 0].any()


@pytest.mark.parametrize(
    "rule", [*RULES.values(), AdvantageRule(weighting="episode"), AdvantageRule(mean="none", std="agent")], ids=str
)
def test_large_groups_tend_to_the_population(rule):
    """One group of 30,000 episodes, through the product: its statistics are the population's but for a percent."""
    team, logits = shaped((0.7, 0.5), 0.3, 0.2), np.log([[0.6, 0.4], [0.7, 0.3]])
    rows = team.play(logits, groups=1, size=30_000, seed=4)
    values = advantages(rows, rule).values
    for agent, moments in population(team, logits, rule).items():
        own = np.array([value for row, value in zip(rows, values, strict=True) if row.agent == agent])
        assert (own**2).mean() == pytest.approx(moments.factor, rel=0.02)
        assert own.mean() == pytest.approx(moments.row_mean, abs=0.02)


def test_too_many_groups_are_not_enumerated():
    assert finite(RESCUE, LOGITS, RULES["grpo"], 300) is None
