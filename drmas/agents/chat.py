"""Messages become prompt ids, by the tokenizer and chat template of one policy.

    prompt = renderer.render([{"role": "user", "content": "2+3?"}])
    longer = renderer.extend(prompt, response_ids, [{"role": "tool", "content": "5"}])     # the next prompt of the same call
    short = renderer.fit(messages, 4096)                                                   # cut so that it fits

The renderer writes prompts only: a sampled response is never tokenised again for its own row (I1), and `extend` keeps prompt
and response as they are. Text that others wrote (questions, other agents' answers, tool results) may contain the literals of
special tokens, or those that the template puts around tool results; they are broken up here, so that only the chat template
itself puts them into a prompt. Called by `dialogue`; one renderer per policy, since policies may have different tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from drmas.agents.chat_template import ANSWER, Traits, results_as_user, special_ids, traits_of, with_described_tools
from drmas.errors import PromptTooLong, TeamError

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}."""

CUT = "[...]"
"""Stands where `fit` cut a text."""
_SLACK_TOKENS = 2
"""So near its limit a cut prompt is good enough; the last tokens would cost as many renderings as all before them."""


class ChatRenderer:
    """Renders messages with `tokenizer` (of transformers). Without a chat template the contents are simply joined."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._traits = traits_of(tokenizer) if tokenizer.chat_template else None
        self._ends = _ends(tokenizer, self._traits)
        literals = _marker_literals(tokenizer)
        if self._traits is not None:
            literals |= dict.fromkeys(self._traits.markers, False)
        self._separator = next(sign for sign in (" ", "·", "¦", "‖") if not any(sign in literal for literal in literals))
        self._markers = _alternatives(literals)
        # a base model's own start token; an end token that the tokenizer adds would end the prompt and is left out
        start = tokenizer("")["input_ids"][:1]
        self._start = start if start and start[0] == tokenizer.bos_token_id else []

    def render(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The ids of a prompt that asks for the next assistant message. `options` go to the chat template.

        `tools` (function schemas) go to it too, or into the system message where it would leave them out; a tokenizer without a
        template has no place for them.

        TeamError: the chat template refuses the messages (a role it doesn't know).
        """
        if self._traits is None:
            return self._start + self._ids(self._joined(messages))
        if tools:
            tools = self._harmless(tools)
            if not self._traits.tools:
                messages = with_described_tools(messages, tools)
        return self._apply(self._safe(messages), options, tools, tokenize=True)

    def extend(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        messages: Sequence[Message],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """`prompt_ids` and `response_ids` as they are (I1), then what the chat template writes after an assistant message:
        `messages` (tool results, say) and the start of the next assistant message.

        The end token of the assistant message is written where the response has none, because it was cut or hit a stop text;
        that token, the tokenizer's own and <|eom_id|> count as one. Where the template has no role for tools, results are a
        user message.

        TeamError: the chat template refuses the messages, or writes no assistant message.

        Example: with ChatML's, [..., 9, END] and a result give [..., 9, END, "\\n<|im_start|>tool\\n", result, END, ...].
        """
        kept = [*prompt_ids, *response_ids]
        if self._traits is None:
            return kept + self._ids(self._joined(messages))
        answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        text = self._apply([*answered, *self._safe(messages)], options, self._harmless(tools or ()) or None, tokenize=False)
        _, found, tail = text.partition(ANSWER)
        if not found:
            raise TeamError(
                "the chat template writes no assistant messages, so a call can't go on after a tool result; "
                "remove the agent's `tools`"
            )
        return kept + self._after(response_ids, self._tail_ids(tail))

    def fit(
        self,
        messages: Sequence[Message],
        limit: int,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """As `render`, at most `limit` ids: the longest user text is cut in its middle, as little as possible.

        System messages and what the template writes stay whole.

        PromptTooLong: not even without that text, or there is none.
        """
        ids = self.render(messages, options, tools)
        if len(ids) <= limit:
            return ids
        users = [place for place, message in enumerate(messages) if message["role"] == "user"]
        longest = max(users, key=lambda place: len(messages[place]["content"]), default=None)
        if longest is None:
            raise PromptTooLong(f"a prompt has {len(ids)} tokens and no user text to cut; there is room for {limit}")
        text = messages[longest]["content"]

        def cut_to(kept: int) -> list[int]:
            changed = {**messages[longest], "content": _without_middle(text, kept)}
            return self.render([*messages[:longest], changed, *messages[longest + 1 :]], options, tools)

        best = cut_to(0)
        if len(best) > limit:
            raise PromptTooLong(
                f"a prompt has {len(best)} tokens without its longest user text ({len(ids)} with it); there is room for {limit}"
            )
        low, high, most = 0, len(text), len(ids)
        halve = False  # every other time, so that a text of uneven density can't make the guesses creep
        while high - low > 1 and limit - len(best) > _SLACK_TOKENS:
            guess = (high - low) // 2 if halve else (high - low) * (limit - len(best)) // (most - len(best))
            kept = min(max(low + guess, low + 1), high - 1)
            ids = cut_to(kept)
            if len(ids) <= limit:
                low, best = kept, ids
            else:
                high, most = kept, len(ids)
            halve = not halve
        return best

    def decode(self, ids: Sequence[int]) -> str:
        """`ids` as text for others to read, special tokens left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def neutralise(self, text: str) -> str:
        """`text` with a visible sign put into each special-token literal and tool-result marker, otherwise unchanged.

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

    def _safe(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` as the template takes them, forged markers broken."""
        harmless = [{**message, "content": self.neutralise(message["content"])} for message in messages]
        return harmless if self._traits is None or self._traits.tool_role else results_as_user(harmless)

    def _harmless(self, value: Any) -> Any:
        """A JSON value with forged markers broken in all its texts: a tool's description is its server's text."""
        if isinstance(value, str):
            return self.neutralise(value)
        if isinstance(value, Mapping):
            return {self._harmless(key): self._harmless(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._harmless(item) for item in value]
        return value

    def _joined(self, messages: Sequence[Message]) -> str:
        return self.neutralise("".join(message["content"] for message in messages))

    def _apply(self, messages: Sequence[Message], options: Mapping[str, Any] | None, tools: Any, *, tokenize: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools or None,
                tokenize=tokenize,
                add_generation_prompt=True,
                return_dict=False,
                **(options or {}),
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TeamError(
                f"the chat template refuses messages with the roles {roles}: {error}; change the agent's `system` or "
                f"`chat_template_options`"
            ) from error

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tail_ids(self, tail: str) -> list[int]:
        """`tail` as the middle of a prompt, where a tokenizer that writes a space before the first word writes none."""
        ids = self._ids(tail)
        end = self._tokenizer.eos_token
        if not ids or ids[0] in self._special or not end:
            return ids
        after_end = self._ids(end + tail)
        return after_end[1:] if after_end[0] == self._tokenizer.eos_token_id else ids

    def _after(self, response_ids: Sequence[int], tail: list[int]) -> list[int]:
        """`tail` without the end token that the response already has."""
        if not response_ids or response_ids[-1] not in self._ends:
            return tail
        place = next((place for place, token in enumerate(tail) if token in self._special), None)
        if place is None or tail[place] not in (self._traits.end, self._tokenizer.eos_token_id):
            return tail
        return tail[place + 1 :]


def _without_middle(text: str, kept: int) -> str:
    """`kept` characters of `text`, half from its start and half from its end, around the mark of a cut."""
    head, tail = (kept + 1) // 2, kept // 2
    return text[:head] + CUT + text[len(text) - tail :]


def _ends(tokenizer: Any, traits: Traits | None) -> frozenset[int]:
    """The ids that end a message: the template's, the tokenizer's, and Llama's for a message that calls a tool. Other special
    tokens (<|python_tag|>) stand within one, and may be the last that a cut response got."""
    calls = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.content == "<|eom_id|>"}
    found = calls | {tokenizer.eos_token_id} | ({traits.end} if traits else set())
    return frozenset(found - {None})


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
