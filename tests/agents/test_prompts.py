from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drmas.agents.prompts import fill, placeholders


def test_only_the_template_has_placeholders() -> None:
    question = "What does {memory} mean in Python's format? {step} {{question}} { } }{"
    assert fill("Q: {question}!", {"question": question, "memory": "SECRET", "step": 3}) == f"Q: {question}!"


@given(value=st.text(), other=st.text())
def test_values_arrive_unchanged(value: str, other: str) -> None:
    assert fill("<{a}|{b}>", {"a": value, "b": other}) == f"<{value}|{other}>"


def test_braces_that_name_nothing_stay() -> None:
    assert fill(r"\boxed{} {1} { x } {a-b} {x}", {"x": 5}) == r"\boxed{} {1} { x } {a-b} 5"


def test_doubled_braces_are_the_text_itself() -> None:
    assert fill("{{answer}} {answer}", {"answer": 7}) == "{answer} 7"
    assert placeholders(r"{question} in \boxed{}, not {{answer}} or \frac{1}{2}") == {"question"}


def test_missing_value_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="critique"):
        fill("{critique}", {"question": "1"})
