"""The report: one file, the same bytes for the same trials, its numbers those of results.json, what failed in sight."""

import json
import random
import re

import pytest

from drmas.errors import DataError
from drmas.reproduce.page import write_page
from drmas.reproduce.words import CLAIMS
from tests.page import Page
from tests.reproduce.fabricated import crashed, reproduction, trial, write

OUTPUTS = ("report.html", "results.json", "results.md")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """dr-mas wins in one scenario and grpo in the other; one trial crashed, one diverged."""
    trials = reproduction("dr-mas", 3, ("maths-shared",)) + reproduction("grpo", 3, ("search-separate",))
    trials[0] |= {"status": "diverged", "error": "the mean reward fell from 0.41 to 0.12"}
    trials[4] = crashed("maths-shared", "grpo-turns", 1, "killed by signal 9 <b>")
    folder = write(tmp_path_factory.mktemp("reproduction"), trials)
    (folder / "trials" / "maths-shared" / "rloo" / "seed-7").mkdir()
    write_page(folder)
    return folder


@pytest.fixture(scope="module")
def page(root) -> Page:
    return Page((root / "report.html").read_text())


def test_the_page_is_whole_and_needs_nothing_outside_itself(root, page):
    html = (root / "report.html").read_text()
    assert page.stack == []
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not {name for _, attrs in page.tags for name in attrs} & {"src", "srcset", "onclick", "onerror"}
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html
    anchors = {attrs["id"] for _, attrs in page.tags if attrs.get("id")}
    links = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    assert links == {f"#{anchor}" for anchor in anchors}


def test_the_claims_come_first_with_their_verdicts_good_and_bad(root, page):
    numbers = json.loads((root / "results.json").read_text())
    first = page.text[: page.text.index("Predicted and measured")]
    words = [one["word"] for one in numbers["verdicts"]]
    assert len(words) == 2 * len(CLAIMS)
    cells = [
        " ".join(cell.split()) for cell in re.findall('<b class="\\w+">(.*?)</b><small>', (root / "report.html").read_text())
    ]
    assert sorted(cells) == sorted(words)
    assert first.index("Of 14 claims about training") < first.index("Claims about training")
    assert first.index("Claims about second moments") < first.index("Arithmetic that must hold")
    (lost,) = [one for one in numbers["verdicts"] if (one["claim"], one["scenario"]) == ("reward", "search-separate")]
    assert (lost["word"], lost["numbers"] in first) == ("contradicted", True)
    assert "What this doesn't say" in first


def test_every_number_of_a_table_is_in_the_json(root):
    numbers = json.loads((root / "results.json").read_text())
    own = numbers["scenarios"]["maths-shared"]["methods"]["dr-mas"]
    final = own["final"]
    text = (root / "results.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| dr-mas |"))
    assert row.split(" | ")[1:3] == ["3 of 3", f"{final['value']:.3f} [{final['low']:.3f}, {final['high']:.3f}]"]
    spikes = own["agents"]["solver"]["spikes"]
    row = next(line for line in text.splitlines() if line.startswith("| dr-mas: solver |"))
    assert f"{spikes['value']:.3f} [{spikes['low']:.3f}, {spikes['high']:.3f}]" in row
    turns = next(line for line in text.splitlines() if line.startswith("| grpo-turns |"))
    assert turns.split(" | ")[1] == "2 of 3"


def test_each_scenario_has_its_charts(page):
    for agent in ("solver", "verifier", "router", "searcher", "answerer"):
        for kind in ("Gradient norm", "Inflation factor", "Row sum"):
            assert page.charts.count(f"{kind}: {agent}") == 1
    for method in ("dr-mas", "grpo-turns", "single-agent", "rloo"):
        assert page.charts.count(f"Reward: {method}") == 2
    assert page.charts.count("Final reward less grpo's") == 2
    assert page.charts[:2] == ["Second moment and factor", "Arithmetic: with Δ"]


