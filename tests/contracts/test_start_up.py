"""The command answers at once: nothing heavy is imported before a command needs it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm", "megatron", "numpy", "triton", "tensorboard", "sympy")


@pytest.mark.parametrize(
    "words",
    [[], *([name] for name in ("train", "eval", "inspect", "launch", "plan", "reproduce", "config", "doctor"))],
)
def test_help_imports_nothing_heavy(words):
    program = (
        "import sys; from drmas.cli.main import main\n"
        f"sys.argv = ['drmas', *{words!r}, '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"print('IMPORTED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert done.stdout.splitlines()[-1] == "IMPORTED []"


def test_configuration_is_read_without_torch():
    program = (
        "import sys; from drmas.config.load import load; load('quickstart')\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'vllm', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
