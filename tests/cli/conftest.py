import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def drmas(tmp_path):
    """Run the command in a process of its own, as a user does."""

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        import os

        command = [sys.executable, "-m", "drmas.cli", *words]
        env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120", **environment}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120, check=False)

    return run


@pytest.fixture
def rows_file(tmp_path):
    """Write rows (objects or raw lines) as a JSONL file."""

    def write(*rows: dict | str) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write
