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
    assert share.gather(lambda: 3) == [3]


def two_ranks(*words: str) -> dict[int, dict]:
    """What each of two ranks said."""
    script = Path(__file__).with_name("broadcast_rank.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), *words]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {line["rank"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_every_rank_hears_rank_zeros_result_and_its_errors_and_what_all_gathered() -> None:
    said = two_ranks()
    shared = {"rows": [1, "é"], "none": None}
    gathered = [
        [{"name": "é" * 300}, [1.5, float("inf")]],
        ["DataError", "rank 1: row 3"],
        ["DataError", "row 3"],
        ["ConfigError", "rank 0: a key; rank 1: row 3"],
    ]
    after = [[1, 2]]
    ours, theirs = ["KeyError", "'a fault of ours'"], ["DrmasError", "rank 1: 'a fault of ours'"]
    assert said[0]["heard"] == [shared, ["DataError", "bad.jsonl:2"], ["KeyError", ""], 7, *gathered, theirs, *after]
    assert said[1]["heard"] == [
        *(shared, ["DataError", "bad.jsonl:2"], ["DrmasError", "'a fault of ours'"], 7),
        *(*gathered, ours, *after),
    ]


def test_a_rank_whose_error_nobody_hears_leaves_and_the_others_notice() -> None:
    said = two_ranks("alone")
    assert said[1]["heard"] == "nobody hears it"
    assert said[1]["seconds"] < 3.5
    assert said[0]["heard"] == "another rank of the job is gone; its own output says why"
    assert said[0]["seconds"] < 20


def test_after_an_error_that_was_not_the_end_ranks_wait_for_rank_zero_as_before() -> None:
    error = ["DataError", "rank 1: not saved"]
    said = two_ranks("after")
    assert {rank: each["heard"] for rank, each in said.items()} == {0: [error, "a step"], 1: [error, "a step"]}


def test_a_rank_that_never_comes_is_not_waited_for_without_end() -> None:
    (said,) = two_ranks("missing").values()
    assert said["rank"] == 0
    assert said["heard"].startswith("the trainer processes can't meet at ")
    assert "not all ranks came; what the others write, on whichever host they are, says why" in said["heard"]
    assert said["seconds"] < 60
