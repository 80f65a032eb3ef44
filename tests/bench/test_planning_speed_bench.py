"""The rows that plans are timed on: as many as asked for, alike where they say so; and a small run of the benchmark."""

from __future__ import annotations

import pytest

from bench.planning_speed import CASES, GROUP, TURNS, episodes_rows, main
from bench.suite.record import Result
from drmas.core.prefixes import PrefixOrder


@pytest.mark.parametrize("nested", [True, False])
def test_rows_of_groups_that_start_alike(nested):
    rows = episodes_rows(100, nested=nested)
    assert len(rows) == 100
    assert len({row.task for row in rows}) == -(-100 // (GROUP * TURNS))
    first = [row for row in rows if row.task == rows[0].task and row.turn == 0]
    assert len(first) == GROUP
    assert all(row.prompt_ids == first[0].prompt_ids for row in first)
    assert not any(a is b for a in first[0].prompt_ids[:1] for b in first[1].prompt_ids[:1] if a > 256)
    solver, second = rows[0], rows[1]
    assert (second.prompt_ids[: len(solver.prompt_ids)] == solver.prompt_ids) is nested
    if nested:
        assert second.prompt_ids == solver.prompt_ids + solver.response_ids
    order = PrefixOrder.of_turns([row.prompt_ids for row in rows], [row.response_ids for row in rows])
    assert order.computed < 0.95 * order.lengths.sum()


def test_a_run_writes_what_it_measured(tmp_path, capsys):
    assert main(["--rows", "60", "--ranks", "4", "--budget", "4096", "--rounds", "1", "--json", str(tmp_path / "p.json")]) == 0
    result = Result.read(tmp_path / "p.json")
    assert [row[0] for row in result.tables[0].rows] == list(CASES)
    assert all(row[1] == 60 and all(cell > 0 for cell in row[2:]) for row in result.tables[0].rows)
    assert [ratio.better for ratio in result.ratios] == ["lower"] * 3
    assert "The plan of `turns` took" in capsys.readouterr().out
