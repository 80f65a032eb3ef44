"""Two trainer ranks push shards into a real engine of two workers: exact under every layout, and bounded when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drmas.config.schema import EngineConfig

pytestmark = pytest.mark.timeout(900)
MODELS = ("tied", "untied")
LAYOUTS = ("tp2", "pp2", "dp2", "apart")
BUCKET_BYTES = 50_000


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found; one launch for all tests."""
    shared = tmp_path_factory.mktemp("shards")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, Path(__file__).with_name("shard_ranks.py"), shared],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((shared / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_I10_after_every_push_the_engine_computes_with_the_trainers_weights(ranks, model, layout):
    found = ranks[0][f"{model} {layout}"]
    assert min(found["before"]) > 1e-2  # each push is one that is seen; the last was staged while the engine went on
    assert max(found["gaps"]) < 1e-5
    assert found["version"] is True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_broadcast_of_the_same_weights_changes_no_bit(ranks, model, layout):
    assert ranks[0][f"{model} {layout}"]["same bits"] is True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_ranks_share_what_one_would_broadcast(ranks, model, layout):
    sent = [rank[f"{model} {layout}"]["bytes"] for rank in ranks]
    whole = ranks[0][f"{model} {layout}"]["broadcast bytes"]
    assert len({tuple(each) for each in zip(*sent, strict=True)}) == 1  # every push is the same work
    total = sent[0][0] + sent[1][0]
    assert whole < total < 1.1 * whole  # norms, and heads that workers share, go to both workers
    if layout == "apart":
        assert sent[0][0] == 0  # rank 0 has the engine, and no weights
    elif layout == "dp2":
        assert abs(sent[0][0] - sent[1][0]) <= BUCKET_BYTES  # the largest piece
    else:
        assert max(sent[0][0], sent[1][0]) < 0.6 * whole


def test_a_NaN_on_one_rank_is_refused_by_name(ranks):
    found = ranks[0]["NaN"]
    assert "trainer rank 1: model.layers.1.mlp.down_proj.weight holds NaN or Inf" in found["error"]
    assert found["as before"] is True
    assert ranks[1]["NaN"]["error"] == ""  # the sender alone raises


def test_a_corrupt_message_is_refused_by_name_and_the_next_push_is_exact(ranks):
    found = ranks[0]["corrupt"]
    assert found["error"].startswith("SyncError: version ")
    assert "of engine 0: model." in found["error"]
    assert "from trainer rank 1 arrived corrupt: checksum" in found["error"]
    assert found["as before"] is True
    assert ranks[0]["after corrupt"]["error"] == ""
    assert ranks[0]["after corrupt"]["gap"] < 1e-5


def test_a_rank_that_is_silent_for_longer_than_the_timeout_is_waited_for_once_more(ranks):
    found = ranks[0]["silent"]
    assert found["error"] == ""
    assert found["gap"] < 1e-5
    assert found["seconds"] > 4  # the first attempt was given up


def test_an_engine_killed_in_the_middle_is_a_death_and_comes_back(ranks):
    found = ranks[0]["killed engine"]
    assert found["error"].startswith("EngineDied: engine tied ")
    assert "was killed by SIGKILL" in found["error"]
    assert found["seconds"] < EngineConfig().request_timeout_seconds
    assert ranks[0]["after killed engine"]["error"] == ""
    assert ranks[0]["after killed engine"]["gap"] < 1e-5


def test_a_rank_that_dies_in_the_middle_is_named_and_the_engine_keeps_its_weights(ranks):
    found = ranks[0]["dead rank"]
    assert "no word from trainer rank 1" in found["error"]
    assert "a trainer rank is gone; its own output says why" in found["error"]
    assert found["as before"] is True
    assert found["seconds"] < 60
