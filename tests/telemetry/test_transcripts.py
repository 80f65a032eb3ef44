"""Which episodes a report shows."""

import json

import pytest

from drmas.telemetry.episodes import path_of, write_episodes
from drmas.telemetry.markup import shortened, table, text
from drmas.telemetry.transcripts import pick, spread, transcripts


def episode(name: str, reward: float | None, status: str = "ok") -> dict:
    return {"episode": name, "reward": reward, "status": status}


def test_steps_are_spread_with_the_first_and_the_last():
    assert spread([1, 2, 3, 4, 5, 6, 7], 3) == [1, 4, 7]
    assert spread(list(range(1, 1001)), 5) == [1, 251, 501, 750, 1000]
    assert spread([3], 5) == [3]
    assert spread([], 5) == []


def test_a_failed_the_best_and_the_worst_come_before_the_first_ones():
    episodes = [episode("a", 0.5), episode("b", 1.0), episode("c", 0.0), episode("d", None, "engine"), episode("e", 0.5)]
    assert [e["episode"] for e in pick(episodes, 3)] == ["b", "c", "d"]
    assert [e["episode"] for e in pick(episodes, 4)] == ["a", "b", "c", "d"]
    assert [e["episode"] for e in pick(episodes, 9)] == ["a", "b", "c", "d", "e"]
    assert [e["episode"] for e in pick([episode("x", None, "team")], 2)] == ["x"]


def test_long_text_says_how_much_is_left_out():
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefgh", 6) == "abcdef … (2 more characters)"


def test_text_is_escaped_and_headers_too():
    assert text('<a href="x">\'&') == "&lt;a href=&quot;x&quot;&gt;&#x27;&amp;"
    assert "<th>&lt;b&gt;</th>" in table(["<b>"], [["1"]])


def changed(**values):
    """The file's first episode with other values."""
    return lambda first: json.dumps(json.loads(first) | values).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda first: b'{"turns": "\xff"}',
        lambda first: b"[" * 100_000,
        lambda first: b'{"turns": [' + b"9" * 5000 + b"]}",
        lambda first: first[:40],
        lambda first: b'{"turns": []}',
        changed(reward="best"),
        changed(reward=10**400),
        changed(tools=7),
        changed(turns=["hello"]),
        changed(seconds="soon"),
        lambda first: first.replace(b'"segments": {', b'"segments": [], "x": {'),
    ],
)
def test_a_damaged_file_is_named_and_the_other_steps_are_shown(tmp_path, episodes, tokenizers, advantages, damage):
    for step in (1, 2):
        write_episodes(tmp_path, step, episodes, tokenizers, advantages)
    first = path_of(tmp_path, 2).read_bytes().splitlines()[0]
    path_of(tmp_path, 2).write_bytes(damage(first) + b"\n")
    newest, oldest = transcripts(tmp_path, 4).split("<summary>Step 1</summary>")
    assert "These episodes can't be shown: " in newest
    assert "<article>" not in newest
    assert "These episodes can't be shown" not in oldest
    assert oldest.count("<article>") == len(episodes)
