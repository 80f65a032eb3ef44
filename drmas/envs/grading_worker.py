"""The grader's process: reads {"text", "truth", "timeout_seconds"} lines, writes {"reward"} or {"error"} lines.

Started by `grading`, never imported by it. Nothing from outside can be run here: both directions are JSON, and the arguments
are the limit of its memory and its rule. It ends when its input ends, so that it can't outlive its parent for long.
To add a rule: a function of (text, truth) behind a name in `_rule`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
from collections.abc import Callable


def main() -> None:
    memory_bytes = int(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not write into the replies
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    verdict = _rule(sys.argv[2])
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        question = json.loads(line)
        _limit_cpu(question["timeout_seconds"])
        try:
            reply = {"reward": verdict(question["text"], question["truth"])}
        except Exception as error:  # the boundary to math-verify and sympy: the parent raises what went wrong
            reply = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _rule(name: str) -> Callable[[str, str], float]:
    """The rule `name`, loaded: imports and tables must not count against an answer's deadline."""
    if name == "gym":
        from drmas.envs.generated import gym_verdict, load_generators

        load_generators()
        return gym_verdict
    from drmas.envs.math import verdict

    verdict("\\boxed{\\frac{2}{4}}", "0.5")
    return verdict


def _limit(kind: int, value: int) -> None:
    """A soft limit, where the system has it; a stricter one that is already set stays."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _limit_cpu(timeout_seconds: float) -> None:
    """Let this answer use its deadline and a little more: the end of a worker whose parent was killed in the middle of one."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + timeout_seconds) + 5)


if __name__ == "__main__":
    main()
