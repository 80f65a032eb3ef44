r"""The last \boxed{...} of a text: what a solver marks as its answer. Read by the parser of agents and by the grader."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
"""An opening box, an escaped character (so that \{ is no brace), or a brace."""


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed, the inner one of a nest; None if there is none.

    One pass over the text, so a hostile answer (thousands of open boxes) costs no more than its length.

    Example: last_boxed(r"so \boxed{\frac{1}{2}} or \boxed{3") == r"\frac{1}{2}"
    """
    open_boxes: list[int | None] = []
    start, content = -1, None
    for token in _TOKENS.finditer(text):
        found = token.group()
        if found.startswith("\\boxed"):
            open_boxes.append(token.end())
        elif found == "{":
            open_boxes.append(None)
        elif found == "}" and open_boxes:
            opened = open_boxes.pop()
            if opened is not None and opened > start:
                start, content = opened, text[opened : token.start()]
    return content
