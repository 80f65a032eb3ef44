"""Tables: cells are the analysis' numbers, and say how many seeds they lack."""

from drmas.reproduce.analysis import analyse
from drmas.reproduce.results import Results, Trial
from drmas.reproduce.tables import of_claims, of_failures, of_fit, of_scenario, of_verdicts
from drmas.reproduce.words import CLAIMS, verdicts
from tests.reproduce.fabricated import crashed, reproduction, trial


def analysed(trials: list[dict]) -> dict:
    return analyse(Results([Trial.model_validate(one) for one in trials], {}, None, []))


def test_a_row_says_its_seeds_and_a_cell_only_where_it_has_others():
    trials = [
        {**trial("maths-shared", method, seed, steps=10), "reward": [0.5] * 10}
        for method in ("grpo", "rloo")
        for seed in range(4)
    ]
    trials[0]["eval"]["after"] = None
    trials[4] = crashed("maths-shared", "rloo", 0, "it died")
    scores, differences, *_ = of_scenario(analysed(trials)["scenarios"]["maths-shared"])
    rows = {row[0]: dict(zip(scores.headers, row, strict=True)) for row in scores.rows}
    assert (rows["grpo"]["seeds"], rows["grpo"]["final reward"]) == ("4 of 4", "0.500 [0.500, 0.500]")
    assert rows["grpo"]["avg@16 after"].endswith(" (3 of 4 seeds)")
    assert (rows["rloo"]["seeds"], rows["rloo"]["mean reward"]) == ("3 of 4", "0.500 [0.500, 0.500]")
    assert differences.rows[0][:3] == ["rloo less grpo", "3 of 4", "+0.000 [+0.000, +0.000]"]


def test_every_agent_of_every_method_has_a_row_and_every_row_is_as_long_as_the_headers():
    found = analysed(reproduction(seeds=2))
    for name, agents in (("maths-shared", 6 * 2 + 1), ("search-separate", 6 * 3 + 1)):
        tables = of_scenario(found["scenarios"][name])
        assert [one.title.partition(":")[0] for one in tables[:3]] == ["Scores", "Differences by seed", "Agents"]
        assert len(tables[2].rows) == agents
        for one in tables:
            assert {len(row) for row in one.rows} == {len(one.headers)}


def test_shares_and_skipped_updates_stand_with_the_agents():
    trials = [{**trial("maths-shared", "grpo", seed, steps=10), "skipped": seed} for seed in range(3)]
    table = of_scenario(analysed(trials)["scenarios"]["maths-shared"])[1]
    row = dict(zip(table.headers, table.rows[0], strict=True))
    assert row["valid turns, last"] == "0.950 [0.950, 0.950]"
    assert row["rows compared with nothing"] == "0.125 [0.125, 0.125]"
    assert row["updates of the method skipped, not finite"] == "3"


def test_the_fit_has_a_row_per_scenario_and_one_for_all():
    found = analysed(reproduction(seeds=2))
    fits, bins = of_fit(found)
    assert [row[0] for row in fits.rows] == ["maths-shared", "search-separate", "all scenarios"]
    assert fits.rows[0][2] == f"{found['scenarios']['maths-shared']['moments']['slope']:.3f}"
    assert sum(int(row[1].replace(",", "")) for row in bins.rows) == found["moments"]["count"]
    assert of_fit(analysed([{**trial("maths-shared", "grpo", 0), "moments": []}])) == []


def test_claims_are_counted_and_listed():
    found = verdicts(analysed(reproduction("dr-mas", seeds=3)))
    made = of_claims(found)
    assert [row[1] for one in made for row in one.rows] == ["2"] * len(CLAIMS)
    assert {cell for one in made for row in one.rows for cell in row[2:]} == {"0"}
    assert made[-1].headers[1:] == ["holds", "not confirmed", "fails", "not tested"]
    listed = of_verdicts("maths-shared", found)
    assert [row[1] for row in listed.rows] == ["confirmed"] * (len(CLAIMS) - 2) + ["holds"] * 2


def test_failures_are_a_table_or_nothing():
    assert of_failures(analysed([trial("maths-shared", "grpo", 0)])) is None
    table = of_failures(analysed([crashed("maths-shared", "grpo", 0, "it died")]))
    assert table.rows == [["maths-shared/grpo/seed-0", "crashed", "it died"]]