def test_failures_are_listed_as_text(root, page):
    failures = page.text[page.text.rindex("Failures") :]
    assert "maths-shared/grpo-turns/seed-1 crashed killed by signal 9 <b>" in " ".join(failures.split())
    assert "maths-shared/grpo/seed-0 diverged the mean reward fell from 0.41 to 0.12" in " ".join(failures.split())
    assert "killed by signal 9 &lt;b>" in (root / "results.md").read_text()
    assert "trials/maths-shared/rloo/seed-7/result.json: no such file" in failures
    assert "bandit.json: no such file" in failures


def test_the_same_trials_give_the_same_bytes_whenever_and_in_whatever_order_they_were_made(root, tmp_path):
    before = [(root / name).read_bytes() for name in OUTPUTS]
    write_page(root)
    assert [(root / name).read_bytes() for name in OUTPUTS] == before
    trials = [json.loads(path.read_text()) for path in root.glob("trials/*/*/*/result.json")]
    random.Random(0).shuffle(trials)
    again = write(tmp_path / "again", [dict(sorted(one.items(), reverse=True)) for one in trials])
    (again / "trials" / "maths-shared" / "rloo" / "seed-7").mkdir()
    for path in again.glob("trials/*/*/*"):
        (path / "timing.json").write_text('{"seconds": 12.3}')
    write_page(again)
    assert [(again / name).read_bytes() for name in OUTPUTS] == before


def test_no_machine_path_is_in_it(root):
    assert not [name for name in OUTPUTS if str(root) in (root / name).read_text()]


@pytest.mark.parametrize(
    "trials",
    [
        [trial("maths-shared", "grpo", 0, steps=3)],
        [trial("maths-shared", "dr-mas", 0, steps=3)],
        [crashed("maths-shared", "grpo", 0, "at once")],
        [{**trial("maths-shared", "grpo", 0, steps=3), "moments": [], "eval": {}}],
        [{"scenario": "maths-shared", "method": "start", "seed": 0, "status": "ok"}],
        [trial("a-new-one", "a new method", 0, steps=4)],
    ],
)
def test_any_part_of_a_reproduction_has_a_page(tmp_path, trials):
    page = Page(write_page(write(tmp_path, trials)).read_text())
    assert page.stack == []
    assert "What became of each claim" in page.text
    assert "nan" not in re.findall(r"[a-z]+", page.text)


def test_numbers_that_are_not_finite_are_null(tmp_path):
    written = trial("maths-shared", "grpo", 0, steps=10)
    written["moments"][0]["per_agent"] = float("nan")
    written["grad_norm"]["solver"] = [float("inf")] * 10
    write_page(write(tmp_path, [written]))
    numbers = json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert numbers["scenarios"]["maths-shared"]["points"][0][2] is None
    assert numbers["scenarios"]["maths-shared"]["methods"]["grpo"]["agents"]["solver"]["spikes"]["value"] == 1.0


@pytest.mark.parametrize(
    "bandit",
    [
        {"regimes": [{}]},
        {"regimes": 3},
        {"learning": [{"name": "a"}]},
        {"check": []},
        {"growth": {}, "check": {"lemma": "no"}},
        {"a": 1},
    ],
)
def test_a_bandit_of_another_form_is_named(tmp_path, bandit):
    page = Page(write_page(write(tmp_path, [trial("maths-shared", "grpo", 0, steps=3)], bandit=bandit)).read_text())
    assert "bandit.json: can't be used: " in page.text
    assert page.stack == []


def test_a_huge_norm_has_a_page(tmp_path):
    made = [trial("maths-shared", "grpo", seed, steps=10) for seed in range(2)]
    made[0]["grad_norm"]["solver"][7] = 1e200
    assert Page(write_page(write(tmp_path, made)).read_text()).stack == []


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="nothing to report"):
        write_page(tmp_path)
