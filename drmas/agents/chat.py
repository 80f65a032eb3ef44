"""Messages become prompt ids, by the tokenizer and chat template of one policy.

The renderer writes prompts only: a sampled response is never tokenised again for its own row (I1). Text that others wrote
(questions, other agents' answers) may contain the literals of special tokens; they are broken up here, so that only the chat
template itself puts special ids into a prompt. Called by `agent`; one renderer per policy, since policies may have different
tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from drmas.errors import TeamError

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}."""


class ChatRenderer:
    """Renders messages with `tokenizer` (of transformers). Without a chat template the contents are simply joined."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        literals = _marker_literals(tokenizer)
        self._separator = next(sign for sign in (" ", "·", "¦", "‖") if not any(sign in literal for literal in literals))
        self._markers = _alternatives(literals)
        # a base model's own start token; an end token that the tokenizer adds would end the prompt and is left out
        start = tokenizer("")["input_ids"][:1]
        self._start = start if start and start[0] == tokenizer.bos_token_id else []

    def render(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> list[int]:
        """The ids of a prompt that asks for the next assistant message. `options` go to the chat template.

        TeamError: the chat template refuses the messages (a role it doesn't know).
        """
        if not self._tokenizer.chat_template:
            text = self.neutralise("".join(message["content"] for message in messages))
            return self._start + self._tokenizer(text, add_special_tokens=False)["input_ids"]
        harmless = [{**message, "content": self.neutralise(message["content"])} for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                harmless, tokenize=True, add_generation_prompt=True, return_dict=False, **(options or {})
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TeamError(
                f"the chat template refuses messages with the roles {roles}: {error}; change the agent's `system` or "
                f"`chat_template_options`"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """`ids` as text for others to read, special tokens left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def neutralise(self, text: str) -> str:
        """`text` with a visible sign put into each special-token literal, otherwise unchanged.

        Example: neutralise("<|im_start|>system") == "< |im_start|>system"
        """
        if self._markers is None:
            return text
        # again until none is left: literals may overlap, and breaking one can leave the next
        while self._markers.search(text):
            text = self._markers.sub(self._break, text)
        return text

    def _break(self, match: re.Match[str]) -> str:
        literal = match.group()
        # a literal of one character can't be broken, only replaced
        return literal[0] + self._separator + literal[1:] if len(literal) > 1 else "\N{REPLACEMENT CHARACTER}"


def _marker_literals(tokenizer: Any) -> dict[str, bool]:
    """The literal of each special token and role marker -> whether the tokenizer normalises text before it looks for it.

    Added tokens that aren't marked special (<think>, <tool_call>) are words that models write and read; they stay, unless they
    have the form <|...|>, which only templates use.
    """
    literals = dict.fromkeys(tokenizer.all_special_tokens, False)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or re.fullmatch(r"<\|.*\|>", token.content):
            literals[token.content] = token.normalized
    return {literal: normalised for literal, normalised in literals.items() if literal}


def _alternatives(literals: Mapping[str, bool]) -> re.Pattern[str] | None:
    if not literals:
        return None
    longest_first = sorted(literals, key=len, reverse=True)
    # a normaliser may change the case, so a normalised token is looked for in any
    return re.compile("|".join(f"(?i:{re.escape(x)})" if literals[x] else re.escape(x) for x in longest_first))
