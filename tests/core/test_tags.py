from __future__ import annotations

import pytest

from drmas.core.tags import last_tagged


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>Bach</answer>", "Bach"),
        ("<Answer>x</Answer> and <ANSWER> y\n</answer>", " y\n"),
        ("<answer>a</answer><answer>b", "a"),
        ("<answer>a <answer>b</answer></answer>", "b"),
        ("</answer>a<answer>", None),
        ("<answer></answer>", ""),
        ("<answers>a</answers>", None),
        ("<an\u017fwer>a</answer>", None),  # the long s, which is an s where case is ignored beyond ASCII
        ("", None),
    ],
)
def test_the_last_complete_pair_counts(text: str, content: str | None) -> None:
    assert last_tagged(text, "answer") == content
