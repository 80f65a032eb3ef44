"""How a side of `bench/end_to_end.py` takes its turns: it waits for the word before every step, and then says what that was.

Standard library only: the other side may be an environment without drmas. Imported by the sides, which are started as scripts.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Turns:
    """A line comes in on stdin for every step, a JSON object goes out for it. Whatever else is printed goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **facts: Any) -> None:
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()

    def wait(self) -> None:
        """Until the next step may start. SystemExit: there is none."""
        if not sys.stdin.readline():
            raise SystemExit(0)
