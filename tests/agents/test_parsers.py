from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drmas.agents.parsers import make_parser, spoken
from drmas.errors import ConfigError

TAGGED = st.lists(
    st.sampled_from(["<verdict>", "</verdict>", "<choice>", "</choice>", "<a>", "</a>", "yes", " ", "\\boxed{", "}"])
)


def read(spec: str, text: str) -> tuple:
    parsed = make_parser(spec)(text)
    return parsed.value, parsed.valid


@pytest.mark.parametrize(
    ("text", "value", "valid"),
    [
        ("ok <verdict>approve</verdict>", True, True),
        ("<VERDICT> Reject </Verdict>", False, True),
        ("<verdict>approve</verdict> wait <verdict>reject</verdict>", False, True),
        ("</verdict> <verdict>approve</verdict>", True, True),
        ("<verdict>approve</verdict></verdict>", True, True),
        ("<verdict>reject<verdict>approve</verdict>", True, True),
        ("<verdict>approve</verdict> <verdict>reje", True, True),
        ("<verdict>approve or reject</verdict>", False, False),
        ("<verdict></verdict>", False, False),
        ("<verdict>approve", False, False),
        ("I approve of this", False, False),
        ("approve</verdict>", False, False),
        ("", False, False),
        (" Approve\n", True, True),
        ("我认为 <verdict>approve</verdict>", True, True),
        ("İ <verdict>approve</verdict>", True, True),
    ],
)
def test_verdict_takes_the_last_complete_tag_pair(text: str, value: bool, valid: bool) -> None:
    assert read("verdict", text) == (value, valid)


def test_verdict_with_words_of_its_own() -> None:
    spec = "verdict:yes, no"
    assert read(spec, "yes") == (True, True)
    assert read(spec, "NO ") == (False, True)
    assert read(spec, "yes no") == (False, False)
    assert read(spec, "<verdict>no</verdict>") == (False, True)
    assert read(spec, "approve") == (False, False)


def test_a_choice_is_one_of_the_words_as_they_were_written() -> None:
    spec = "choice:Left,right,3"
    assert read(spec, "LEFT.") == ("Left", True)
    assert read(spec, "3") == ("3", True)
    assert read(spec, "I go <choice>left</choice>, no: <choice> Right! </choice>") == ("right", True)
    assert read(spec, "left or right") == (None, False)
    assert read(spec, "<choice>up</choice> left") == (None, False)
    assert read(spec, "<choice>left") == (None, False)
    assert make_parser(spec)("left or right").lenient == "Left"


def test_a_tag_is_read_from_its_last_complete_pair() -> None:
    spec = "tag:answer"
    assert read(spec, "<answer>a</answer> <ANSWER>\n b </answer> <answer>c") == ("b", True)
    assert read(spec, "b") == (None, False)
    assert read(spec, "<answer> </answer>") == (None, False)
    assert read(spec, "<answers>b</answers>") == (None, False)
    assert read("tag:final-answer", "<final-answer>b</final-answer>") == ("b", True)
    assert make_parser(spec)(" b ").lenient == "b"


@pytest.mark.parametrize("spec", ["verdict", "choice:a,b", "tag:a", "boxed", "text"])
def test_hostile_tags(spec: str) -> None:
    for text in ("<verdict>" * 50_000, "<choice>" * 50_000, "<a>" * 50_000, "\\boxed{" * 50_000, "\0" * 100_000):
        make_parser(spec)(text)
    assert read("verdict", "<verdict>" * 50_000) == (False, False)


@given(parts=TAGGED)
def test_what_is_valid_holds_a_value_that_the_text_has(parts: list[str]) -> None:
    text = "".join(parts)
    for spec in ("tag:a", "boxed", "choice:yes,no"):
        value, valid = read(spec, text)
        assert valid == (value is not None)
        assert value is None or value in text


def test_text_is_stripped_and_empty_is_invalid() -> None:
    assert read("text", " 12\n") == ("12", True)
    assert read("text", " \n") == ("", False)


def test_boxed_needs_a_closed_box_with_content() -> None:
    assert read("boxed", r"so \boxed{ 12 }") == ("12", True)
    assert read("boxed", r"so \boxed{12") == (None, False)
    assert read("boxed", r"\boxed{ }") == (None, False)
    assert read("boxed", "12") == (None, False)
    assert make_parser("boxed")(" 12 ").lenient == "12"


