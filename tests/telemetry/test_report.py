"""report.html: one file, what it shows, and that data stays data."""

import json
import re
import shutil

import pytest

from drmas.errors import DataError
from drmas.telemetry.alarms import Alarm, append_alarms, keep_alarms_until
from drmas.telemetry.environment import environment, write_environment
from drmas.telemetry.episodes import path_of, write_episodes
from drmas.telemetry.report import charts, write_report
from drmas.telemetry.sinks import read_metrics
from drmas.types import Episode
from tests.page import Page


def page_of(run_dir) -> Page:
    return Page(write_report(run_dir).read_text())


def test_the_page_is_whole_and_needs_nothing_outside_itself(make_run):
    path = write_report(make_run(4))
    html = path.read_text()
    page = Page(html)
    assert page.stack == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not attributes & {"src", "href", "srcset", "onclick", "onerror"}
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_curves_are_drawn_per_agent_and_policy(make_run):
    page = page_of(make_run(4))
    drawn = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert drawn == ["Reward", "Inflation factor", "Advantage", "Gradient norm", "Log-prob gap", "Throughput", "Time by phase"]
    assert "solver, 4: 1" in page.text
    assert "verifier, 4: 0.95" in page.text
    assert "main, 3: 0.03" in page.text


def test_the_first_numbers_are_first_last_best_and_extremes(make_run):
    run_dir = make_run(4)
    with (run_dir / "metrics.jsonl").open("a") as file:
        memory = {"train/peak_memory_bytes": 3 * 2**30, "engine/main/peak_memory_bytes": 1.5 * 2**30}
        file.write(json.dumps({"step": 5, "reward/mean": 0.5, **memory}) + "\n")
    html = write_report(run_dir).read_text()
    tiles = dict(re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', html))
    assert list(tiles) == ["0.250 → 0.500", "1.000", "12 (4)", "0.04", "3.20e-04", "54", "3.0 GiB · 1.5 GiB"]


def test_a_step_without_a_value_is_a_gap(make_run):
    steps = read_metrics(make_run(4))
    inflation = charts(steps)[1]
    assert 'class="reference"' in inflation
    # step 2 has no factor: step 1 stands alone, 3 and 4 are joined
    assert re.findall(r'<polyline class="line s\d" points="([^"]*)"', inflation).__len__() == 2
    assert "solver, 1: 1.5" in inflation
    assert "solver, 2:" not in inflation


def test_moments_are_joined_over_the_steps_that_measured_them(make_run):
    steps = read_metrics(make_run(4))
    for metrics, pooled in zip(steps[1::2], (1.75, 2.5), strict=True):
        metrics |= {"moments/solver/score": 3.0, "moments/solver/pooled": pooled, "moments/solver/own": None}
    (drawn,) = [chart for chart in charts(steps) if "Second moment" in chart]
    assert "solver" in drawn
    assert "pooled, 2: 1.75" in drawn
    assert "pooled, 4: 2.5" in drawn
    assert drawn.count("<polyline") == 1
    assert "as trained" not in drawn


def test_the_table_has_a_row_per_step_with_failures(make_run):
    html = write_report(make_run(4)).read_text()
    body = html[html.index("<tbody>") : html.index("</tbody>")]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in body.split("</tr>") if "<td>" in row]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert [row[-1] for row in rows] == ["engine 1"] * 4
    assert [row[-2] for row in rows] == ["13.5"] * 4
    assert '<span class="soft">-</span>' in rows[1]


def alarm(step: int, **changes) -> Alarm:
    given = {
        "kind": "spike",
        "agent": "solver",
        "metric": "train/main/grad_norm",
        "message": "norm 31",
        "value": 31.0,
        "limit": 9.0,
    }
    return Alarm(step=step, rows=["sums/1#0/0", "sums/1#1/0"], **(given | changes))


def test_alarms_are_listed_with_their_rows_and_marked_on_the_curves_they_are_about(make_run):
    run_dir = make_run(4)
    append_alarms(
        run_dir, [alarm(2, message="<b>31</b>"), alarm(3, kind="idle", agent="verifier", metric="rollout/verifier/rows")]
    )
    html = write_report(run_dir).read_text()
    section = html[html.index("<h2>Alarms</h2>") : html.index("<h2>Curves</h2>")]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in section.split("</tr>") if "<td>" in row]
    assert rows == [
        ["2", "spike", "solver", "&lt;b&gt;31&lt;/b&gt;", "sums/1#0/0, sums/1#1/0"],
        ["3", "idle", "verifier", "norm 31", "sums/1#0/0, sums/1#1/0"],
    ]
    drawn = re.findall(r'<svg[^>]*aria-label="([^"]*)">(.*?)</svg>', html, re.DOTALL)
    assert [title for title, svg in drawn if 'class="mark"' in svg] == ["Gradient norm"]
    (mark,) = re.findall(r'class="mark" d="M([\d.]+) ', html)
    dots = dict(re.findall(r'cx="([\d.]+)" [^>]*><title>main, (\d)', html))
    assert dots[mark] == "2"


