"""The bandit's results as a whole, and the command that prints them."""

import json

import pytest

from drmas.reproduce import bandit
from drmas.reproduce.bandit import GROWTH, Effort, as_text, check, growth, main, run_bandit
from drmas.reproduce.bandit_training import scenarios
from drmas.reproduce.regimes import RULES, regimes

TINY = Effort(groups={4: 150, 8: 150, 64: 6}, seeds=4, tuning_seeds=2, steps=8)


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandit, "QUICK", TINY)
        return run_bandit(quick=True)


def test_results_are_json_and_have_every_regime_and_scenario(results):
    assert json.loads(json.dumps(results)) == results
    assert [table["name"] for table in results["regimes"]] == [regime.name for regime in regimes()]
    assert [table["name"] for table in results["learning"]] == [scenario.name for scenario in scenarios()]
    assert all(set(agent["rules"]) == set(RULES) for table in results["regimes"] for agent in table["agents"])


def test_large_groups_have_half_the_seeds(results):
    sizes = {table["size"]: table["variants"][0]["rules"]["grpo"]["own"]["final"]["n"] for table in results["learning"]}
    assert sizes == {8: 4, 32: 2}


def test_theory_and_measurement_agree(results):
    found = results["check"]
    assert found["lemma"] < 1e-12
    assert found["proposition"] is True
    assert found["within_4"] >= 0.99
    assert found["within_2"] > 0.85
    for size, each in found["bound"].items():
        assert each["bound"] == (int(size) - 1) ** 2 / int(size)
        assert each["bound"] * 0.999 < each["largest"] <= each["bound"]


def test_a_wrong_measurement_is_seen(results):
    """Second moments that are twice as large as they should be leave the four standard errors."""
    broken = json.loads(json.dumps(results["regimes"]))
    for table in broken:
        for agent in table["agents"]:
            for rule in agent["rules"].values():
                for cell in rule["sizes"].values():
                    if "sampled" in cell:
                        cell["sampled"] *= 2
    assert check(broken)["within_4"] < 0.3


def test_growth_is_the_formula_and_stops_in_finite_groups():
    rows = growth()
    assert [row["success"] for row in rows] == list(GROWTH)
    for row in rows:
        p, own = row["success"], row["own"]
        assert row["second"] == pytest.approx(own * (1 - p) / p + (1 - own) * p / (1 - p), rel=1e-8)
        assert row["second"] == pytest.approx(row["distance"] + row["spread"], rel=1e-12)
        assert row["own_second"] == pytest.approx(1, rel=1e-12)
        assert row["finite"]["4"] < row["finite"]["8"] < row["finite"]["64"] < row["second"] + 1e-9
        assert all(value < int(size) - 1 for size, value in row["finite"].items())
    assert rows[0]["second"] == pytest.approx(1, abs=1e-12)
    assert rows[-1]["second"] > 700
    assert rows[-1]["finite"]["8"] < 4.5


def test_the_text_has_every_table(results):
    text = as_text(results)
    for name in [*(regime.name for regime in regimes()), *(f"training, {scenario.name}" for scenario in scenarios())]:
        assert f"\n{name}: " in text
    grpo = results["regimes"][4]["agents"][1]["rules"]["grpo"]
    assert f"{grpo['second']:.3f}" in text
    assert "nan" not in text


def test_the_command_prints_the_tables_and_writes_the_results(results, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bandit, "run_bandit", lambda quick: {**results, "quick": quick})
    main(["--quick", "--json", str(tmp_path / "bandit.json")])
    assert capsys.readouterr().out == as_text(results)
    assert json.loads((tmp_path / "bandit.json").read_text()) == {**results, "quick": True}
