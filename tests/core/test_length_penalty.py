"""The price of a response's length, at its corners, on its slope, and where it is off."""

from __future__ import annotations

import pytest

from drmas.core.length_penalty import length_penalty


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (1, 0.0), (11, 0.0), (12, 0.0), (13, 0.1), (15, 0.3), (16, 0.4), (17, 0.5), (40, 0.5)],
)
def test_it_is_nothing_up_to_the_buffer_and_then_a_line_to_the_whole_at_the_limit(tokens, expected):
    assert length_penalty(tokens, max_tokens=17, buffer=5, penalty=0.5) == pytest.approx(expected, abs=1e-15)


def test_the_papers_own_numbers():
    """16,384 tokens and a cache of 4,096 below a limit of 20,480: the paper's setting."""
    values = [length_penalty(tokens, max_tokens=20480, buffer=4096, penalty=1.0) for tokens in (16384, 17408, 18432, 20480)]
    assert values == [0.0, 0.25, 0.5, 1.0]


def test_a_response_that_was_cut_is_as_long_as_can_be():
    assert length_penalty(3, max_tokens=17, buffer=5, penalty=0.5, cut=True) == 0.5


@pytest.mark.parametrize("cut", [False, True])
def test_without_a_buffer_nothing_is_taken_off(cut):
    assert length_penalty(17, max_tokens=17, buffer=0, penalty=0.5, cut=cut) == 0.0
