"""The launchers on hosts of their own: trainers on two, engines on a third, as a person starts them by hand."""

import json
import os
import re
import sys
import time
from pathlib import Path

from tests.cluster.netns import hosts

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a secret of at least sixteen letters"


def recipe() -> str:
    """The tiny recipe of the whole runs."""
    return re.search(r'^RECIPE = """\n(.*?)^"""', (ROOT / "tests/e2e/conftest.py").read_text(), re.DOTALL | re.MULTILINE)[1]


def test_two_trainer_hosts_and_an_engine_host(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(recipe())
    shared = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "",  # found from the route to the rendezvous
        "OMP_NUM_THREADS": "1",
        "DRMAS_CACHE": str(tmp_path / "cache"),
        "DRMAS_LOCAL": str(tmp_path / "local"),
        "DRMAS_ENGINE_TOKEN": SECRET,
        "ENGINE_LOGS": str(tmp_path / "engine-logs"),
    }
    with hosts(3) as (first, second, engines):
        script = str(ROOT / "launchers" / "torchrun" / "engine_node.sh")
        server = engines.start([script, engines.address], log=tmp_path / "engines.log", env=shared)
        limit = time.monotonic() + 120
        while "engine host of" not in (tmp_path / "engines.log").read_text():
            assert time.monotonic() < limit
            assert server.poll() is None
            time.sleep(0.05)
        words = ["1", "tiny.toml", "--auto-resume", "--train.steps", "2", "--policies.main.engine.gpus", "own"]
        words += ["--cluster.engine_hosts", json.dumps([f"tcp://{engines.name}:8200"])]
        script = str(ROOT / "launchers" / "torchrun" / "multi_node.sh")
        meeting = {"NODES": "2", "RENDEZVOUS": f"{first.name}:29500"}
        trainers = [
            host.start([script, *words], log=tmp_path / f"{rank}.log", env=shared | meeting | {"NODE_RANK": str(rank)})
            for rank, host in ((1, second), (0, first))
        ]
        statuses = [trainer.wait(timeout=240) for trainer in trainers]
        server.terminate()
        said = {path.stem: path.read_text() for path in tmp_path.glob("*.log")}
        assert statuses == [0, 0], "\n".join(said.values())
        assert server.wait(timeout=60) == 0
    assert "trainer TP 1 x DP 2 on ranks 0-1" in said["0"]
    assert f"tcp://{engines.name}:8200" in said["0"]
    assert "step 2/2" in said["0"]
    assert "step" not in said["1"]  # rank 0 is where NODE_RANK is 0
    assert "ended with status 0" in said["engines"]
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step_2" / "run.json").is_file()
    assert list((tmp_path / "engine-logs" / engines.name).glob("engine-main-*.log"))
    assert not any(SECRET in text for text in said.values())
