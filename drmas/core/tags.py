"""What a model put between a pair of tags. Called by `drmas.envs.search.scoring` and `drmas.agents.parsers`.

last_tagged("<answer>Bach</answer> or <Answer>Händel</Answer>", "answer") == "Händel"
"""

from __future__ import annotations

import re


def last_tagged(text: str, tag: str) -> str | None:
    """What stands in the last complete pair of `tag`, whatever its case; None without one.

    A stray end tag and an unclosed start tag make no pair.
    """
    start, content = None, None
    for found in re.finditer(rf"</?{re.escape(tag)}>", text, re.IGNORECASE | re.ASCII):
        if not found.group().startswith("</"):
            start = found.end()
        elif start is not None:
            start, content = None, text[start : found.start()]
    return content
