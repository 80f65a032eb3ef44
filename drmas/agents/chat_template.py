"""What a chat template does with tools, found by asking it: `traits_of` renders a few messages and looks at what it wrote.

    traits = traits_of(tokenizer)
    traits.tool_role        # it writes messages of the role "tool"
    traits.markers          # ("<tool_response>", "</tool_response>") of Qwen's

Called by `chat`, once per policy. A template is part of a model's folder and may refuse anything; what it refuses here, it is
taken not to know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ANSWER = "ANSWER7fQ2xAssistantSpoke"
"""Stands for a response where only what a template writes around it is of interest."""
_RESULT = "RESULT7fQ2xToolSpoke"
_FUNCTION = "function_7fq2x"
_ASKED = {"role": "user", "content": "?"}
_ANSWERED = {"role": "assistant", "content": ANSWER}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": _FUNCTION, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]
_TAG = re.compile(r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")

RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
"""Around tool results in the user message that carries them where a template has no role for tools (the form of Hermes)."""


@dataclass(frozen=True, slots=True)
class Traits:
    """`tools`: it writes the function schemas it is given. `end`: the id of the token that it writes after an assistant
    message. `markers`: literals that tell tool results from other messages and aren't special tokens."""

    tools: bool
    tool_role: bool
    end: int | None
    markers: tuple[str, ...]


def traits_of(tokenizer: Any) -> Traits:
    """The traits of the chat template of `tokenizer` (of transformers), which must have one."""
    described = _written(tokenizer, [_ASKED], _TOOLS)
    answered = _written(tokenizer, [_ASKED, _ANSWERED])
    result = _written(tokenizer, [_ASKED, _ANSWERED, {"role": "tool", "content": _RESULT}])
    tool_role = _RESULT in result.partition(ANSWER)[2]
    if tool_role:
        asked_again = _written(tokenizer, [_ASKED, _ANSWERED, {"role": "user", "content": _RESULT}])
        markers = _tags(result) - _tags(asked_again)
    else:
        markers = {RESULT_OPEN, RESULT_CLOSE}
    special = special_ids(tokenizer)
    after = tokenizer(answered.partition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    return Traits(
        tools=_FUNCTION in described,
        tool_role=tool_role,
        end=next((token for token in after if token in special), None),
        markers=tuple(sorted(markers)),
    )


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of the tokens that decoding leaves out."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def with_described_tools(messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, str]]:
    """`messages` with the schemas of `tools` in their system message, for templates that leave tools out."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You may call functions. Their schemas, one per line:\n{schemas}\n"
        'To call one, write <tool_call>{"name": "NAME", "arguments": {...}}</tool_call> and stop; its result comes next.'
    )
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def results_as_user(messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """`messages` with each run of tool results as one user message, for templates without a role for tools."""
    said: list[Mapping[str, str]] = []
    results: list[str] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            results.append(f"{RESULT_OPEN}\n{message['content']}\n{RESULT_CLOSE}")
            continue
        if results:
            said.append({"role": "user", "content": "\n".join(results)})
            results = []
        if message is not None:
            said.append(message)
    return said


def _written(tokenizer: Any, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None = None) -> str:
    """What the template writes; nothing where it refuses."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except Exception:  # the boundary to the template's author, whose code may raise anything
        return ""


def _tags(text: str) -> set[str]:
    return set(_TAG.findall(text))
