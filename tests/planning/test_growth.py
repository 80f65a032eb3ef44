"""Growth over GPUs: which sizes and modes there are, and what must hold between them."""

from __future__ import annotations

import pytest

from drmas.agents.team import load_team
from drmas.config.load import load as load_recipe
from drmas.errors import ConfigError
from drmas.planning import growth
from drmas.planning.cluster import load_cluster
from drmas.planning.growth import AHEAD, CARRIED, ON_POLICY, simulate_growth, table, with_spread
from drmas.planning.workload import default_workload


def grow(sizes, *, recipe="quickstart", spread=None, **options):
    run = load_recipe(recipe, ["--rollout.tasks_per_step", "16"])
    team = load_team(run.team)
    work, source = default_workload(run, team)
    work = work if spread is None else with_spread(work, spread)
    return simulate_growth(run, team, load_cluster("h100-4x8"), work, source, sizes=sizes, base=4, steps=4, **options)


def test_one_gpu_takes_turns_and_more_are_split():
    points = grow((1, 2, 8), scalings=("weak",))
    assert [(point.gpus, point.mode) for point in points] == [
        (1, "on-policy"),
        *((gpus, mode.name) for gpus in (2, 8) for mode in (ON_POLICY, AHEAD, CARRIED)),
    ]
    assert (points[0].trainer_gpus, points[0].engine_gpus) == (1, 1)
    assert all(point.trainer_gpus + point.engine_gpus == point.gpus for point in points[1:])
    assert [point.episodes for point in points] == [16, *[32] * 3, *[128] * 3]


def test_strong_scaling_keeps_the_work_and_is_no_slower():
    few, many = grow((2, 16), scalings=("strong",), modes=(ON_POLICY,))
    assert few.episodes == many.episodes == 64
    assert many.step.seconds <= few.step.seconds * 1.02
    assert many.tokens_per_second_per_gpu < few.tokens_per_second_per_gpu


def test_longer_tails_of_the_same_mean_take_longer_and_more_so_on_policy():
    flat, wide = (grow((8,), scalings=("weak",), spread=spread) for spread in (0.0, 1.0))
    assert [point.spread for point in flat] == [0.0] * 3
    ratios = [b.step.seconds / a.step.seconds for a, b in zip(flat, wide, strict=True)]
    assert all(ratio > 0.99 for ratio in ratios)
    assert ratios[0] >= ratios[2] - 0.02


def test_a_part_stands_for_a_large_step(monkeypatch):
    whole = grow((64,), scalings=("weak",))
    monkeypatch.setattr(growth, "MOST_EPISODES", 512)
    part = grow((64,), scalings=("weak",))
    assert [point.episodes for point in part] == [point.episodes for point in whole] == [1024] * 3
    for one, other in zip(whole, part, strict=True):
        assert other.step.seconds == pytest.approx(one.step.seconds, rel=0.1)
        assert other.tokens_per_second_per_gpu == pytest.approx(one.tokens_per_second_per_gpu, rel=0.1)


def test_a_spread_keeps_the_mean():
    run = load_recipe("quickstart")
    work, _ = default_workload(run, load_team(run.team))
    wide = with_spread(work, 1.3)
    assert {agent.response.spread for agent in wide.agents} == {1.3}
    means = [agent.response.moment(1) for agent in work.agents]
    assert [agent.response.moment(1) for agent in wide.agents] == pytest.approx(means)


def test_a_layout_that_no_size_fits_is_refused():
    with pytest.raises(ConfigError, match="no mode fits on 1, 2 GPUs"):
        grow((1, 2), recipe="paper-maths-4b")


def test_a_table_has_a_line_per_point():
    points = grow((1,), scalings=("weak",))
    head, line, *legend = table(points).splitlines()
    assert [each.partition(":")[0] for each in legend] == ["", "train+eng", "wait", "lag"]
    assert line.split()[:3] == ["1", "weak", "on-policy"]
    assert len(head) == len(line)
