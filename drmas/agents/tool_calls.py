"""Tool calls in what a model wrote: found, read, held against the tool's schema. What is wrong with one is a text for it.

    <tool_call>{"name": "search", "arguments": {"query": "tungsten"}}</tool_call>       Qwen, Hermes
    {"name": "search", "parameters": {"query": "tungsten"}}                             Llama 3, as the whole answer
    {"function": {"name": "search", "arguments": "{\\"query\\": \\"tungsten\\"}"}}      OpenAI, in either place

Several calls may follow each other, or stand in a list. The text is data: it is parsed as JSON and never run. Thoughts
(<think>...</think>) are not searched; a call that holds </think> itself is answered with a text that says so. Called by
`tools`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry

MOST_CALLS = 32
"""Calls that are read from one text; what follows them is left alone."""
MOST_CHARACTERS = 20_000
"""Of the arguments of one call, as JSON."""
MOST_LEVELS = 32
"""Of lists and objects in each other, in the arguments of one call."""
_MOST_DIGITS = 300
_SHOWN = 300
"""Characters of a model's text, or of a schema's complaint, that an answer repeats."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT_END = "</think>"
_UNCHECKED = ("pattern", "patternProperties", "uniqueItems", "unevaluatedProperties")
"""Keywords that `mismatch` passes over; the last one reads patterns too."""
_FORM = '{"name": NAME, "arguments": {...}}'
_ATTEMPT = re.compile(r'"name".*"(?:arguments|parameters)"|"(?:arguments|parameters)".*"name"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it. `problem` says why it can't be made; its `arguments` are empty then.

    Example: ToolCall("search", {"query": "tungsten"})
    """

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def find_calls(text: str) -> list[ToolCall]:
    """The calls in `text`, in order, none if it holds none; never raises.

    Example: find_calls('<tool_call>{"name": "now"}</tool_call>') == [ToolCall("now", {})]
    """
    thought, _, rest = text.rpartition(_THOUGHT_END)
    said = rest.partition("<think>")[0]
    if _OPEN in said:
        bodies = [part.partition(_CLOSE)[0] for part in said.split(_OPEN, MOST_CALLS)[1:]]
        calls = [call for body in bodies for call in _read_body(body.strip())]
    else:
        calls = _read_bare(said.strip())
    if thought and _is_torn(thought, rest):
        calls.insert(
            0, ToolCall("", {}, f"a tool call holds {_THOUGHT_END}, which ends a thought, and was not read; leave it out")
        )
    return calls[:MOST_CALLS]


def compile_schema(schema: Mapping[str, Any]) -> Any:
    """A validator of arguments. ValueError: `schema` is no JSON schema. References to other documents are never fetched.

    `pattern`, `patternProperties` and `uniqueItems` are not checked: with a server's expression and a model's text they may
    take for ever, in the event loop that all episodes share. The server checks what it is sent by itself.
    """
    try:
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except (SchemaError, TypeError, AttributeError) as error:
        raise ValueError(_shown(getattr(error, "message", str(error)))) from error
    additional = kind.VALIDATORS["additionalProperties"]

    def where_no_pattern_decides(validator: Any, allowed: Any, value: Any, part: Any) -> Iterator[Any]:
        return iter(()) if "patternProperties" in part else additional(validator, allowed, value, part)

    passed_over = dict.fromkeys(_UNCHECKED, lambda *_: iter(()))
    quick = extend(kind, {**passed_over, "additionalProperties": where_no_pattern_decides})
    return quick(_without_dialects(schema), registry=Registry())


def mismatch(validator: Any, arguments: Mapping[str, Any]) -> str | None:
    """What doesn't fit the schema, and where; None if `arguments` fit.

    Example: mismatch(compile_schema({"required": ["query"]}), {}) == "'query' is a required property"
    """
    error = best_match(validator.iter_errors(arguments))
    if error is None:
        return None
    where = "" if error.json_path == "$" else f"{error.json_path.removeprefix('$.')}: "
    return _shown(where + error.message)


def _without_dialects(value: Any) -> Any:
    """A schema whose parts don't say which validator they want: they would get one that checks everything."""
    if isinstance(value, Mapping):
        return {key: _without_dialects(item) for key, item in value.items() if key != "$schema" or not isinstance(item, str)}
    return [_without_dialects(item) for item in value] if isinstance(value, list) else value


def _is_torn(thought: str, rest: str) -> bool:
    """Whether the </think> between the two stands within a tool call, in its arguments, and ends no thought."""
    _, opened, body = thought.rpartition(_OPEN)
    if opened:
        if _CLOSE in body:
            return False
        if _CLOSE in rest.partition(_OPEN)[0]:
            return True
    elif not _ATTEMPT.search(thought[:MOST_CHARACTERS]):
        return False
    elif thought.lstrip()[:1] not in ("{", "["):
        body = thought.rpartition(_THOUGHT_END)[2]
    body = body.lstrip()
    whole = (body + _THOUGHT_END + rest)[: 2 * MOST_CHARACTERS]
    try:
        _, after = _parse_first(whole)
    except ValueError:
        return False
    return len(whole) - len(after) > len(body)


def _read_body(body: str) -> list[ToolCall]:
    """What stands between <tool_call> and </tool_call>: a call, or a list of them."""
    try:
        return [_read(value) for value in _flat(_parse(body))]
    except ValueError as error:
        return [_broken(body, str(error))]


def _read_bare(text: str) -> list[ToolCall]:
    """Calls that are the whole text, one after the other; what follows the last is left alone."""
    values: list[Any] = []
    rest = text
    while rest[:1] in ("{", "[") and len(values) < MOST_CALLS:
        try:
            value, rest = _parse_first(rest)
        except ValueError as error:
            if not values and _ATTEMPT.search(text[:MOST_CHARACTERS]):
                return [_broken(text, str(error))]
            break
        if not all(_is_call(item) for item in _flat(value)):
            break
        values.extend(_flat(value))
        rest = rest.lstrip(" \t\r\n;,")
    return [_read(value) for value in values]


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("function"), dict):
        value = value["function"]
    return isinstance(_name(value), str) and ("arguments" in value or "parameters" in value)


