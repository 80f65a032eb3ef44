"""The correctness tests that run before the benchmark prints a number. Called by the runner."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "kernels"
ALWAYS = ("test_numerics.py",)
PATTERNS = {
    "segment_advantage": ("test_segment_advantage*.py",),
    "linear_logprob": ("test_linear_logprob*.py", "test_head*.py"),
    "linear_policy_loss": ("test_linear_logprob*.py", "test_head*.py", "test_policy_loss*.py"),
    "logprob": ("test_logprob*.py", "test_logits*.py"),
    "policy_loss": ("test_policy_loss*.py",),
    "squared_norms": ("test_grad_norm*.py",),
    "adamw_step": ("test_adamw*.py",),
}
"""The files of tests/kernels that hold an operation's values and gradients."""
SELECTED = {"cpu": "not triton and not ranks", "cuda": "not ranks"}
"""Pytest's -m by device: nothing that starts processes, and on the CPU the torch backend alone, for it is what is measured."""


def tests_of(ops: Sequence[str]) -> list[Path]:
    """The files for these operations, each once. FileNotFoundError: a pattern matches none."""
    found = {FOLDER / name: None for name in ALWAYS}
    for op in ops:
        for pattern in PATTERNS[op]:
            files = sorted(FOLDER.glob(pattern))
            if not files:
                raise FileNotFoundError(f"{FOLDER} has no {pattern}, where gate.PATTERNS expects tests of {op}")
            found |= dict.fromkeys(files)
    return list(found)


def run_gate(ops: Sequence[str], device: str) -> None:
    """Run the tests of `ops` on `device`. SystemExit: one fails, and there is nothing to measure."""
    files = [str(path.relative_to(ROOT)) for path in tests_of(ops)]
    options = ["-m", SELECTED[device], *files]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-x", *options]
    print(f"first, on {device}: pytest {shlex.join(options)}", flush=True)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"DRMAS_TEST_DEVICE": device}, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n")
        raise SystemExit(f"no numbers: the correctness tests failed on {device}")
    print(done.stdout.strip().splitlines()[-1], flush=True)
