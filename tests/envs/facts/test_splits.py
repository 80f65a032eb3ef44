from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from drmas.config.tasks import FactsData
from drmas.envs.facts import passages, questions
from drmas.envs.facts.splits import side
from drmas.envs.facts.templates import CLEAR, drafts
from drmas.envs.search.scoring import exact_match
from drmas.errors import ConfigError
from drmas.types import Task

CONTENTS = {passage.id: passage.contents for passage in passages()}
SPLITS = {split: questions(FactsData(split=split, hops=[1, 2, 3])) for split in ("train", "test")}
ALL = SPLITS["train"] + SPLITS["test"]
BY_ID = {task.id: task for task in ALL}


def test_there_are_thousands_of_questions_of_each_kind() -> None:
    counts = Counter((split, task.extra["hops"]) for split, tasks in SPLITS.items() for task in tasks)
    assert 2200 <= counts["train", 1] <= 3200
    assert 1600 <= counts["train", 2] <= 2400
    assert 600 <= counts["train", 3] <= 1000
    for hops in (1, 2, 3):
        share = counts["test", hops] / (counts["test", hops] + counts["train", hops])
        assert 0.12 <= share <= 0.28, hops


def test_every_fact_stands_in_its_support_and_an_answer_in_the_last() -> None:
    for task in ALL:
        support, facts = task.extra["support"], task.extra["facts"]
        assert len(support) == len(facts) > 0
        for passage, words in zip(support, facts, strict=True):
            assert words, task
            assert re.search(rf"(?<!\w){re.escape(words)}(?!\w)", CONTENTS[passage]), task
        assert any(answer in CONTENTS[support[-1]] for answer in task.extra["answers"]), task
        assert task.truth in CONTENTS[support[-1]] or task.truth == task.extra["answers"][0], task


def test_a_question_has_one_answer_and_an_id_of_its_own() -> None:
    answers = defaultdict(set)
    for draft in drafts():
        answers[draft.question].add(draft.answers[0])
    assert [question for question, found in answers.items() if len(found) > 1] == []
    assert len(BY_ID) == len(ALL) == len({task.question for task in ALL})


def test_nothing_is_empty_and_each_answer_is_accepted() -> None:
    for task in ALL:
        assert task.question.endswith("?")
        assert task.source == f"facts/{task.extra['hops']}"
        assert task.id.startswith(f"{task.source}/")
        for text in (task.question, task.truth, *task.extra["answers"]):
            assert text == " ".join(text.split()) != "", task
            assert not re.search(r"\bNone\b|the the |\?\?", text), task
        assert task.truth == task.extra["answers"][0]
        assert all(exact_match(answer, [answer]) == 1.0 for answer in task.extra["answers"]), task


def test_a_question_doesnt_give_its_answer_away() -> None:
    compares = re.compile(r"/(larger-of|melts-higher|discovered-earlier)")
    given = [task for task in ALL if re.search(rf"(?<!\w){re.escape(task.truth)}(?!\w)", task.question)]
    assert [task for task in given if not compares.search(task.id)] == []


def test_the_splits_share_no_entity_from_start_to_answer() -> None:
    entities = {split: {entity for task in tasks for entity in task.extra["entities"]} for split, tasks in SPLITS.items()}
    assert len(entities["test"]) > 300
    assert entities["train"] & entities["test"] == set()
    for task in ALL:
        assert task.extra["entity"] == task.extra["entities"][0]
        assert set(task.extra["entities"]) <= CONTENTS.keys()


def test_only_what_changes_sides_is_in_neither_split() -> None:
    sides = Counter(side(draft) for draft in drafts())
    assert sides["train"] == len(SPLITS["train"])
    assert sides["test"] == len(SPLITS["test"])
    assert 0 < sides[None] < 0.15 * sides.total()


@pytest.mark.parametrize(
    ("key", "question", "truth", "support"),
    [
        ("facts/1/symbol/W", "What is the chemical symbol of tungsten?", "W", ["element/W"]),
        ("facts/1/discoverer/I", "Who discovered the element iodine?", "Bernard Courtois", ["element/I"]),
        ("facts/1/capital/US", "What is the capital of the United States?", "Washington D.C.", ["country/US"]),
        ("facts/1/by-capital/FR", "Which country has Paris as its capital?", "France", ["country/FR"]),
        (
            "facts/2/capital-of-discovery/W",
            "What is the capital of the country where the element tungsten was discovered?",
            "Madrid",
            ["element/W", "country/ES"],
        ),
        (
            "facts/2/largest-neighbour/KE",
            "Of the countries that border Kenya, which has the largest area?",
            "Ethiopia",
            ["country/KE", "country/SO", "country/SS", "country/TZ", "country/UG", "country/ET"],
        ),
    ],
)
def test_questions_are_what_they_seem(key: str, question: str, truth: str, support: list[str]) -> None:
    found = {f"facts/{draft.hops}/{draft.template}/{draft.chain[0].split('/')[1]}": draft for draft in drafts()}[key]
    assert (found.question, found.answers[0], list(found.support)) == (question, truth, support)


