"""Which episodes a report shows."""

from drmas.telemetry.markup import shortened, table, text
from drmas.telemetry.transcripts import pick, spread


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
