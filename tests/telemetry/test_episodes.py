"""The episode files of a run."""

import json

import pytest

from drmas.errors import DataError
from drmas.telemetry.episodes import read_episodes, steps_with_episodes, write_episodes
from drmas.types import Episode, ToolUse


def test_an_episode_reads_back_with_its_turns_ids_advantages_and_segments(tmp_path, episodes, tokenizers, advantages):
    write_episodes(tmp_path, 3, episodes, tokenizers, advantages)
    first = read_episodes(tmp_path, 3)[0]
    turns = first.pop("turns")
    assert first == {
        "task": "sums/1",
        "sample": 0,
        "episode": "sums/1#0",
        "probe": None,
        "question": "What is 1 + 1?",
        "truth": "2",
        "answer": "2",
        "reward": 1.0,
        "agent_rewards": {},
        "status": "ok",
        "message": "",
        "seconds": 1.5,
        "retried": 0,
        "tools": [],
    }
    assert turns[1] == {
        "agent": "verifier",
        "policy": "main",
        "turn": 1,
        "prompt": "<bos>ab",
        "text": "yes",
        "prompt_ids": [0, 1, 2],
        "response_ids": [6, 7],
        "logprobs": [-0.25, -0.25],
        "versions": [3, 3],
        "finish_reason": "stop",
        "valid": True,
        "penalty": 0.0,
        "trained": True,
        "seconds": 0.0,
        "advantage": 0.5,
        "segments": {"mean": ["sums/1", "verifier"], "std": ["sums/1", "verifier"]},
        "reward": 1.0,
        "status": "ok",
    }


def test_an_episode_of_a_probe_is_written_with_its_name_and_without_rows(tmp_path, episodes, tokenizers, advantages):
    probe = Episode(episodes[0].task, -1, list(episodes[0].turns), "2", 1.0, probe="greedy")
    write_episodes(tmp_path, 1, [episodes[0], probe, *episodes[1:]], tokenizers, advantages)
    first, written, *rest = read_episodes(tmp_path, 1)
    assert (written["episode"], written["probe"], written["reward"]) == ("sums/1#greedy/0", "greedy", 1.0)
    assert [turn["text"] for turn in written["turns"]] == ["2", "yes"]
    assert {(turn["advantage"], turn["reward"], turn["status"]) for turn in written["turns"]} == {(None, None, None)}
    alone = tmp_path / "alone"
    write_episodes(alone, 1, episodes, tokenizers, advantages)
    assert [first, *rest] == read_episodes(alone, 1)  # nobody else's rows have moved


def test_a_turn_has_its_rows_own_reward_and_status_and_an_episode_its_tool_calls(tmp_path, episodes, tokenizers, advantages):
    episodes[0].agent_rewards = {"solver": -1.0}
    episodes[0].turns[1].stale = True
    episodes[0].tool_uses = [ToolUse("search", '{"query": "a"}', "[1] b", agent="solver", turn=0, seconds=0.5)]
    episodes[1].turns[0].prompt_text, episodes[1].turns[0].prompt_ids = "what a remote model was asked", []
    write_episodes(tmp_path, 1, episodes, tokenizers, advantages)
    first, second, failed = read_episodes(tmp_path, 1)
    assert [(turn["reward"], turn["status"]) for turn in first["turns"]] == [(-1.0, "ok"), (1.0, "stale")]
    assert [(use["tool"], use["turn"], use["result"], use["ok"]) for use in first["tools"]] == [("search", 0, "[1] b", True)]
    assert second["turns"][0]["prompt"] == "what a remote model was asked"
    assert [turn["status"] for turn in failed["turns"]] == ["engine"]


def test_a_turn_without_a_row_shifts_no_advantage(tmp_path, episodes, tokenizers, advantages):
    write_episodes(tmp_path, 1, episodes, tokenizers, advantages)
    second = read_episodes(tmp_path, 1)[1]["turns"]
    assert [turn["advantage"] for turn in second] == [None, -0.6]
    assert second[0]["segments"] == {"mean": None, "std": None}
    assert (second[1]["valid"], second[1]["penalty"]) == (False, 0.1)


def test_I3_a_failed_episode_is_kept_without_reward_or_advantage(tmp_path, episodes, tokenizers, advantages):
    write_episodes(tmp_path, 1, episodes, tokenizers, advantages)
    failed = read_episodes(tmp_path, 1)[2]
    assert (failed["reward"], failed["status"], failed["message"]) == (None, "engine", "exit code 9")
    assert (failed["turns"][0]["advantage"], failed["turns"][0]["segments"]["mean"]) == (None, None)


def test_advantages_of_other_episodes_are_refused(tmp_path, episodes, tokenizers, advantages):
    advantages.values.append(1.0)
    with pytest.raises(ValueError, match="5 advantages for 4 rows"):
        write_episodes(tmp_path, 1, episodes, tokenizers, advantages)
    assert steps_with_episodes(tmp_path) == []


def test_values_that_are_not_finite_are_null(tmp_path, episodes, tokenizers, advantages):
    episodes[0].turns[0].logprobs = [float("-inf")]
    path = write_episodes(tmp_path, 1, episodes, tokenizers, advantages)
    assert read_episodes(tmp_path, 1)[0]["turns"][0]["logprobs"] == [None]
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_half_a_surrogate_pair_in_a_text_does_not_stop_the_run(tmp_path, episodes, tokenizers, advantages):
    episodes[0].turns[0].text = "a\ud83d"
    write_episodes(tmp_path, 1, episodes, tokenizers, advantages)
    assert read_episodes(tmp_path, 1)[0]["turns"][0]["text"] == "a\ud83d"


def test_an_unknown_step_lists_the_known_ones(tmp_path, episodes, tokenizers, advantages):
    for step in (2, 10):
        write_episodes(tmp_path, step, episodes, tokenizers, advantages)
    with pytest.raises(DataError, match="the steps with episodes are: 2, 10"):
        read_episodes(tmp_path, 3)
    with pytest.raises(DataError, match=r"are: none \(with telemetry.episodes = false"):
        read_episodes(tmp_path / "elsewhere", 3)


def test_a_damaged_line_is_named(tmp_path, episodes, tokenizers, advantages):
    path = write_episodes(tmp_path, 1, episodes, tokenizers, advantages)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40]]))
    with pytest.raises(DataError, match=r"step_1\.jsonl:2: not JSON"):
        read_episodes(tmp_path, 1)
    path.write_text("3\n")
    with pytest.raises(DataError, match=r"step_1\.jsonl:1: holds a int; expected an episode"):
        read_episodes(tmp_path, 1)


def test_a_turns_state_is_named_where_an_estimator_compares_equal_states(tmp_path, episodes, tokenizers, advantages):
    state = type(advantages.segments[0])(scope="anchor", key=("sums/1", "verifier", "state 0"), rows=[1])
    advantages.anchors.append(state)
    write_episodes(tmp_path, 1, episodes, tokenizers, advantages)
    first = read_episodes(tmp_path, 1)[0]["turns"]
    assert "anchor" not in first[0]["segments"]
    assert first[1]["segments"]["anchor"] == ["sums/1", "verifier", "state 0"]
