"""Weights that reach rank 0 from ranks elsewhere: whole, in step after whatever was given up, and with the leader's errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def said() -> dict[int, dict[str, Any]]:
    """What three ranks found: 0 has the engines, 1 and 2 a policy."""
    script = Path(__file__).with_name("relay_rank.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {line["rank"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_rank_0_gets_the_policys_tensors_in_their_dtypes_and_shapes(said) -> None:
    assert said[0]["whole"]
    assert said[0]["metadata"] == said[1]["metadata"] == said[2]["metadata"] == 4


def test_a_pass_that_rank_0_gives_up_is_completed_and_the_next_is_whole(said) -> None:
    assert said[0]["after a break"]
    assert said[1]["given"] == said[2]["given"] == 12  # three passes of four tensors, on each rank of the policy


def test_an_error_of_the_source_reaches_rank_0_alone_and_the_next_pass_is_whole(said) -> None:
    expected = "transposed did not leave the policy's ranks: the gather failed"
    assert (said[0]["breaks_at"], said[1]["breaks_at"]) == (expected, None)
    assert said[0]["breaks_at seen"] == said[1]["breaks_at seen"] == ["embed", "norm"]
    assert said[0]["after an error"]


def test_a_source_that_contradicts_its_metadata_is_refused_and_iterated_to_its_end(said) -> None:
    """Rank 2 iterates all of it, each tensor with the leader."""
    assert "the source gave transposed torch.float16 [3, 2] in its place" in said[0]["lies_at"]
    assert said[1]["lies_at"] is None


def test_ranks_of_the_policy_but_the_leader_iterate_its_own_source_and_others_nothing(said) -> None:
    assert [said[rank]["same"] for rank in (0, 1, 2)] == [False, False, True]
    assert all(line["outside"] == [[], []] for line in said.values())
