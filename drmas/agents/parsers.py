"""What an agent's text says: parsers turn a response into a value and say whether it kept to its form.

A recipe names one per agent: `parser = "boxed"`, or with arguments after a colon, `parser = "verdict:yes,no"`. To add one:
write a factory that takes the arguments and returns a function of the text, and put it under `PARSERS`. A parser only reads:
the training row keeps the sampled ids whatever it finds (I1).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drmas.core.boxed import last_boxed
from drmas.core.names import expected_names
from drmas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parsed:
    """`value` is what other agents and the reward read; `valid` is False where the text broke its form."""

    value: Any
    valid: bool


Parser = Callable[[str], Parsed]


def text_parser(arguments: list[str]) -> Parser:
    """The stripped text; valid unless empty."""
    _refuse_arguments("text", arguments)

    def parse(text: str) -> Parsed:
        return Parsed(text.strip(), valid=bool(text.strip()))

    return parse


def boxed_parser(arguments: list[str]) -> Parser:
    r"""The content of the last \boxed{...}; None and invalid without one."""
    _refuse_arguments("boxed", arguments)

    def parse(text: str) -> Parsed:
        content = last_boxed(text)
        return Parsed(None if content is None else content.strip(), valid=bool(content and content.strip()))

    return parse


def verdict_parser(arguments: list[str]) -> Parser:
    """True, False, or None and invalid: the last complete <verdict>...</verdict>, or without any tag the whole text.

    What stands there must be one of the two words, whatever its case and the punctuation after it. The words are the arguments:
    `verdict:yes,no`; approve and reject if there are none.
    """
    words = arguments or ["approve", "reject"]
    if len(words) != 2 or not all(words) or words[0].casefold() == words[1].casefold():
        raise ConfigError(
            f"parser verdict has the words {', '.join(words)}; expected two different ones: verdict:approve,reject"
        )
    meaning = {words[0].casefold(): True, words[1].casefold(): False}

    def parse(text: str) -> Parsed:
        said = _last_tagged(text, "verdict")
        if said is None and "<verdict>" not in text.casefold():
            said = text
        verdict = meaning.get((said or "").strip().rstrip(".,;:!").casefold())
        return Parsed(verdict, valid=verdict is not None)

    return parse


PARSERS: dict[str, Callable[[list[str]], Parser]] = {
    "text": text_parser,
    "boxed": boxed_parser,
    "verdict": verdict_parser,
}


def make_parser(spec: str) -> Parser:
    """The parser that `name` or `name:argument,argument` names; ConfigError with the nearest name if there is none."""
    name, _, rest = spec.partition(":")
    if name not in PARSERS:
        raise ConfigError(f"parser is {spec!r}; {expected_names(name, PARSERS)}")
    return PARSERS[name]([part.strip() for part in rest.split(",")] if rest else [])


def _refuse_arguments(name: str, arguments: list[str]) -> None:
    if arguments:
        raise ConfigError(f"parser {name} takes no arguments; found {', '.join(arguments)}")


def _last_tagged(text: str, tag: str) -> str | None:
    """What stands in the last complete pair of `tag`; a stray end tag and an unclosed start tag make no pair."""
    start, content = None, None
    for found in re.finditer(rf"</?{tag}>", text, re.IGNORECASE | re.ASCII):
        if not found.group().startswith("</"):
            start = found.end()
        elif start is not None:
            start, content = None, text[start : found.start()]
    return content
