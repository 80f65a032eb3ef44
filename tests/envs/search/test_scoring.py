from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drmas.envs.search.scoring import exact_match, f1, final_answer, normalise

VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "search_em.json").read_text())["vectors"]


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["text"] for vector in VECTORS])
def test_vectors_of_the_methods_first_implementation(vector):
    assert exact_match(vector["text"], vector["targets"]) == vector["expected"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> Lima </answer>", "Lima"),
        ("<answer>Quito</answer> no, <answer>Lima</answer>", "Lima"),
        ("<answer>Quito <answer>Lima</answer>", "Lima"),
        ("<answer>Lima</answer> <answer>Quito", "Lima"),
        ("<answer>Lima</answer> </answer>", "Lima"),
        ("</answer> Lima <answer>", "</answer> Lima <answer>"),
        ("<Answer>Lima</ANSWER>", "Lima"),
        ("<answer></answer>", ""),
        ("<think>is it <answer>Quito</answer>?</think> <answer>Lima</answer>", "Lima"),
        ("<think>is it <answer>Quito</answer>?</think> Lima\n", "Lima"),
        ("Lima\n", "Lima"),
        ("", ""),
    ],
)
def test_the_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  The Quick, brown fox! ", "quick brown fox"),
        ("an apple a day in Athens", "apple day in athens"),
        ("New-York", "newyork"),
        ("“Ünïcode” — ﬁne…", "ünïcode fine"),
        ("ＬＩＭＡ", "lima"),
        ("9.9 and -5, 1,000 or .5", "9.9 and -5 1000 or .5"),
        ("\u22125", "-5"),
        ("1990-1995. End.", "19901995 end"),
        ("A", "a"),
        ("The", "the"),
        ("+", "+"),
        (" \n", ""),
        ("", ""),
    ],
)
def test_normal_text(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "accepted", "score"),
    [
        ("the Beatles!", ["Rolling Stones", "Beatles"], 1.0),
        ("Beatles and Stones", ["Beatles"], 0.0),
        ("", ["A"], 0.0),
        ("", ["", "  "], 0.0),
        ("the", ["A"], 0.0),
        ("a", ["A"], 1.0),
        ("99", ["9.9"], 0.0),
        ("5", ["-5"], 0.0),
        ("Lima", [], 0.0),
    ],
)
def test_exact_match(answer, accepted, score):
    assert exact_match(answer, accepted) == score


@pytest.mark.parametrize(
    ("answer", "accepted", "score"),
    [
        ("John Lennon and the Beatles", ["Beatles"], 2 * 0.25 * 1 / 1.25),
        ("capital of Peru", ["capital of Chile", "Lima"], 2 / 3),
        ("Lima Lima Lima", ["Lima"], 0.5),
        ("Lima Lima", ["Lima Lima Lima"], 0.8),
        ("Quito", ["Lima"], 0.0),
        ("", ["Lima"], 0.0),
        ("Lima", [], 0.0),
    ],
)
def test_f1(answer, accepted, score):
    assert f1(answer, accepted) == pytest.approx(score)


@given(st.text(), st.lists(st.text(), max_size=3))
def test_scores_are_bounded_and_an_exact_match_is_a_perfect_f1(answer, accepted):
    exact, overlap = exact_match(answer, accepted), f1(answer, accepted)
    assert exact in (0.0, 1.0)
    assert exact <= overlap <= 1.0
