"""The sentences for who has two minutes: made-up results whose truth is known."""

from drmas.reproduce.analysis import analyse
from drmas.reproduce.headlines import headlines
from drmas.reproduce.results import Results, Trial
from drmas.reproduce.words import verdicts
from tests.reproduce.fabricated import reproduction, trial


def said(trials: list[dict]) -> list[str]:
    analysis = analyse(Results([Trial.model_validate(one) for one in trials], {}, None, []))
    return headlines(analysis, verdicts(analysis))


def test_what_is_confirmed_and_what_is_contradicted_comes_first():
    answer, first, *_ = said(reproduction("grpo"))
    assert answer == (
        "Final training reward, dr-mas against grpo: better in 0, worse in 2, no difference seen in 0 of 2 scenarios."
    )
    confirmed, contradicted = first.split("Contradicted: ")
    assert first.startswith("Of 14 claims about training, each in one scenario. Confirmed: ")
    claim = "dr-mas ends with a higher training reward than grpo (maths-shared -0."
    assert (claim in confirmed, claim in contradicted) == (False, True)


def test_what_could_not_differ_is_said():
    made = [trial("maths-shared", "grpo", seed) for seed in range(3)]
    lines = said([*made, *({**one, "method": "dr-mas"} for one in made)])
    assert lines[0].endswith("no difference seen in 1 of 1 scenarios.")
    assert lines[1] == "Of 7 claims about training, each in one scenario. Confirmed: nothing. Contradicted: nothing."
    (line,) = [line for line in lines if line.startswith("What could not differ")]
    assert "dr-mas ends with a higher training reward than grpo (maths-shared)" in line


def test_the_agent_with_the_largest_factor_is_named_with_its_norms_and_what_is_silent_there():
    made = [trial("maths-shared", method, seed) for method in ("grpo", "dr-mas") for seed in range(3)]
    made += [trial("search-separate", method, seed, factor=3.0) for method in ("grpo", "dr-mas") for seed in range(3)]
    for one in made[6:]:
        one["uncompared"]["router"] = [0.5 if one["method"] == "dr-mas" else 0.25] * 60
    line = said(made)[-1]
    assert line.startswith(
        "The largest mean factor under grpo is 1.65 [1.51, 1.79], of the answerer in search-separate: its gra"
    )
    assert "50% of the rows of router are compared with nothing under dr-mas" in line


def test_where_pooling_inflates_and_where_there_is_nothing_to_remove():
    made = [trial("maths-shared", "grpo", seed) for seed in range(3)]
    flat = [trial("search-separate", "grpo", seed) for seed in range(3)]
    for one in flat:
        one["moments"] = [{**moment, "predicted": 1.0, "pooled": 1.5, "per_agent": 1.5} for moment in one["moments"]]
    (line,) = [line for line in said(made + flat) if line.startswith("Nothing to remove")]
    assert line.startswith("Nothing to remove, a mean factor of about 1, in 1 of 2 scenarios (search-separate).")
    assert "same rows (maths-shared +0." in line


def test_too_few_seeds_are_no_answer():
    assert said([trial("maths-shared", "grpo", 0)])[0].startswith("Unfinished: ")


def test_failed_trials_are_counted_by_method():
    made = [trial("maths-shared", method, seed) for method in ("grpo", "dr-mas") for seed in range(3)]
    for one in (made[0], made[1], made[3]):
        one |= {"status": "diverged", "error": "the mean reward fell"}
    assert "Trials that failed, by method. Diverged: dr-mas 1, grpo 2." in said(made)


def test_without_trials_there_is_nothing_to_say():
    assert said([]) == []
