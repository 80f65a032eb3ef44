"""`drmas inspect`: rows in, segments and advantages out, and what is said about a bad row."""

import json
import math

import pytest

from drmas.cli.inspect import doubts, inspect_rows, inspect_run, read_rows
from drmas.errors import ConfigError, DataError
from drmas.telemetry.episodes import write_episodes
from drmas.types import Episode, Failure, Task, Turn


def row(episode: str, agent: str, reward, **more) -> dict:
    return {"task": "t", "episode": episode, "agent": agent, "reward": reward, **more}


ROWS = [
    row("e0", "solver", 1, turn=0, note="kept"),
    row("e0", "verifier", 1, turn=1),
    row("e1", "solver", 0, penalty=0.1),
    row("e2", "solver", None, status="engine"),
    row("e3", "solver", 0),
]


def as_json(path, *overrides):
    return json.loads(inspect_rows(read_rows(path), overrides, as_json=True))


def test_every_row_comes_back_in_order_with_its_advantage_and_its_own_keys(rows_file):
    answer = as_json(rows_file(*ROWS))
    assert list(answer) == ["rule", "segments", "rows"]
    assert [(r["episode"], r["agent"]) for r in answer["rows"]] == [(r["episode"], r["agent"]) for r in ROWS]
    assert answer["rows"][0]["note"] == "kept"
    std = math.sqrt(1 / 3)
    expected = [(2 / 3) / (std + 1e-6), 0.0, (-1 / 3) / (std + 1e-6) - 0.1, None, (-1 / 3) / (std + 1e-6)]
    assert [r["advantage"] for r in answer["rows"]] == pytest.approx(expected, abs=1e-12)


def test_I3_a_failed_row_is_null_and_counted_in_its_segment(rows_file):
    answer = as_json(rows_file(*ROWS))
    segment = next(s for s in answer["segments"] if s["scope"] == "mean" and s["key"] == ["t", "solver"])
    assert (segment["rows"], segment["num_excluded"], segment["num_episodes"]) == ([0, 2, 4], 1, 3)
    assert segment["mean"] == pytest.approx(1 / 3)
    assert segment["std"] == pytest.approx(math.sqrt(1 / 3))
    assert (segment["singleton"], segment["constant"]) == (False, False)


def test_overrides_change_the_rule(rows_file):
    path = rows_file(*ROWS)
    grpo = as_json(path, "--advantage.preset", "grpo")
    assert (grpo["rule"]["mean"], grpo["rule"]["weighting"]) == ("task", "episode")
    assert grpo["rows"][1]["advantage"] == pytest.approx((2 / 3) / (math.sqrt(1 / 3) + 1e-6))
    mixed = as_json(path, "--advantage.mean", "task", "--advantage.std=none", "--advantage.penalty", "inside")
    assert mixed["rule"]["std"] == "none"
    assert mixed["rows"][2]["advantage"] == pytest.approx(-0.1 - (1 + 1 - 0.1 + 0) / 4)


def test_the_text_lists_segments_flags_factors_and_every_row(rows_file):
    text = inspect_rows(read_rows(rows_file(*ROWS)), [], as_json=False)
    lines = text.splitlines()
    assert "advantage.preset dr-mas:  mean=agent  std=agent" in lines[0]
    assert "segments of the mean (taken off) and of the std (divided by)" in text
    verifier = next(line for line in lines if "t / verifier" in line)
    assert "singleton" in verifier
    body = text[text.index("rows\n", text.index("inflation factor")) :]
    order = [body.index(f"│ {index} ") for index in range(len(ROWS))]
    assert order == sorted(order)
    assert "1.154699" in body
    assert "-0.677349" in body
    # the pooled variance over 3 episodes is 2/9; the verifier's rows sit (2/3)^2 from the pooled mean
    assert "solver 1.000  verifier 2.000" in text


def test_two_scopes_give_two_tables(rows_file):
    text = inspect_rows(read_rows(rows_file(*ROWS)), ["--advantage.std", "task"], as_json=False)
    first, second = text.index("segments of the mean (taken off)\n"), text.index("segments of the std (divided by)\n")
    assert "t / solver" in text[first:second]
    assert "t / solver" not in text[second : text.index("inflation factor")]


