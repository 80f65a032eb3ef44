"""The gate: what got worse, what is missing, and what passes; result files that are no results."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from bench.suite import gate
from bench.suite.convert import plan_validation
from bench.suite.record import About, Ratio, Result, Table, command_line, plain, printed

HERE = About(machine="a machine", date="2026-12-01", versions={}, command="python bench/x.py", threads=1)


def ratio(name, value, better="higher", tolerance=0.25, **more):
    return Ratio(name=name, value=value, better=better, tolerance=tolerance, why="other work", **more)


def result(*ratios, name="x", machine="a machine", **more):
    return Result(benchmark=name, about=HERE.model_copy(update={"machine": machine}), tables=[], ratios=list(ratios), **more)


def verdicts(before, now):
    return gate.compare({"x": result(*before)}, {"x": result(*now)}, ["x"])


@pytest.mark.parametrize(
    ("better", "before", "now", "worse"),
    [
        ("higher", 5.0, 4.0, False),  # 5 / 1.25
        ("higher", 5.0, 3.99, True),
        ("higher", 5.0, 50.0, False),
        ("lower", 0.8, 1.0, False),  # 0.8 * 1.25
        ("lower", 0.8, 1.01, True),
        ("lower", 0.8, 0.1, False),
    ],
)
def test_a_ratio_may_be_off_by_its_tolerance_in_the_bad_direction_only(better, before, now, worse):
    (found,) = verdicts([ratio("speed", before, better)], [ratio("speed", now, better)])
    assert found.worse is worse
    assert ("WORSE" in found.text, "fine" in found.text) == (worse, not worse)
    assert "x: speed" in found.text


def test_the_tolerance_is_that_of_the_tree_at_hand():
    assert not verdicts([ratio("speed", 5.0, tolerance=0.0)], [ratio("speed", 4.0)])[0].worse
    assert verdicts([ratio("speed", 5.0)], [ratio("speed", 4.9, tolerance=0.01)])[0].worse


def test_what_is_missing_is_worse_and_what_is_new_is_not():
    found = verdicts([ratio("speed", 5.0), ratio("memory", 0.8, "lower")], [ratio("speed", 5.0), ratio("sync", 0.1)])
    assert [(each.worse, each.text) for each in found] == [
        (False, "x: speed 5 -> 5 (at least 4): fine"),
        (True, "x: memory 0.8 -> not measured now: WORSE"),
        (False, "x: sync is not in the baseline"),
    ]


def test_whole_benchmarks_that_are_missing():
    speed = ratio("speed", 5.0)
    before, now = {"x": result(speed), "y": result(speed, name="y")}, {"x": result(speed), "z": result(speed, name="z")}
    found = {each.text: each.worse for each in gate.compare(before, now, ["x", "y", "z"])}
    assert found == {
        "x: speed 5 -> 5 (at least 4): fine": False,
        "y: in the baseline and not measured now: WORSE": True,
        "z: not in the baseline; measure and commit it first: WORSE": True,
    }
    assert not any(each.worse for each in gate.compare(before, now, ["x"]))  # y wasn't asked for


def test_another_machine_is_said():
    found = gate.compare({"x": result(ratio("a", 1.0))}, {"x": result(ratio("a", 1.0), machine="another")}, ["x"])
    assert found[0] == gate.Verdict("x: the baseline is of a machine, this run of another", False)


def test_a_result_survives_its_file(tmp_path):
    made = result(ratio("a", 2.5, target=2.0), ratio("b", 0.1, "lower"), notes=["TRL is not installed"])
    made.write(tmp_path / "deep" / "x.json")
    assert Result.read(tmp_path / "deep" / "x.json") == made
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw | {"ratios": [{"name": "a"}]}, "ratios.0.value: Field required"),
        (lambda raw: raw | {"tables": [{"title": "t", "columns": ["a"], "rows": [[1, 2]]}]}, "2 cells for 1 columns"),
        (lambda raw: raw | {"seconds": 3}, "seconds: Extra inputs"),
        (lambda raw: [raw], "the file: Input should be an object"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path, change, message):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(change(json.loads(result(ratio("a", 1.0)).model_dump_json()))))
    with pytest.raises(ValueError, match=message):
        Result.read(path)


def test_ratios_have_names_of_their_own_reasons_and_finite_values():
    with pytest.raises(ValidationError, match="two ratios are called 'a'"):
        result(ratio("a", 1.0), ratio("a", 2.0))
    with pytest.raises(ValidationError, match="finite"):
        ratio("a", float("nan"))
    with pytest.raises(ValidationError):
        Ratio(name="a", value=1.0, better="lower", tolerance=0.1, why="")


def test_what_is_printed():
    table = Table(title="A step", columns=["side", "s"], rows=[["drmas", 1.0], ["TRL", 12345.6]])
    made = result(ratio("speed", 2.5, target=3.0), ratio("memory", 0.5, "lower", target=0.8), notes=["left out"])
    assert printed(made.model_copy(update={"tables": [table]})).splitlines() == [
        "",
        "A step",
        "  side        s",
        "  drmas       1",
        "  TRL    12,346",
        "",
        "speed: 2.5   missed: at least 3",
        "memory: 0.5   reached: at most 0.8",
        "left out",
    ]


@pytest.mark.parametrize(
    ("cell", "text"), [(None, ""), ("a", "a"), (0, "0"), (3, "3"), (0.0123456, "0.0123"), (12.345, "12.3"), (99999.4, "99,999")]
)
def test_cells_are_short(cell, text):
    assert plain(cell) == text


def test_commands_are_as_one_types_them():
    assert command_line(["end_to_end.py", "--sides", "TRL, x"]) == "python bench/end_to_end.py --sides 'TRL, x'"


def test_a_validation_of_plans_becomes_a_result():
    phases = {
        "rollout": {"measured": 4.0, "predicted": 3.0, "error": -0.25, "from_defaults": 5.0},
        "step": {"measured": 10.0, "predicted": 8.0, "error": -0.2, "from_defaults": 9.0},
    }
    made = plan_validation({"steps": 3, "comparisons": [{"name": "quickstart", "phases": phases}]}, HERE)
    assert made.tables[0].rows[1] == ["quickstart", "step", 10.0, 8.0, -0.2, 9.0]
    assert [(each.value, each.target, each.missed) for each in made.ratios] == [(pytest.approx(0.2), 0.15, True)]
