from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from referencing.exceptions import Unresolvable

from drmas.agents.tool_calls import (
    MOST_CALLS,
    MOST_CHARACTERS,
    MOST_LEVELS,
    ToolCall,
    compile_schema,
    find_calls,
    mismatch,
)

SEARCH = ToolCall("search", {"query": "x"})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>', [SEARCH]),
        ('I look it up.\n<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call> and wait', [SEARCH]),
        ('<tool_call>{"name": "search", "arguments": {"query": "x"}}', [SEARCH]),  # ended by a stop text
        ('<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>', None),
        ('<tool_call>[{"name": "now"}, {"name": "search", "parameters": {"query": "x"}}]</tool_call>', None),
        ('{"name": "search", "parameters": {"query": "x"}}', [SEARCH]),
        (' {"name": "now", "parameters": {}}; {"name": "search", "parameters": {"query": "x"}}\nDone.', None),
        ('[{"name": "now", "arguments": {}}, {"name": "search", "arguments": {"query": "x"}}]', None),
        ('{"type": "function", "function": {"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}}', [SEARCH]),
        ('{"tool_calls": [{"id": "1", "function": {"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}}]}', [SEARCH]),
        ('{"type": "function", "function": "search", "parameters": {"query": "x"}}', [SEARCH]),
        (
            '<think>maybe <tool_call>{"name": "now"}</tool_call></think>{"name": "search", "parameters": {"query": "x"}}',
            [SEARCH],
        ),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [ToolCall("now", {})]),
        ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', [ToolCall("now", {})]),
    ],
)
def test_calls_are_found_in_the_forms_that_models_write(text: str, calls: list[ToolCall] | None) -> None:
    assert find_calls(text) == (calls or [ToolCall("now", {}), SEARCH])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 5.",
        '{"answer": 5}',
        '{"name": "Ada"}',
        '[1, 2, {"name": "search", "arguments": {}}]',
        'Call {"name": "search", "parameters": {}} if you like.',
        "{x} + {y}",
        '<think><tool_call>{"name": "now"}</tool_call>',
        "tool_call </tool_call>",
        "{" * 50,
    ],
)
def test_other_texts_hold_no_call(text: str) -> None:
    assert find_calls(text) == []


@pytest.mark.parametrize(
    ("body", "name", "problem"),
    [
        ('{"name": "search", "arguments": {"query": "x"}', "", "no JSON (Expecting ',' delimiter at character 46)"),
        ("", "", "no JSON (Expecting value at character 0)"),
        ("search('x')", "", "no JSON"),
        ('{"name": "a", "arguments": {}} {', "", "there is more after its end: {"),
        ('{"name": "a", "arguments": {"x": NaN}}', "", "NaN is no JSON"),
        ('{"name": "a", "arguments": {"x": %s}}' % ("1" * 5000), "", "a number of 5000 digits"),
        ("[" * 100_000, "", f"more than {MOST_LEVELS} levels"),
        ("[]", "", "this tool call is []"),
        ("3", "", "this tool call is 3"),
        ('{"arguments": {}}', "", "has no name"),
        ('{"name": 3, "arguments": {}}', "", "has no name"),
        ('{"name": "a", "arguments": [1]}', "a", "they are [1]; expected a JSON object"),
        ('{"name": "a", "arguments": "x"}', "a", "the arguments of a: Expecting value at character 0"),
        ('{"name": "a", "arguments": "3"}', "a", "they are 3; expected a JSON object"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "a", "the arguments of a: Out of range float"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "a", "half a character"),
        ('{"name": "a", "arguments": {"x": %s}}' % ("[" * 40 + "]" * 40), "a", f"more than {MOST_LEVELS} levels"),
        ('{"name": "a", "arguments": {"x": "%s"}}' % ("y" * MOST_CHARACTERS), "a", f"at most {MOST_CHARACTERS}"),
    ],
)
def test_a_broken_call_says_what_is_wrong_with_it(body: str, name: str, problem: str) -> None:
    (call,) = find_calls(f"<tool_call>{body}</tool_call>")
    assert (call.name, call.arguments) == (name, {})
    assert problem in (call.problem or "")
    assert len(call.problem or "") < 1000


def test_a_bare_call_that_breaks_off_is_a_broken_call_and_not_an_answer() -> None:
    (call,) = find_calls('{"name": "search", "parameters": {"query": "x"')
    assert "no JSON" in (call.problem or "")


def test_the_deepest_arguments_that_are_taken() -> None:
    inner = "[" * (MOST_LEVELS - 1) + "]" * (MOST_LEVELS - 1)
    (call,) = find_calls(f'{{"name": "a", "arguments": {{"x": {inner}}}}}')
    assert call == ToolCall("a", {"x": json.loads(inner)})


def test_a_text_of_many_calls_is_read_up_to_a_bound() -> None:
    one = '<tool_call>{"name": "now"}</tool_call>'
    assert find_calls(one * 1000) == [ToolCall("now", {})] * MOST_CALLS
    many = ", ".join(['{"name": "now"}'] * 1000)
    assert find_calls(f"<tool_call>[{many}]</tool_call>") == [ToolCall("now", {})] * MOST_CALLS
    assert find_calls('{"name": "now", "arguments": {}}' * 1000) == [ToolCall("now", {})] * MOST_CALLS


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
call_like = st.fixed_dictionaries(
    {}, optional={"name": json_values, "arguments": json_values, "parameters": json_values, "function": json_values}
).map(json.dumps)
parts = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", "[", "]", '"name":', '"arguments":', '"\\ud800"', ","]
)


