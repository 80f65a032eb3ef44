"""Learning rates against their closed forms, written out as numbers where they are few."""

from __future__ import annotations

import math

import pytest

from drmas.core.schedule import learning_rate


def rates(steps: range, **changes) -> list[float]:
    settings = {"style": "linear", "lr": 1.0, "lr_min": 0.1, "warmup_steps": 0, "total_steps": 8, "decay_share": 0.5} | changes
    return [learning_rate(step, **settings) for step in steps]


def test_warm_up_rises_by_a_line_from_nothing():
    for style in ("constant", "linear", "cosine", "wsd"):
        assert rates(range(1, 5), style=style, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays():
    assert rates(range(1, 12), style="constant") == [1.0] * 11


def test_linear_reaches_the_floor_one_update_after_the_last():
    assert rates(range(1, 12)) == pytest.approx([1.0 - 0.1 * step for step in range(1, 10)] + [0.1, 0.1])
    assert rates(range(2, 10), warmup_steps=2) == pytest.approx([1.0 - 0.9 * i / 7 for i in range(8)])


def test_cosine_is_half_a_wave():
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * (step - 1) / 8)) / 2 for step in range(1, 10)]
    assert rates(range(1, 10), style="cosine", warmup_steps=1) == pytest.approx(expected)
    assert rates(range(9, 12), style="cosine") == pytest.approx([0.1] * 3)
    middle = rates(range(5, 6), style="cosine", warmup_steps=1)
    assert middle == pytest.approx([0.55])


def test_wsd_descends_over_the_last_share():
    """Of 8 updates the last 4."""
    expected = [1.0] * 4 + [1.0 - 0.9 * i / 5 for i in range(1, 6)] + [0.1]
    assert rates(range(1, 11), style="wsd") == pytest.approx(expected)
    assert rates(range(1, 10), style="wsd", decay_share=0.01) == pytest.approx([1.0] * 8 + [0.1])
    whole = {"style": "wsd", "decay_share": 1.0, "warmup_steps": 2}
    assert rates(range(1, 11), **whole) == pytest.approx(rates(range(1, 11), warmup_steps=2))


def test_a_run_that_ends_in_its_warm_up():
    for style in ("linear", "cosine", "wsd"):
        assert rates(range(1, 4), style=style, warmup_steps=10, total_steps=3) == pytest.approx([0.1, 0.2, 0.3])
        assert rates(range(10, 12), style=style, warmup_steps=10, total_steps=3) == pytest.approx([1.0, 0.1])