def test_blank_lines_numeric_names_and_a_byte_order_mark_are_fine(rows_file, tmp_path):
    path = rows_file(row("0", "a", 1, task="x"), "", json.dumps({"task": 7, "episode": 3, "agent": "a", "reward": 0.5}))
    path.write_text("\ufeff" + path.read_text())
    assert [(r.task, r.episode, r.turn, r.penalty, r.status) for r in read_rows(path)] == [
        ("x", "0", 0, 0.0, "ok"),
        ("7", "3", 0, 0.0, "ok"),
    ]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"task": "t", ', "not JSON"),
        ("[1]", "holds a list; expected an object with task, episode, agent and reward"),
        ('{"episode": "e", "agent": "a", "reward": 1}', "task is missing"),
        ('{"task": "t", "agent": "a", "reward": 1}', "episode is missing"),
        ('{"task": "t", "episode": "e", "reward": 1}', "agent is missing"),
        ('{"task": "t", "episode": "e", "agent": "a"}', "reward is missing"),
        ('{"task": ["t"], "episode": "e", "agent": "a", "reward": 1}', 'task is ["t"]; expected text'),
        ('{"task": "t", "episode": "e", "agent": null, "reward": 1}', "agent is null; expected text"),
        ('{"task": "t", "episode": "e", "agent": "a", "reward": NaN}', "reward is NaN; expected a finite number"),
        ('{"task": "t", "episode": "e", "agent": "a", "reward": 1e999}', "reward is Infinity; expected a finite number"),
        ('{"task": "t", "episode": "e", "agent": "a", "reward": null}', "reward is null; expected a finite number"),
        ('{"task": "t", "episode": "e", "agent": "a", "reward": "1"}', 'reward is "1"; expected a finite number'),
        ('{"task": "t", "episode": "e", "agent": "a", "reward": true}', "reward is true; expected a finite number"),
        ('{"task": "t", "episode": "e", "agent": "a", "reward": 1, "penalty": "x"}', 'penalty is "x"'),
        ('{"task": "t", "episode": "e", "agent": "a", "reward": 1, "turn": -1}', "turn is -1"),
        ('{"task": "t", "episode": "e", "agent": "a", "reward": 1, "turn": 0.5}', "turn is 0.5"),
        ('{"task": "t", "episode": "e", "agent": "a", "reward": 1, "status": 0}', "status is 0"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(rows_file, bad, message):
    path = rows_file(ROWS[0], ROWS[1], bad, ROWS[2])
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_failed_row_may_lack_its_reward(rows_file):
    path = rows_file(ROWS[0], '{"task": "t", "episode": "e", "agent": "a", "status": "timeout", "reward": NaN}')
    assert read_rows(path)[1].reward is None
    assert as_json(path)["rows"][1]["advantage"] is None


def test_a_file_that_cannot_be_read_is_named(tmp_path, rows_file):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: No such file"):
        read_rows(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(rows_file(""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_rows(tmp_path / "binary")


def test_an_unknown_preset_or_option_is_a_configuration_error(rows_file):
    with pytest.raises(ConfigError, match="the nearest is 'grpo'"):
        inspect_rows(read_rows(rows_file(*ROWS)), ["--advantage.preset", "grop"], as_json=True)
    with pytest.raises(ConfigError, match="--foo: unknown option"):
        inspect_rows(read_rows(rows_file(*ROWS)), ["--foo", "3"], as_json=True)


@pytest.fixture
def run_dir(tmp_path):
    class Words:
        def decode(self, token_ids):
            return " ".join(map(str, token_ids))

    class NoAdvantages:
        values = (0.0, 0.0, 0.0, None)
        segments = ()

    def turn(agent, index, response):
        size = len(response)
        return Turn(agent, "main", index, [1], response, [-1.0] * size, [0] * size, "stop", "text")

    task = Task("t", "q", "a")
    episodes = [
        Episode(task, 0, [turn("solver", 0, [1]), turn("verifier", 1, [2])], "a", 1.0),
        Episode(task, 1, [turn("solver", 0, [3]), turn("verifier", 1, [])], "b", 0.0),
        Episode(task, 2, [turn("solver", 0, [4])], failure=Failure("timeout", "too long")),
    ]
    write_episodes(tmp_path, 2, episodes, {"main": Words()}, NoAdvantages())
    (tmp_path / "config.json").write_text('{"advantage": {"preset": "grpo", "ddof": 0}}')
    return tmp_path


def test_a_step_of_a_run_is_shown_under_the_runs_own_rule(run_dir):
    answer = json.loads(inspect_run(run_dir, 2, [], as_json=True))
    assert (answer["rule"]["mean"], answer["rule"]["ddof"]) == ("task", 0)
    assert [(r["episode"], r["agent"], r["turn"]) for r in answer["rows"]] == [
        ("t#0", "solver", 0),
        ("t#0", "verifier", 1),
        ("t#1", "solver", 0),
        ("t#2", "solver", 0),
    ]
    expected = 0.5 / (0.5 + 1e-6)
    values = [r["advantage"] for r in answer["rows"]]
    assert values[:3] == pytest.approx([expected, expected, -expected])
    assert values[3] is None
    changed = json.loads(inspect_run(run_dir, 2, ["--advantage.preset", "dr-mas"], as_json=True))
    assert [r["advantage"] for r in changed["rows"]][1] == 0.0


def test_an_unknown_step_lists_the_known_ones(run_dir):
    with pytest.raises(DataError, match="the steps with episodes are: 2"):
        inspect_run(run_dir, 7, [], as_json=True)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(DataError, match=r"config\.json: can't be read"):
        inspect_run(tmp_path, 1, [], as_json=True)


def test_rows_that_no_run_would_write_are_taken_and_named(rows_file):
    row = {"task": "a", "episode": "e", "agent": "s", "turn": 0, "reward": 1.0}
    sound = read_rows(rows_file(row, {**row, "turn": 1}, {**row, "episode": "f", "reward": 0.0}))
    assert doubts(sound) == []
    odd = read_rows(rows_file(row, row, {**row, "turn": 1, "reward": 0.0}, {**row, "turn": 2, "penalty": -1}))
    assert doubts(odd) == [
        "row 2: a second row of a/e/s/0; under weighting by turn it counts again",
        "row 3: another reward than the rows of a/e before it",
        "row 4: penalty -1 raises the advantage",
    ]
