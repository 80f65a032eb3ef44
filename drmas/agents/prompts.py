"""Prompt templates: {name} placeholders filled in one pass, so that braces in a value are never read again.

Only `{name}` with a plain identifier is a placeholder; `{{name}}` is the text {name}; every other brace is itself, so LaTeX
needs no doubling. Called by `agent` (filling) and by `team` (checking when a configuration is read).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


def placeholders(template: str) -> set[str]:
    """The names that `template` asks for.

    Example: placeholders(r"{question} in \\boxed{}, not {{answer}}") == {"question"}
    """
    return {match.group(2) for match in _PLACEHOLDER.finditer(template) if match.group(2)}


def fill(template: str, values: Mapping[str, object]) -> str:
    """`template` with each placeholder replaced by its value, as text. KeyError if a value is missing.

    Example: fill("{question} =", {"question": "What is {x}?"}) == "What is {x}? ="
    """
    return _PLACEHOLDER.sub(
        lambda match: f"{{{match.group(1)}}}" if match.group(1) else str(values[match.group(2)]),
        template,
    )