@pytest.mark.parametrize(
    ("key", "accepted"),
    [
        ("by-number/Al", "aluminium"),
        ("capital/US", "Washington"),
        ("capital/BR", "Brasilia"),
        ("discovery-country/H", "England"),
        ("discovery-country/H", "the United Kingdom"),
        ("discoverer/Na", "Davy"),
        ("currency/CN", "Yuan"),
        ("currency/FR", "EUR"),
        ("calling-code/FR", "33"),
        ("by-capital/RU", "Russian Federation"),
        ("melting/W", "3687 K"),
    ],
)
def test_other_names_of_an_answer_are_accepted(key: str, accepted: str) -> None:
    answers = {f"{draft.template}/{draft.chain[0].split('/')[1]}": draft.answers for draft in drafts()}[key]
    assert exact_match(accepted, answers) == 1.0
    assert exact_match("something else", answers) == 0.0


@pytest.mark.parametrize(
    "key",
    [
        "1/language/PG",
        "1/language/MK",
        "1/discovery-year/Am",
        "1/discovery-country/Ho",
        "1/discovery-country/Lr",
        "1/discoverer/Lu",
        "2/capital-of-discovery/Lu",
        "1/melting/At",
        "1/melting/Fr",
    ],
)
def test_what_is_doubtful_is_not_asked(key: str) -> None:
    assert f"facts/{key}" not in BY_ID


def test_the_largest_neighbour_of_bosnia_is_serbia_in_every_wording() -> None:
    asked = [task for task in ALL if "neighbour" in task.id and "country/BA" in task.extra["entities"][:-1]]
    assert len(asked) >= 7
    for task in asked:
        assert task.truth == ("Belgrade" if "capital-of-largest" in task.id else "Serbia"), task


AREA, KELVIN = r"an area of ([\d,.]+) square", r"melts at (\d+) kelvin"


@pytest.mark.parametrize(
    ("template", "measure", "before"),
    [
        ("larger-of", AREA, 0),
        ("melts-higher", KELVIN, 0),
        ("largest-neighbour/", AREA, 1),
        ("largest-neighbour-of-airport", AREA, 2),
    ],
)
def test_comparisons_are_right_and_clear(template: str, measure: str, before: int) -> None:
    """`before`: the passages in the support that lead to what is compared."""
    compared = [task for task in ALL if f"{task.id.removeprefix(task.source + '/')}".startswith(template)]
    assert len(compared) > 20
    for task in compared:
        rivals = [CONTENTS[passage] for passage in task.extra["support"][before:]]
        *others, winner = [float(re.search(measure, text)[1].replace(",", "")) for text in rivals]
        assert others
        assert all(winner >= CLEAR * other for other in others), task
        assert rivals[-1].lower().startswith((task.truth.lower(), f"the {task.truth.lower()}")), task


def test_hops_and_size_pick_and_the_seed_draws() -> None:
    def draw(**settings) -> list[Task]:
        return questions(FactsData(**settings))

    assert {task.extra["hops"] for task in draw(hops=[2])} == {2}
    assert draw(size=50, seed=1) == draw(size=50, seed=1)
    assert draw(size=50, seed=1) == draw(seed=1)[:50]
    assert draw(size=50, seed=1) != draw(size=50, seed=2)
    assert len({task.id for task in draw(size=50)}) == 50
    assert {task.id for task in draw(seed=1)} == {task.id for task in draw(seed=2)}


def test_more_questions_than_there_are_are_refused() -> None:
    there = len(questions(FactsData(split="test", hops=[3])))
    with pytest.raises(
        ConfigError, match=rf"data\.size is {there + 1}; there are {there} questions of hops \[3\] in the split test"
    ):
        questions(FactsData(split="test", hops=[3], size=there + 1))


def test_I9_two_processes_with_other_hash_seeds_make_the_same_corpus_and_questions() -> None:
    program = (
        "from hashlib import sha256; from drmas.config.tasks import FactsData\n"
        "from drmas.envs.facts import passages, questions\n"
        "print(sha256(repr([passages(), questions(FactsData(hops=[1, 2, 3]))]).encode()).hexdigest())"
    )
    digests = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        digests.add(done.stdout)
    assert len(digests) == 1
