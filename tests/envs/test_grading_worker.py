from __future__ import annotations

import json
import subprocess
import sys


def test_one_reply_per_line_until_the_input_ends() -> None:
    questions = [
        {"text": r"\boxed{5}", "truth": "5", "timeout_seconds": 10},
        {"text": r"\boxed{6}", "truth": "5", "timeout_seconds": 10},
        {"text": 7, "truth": "5", "timeout_seconds": 10},
    ]
    done = subprocess.run(
        [sys.executable, "-m", "drmas.envs.grading_worker", str(4 * 2**30), "math"],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    ready, *replies = done.stdout.splitlines()
    assert ready == "ready"
    right, wrong, failed = map(json.loads, replies)
    assert (right, wrong) == ({"reward": 1.0}, {"reward": 0.0})
    assert failed["error"].startswith("AttributeError")