@settings(max_examples=500, deadline=None)
@given(text=st.text() | st.lists(parts | call_like | st.text(max_size=5), max_size=12).map("".join))
@example(text="\ud800<tool_call>\ud800{")
@example(text='<tool_call>{"name": "\\ud800"}')
def test_no_text_raises_and_what_is_found_can_be_written_down(text: str) -> None:
    calls = find_calls(text)
    assert len(calls) <= MOST_CALLS
    for call in calls:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
        (call.problem or "").encode()
        assert call.problem is None or call.arguments == {}


def test_arguments_are_held_against_the_schema() -> None:
    validator = compile_schema(
        {
            "type": "object",
            "properties": {"query": {"type": "string"}, "page": {"type": "object", "properties": {"n": {"type": "integer"}}}},
            "required": ["query"],
            "additionalProperties": False,
        }
    )
    assert mismatch(validator, {"query": "x", "page": {"n": 2}}) is None
    assert mismatch(validator, {}) == "'query' is a required property"
    assert mismatch(validator, {"query": 3}) == "query: 3 is not of type 'string'"
    assert mismatch(validator, {"query": "x", "page": {"n": "2"}}) == "page.n: '2' is not of type 'integer'"
    assert "('quary' was unexpected)" in (mismatch(validator, {"query": "x", "quary": 1}) or "")
    assert len(mismatch(validator, {"query": ["x" * 10_000]}) or "") < 400


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "text"}, "'text' is not valid"),
        ({"properties": 3}, "3 is not of type 'object'"),
        ([1], "is not of type 'object'"),
        (3, "not iterable"),
        ({"required": "query"}, "'query' is not of type 'array'"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_schema(schema)


EVIL = "^(a+)+$"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"pattern": EVIL}}},
        {"patternProperties": {EVIL: {}}},
        {"patternProperties": {EVIL: {}}, "additionalProperties": False},
        {"patternProperties": {EVIL: {}}, "unevaluatedProperties": False},
        {"propertyNames": {"pattern": EVIL}},
        {"properties": {"x": {"$ref": "#/$defs/p"}}, "$defs": {"p": {"pattern": EVIL}}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "anyOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": {}}},
        {"properties": {"x": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": EVIL}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "patternProperties": {EVIL: {}}, "additionalProperties": False},
    ],
)
def test_an_expression_of_the_server_can_not_hold_up_the_loop(schema: dict[str, Any]) -> None:
    text = "a" * 40 + "!"
    started = time.process_time()
    assert mismatch(compile_schema(schema), {"x": text, text: 1}) is None
    assert time.process_time() - started < 5  # the expression itself would take hours


def test_equal_items_are_the_servers_to_find_and_all_else_is_still_checked() -> None:
    validator = compile_schema(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "properties": {"pattern": {"type": "string"}, "x": {"uniqueItems": True}, "$schema": {"type": "string"}},
            "additionalProperties": False,
        }
    )
    assert mismatch(validator, {"pattern": "a", "x": [1, 1], "$schema": "b"}) is None
    assert mismatch(validator, {"pattern": 3}) == "pattern: 3 is not of type 'string'"
    assert mismatch(validator, {"$schema": 3}) == "$['$schema']: 3 is not of type 'string'"
    assert "('y' was unexpected)" in (mismatch(validator, {"y": 3}) or "")


def test_a_schema_elsewhere_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *arguments, **_: asked.append(arguments))
    validator = compile_schema({"properties": {"x": {"$ref": "http://127.0.0.1:9/schema.json"}}})
    with pytest.raises(Unresolvable):
        mismatch(validator, {"x": 1})
    assert asked == []


QUOTED = '{"name": "search", "arguments": {"query": "what is </think> for"}}'


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{QUOTED}</tool_call>",
        f"<think>hm</think><tool_call>{QUOTED}</tool_call>",
        f"<tool_call>{QUOTED}",
        '<tool_call>{"name": search, "query": "</think>"}</tool_call>',
        QUOTED,
        f"<think>hm</think>\n{QUOTED}",
    ],
)
def test_a_call_that_holds_the_end_of_a_thought_is_answered_with_a_word_of_it(text: str) -> None:
    (call,) = find_calls(text)
    assert (call.name, call.arguments) == ("", {})
    assert "holds </think>, which ends a thought, and was not read" in (call.problem or "")


def test_the_calls_after_one_that_was_torn_are_read() -> None:
    torn, other = find_calls(f'<tool_call>{QUOTED}</tool_call><tool_call>{{"name": "now"}}</tool_call>')
    assert torn.problem
    assert other == ToolCall("now", {})


@pytest.mark.parametrize(
    "text",
    [
        '<think>maybe <tool_call>{"name": "now"}</think>It is 5.',
        '<think>maybe <tool_call>{"name": "now"}</tool_call></think>It is 5.',
        'maybe {"name": "now", "arguments": {}}</think>It is 5.',
        f"<think>maybe {QUOTED}</think>It is 5." + "x" * 3 * MOST_CHARACTERS,
    ],
)
def test_a_call_that_was_only_thought_of_is_none(text: str) -> None:
    assert find_calls(text) == []
