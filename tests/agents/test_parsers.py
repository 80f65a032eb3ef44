from __future__ import annotations

import pytest

from drmas.agents.parsers import Parsed, make_parser
from drmas.errors import ConfigError


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
        ("<verdict>approve or reject</verdict>", None, False),
        ("<verdict></verdict>", None, False),
        ("<verdict>approve", None, False),
        ("I approve of this", None, False),
        ("approve</verdict>", None, False),
        ("", None, False),
        (" Approve\n", True, True),
        ("我认为 <verdict>approve</verdict>", True, True),
        ("İ <verdict>approve</verdict>", True, True),
    ],
)
def test_verdict_takes_the_last_complete_tag_pair(text: str, value: bool | None, valid: bool) -> None:
    assert make_parser("verdict")(text) == Parsed(value, valid)


def test_verdict_with_words_of_its_own() -> None:
    parse = make_parser("verdict:yes, no")
    assert parse("yes") == Parsed(True, True)
    assert parse("NO ") == Parsed(False, True)
    assert parse("yes no") == Parsed(None, False)
    assert parse("<verdict>no</verdict>") == Parsed(False, True)
    assert parse("approve") == Parsed(None, False)


def test_hostile_tags() -> None:
    assert make_parser("verdict")("<verdict>" * 50_000) == Parsed(None, False)


def test_text_is_stripped_and_empty_is_invalid() -> None:
    assert make_parser("text")(" 12\n") == Parsed("12", True)
    assert make_parser("text")(" \n") == Parsed("", False)


def test_boxed_needs_a_closed_box_with_content() -> None:
    parse = make_parser("boxed")
    assert parse(r"so \boxed{ 12 }") == Parsed("12", True)
    assert parse(r"so \boxed{12") == Parsed(None, False)
    assert not parse(r"\boxed{ }").valid
    assert parse("12") == Parsed(None, False)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("verdct", "the nearest is 'verdict'"),
        ("", "expected one of boxed, text, verdict"),
        ("boxed:x", "takes no arguments; found x"),
        ("verdict:yes", "expected two different ones"),
        ("verdict:yes,yes", "expected two different ones"),
        ("verdict:Yes,yes", "expected two different ones"),
        ("verdict:yes,", "expected two different ones"),
    ],
)
def test_bad_spec_is_a_config_error(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_parser(spec)