def test_a_parser_of_ones_own_is_run_once_and_gives_parsed_or_a_pair(tmp_path: Path) -> None:
    file = tmp_path / "my parser.py"
    file.write_text(
        "from drmas.agents.parsers import Parsed\n\nloads = []\nloads.append(1)\n\n\n"
        "def length(text):\n    return len(text), len(text) > 2\n\n\n"
        "def full(text):\n    return Parsed(len(loads), valid=False, lenient='x')\n"
    )
    length = make_parser(f"{file}:length")
    assert [(length(text).value, length(text).valid, length(text).lenient) for text in ("abc", "a")] == [
        (3, True, 3),
        (1, False, 1),
    ]
    full = make_parser(f"{file}:full")("abc")
    assert (full.value, full.valid, full.lenient) == (1, False, "x")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("verdct", "the nearest is 'verdict'"),
        ("", "expected one of boxed, choice, tag, text, verdict, or path/to/file.py:function"),
        ("boxed:x", "takes no arguments; found x"),
        ("verdict:yes", "expected two different ones"),
        ("verdict:yes,yes", "expected two different ones"),
        ("verdict:Yes,yes", "expected two different ones"),
        ("verdict:yes,", "expected two different ones"),
        ("verdict:a,b,c", "verdict has the words a, b, c; expected two of them"),
        ("choice", "choice has the words ''; expected two different ones or more: choice:a,b"),
        ("choice:a", "choice has the words 'a'; expected two different ones or more"),
        ("choice:a,b,A.", "choice has the words 'a, b, A.'; expected two different ones"),
        ("tag", "tag has the arguments ''; expected one name: tag:answer"),
        ("tag:a,b", "tag has the arguments 'a, b'; expected one name"),
        ("tag:<a>", "tag has the arguments '<a>'; expected one name"),
        ("nowhere.py:read", "parser: there is no file nowhere.py; expected path/to/file.py:name"),
        ("nowhere.py", "parser is 'nowhere.py'; expected path/to/file.py:name"),
    ],
)
def test_bad_spec_is_a_config_error(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_parser(spec)


def test_a_parser_file_without_the_function_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("word = 3\n\n\ndef read(text):\n    return text, True\n")
    with pytest.raises(ConfigError, match=r"in .*mine.py the nearest is 'read'"):
        make_parser(f"{tmp_path}/mine.py:reed")
    with pytest.raises(ConfigError, match=r"mine.py:word', a int; expected a function of the text"):
        make_parser(f"{tmp_path}/mine.py:word")


THOUGHT = r"<think>maybe \boxed{7} <answer>draft</answer><choice>no</choice></think>"


@pytest.mark.parametrize(
    ("spec", "text", "value", "valid", "lenient"),
    [
        ("boxed", f"{THOUGHT}\n\nyes", None, False, "yes"),
        ("tag:answer", f"{THOUGHT}\n\nyes", None, False, "yes"),
        ("verdict:yes,no", f"{THOUGHT}\n\nyes", True, True, True),
        ("choice:yes,no", f"{THOUGHT}\n\nyes", "yes", True, "yes"),
        ("text", f"{THOUGHT}\n\nyes", "yes", True, "yes"),
        ("boxed", rf"{THOUGHT} \boxed{{8}}", "8", True, r"\boxed{8}"),
        ("boxed", r"it was \boxed{7}</think>8", None, False, "8"),  # its start stood in the prompt
        ("text", THOUGHT, "", False, ""),
        ("boxed", r"<think>maybe \boxed{7}", None, False, ""),
        ("tag:answer", f"{THOUGHT}<answer>8</answer><think>or", None, False, ""),
        ("verdict:yes,no", "<think>yes", False, False, True),
        ("verdict:yes,no", "<think><verdict>yes</verdict>", False, False, True),
        ("choice:yes,no", "<think><choice>no</choice>", None, False, "yes"),
        ("text", "<think>yes", "", False, ""),
    ],
)
def test_a_thought_is_no_answer(spec: str, text: str, value: object, valid: bool, lenient: object) -> None:
    parsed = make_parser(spec)(text)
    assert (parsed.value, parsed.valid, parsed.lenient) == (value, valid, lenient)


def test_a_text_without_thoughts_is_spoken_as_it_is() -> None:
    assert spoken("\n 8 <thinking> ") == "\n 8 <thinking> "
    assert spoken("<think>a</think>b<think>c</think>\n\n8 ") == "8 "


def test_a_parser_of_ones_own_gets_the_thoughts_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def read(text):\n    return text, True\n")
    assert read(f"{tmp_path}/mine.py:read", THOUGHT) == (THOUGHT, True)
