"""What an agent's text says: parsers turn a response into a value and say whether it kept to its form.

A recipe names one per agent: `parser = "boxed"`, with arguments after a colon, `parser = "verdict:yes,no"`, or a function of
its own, `parser = "path/to/file.py:read"`, which takes the text and returns a `Parsed`, or a value and whether it is valid:

    def read(text):
        return text.strip().lower(), text.strip() != ""

A parser reads one response of its own agent and nothing else: what other agents or tools said can't pass for an answer. Nor
can a thought: those under `PARSERS` get what is `spoken`; a function of yours gets the whole text. A parser only reads: the
training row keeps the sampled ids whatever it finds (I1). To add one: write a factory that takes the arguments and returns a
function of the text, and put it under `PARSERS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from drmas.agents.user_code import is_file_spec, load_object
from drmas.core.boxed import last_boxed
from drmas.core.names import expected_names
from drmas.core.tags import last_tagged
from drmas.errors import ConfigError, TeamError


@dataclass(frozen=True, slots=True)
class Parsed:
    """`value` is what other agents and the reward read; `valid` is False where the text broke its form.

    `lenient` stands in for the value of an invalid text whose agent has `on_invalid = "fail_open"`.
    """

    value: Any
    valid: bool
    lenient: Any = None


Parser = Callable[[str], Parsed]


def spoken(text: str) -> str:
    """`text` without its thoughts: what stands after its last </think>, nothing where a <think> after that is still open.

    What an agent hands on to others is this too; `turn.text` is the whole response.

    Example: spoken("<think>7? no</think>\\n\\n8") == "8"
    """
    _, closed, rest = text.rpartition("</think>")
    if "<think>" in rest:
        return ""
    return rest.lstrip() if closed else text


def text_parser(arguments: list[str]) -> Parser:
    """The stripped text; valid unless empty."""
    _refuse_arguments("text", arguments)

    def parse(text: str) -> Parsed:
        return Parsed(text.strip(), valid=bool(text.strip()), lenient=text.strip())

    return parse


def boxed_parser(arguments: list[str]) -> Parser:
    r"""The content of the last \boxed{...}; invalid without one: None, or leniently the whole text."""
    _refuse_arguments("boxed", arguments)
    return lambda text: _content(last_boxed(text), text)


def tag_parser(arguments: list[str]) -> Parser:
    """The content of the last complete <NAME>...</NAME>; invalid without one: None, or leniently the whole text."""
    if len(arguments) != 1 or not re.fullmatch(r"[A-Za-z][\w-]*", arguments[0]):
        raise ConfigError(f"parser tag has the arguments {', '.join(arguments)!r}; expected one name: tag:answer")
    return lambda text: _content(last_tagged(text, arguments[0]), text)


def verdict_parser(arguments: list[str]) -> Parser:
    """True or False: the last complete <verdict>...</verdict>, or without any tag the whole text.

    What stands there must be one of the two words, whatever its case and the punctuation after it. The words are the arguments:
    `verdict:yes,no`; approve and reject if there are none. An invalid text counts as False, leniently as True.
    """
    words = _words("verdict", arguments or ["approve", "reject"])
    if len(words) != 2:
        raise ConfigError(f"parser verdict has the words {', '.join(words)}; expected two of them: verdict:approve,reject")

    def parse(text: str) -> Parsed:
        said = _marked(text, "verdict")
        return Parsed(said == words[0], valid=said in words, lenient=True)

    return parse


def choice_parser(arguments: list[str]) -> Parser:
    """One of the words, as written in the arguments: the last complete <choice>...</choice>, or without any tag the whole text.

    Case and the punctuation after it don't matter. An invalid text counts as None, leniently as the first word.
    """
    words = _words("choice", arguments)
    original = dict(zip(words, arguments, strict=True))

    def parse(text: str) -> Parsed:
        said = _marked(text, "choice")
        return Parsed(original.get(said), valid=said in original, lenient=arguments[0])

    return parse


PARSERS: dict[str, Callable[[list[str]], Parser]] = {
    "text": text_parser,
    "boxed": boxed_parser,
    "tag": tag_parser,
    "verdict": verdict_parser,
    "choice": choice_parser,
}


@cache
def make_parser(spec: str) -> Parser:
    """The parser that `name`, `name:argument,argument` or `path/to/file.py:function` names.

    ConfigError: no such parser (with the nearest name), file or function, or arguments that it doesn't take.
    """
    name, _, rest = spec.partition(":")
    if name in PARSERS:
        parse = PARSERS[name]([part.strip() for part in rest.split(",")] if rest else [])
        return lambda text: parse(spoken(text))
    if is_file_spec(spec):
        return _from_file(spec)
    raise ConfigError(f"parser is {spec!r}; {expected_names(name, PARSERS)}, or path/to/file.py:function")


def _from_file(spec: str) -> Parser:
    function = load_object(spec, "parser")
    if not callable(function):
        raise ConfigError(f"parser is {spec!r}, a {type(function).__name__}; expected a function of the text")

    def parse(text: str) -> Parsed:
        try:
            found = function(text)
        except Exception as error:  # a user's function may raise anything; it is named, and fails the episode
            raise TeamError(f"parser {spec} raised {type(error).__name__}: {error}") from error
        if isinstance(found, Parsed):
            return found
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], bool):
            return Parsed(found[0], valid=found[1], lenient=found[0])
        raise TeamError(f"parser {spec} returned a {type(found).__name__}; expected a Parsed, or a value and True or False")

    return parse


def _refuse_arguments(name: str, arguments: list[str]) -> None:
    if arguments:
        raise ConfigError(f"parser {name} takes no arguments; found {', '.join(arguments)}")


def _words(name: str, arguments: list[str]) -> list[str]:
    """The arguments in the form in which a text's word is compared with them."""
    words = [_plain(argument) for argument in arguments]
    if len(words) < 2 or not all(words) or len(set(words)) < len(words):
        raise ConfigError(
            f"parser {name} has the words {', '.join(arguments)!r}; expected two different ones or more: {name}:a,b"
        )
    return words


def _plain(word: str) -> str:
    return word.strip().rstrip(".,;:!").casefold()


def _marked(text: str, tag: str) -> str:
    """The word in the last complete pair of `tag`, or the whole text where `tag` isn't opened; as `_words` has it."""
    said = last_tagged(text, tag)
    if said is None and f"<{tag}>" not in text.casefold():
        said = text
    return _plain(said or "")


def _content(found: str | None, text: str) -> Parsed:
    content = (found or "").strip()
    return Parsed(content or None, valid=bool(content), lenient=text.strip())
