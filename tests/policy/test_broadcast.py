import json
import subprocess
import sys
from pathlib import Path

import pytest

from drmas.errors import DataError
from drmas.policy.broadcast import Broadcast


def test_alone_it_is_the_action_itself() -> None:
    share = Broadcast()
    assert share(lambda: 3) == 3
    with pytest.raises(DataError, match="x"):
        share(lambda: (_ for _ in ()).throw(DataError("x")))


def test_every_rank_hears_rank_zeros_result_and_its_errors() -> None:
    script = Path(__file__).with_name("broadcast_rank.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = {line["rank"]: line["heard"] for line in map(json.loads, done.stdout.splitlines())}
    shared = {"rows": [1, "é"], "none": None}
    assert said[0] == [shared, ["DataError", "bad.jsonl:2"], ["KeyError", ""], 7]
    assert said[1] == [shared, ["DataError", "bad.jsonl:2"], ["DrmasError", "'a fault of ours'"], 7]
