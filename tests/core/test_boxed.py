from __future__ import annotations

import pytest

from drmas.core.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{8}", "8"),
        (r"first \boxed{7}, no: \boxed{8} then 9", "8"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x^{10}}", "x^{10}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{}", ""),
        ("} } {", None),
        ("42", None),
        ("", None),
        ("答案 \\boxed{五}", "五"),
    ],
)
def test_last_closed_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_hostile_nesting() -> None:
    assert last_boxed("\\boxed{" * 20_000) is None
    assert last_boxed("\\boxed" + "{" * 20_000 + "1" + "}" * 20_000) == "{" * 19_999 + "1" + "}" * 19_999
