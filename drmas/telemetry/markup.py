"""Text and tables as HTML. Everything that a model, a task or a user wrote goes through `text`: it is data, never markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")


def text(value: Any) -> str:
    """`value` as escaped text; control characters and halves of surrogate pairs, which HTML can't hold, become U+FFFD."""
    clean = str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return escape(_CONTROL.sub("\ufffd", clean), quote=True)


def shortened(value: str, limit: int) -> str:
    """The first `limit` characters, and how many are left out."""
    return value if len(value) <= limit else f"{value[:limit]} … ({len(value) - limit} more characters)"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already; it scrolls sideways where the page is too narrow."""
    head = "".join(f"<th>{text(name)}</th>" for name in headers)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def pairs(values: dict[str, Any]) -> str:
    """Names and values as a definition list."""
    return (
        "<dl>" + "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in values.items()) + "</dl>"
    )
