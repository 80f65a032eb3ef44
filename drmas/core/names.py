"""Unknown names in error messages: the nearest valid one, and all of them where they are few.

Called wherever a user names something that must exist (teams, agents, policies, parsers, generators).
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LISTED = 12
"""Longer lists of valid names don't help a reader of one line."""


def expected_names(found: str, valid: Iterable[str]) -> str:
    """How an error about the unknown name `found` goes on.

    Example: expected_names("sover", ["solver", "verifier"]) == "the nearest is 'solver'; expected one of solver, verifier"
    """
    names = sorted(valid)
    if not names:
        return "there are none to choose from"
    near = get_close_matches(found, names, n=1, cutoff=0.5)
    parts = [f"the nearest is {near[0]!r}"] if near else []
    if len(names) <= _LISTED or not near:
        shown = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        parts.append(f"expected one of {shown}")
    return "; ".join(parts)
