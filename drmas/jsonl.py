"""The objects of a JSONL file, one per line in UTF-8: all readers of such files go through here, with one tolerance for all.

Empty lines and a byte order mark are passed over. Called by the readers of tasks, passages, rows, metrics, alarms and episodes.

    for number, row in read_objects(Path("rows.jsonl"), "an object with task and reward"):
        print(f"line {number}: {row['task']}")
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drmas.errors import DataError


def read_objects(path: Path, what: str, *, key: str = "", killed: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of each line of the file; `what` an object is and the `key` of the file are for errors.

    `killed`: a last line without its end is passed over, since its writer was killed. DataError: the file can't be read, or a
    line of it, as in `parse_object`.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and not (killed and not line.endswith(b"\n")):
                    yield number, parse_object(line, f"{path}:{number}", what)
    except OSError as error:
        place = f"{key} {path}" if key else path
        raise DataError(f"{place}: {error.strerror or error}; expected a JSONL file, {what} per line") from error


def parse_object(line: bytes, where: str, what: str) -> dict[str, Any]:
    """The object in `line`. DataError: it isn't UTF-8 or JSON, it nests too deep, or is no object; `where` is for the error."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line; expected {what} per line") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}; expected {what} per line") from error
    except (RecursionError, ValueError) as error:  # nested too deep; a number with thousands of digits
        raise DataError(f"{where}: can't be read: {error}; expected {what} per line") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: holds a {type(value).__name__}; expected {what}")
    return value
