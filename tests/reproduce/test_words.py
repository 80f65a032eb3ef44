"""Each word is what its rule says of made-up results whose truth is known, and of the bounds of intervals."""

import pytest

from drmas.reproduce.analysis import analyse
from drmas.reproduce.results import Results, Trial
from drmas.reproduce.words import CLAIMS, by_sign, comparisons, limits, of_kind, shown, silence, summary, verdicts
from tests.reproduce.fabricated import crashed, reproduction, trial


def analysed(trials: list[dict]) -> dict:
    return analyse(Results([Trial.model_validate(one) for one in trials], {}, None, []))


def words(trials: list[dict], scenario: str = "maths-shared") -> dict[str, str]:
    return {one.claim: one.word for one in verdicts(analysed(trials)) if one.scenario == scenario}


def pair(seeds: int = 5, **of_dr_mas) -> list[dict]:
    """grpo and dr-mas in one scenario, with one more setting for the latter."""
    made = [trial("maths-shared", "grpo", seed) for seed in range(seeds)]
    return made + [trial("maths-shared", "dr-mas", seed, **of_dr_mas) for seed in range(seeds)]


def test_where_everything_holds_everything_is_confirmed():
    found = verdicts(analysed(reproduction("dr-mas")))
    good = {claim.key: "holds" if claim.kind == "arithmetic" else "confirmed" for claim in CLAIMS}
    assert {(one.claim, one.word) for one in found} == set(good.items())
    assert {one.claim for one in of_kind(found, "arithmetic")} == {"lemma", "row-sum"}
    assert {one.scenario for one in found} == {"maths-shared", "search-separate"}


def test_where_grpo_wins_the_report_says_contradicted():
    found = words(reproduction("grpo"))
    assert [found[key] for key in ("reward", "avg", "spikes")] == ["contradicted"] * 3
    assert found["std"] == "not confirmed", "the std-only ablation is better, but dr-mas gains nothing that it could be part of"


def test_where_nothing_differs_there_is_no_room():
    same = [{**one, "method": method} for one in pair(6)[:6] for method in ("grpo", "dr-mas", "grpo-turns")]
    found = words(same)
    assert [found[key] for key in ("spikes", "reward", "avg", "pass", "identity")] == ["no room"] * 5


def test_a_difference_that_is_one_number_in_all_seeds_is_not_confirmed():
    trials = [{**one, "reward": [0.5 + (one["method"] == "dr-mas") / 4] * 60} for one in pair(3)]
    assert words(trials)["reward"] == "not confirmed"


def test_where_one_side_lost_more_trials_nothing_is_tested():
    lost = [crashed("maths-shared", "dr-mas", 4, "it died")]
    found = words([*pair(4, gain=0.3), trial("maths-shared", "grpo", 4), *lost])
    assert (found["reward"], found["avg"]) == ("not tested", "not tested")
    found = words([*pair(4, gain=0.3), crashed("maths-shared", "grpo", 4, "it died"), *lost])
    assert found["reward"] == "confirmed"


def test_two_seeds_or_a_method_that_was_not_run_test_nothing():
    assert set(words(pair(2, gain=0.3)).values()) == {"not tested"}
    found = words(pair(3, gain=0.3))
    assert (found["reward"], found["identity"], found["team"], found["std"]) == ("confirmed", *["not tested"] * 3)


@pytest.mark.parametrize(
    ("low", "high", "claimed", "word"),
    [
        (0.1, 0.3, 1, "confirmed"),
        (-0.1, 0.3, 1, "not confirmed"),
        (0.0, 0.3, 1, "not confirmed"),
        (-0.3, -0.1, 1, "contradicted"),
        (-0.3, -0.1, -1, "confirmed"),
        (0.1, 0.3, -1, "contradicted"),
    ],
)
def test_a_difference_is_judged_by_its_interval(low, high, claimed, word):
    estimate = {"value": (low + high) / 2, "low": low, "high": high, "n": 5, "of": 5}
    assert by_sign(estimate, claimed)[0] == word
    assert by_sign({**estimate, "n": 2}, claimed)[0] == "not tested"


def changed(change) -> dict[str, str]:
    trials = pair()
    for one in trials:
        for moment in one["moments"]:
            moment |= change(moment)
    return words(trials)


def test_a_factor_that_fails_where_it_predicts_much_is_contradicted():
    found = changed(lambda moment: {"pooled": 1.0, "per_agent": 1.0})
    assert (found["factor"], found["inflates"]) == ("contradicted", "not confirmed")


