"""bench/all.py: it runs what it is asked for, keeps what was measured, goes on where it was, and says what failed or lost."""

from __future__ import annotations

import json
import textwrap

import pytest

from bench.suite import entries, runner
from bench.suite.entries import BENCHMARKS, Benchmark, Chart, chosen
from bench.suite.page import END, read_results
from bench.suite.record import Result

SCRIPT = """
import json, os, sys
from pathlib import Path
path = Path(sys.argv[sys.argv.index("--json") + 1])
if sys.argv[1] == "fail":
    sys.exit(3)
if sys.argv[1] == "broken":
    path.write_text("[]")
    sys.exit(0)
about = {"machine": "m", "date": "2026-12-01", "versions": {}, "command": "c", "threads": 1}
speed = {"name": "speed", "value": float(os.environ["SPEED"]), "better": "higher", "tolerance": 0.1, "why": "w", "target": 100}
table = {"title": "t", "columns": ["side", "s"], "rows": [["drmas", 1.0]]}
result = {"benchmark": sys.argv[2], "about": about, "tables": [table], "ratios": [speed]}
path.write_text(json.dumps({"inner": result} if sys.argv[1] == "raw" else result))
sys.exit(1)  # as where a target is missed
"""


def opened(raw, about):
    return Result.model_validate(raw["inner"]).model_copy(update={"about": about})


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Four benchmarks, of which two fail, and a page for them."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "script.py").write_text(textwrap.dedent(SCRIPT))
    made = (
        Benchmark("one", "script.py", ("good", "one"), ("good", "one"), chart=Chart(0, "side", ("s",))),
        Benchmark("two", "script.py", ("raw", "two"), convert=opened),
        Benchmark("three", "script.py", ("fail", "three"), ("good", "three")),
        Benchmark("four", "script.py", ("broken", "four")),
    )
    for module in (entries, runner, runner.page):
        monkeypatch.setattr(module, "BENCHMARKS", made)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "BENCH", tmp_path / "bench")
    monkeypatch.setenv("SPEED", "5")
    (tmp_path / "page.md").write_text("".join(f"<!-- results: {each.name} -->\n{END}\n" for each in made))
    return tmp_path


def call(suite, *words):
    return runner.main([*words, "--page", str(suite / "page.md"), "--output", str(suite / "out")])


def test_what_fails_is_said_and_the_others_are_kept_and_shown(suite, capsys):
    assert call(suite) == 1
    assert set(read_results(suite / "out")) == {"one", "two"}
    said = capsys.readouterr().out
    assert "three: it ended with status 3 and left no result" in said
    assert "four: its result can't be read" in said
    page = (suite / "page.md").read_text()
    assert page.count("| drmas | 1 |") == 2
    assert "Not measured yet: `python bench/all.py --only three`" in page
    assert (suite / "out" / "one.svg").is_file()
    assert not (suite / "out" / "two.raw.json").exists()


def test_a_missed_target_is_no_failure(suite):
    assert call(suite, "--only", "one", "--only", "two") == 0


def test_a_result_that_is_converted_says_how_it_was_measured(suite):
    call(suite, "--only", "two")
    assert read_results(suite / "out")["two"].about.command == "python bench/script.py raw two"


def test_resume_leaves_out_what_was_done(suite, capsys, monkeypatch):
    assert call(suite) == 1
    monkeypatch.setenv("SPEED", "7")
    assert call(suite, "--resume") == 1
    assert read_results(suite / "out")["one"].ratios[0].value == 5.0
    assert "=== one: done before" in capsys.readouterr().out
    assert call(suite, "--only", "one", "--only", "two", "--resume") == 0  # nothing of these is left
    assert call(suite, "--resume", "--only", "one") == 0  # that call was complete: this one begins anew
    assert read_results(suite / "out")["one"].ratios[0].value == 7.0


def test_a_benchmark_that_fails_leaves_no_older_result(suite, monkeypatch):
    call(suite, "--only", "one")
    (suite / "out" / "three.json").write_text((suite / "out" / "one.json").read_text())
    call(suite, "--only", "three")
    assert not (suite / "out" / "three.json").exists()


@pytest.mark.parametrize(("speed", "status", "word"), [("5", 0, "fine"), ("4.6", 0, "fine"), ("4.5", 1, "WORSE")])
def test_check_compares_with_the_baseline_and_leaves_the_page_alone(suite, capsys, monkeypatch, speed, status, word):
    assert runner.main(["--only", "one", "--output", str(suite / "base"), "--page", str(suite / "page.md")]) == 0
    page = (suite / "page.md").read_text()
    monkeypatch.setenv("SPEED", speed)
    assert call(suite, "--only", "one", "--check", "--baseline", str(suite / "base")) == status
    assert f"(at least 4.55): {word}" in capsys.readouterr().out
    assert (suite / "page.md").read_text() == page
    assert read_results(suite / "base")["one"].ratios[0].value == 5.0


def test_check_fails_where_a_benchmark_of_the_baseline_fails(suite, capsys):
    (suite / "base").mkdir()
    raw = {"benchmark": "three", "about": {"machine": "m", "date": "d", "versions": {}, "command": "c", "threads": 1}}
    (suite / "base" / "three.json").write_text(json.dumps(raw | {"tables": [], "ratios": []}))
    assert call(suite, "--only", "three", "--check", "--baseline", str(suite / "base")) == 1
    assert "three: in the baseline and not measured now: WORSE" in capsys.readouterr().out


def test_check_without_a_baseline_measures_nothing(suite, capsys):
    assert call(suite, "--only", "one", "--check", "--baseline", str(suite / "nowhere")) == 1
    assert "has no result of one to compare with: measure and commit it" in capsys.readouterr().out
    assert not (suite / "out").exists()


def test_quick_runs_what_has_a_quick_form_and_leaves_the_page_alone(suite):
    page = (suite / "page.md").read_text()
    assert call(suite, "--quick") == 0
    assert set(read_results(suite / "out")) == {"one", "three"}
    assert (suite / "page.md").read_text() == page


def test_rendering_measures_nothing(suite, monkeypatch):
    call(suite, "--only", "one")
    (suite / "page.md").write_text((suite / "page.md").read_text().replace("| drmas | 1 |", "| drmas | 2 |"))
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("it ran"))
    assert call(suite, "--render") == 0
    assert "| drmas | 1 |" in (suite / "page.md").read_text()


@pytest.mark.parametrize(
    "words", [["--only", "nine"], ["--render", "--check"], ["--quick", "--check"], ["--render", "--only", "one"]]
)
def test_what_makes_no_sense_is_refused(suite, words):
    with pytest.raises(SystemExit) as ended:
        call(suite, *words)
    assert ended.value.code == 2


def test_the_real_list():
    assert len({each.name for each in BENCHMARKS}) == len(BENCHMARKS)
    assert [each.name for each in chosen(["rollout", "kernels"])] == ["kernels", "rollout"]
    assert all(each.quick for each in chosen([], quick=True))
    assert sum(each.minutes for each in BENCHMARKS) <= 30
