r"""Grading of mathematical answers with math-verify.

    grade("so it is \\boxed{1/2}", "0.5") == 1.0

`grade` and `MathGrader` work in killable processes (`grading`); `verdict` is what these processes run, and can take forever on
hostile text, so nothing else calls it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import re

from drmas.core.boxed import last_boxed
from drmas.envs.grading import GraderPool

TIMEOUT_SECONDS = 10.0


def grade(text: str, truth: str, timeout_seconds: float = TIMEOUT_SECONDS) -> float:
    r"""1.0 if the final answer in `text` equals `truth`, else 0.0.

    The final answer is the last \boxed{...} after the last </think>, or what math-verify takes for the answer where no box is.
    Text without any answer is a wrong answer. Callable from any thread.

    GraderTimeout: no verdict in time. GraderError: the grader died or failed. Both mean "not graded" and never 0 (I3).
    """
    return _shared_pool().grade(text, truth, timeout_seconds)


class MathGrader:
    """Grades in `workers` processes of its own, without blocking the event loop."""

    def __init__(self, *, workers: int = 1, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._pool = GraderPool(workers)
        self._timeout_seconds = timeout_seconds

    async def __call__(self, text: str, truth: str) -> float:
        """`grade`, awaited."""
        return await self._pool.grade_async(text, truth, self._timeout_seconds)

    def close(self) -> None:
        self._pool.close()


def verdict(text: str, truth: str) -> float:
    """`grade` in this process, without a deadline. Runs in the grader's worker."""
    answer = text.rpartition("</think>")[2]
    boxed = last_boxed(answer)
    expected = _truth_text(truth)
    if boxed is not None and _plain(boxed) == _plain(expected) != "":
        return 1.0
    if _is_word(expected):
        # math-verify reads a word as a product of letters, in which "abc" equals "cab"
        said = boxed if boxed is not None else answer
        return float(_plain(said) == _plain(expected))
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its own alarm is off; the parent holds the deadline
    target = parse(answer if boxed is None else f"\\boxed{{{boxed}}}", parsing_timeout=None)
    gold = parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
    return float(bool(target) and bool(gold) and verify(gold, target, timeout_seconds=None))


def _truth_text(truth: str) -> str:
    """The truth without the box or the dollar signs that datasets write around it."""
    boxed = last_boxed(truth)
    return (truth if boxed is None else boxed).strip().strip("$").strip()


def _plain(text: str) -> str:
    """`text` for comparison as it stands: no text commands, no case, one space between words."""
    return " ".join(re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}", r"\1", text).split()).casefold()


def _is_word(text: str) -> bool:
    """Words such as `yes` or `North East`, not a symbol such as `x`."""
    return len(text) > 1 and bool(re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", _plain(text)))


@functools.cache
def _shared_pool() -> GraderPool:
    pool = GraderPool()
    atexit.register(pool.close)
    return pool