def _name(value: dict[str, Any]) -> Any:
    return value.get("name", value.get("function"))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    return value if isinstance(value, list) and value else [value]


def _read(value: Any) -> ToolCall:
    """One parsed call, checked for everything but its tool's schema."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return ToolCall("", {}, f"this tool call is {_shown(_dumped(value))}; write {_FORM}")
    name = _name(value)
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, f"this tool call has no name; write {_FORM}")
    name = _shown(name)
    arguments = value.get("arguments", value.get("parameters"))
    try:
        if isinstance(arguments, str):
            arguments = _parse(arguments) if arguments.strip() else {}
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise ValueError(f"they are {_shown(_dumped(arguments))}; expected a JSON object")
        _check_size(arguments)
    except ValueError as error:
        return ToolCall(name, {}, f"the arguments of {name}: {error}; write {_FORM}")
    return ToolCall(name, arguments)


def _broken(body: str, why: str) -> ToolCall:
    return ToolCall("", {}, f"this tool call is no JSON ({why}): {_shown(body)}; write {_FORM}")


def _parse(text: str) -> Any:
    """ValueError: no JSON, or more of it than a call may have."""
    value, rest = _parse_first(text.strip())
    if rest.strip():
        raise ValueError(f"there is more after its end: {_shown(rest.strip())}")
    return value


def _parse_first(text: str) -> tuple[Any, str]:
    """The JSON value that `text` starts with, and what follows it."""
    text = text[: 2 * MOST_CHARACTERS]  # names and spaces stand beside the arguments
    try:
        value, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError(f"more than {MOST_LEVELS} levels") from error
    return value, text[end:]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_int=_integer)


def _check_size(arguments: dict[str, Any]) -> None:
    """ValueError: too long, too deep, or what JSON or UTF-8 can't carry (1e999, half a surrogate pair)."""
    level: list[Any] = [arguments]
    for _ in range(MOST_LEVELS):
        level = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
        level = [item for item in level if isinstance(item, dict | list)]
    if level:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters; at most {MOST_CHARACTERS}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a character (a lone surrogate)") from error


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return type(value).__name__


def _shown(text: str) -> str:
    """The start of a text, as something that can be written anywhere."""
    return text[:_SHOWN].encode(errors="replace").decode() + ("..." if len(text) > _SHOWN else "")
