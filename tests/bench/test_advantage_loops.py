"""The per-row loops that the speed of the advantages is compared with do the same work as they and as the preset."""

import pytest
import torch

from bench.advantage_loops import Rows, per_row_loops
from drmas.core.estimators import resolve


@pytest.mark.parametrize("shape", [(3, 2, 4), (4, 3, 1), (2, 1, 9)])
def test_the_per_row_loops_that_speed_is_compared_with_do_equal_work(shape):
    rows = Rows(*shape)
    torch.testing.assert_close(rows.ours(), rows.baseline(), rtol=2e-5, atol=2e-5)


def test_the_per_row_loops_are_the_preset_dr_mas_paper():
    rows = [Called("t0", str(i), "solver", i % 2, 0.1 * (i % 3)) for i in range(5)]
    rows += [
        Called("t0", "0", "verifier", 1.0, 0.0),
        Called("t1", "9", "solver", 0.5, 0.1),
        Called("t0", "1", "verifier", 0.0, 0.0),
    ]
    expected = resolve("dr-mas-paper")(rows).values
    score = torch.tensor([row.reward - row.penalty for row in rows])
    actual = per_row_loops(score, [row.task for row in rows], [row.agent for row in rows])
    assert actual.tolist() == pytest.approx(expected, rel=2e-5, abs=2e-5)


class Called:
    turn, status = 0, "ok"

    def __init__(self, task, episode, agent, reward, penalty):
        self.task, self.episode, self.agent, self.reward, self.penalty = task, episode, agent, reward, penalty
