"""The bandit's tables: cells are its numbers, as its own code makes them."""

import re

import pytest

from drmas.reproduce import bandit as module
from drmas.reproduce.bandit_tables import chart, descriptions, exact_points, sentences, tables
from drmas.reproduce.bandit_training import scenarios
from drmas.reproduce.page import write_page
from drmas.reproduce.regimes import regimes
from drmas.reproduce.words import shown
from tests.reproduce.fabricated import write


@pytest.fixture(scope="module")
def bandit() -> dict:
    """What `run_bandit` makes, of a regime and a team only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUICK", module.Effort(groups={4: 20, 8: 20}, seeds=3, tuning_seeds=1, steps=5))
        patch.setattr(module, "scenarios", lambda: scenarios()[1:2])
        patch.setattr(module, "regimes", lambda: regimes()[:1])
        return module.run_bandit(quick=True)


def test_the_theory_is_checked_first(bandit):
    table = tables(bandit)[0]
    check = bandit["check"]
    assert [row[1] for row in table.rows][:3] == [f"{check['lemma']:.1e}", "yes", str(check["cells"])]
    assert table.rows[-2][1] == f"{check['bound']['4']['largest']:.3f}, 2.250"


def test_growth_has_a_row_per_success_with_the_sum_of_its_parts(bandit):
    table = tables(bandit)[1]
    assert [row[0] for row in table.rows] == [f"{one['success']:g}" for one in bandit["growth"]]
    for row in table.rows:
        distance, spread, second = map(float, row[2:5])
        assert second == pytest.approx(distance + spread, rel=2e-3)
    assert {row[-1] for row in table.rows} == {"1.000"}
    assert {len(row) for row in table.rows} == {len(table.headers)}


def test_a_regime_has_a_row_per_agent_with_exact_and_sampled_moments(bandit):
    table = tables(bandit)[2]
    (regime,) = bandit["regimes"]
    assert [row[0] for row in table.rows] == [f"{regime['name']}: {one['agent']}" for one in regime["agents"]]
    column = table.headers.index("grpo, exact")
    cell = regime["agents"][0]["rules"]["grpo"]["sizes"]["8"]
    assert table.rows[0][column] == f"{cell['exact']['second']:.3f}"
    assert table.rows[0][column + 1] == f"{cell['sampled']:.3f} ± {cell['stderr']:.3f}"


def test_learning_has_a_row_per_rule_with_its_difference_to_grpo(bandit):
    table = tables(bandit)[-1]
    first = bandit["learning"][0]["variants"][0]["rules"]
    assert table.title == f"Learning: {bandit['learning'][0]['name']}"
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == list(first)
    assert rows["grpo"][:3] == [shown(first["grpo"]["own"]["final"]), "-", "-"]
    assert rows["dr-mas"][:3] == [
        shown(first["dr-mas"]["own"]["final"]),
        shown(first["dr-mas"]["shared"]["difference"], "+.3f"),
        shown(first["dr-mas"]["own"]["difference"], "+.3f"),
    ]
    assert {len(row) for row in table.rows} == {len(table.headers)}


def test_learning_begins_with_dr_mas_less_grpo_of_each_team(bandit):
    table = tables(bandit)[3]
    (team,) = bandit["learning"]
    cells = [shown(variant["rules"]["dr-mas"]["own"]["difference"], "+.3f") for variant in team["variants"]]
    assert table.rows == [[team["name"], "8", f"{max(team['inflation'].values()):.3f}", *cells]]


def test_the_worst_and_the_best_of_learning_are_said(bandit):
    found = [variant["rules"]["dr-mas"]["own"]["difference"] for variant in bandit["learning"][0]["variants"]]
    _, line = sentences(bandit)
    worst, best = (shown(pick(found, key=lambda one: one["value"]), "+.3f") for pick in (min, max))
    assert f"the worst is {worst} (rescue loop" in line
    assert f"the best {best} (rescue loop" in line
    assert f"of {len(found)} pairs of a team (1)" in line
    assert sentences({}) == []


def test_the_bandit_puts_a_mark_per_agent_on_the_chart_of_the_trials(bandit):
    points = exact_points(bandit)
    agents = bandit["regimes"][0]["agents"]
    assert list(points.x) == [one["inflation"] for one in agents]
    assert list(points.y) == [one["rules"]["grpo"]["sizes"]["8"]["sampled"] for one in agents]


def test_the_chart_has_a_dot_per_agent_and_size(bandit):
    svg = chart(bandit)
    agents = bandit["regimes"][0]["agents"]
    assert len(re.findall("<title>grpo: ", svg)) == 2 * len(agents)
    assert chart({}) == ""


def test_what_has_no_exact_number_or_no_row_is_a_dash(bandit):
    agent = {"agent": "a", "calls": 1.0, "own_mean": 0.5, "mean": 0.5, "inflation": None}
    rules = {
        "grpo": {"sizes": {"8": {"exact": None, "sampled": 1.5, "stderr": 0.25}}},
        "dr-mas": {"sizes": {"8": {"exact": None}}},
    }
    (table,) = tables({"regimes": [{"name": "team", "words": "", "agents": [{**agent, "rules": rules}]}]})
    assert table.rows == [["team: a", "1.00", "0.50", "0.50", "-", "-", "-", "-", "1.500 ± 0.250"]]


def test_a_bandit_alone_has_a_page(bandit, tmp_path):
    html = write_page(write(tmp_path, [], bandit=bandit)).read_text()
    assert "Second moment in groups of N" in html
    assert descriptions(bandit)[bandit["learning"][0]["name"]].split(",")[0] in html
    assert "No trial has a result." in html
