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


@pytest.fixture
def turns(rows_file):
    """Two episodes of two turns; the first turns read the same, the second ones don't."""
    rows = [
        row(
            f"e{episode}",
            "solver",
            1 - episode,
            turn=turn,
            prompt_ids=[1, 2, turn * episode, turn],
            response_ids=[5] * (turn + 1),
        )
        for episode in range(2)
        for turn in range(2)
    ]
    return rows_file(*rows)


def test_equal_states_are_shown(turns):
    overrides = ["--advantage.preset", "gigpo", "--advantage.gamma", "0.5", "--advantage.anchor_norm", "mean"]
    answer = as_json(turns, *overrides)
    assert [(s["scope"], s["key"], s["rows"]) for s in answer["segments"][2:]] == [
        ("anchor", ["t", "solver", "state 0"], [0, 2]),
        ("anchor", ["t", "solver", "state 1"], [1]),
        ("anchor", ["t", "solver", "state 2"], [3]),
    ]
    assert (answer["rule"]["gamma"], answer["rule"]["anchor_norm"], answer["rule"]["mean"]) == (0.5, "mean", "agent")
    whole = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert [r["advantage"] for r in answer["rows"]] == pytest.approx([whole + 0.25, whole, -whole - 0.25, -whole])
    text = inspect_rows(read_rows(turns), overrides, as_json=False)
    table = text[text.index("equal states (compared beside that, by discounted reward)") :]
    assert "t / solver / state 1" in table
    assert "0.2500" in table


def test_whitened_tokens_are_shown_by_their_mean(turns):
    answer = as_json(turns, "--advantage.preset", "reinforce++", "--advantage.gamma", "0.5")
    tokens = [1.0, 0.5, 1.0, 0.0, 0.0, 0.0]
    mean = sum(tokens) / 6
    std = math.sqrt(sum((each - mean) ** 2 for each in tokens) / 5) + 1e-6
    expected = [1.0 - mean, 0.75 - mean, -mean, -mean]
    assert [r["advantage"] for r in answer["rows"]] == pytest.approx([each / std for each in expected])
    assert answer["notes"] == ["the advantage of a row is the mean over its tokens"]
    assert answer["segments"] == []


def test_agents_with_an_estimator_of_their_own(rows_file):
    path, overrides = rows_file(*ROWS), ["--advantage.agents.verifier.preset", "grpo"]
    answer = as_json(path, *overrides)
    assert answer["rule"]["agents"]["verifier"]["weighting"] == "episode"
    assert [r["advantage"] for r in answer["rows"]][:2] == pytest.approx([(2 / 3) / (math.sqrt(1 / 3) + 1e-6)] * 2)
    shown = [(s["scope"], s["key"], s["rows"]) for s in answer["segments"] if 1 in s["rows"]]
    assert shown == [("mean", ["t"], [1]), ("std", ["t"], [1])]
    text = inspect_rows(read_rows(path), overrides, as_json=False)
    assert "advantage.agents.verifier:  mean=task  std=task  weighting=episode" in text
    with pytest.raises(ConfigError, match="names 'critic', which isn't in the team"):
        as_json(path, "--advantage.agents.critic.preset", "grpo")