def test_a_run_without_alarms_says_so_and_one_that_did_not_watch_says_nothing(make_run):
    run_dir = make_run(2)
    assert "Alarms" not in page_of(run_dir).text
    keep_alarms_until(run_dir, 0)
    text = page_of(run_dir).text
    assert "Alarms None." in " ".join(text.split())


def test_of_many_alarms_the_last_ones_are_listed(make_run):
    run_dir = make_run(1)
    append_alarms(run_dir, [alarm(step) for step in range(1, 251)])
    html = write_report(run_dir).read_text()
    section = html[html.index("<h2>Alarms</h2>") : html.index("<h2>Curves</h2>")]
    assert "The last 200 of 250 alarms" in section
    assert re.findall(r"<tr><td>(\d+)</td>", section) == [str(step) for step in range(51, 251)]


def test_transcripts_show_turns_advantages_segments_and_failures(make_run):
    text = page_of(make_run(1)).text
    for part in (
        "sums/1#0",
        "reward 1",
        "advantage +0.500",
        "advantage -0.600",
        "compared within sums/1 / verifier",
        "did not parse",
        "penalty 0.1",
        "no advantage",
        "<bos>ab",
        "failed: engine",
        "exit code 9",
    ):
        assert part in text


def test_a_run_without_episode_files_says_so_and_a_probe_is_no_transcript(make_run, episodes, tokenizers, advantages):
    run_dir = make_run(1, config='{"telemetry": {"episodes": false}}')
    shutil.rmtree(run_dir / "episodes")
    assert "The run kept no episodes: telemetry.episodes is false." in page_of(run_dir).text
    probe = Episode(episodes[0].task, -1, [], "7", 9.0, probe="greedy")  # the best of all
    write_episodes(run_dir, 1, [probe, *episodes], tokenizers, advantages)
    (run_dir / "config.json").write_text('{"telemetry": {"transcripts": 1}}')
    text = page_of(run_dir).text
    assert "sums/1#2" in text
    assert "greedy" not in text


def test_what_a_model_wrote_is_data(make_run, episodes, tokenizers, advantages):
    run_dir = make_run(1, config='{"name": "<script>alert(0)</script>", "train": {"steps": 1}}')
    nasty = '</pre><script>alert(1)</script><img src=x onerror="alert(2)"> \x00\x1b[31m \ud83d & é'
    episodes[0].turns[0].text = nasty
    episodes[0].answer = nasty
    episodes[2].failure = type(episodes[2].failure)("engine", nasty)
    object.__setattr__(episodes[0].task, "question", nasty)
    write_episodes(run_dir, 1, episodes, tokenizers, advantages)
    html = write_report(run_dir).read_text(encoding="utf-8")
    assert "<script" not in html
    assert "<img" not in html
    assert "\x00" not in html
    assert "\x1b" not in html
    page = Page(html)
    assert page.stack == []
    assert '</pre><script>alert(1)</script><img src=x onerror="alert(2)"> \ufffd\ufffd[31m \ufffd & é' in page.text


def test_a_run_of_one_step_and_a_run_that_died_have_a_report(make_run):
    assert "1 of 4 steps (ended early, or still running)" in page_of(make_run(1)).text
    died = make_run(2, config=None)
    with (died / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')
    path_of(died, 2).write_text('{"task": "sums/1", "turns"')
    text = page_of(died).text
    assert "2 steps" in text
    assert "These episodes can't be shown" in text
    assert "step_2.jsonl:1: not JSON" in text


def test_a_run_that_died_before_its_first_step_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text('{"name": "early", "train": {"steps": 3}}')
    page = page_of(tmp_path)
    assert "0 of 3 steps" in page.text
    assert page.stack == []


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="expected a run folder"):
        write_report(tmp_path)


def test_the_number_of_transcripts_is_the_configured_one(make_run):
    html = write_report(make_run(1, config='{"telemetry": {"transcripts": 2}}')).read_text()
    assert html.count("<article>") == 2
    assert "failed: engine" in html
    assert "Transcripts" not in write_report(make_run(2, config='{"telemetry": {"transcripts": 0}}')).read_text()


def test_the_environment_of_the_run_is_shown_not_the_readers(make_run):
    run_dir = make_run(1)
    assert "not recorded" in page_of(run_dir).text
    write_environment(run_dir)
    recorded = json.loads((run_dir / "environment.json").read_text())
    assert recorded == environment()
    (run_dir / "environment.json").write_text(json.dumps(recorded | {"python": "9.9.9"}))
    assert "9.9.9" in page_of(run_dir).text
