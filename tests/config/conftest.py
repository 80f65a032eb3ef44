from pathlib import Path

import pytest

RECIPE = """
name = "pair"

[policies.main]
model = "folder"
lr = 1e-6

[team]
name = "solver-verifier"
rounds = 2

[team.solver]
max_tokens = 16

[data]
type = "reasoning-gym"
name = "chain_sum"
size = 7
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "pair.toml"
    path.write_text(RECIPE)
    return str(path)