def test_a_moving_mean_starts_with_these_rows_and_says_so(rows_file):
    path = rows_file(*ROWS)
    answer = as_json(path, "--advantage.preset", "ema")
    assert [r["advantage"] for r in answer["rows"]] == pytest.approx([2 / 3, 0.0, -1 / 3 - 0.1, None, -1 / 3])
    note = "advantage.preset 'ema' starts from these rows here, in a run from the steps before"
    assert answer["notes"] == [note]
    assert note in inspect_rows(read_rows(path), ["--advantage.preset", "ema"], as_json=False)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["--advantage.preset", "ppo"], ConfigError, "advantage.preset 'ppo' needs a critic's values; inspect shows"),
        (["--advantage.preset", "remax"], ConfigError, "'remax' needs episodes beside each group ('greedy')"),
        (["--advantage.preset", "difference"], ConfigError, "('without solver', 'without verifier')"),
        (["--advantage.agents.solver.preset", "remax"], ConfigError, "or advantage.agents.solver.preset 'remax' needs"),
        (["--advantage.preset", "gigpo"], DataError, "the row t/e0/solver/0 has no prompt_ids, which this estimator reads"),
        (["--advantage.whiten", "agent"], DataError, "has no response_ids, which this estimator reads"),
    ],
)
def test_what_an_estimator_lacks_is_named(rows_file, overrides, error, message):
    with pytest.raises(error) as caught:
        as_json(rows_file(*ROWS), *overrides)
    assert message in str(caught.value)


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
        ('{"task": "t", "episode": "e", "agent": "a", "reward": 1, "response_ids": []}', "response_ids is []; expected a list"),
        (
            '{"task": "t", "episode": "e", "agent": "a", "reward": 1, "prompt_ids": [1.5]}',
            "prompt_ids is [1.5]; expected a list",
        ),
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
        anchors = ()

    def turn(agent, index, response):
        size = len(response)
        return Turn(agent, "main", index, [1], response, [-1.0] * size, [0] * size, "stop", "text")

    task = Task("t", "q", "a")
    episodes = [
        Episode(task, 0, [turn("solver", 0, [1]), turn("verifier", 1, [2])], "a", 1.0),
        Episode(task, 1, [turn("solver", 0, [3]), turn("verifier", 1, [])], "b", 0.0),
        Episode(task, 2, [turn("solver", 0, [4])], failure=Failure("timeout", "too long")),
        Episode(task, -1, [turn("solver", 0, [1])], "a", 1.0, probe="greedy"),
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


def test_a_runs_rows_have_their_token_ids_for_who_reads_them(run_dir):
    answer = json.loads(inspect_run(run_dir, 2, ["--advantage.preset", "gigpo", "--advantage.whiten", "pooled"], as_json=True))
    assert [s["rows"] for s in answer["segments"] if s["scope"] == "anchor"] == [[0, 2], [1]]
    assert [r["advantage"] for r in answer["rows"]][1] == 0.0
    assert "prompt_ids" not in answer["rows"][0]


def test_presets_that_need_episodes_beside_each_group_are_shown_of_a_run_that_played_them(run_dir):
    (run_dir / "config.json").write_text('{"advantage": {"preset": "remax"}}')
    answer = json.loads(inspect_run(run_dir, 2, [], as_json=True))
    assert [r["advantage"] for r in answer["rows"]] == [0.0, 0.0, -1.0, None]
    with pytest.raises(ConfigError, match=r"\('without solver', 'without verifier'\), and there are none here"):
        inspect_run(run_dir, 2, ["--advantage.preset", "difference"], as_json=True)


def test_a_greedy_episode_that_rewards_agents_apart_is_shown_so(run_dir):
    (run_dir / "config.json").write_text('{"advantage": {"preset": "remax"}}')
    path = run_dir / "episodes" / "step_2.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["agent_rewards"] = {"verifier": -1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = json.loads(inspect_run(run_dir, 2, [], as_json=True))
    assert [r["advantage"] for r in answer["rows"]] == [0.0, 2.0, -1.0, None]
    lines[-1] |= {"status": "tool", "message": "down", "reward": None, "agent_rewards": {}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = json.loads(inspect_run(run_dir, 2, [], as_json=True))
    assert [r["advantage"] for r in answer["rows"]] == [None] * 4


def test_an_agent_of_the_run_may_have_no_rows_in_the_step(run_dir):
    (run_dir / "config.json").write_text('{"advantage": {"preset": "grpo", "agents": {"judge": {"preset": "rloo"}}}}')
    assert json.loads(inspect_run(run_dir, 2, [], as_json=True))["rule"]["agents"]["judge"]["leave_one_out"] is True


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