def test_a_pooled_baseline_may_deflate():
    found = changed(lambda moment: {"pooled": moment["pooled"] / 4})
    assert (found["factor"], found["inflates"]) == ("contradicted", "contradicted")


def test_a_covariance_that_both_have_inflates_nothing():
    found = changed(lambda moment: {"predicted": 1.0, "pooled": 1.6, "per_agent": 1.6, "covariance": 0.6})
    assert [found[key] for key in ("lemma", "factor", "inflates", "one")] == [
        "holds",
        "not tested",
        "no inflation",
        "contradicted",
    ]


def test_a_moment_that_isnt_factor_and_covariance_fails():
    assert changed(lambda moment: {"covariance": moment["covariance"] + 2.0})["lemma"] == "fails"
    assert changed(lambda moment: {"covariance": None})["lemma"] == "not tested"


@pytest.mark.parametrize(("moment", "word"), [(1.0, "confirmed"), (0.6, "contradicted"), (1.5, "contradicted")])
def test_about_one_is_from_0_8_to_1_25(moment, word):
    trials = [{**one, **trial("maths-shared", one["method"], one["seed"], per_agent=moment)} for one in pair()]
    (found,) = [one for one in verdicts(analysed(trials)) if one.claim == "one"]
    assert (found.word, "compared with nothing" in found.numbers) == (word, moment < 0.8)


def test_a_row_sum_that_is_zero_under_grpo_too_contradicts_the_claim():
    assert words(pair())["row-sum"] == "holds"
    assert words(pair(pushed=True))["row-sum"] == "fails"
    zero = [trial("maths-shared", method, seed, pushed=False) for method in ("grpo", "dr-mas") for seed in range(5)]
    assert words(zero)["row-sum"] == "fails"


def test_the_std_may_be_the_lesser_part():
    trials = reproduction("dr-mas", scenarios=("maths-shared",))
    swapped = {"mean=task,std=agent": "mean=agent,std=task", "mean=agent,std=task": "mean=task,std=agent"}
    trials = [{**one, "method": swapped.get(one["method"], one["method"])} for one in trials]
    assert words(trials)["std"] == "contradicted"


def test_estimates_say_how_many_seeds_they_lack():
    estimate = {"value": 0.5, "low": 0.25, "high": 0.75, "n": 5, "of": 5}
    assert shown(estimate) == "0.500 [0.250, 0.750]"
    assert shown({**estimate, "n": 4}, "+.1f") == "+0.5 [+0.2, +0.8] (4 of 5 seeds)"
    assert shown({**estimate, "low": None, "high": None, "n": 1, "of": 1}) == "0.500 (1 of 1 seeds)"
    assert shown({**estimate, "value": None}) == "-"
    assert shown({**estimate, "high": 1e200}) == "0.5 [0.25, 1e+200]"


def test_the_summary_names_the_scenarios_of_each_word():
    trials = reproduction("dr-mas", scenarios=("maths-shared",)) + reproduction("grpo", scenarios=("search-separate",))
    (line,) = [line for line in summary(verdicts(analysed(trials))) if line.startswith("dr-mas ends")]
    said = "confirmed in 1 (maths-shared); contradicted in 1 (search-separate)."
    assert line == f"dr-mas ends with a higher training reward than grpo: {said}"


def test_the_number_of_intervals_is_said_with_what_chance_makes_of_them():
    found = analysed(pair())
    text = comparisons(found, verdicts(found))
    assert text.startswith(f"{found['excluding']} of {found['intervals']} intervals of differences between trained methods")
    assert "2 intervals decide the claims about training" in text, "reward and avg; spikes and pass are alike"


def test_rows_without_a_comparison_are_said_where_grpo_compares_them():
    trials = pair()
    for one in trials:
        one["uncompared"]["verifier"] = [0.5 if one["method"] == "dr-mas" else 0.25] * 60
    (line,) = silence(analysed(trials)["scenarios"]["maths-shared"])
    assert line.startswith("50% of the rows of verifier are compared with nothing under dr-mas, 25% under grpo")
    assert silence(analysed(pair())["scenarios"]["maths-shared"]) == []


def test_the_scale_and_what_this_does_not_say_are_said():
    text = " ".join(limits(analysed(pair(2))))
    assert "maths-shared: 60 steps, 20 evaluation tasks, 2 seeds" in text
    assert "Fewer than 3 seeds were run of maths-shared" in text
    assert "What this doesn't say" in text
