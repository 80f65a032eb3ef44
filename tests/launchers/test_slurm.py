"""The SLURM jobs: their directives, and what they start on which node, with recorders in the place of srun and the rest."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

JOBS = ("one_node", "several_nodes", "disaggregated")


def directives(script: Path) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize("job", JOBS)
def test_directives(launchers, job) -> None:
    found = directives(launchers / "slurm" / f"{job}.sbatch")
    assert found["ntasks-per-node"] == "1"  # one torchrun, or one engine host, per node
    assert (int(found["nodes"]) > 1) == (job != "one_node")
    assert int(found["gpus-per-node"]) == 8
    assert found.keys() >= {"requeue", "time", "exclusive", "output"}
    assert found["open-mode"] == "append"  # the log of a job that goes on isn't overwritten
    hours, minutes, seconds = map(int, found["time"].split(":"))
    warned = re.fullmatch(r"B:USR1@(\d+)", found["signal"])
    assert 300 <= int(warned[1]) < hours * 3600 + minutes * 60 + seconds


@pytest.fixture
def submit(stage, launchers, free_port):
    """Runs a job as SLURM would, on nodes 127.0.0.1, 127.0.0.2 and so on, in the background."""

    def go(job: str, *words: str, nodes: int | None = None, gpus: int = 8, **variables: str):
        nodes = nodes or int(directives(launchers / "slurm" / f"{job}.sbatch")["nodes"])
        copy = stage.folder / "slurm_script"  # SLURM runs a copy of it
        copy.write_text((launchers / "slurm" / f"{job}.sbatch").read_text())
        if not (stage.folder / "launchers").exists():
            (stage.folder / "launchers").symlink_to(launchers)
        slurm = {
            "SLURM_JOB_ID": str(40000 + free_port() - 20000),
            "SLURM_SUBMIT_DIR": str(stage.folder),
            "SLURM_JOB_NODELIST": ",".join(f"127.0.0.{number}" for number in range(1, nodes + 1)),
            "SLURM_GPUS_ON_NODE": str(gpus),
            "SLURM_CPUS_PER_TASK": "64",
        }
        return stage.start("bash", str(copy), *words, **slurm | variables)

    return go


def ended(process) -> str:
    """The output of a job that ends well."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


AWKWARD = ["my recipe; exit 9", "--team.solver.prompt", "$(touch pwned) {question}"]


def trained(call) -> list[str]:
    words = call["words"]
    return words[words.index("train") + 1 :]


def test_one_node(stage, submit) -> None:
    ended(submit("one_node", *AWKWARD))
    (step,), (call,) = stage.recorded("srun"), stage.recorded("torchrun")
    assert call["words"][:3] == ["--standalone", "--nproc-per-node", "8"]
    assert trained(call) == [*AWKWARD, "--auto-resume"]
    assert call["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert step["environment"]["SRUN_CPUS_PER_TASK"] == "64"
    assert not (stage.folder / "pwned").exists()


@pytest.mark.parametrize(("variables", "ranks"), [({}, "8"), ({"RANKS_PER_NODE": "4"}, "4")])
def test_several_nodes(stage, submit, variables, ranks) -> None:
    ended(submit("several_nodes", *AWKWARD, nodes=3, **variables))
    calls = stage.recorded("torchrun")
    assert sorted(call["environment"]["SLURM_PROCID"] for call in calls) == ["0", "1", "2"]
    port = str(20000 + int(calls[0]["environment"]["SLURM_JOB_ID"]) % 10000)
    for call in calls:
        words = call["words"]
        assert words[:6] == [*("--nnodes", "3", "--nproc-per-node", ranks), "--node-rank", call["environment"]["SLURM_PROCID"]]
        assert words[6:10] == ["--master-addr", "127.0.0.1", "--master-port", port]
        assert trained(call) == [*AWKWARD, "--auto-resume"]


def test_disaggregated(stage, submit, free_port) -> None:
    port = free_port() + 1
    output = ended(submit("disaggregated", *AWKWARD, nodes=4, ENGINE_NODES="2", ENGINE_PORT=str(port)))
    engines, trainers = stage.recorded("drmas"), stage.recorded("torchrun")
    assert sorted(call["environment"]["SLURMD_NODENAME"] for call in engines) == ["127.0.0.3", "127.0.0.4"]
    assert sorted(call["environment"]["SLURMD_NODENAME"] for call in trainers) == ["127.0.0.1", "127.0.0.2"]
    hosts = [f"tcp://127.0.0.3:{port}", f"tcp://127.0.0.4:{port}"]
    for call in trainers:
        assert call["words"][:2] == ["--nnodes", "2"]
        *words, option, value = trained(call)
        assert words == [*AWKWARD, "--auto-resume"]
        assert (option, json.loads(value)) == ("--cluster.engine_hosts", hosts)
    for call in engines:
        assert call["words"][:3] == ["serve-engines", "--host", "0.0.0.0"]
        assert call["words"][-2:] == ["--port", str(port)]
    secrets = {call["environment"]["DRMAS_ENGINE_TOKEN"] for call in engines + trainers}
    (secret,) = secrets
    assert len(secret) >= 32
    every = [
        word for name in ("drmas", "torchrun", "srun", "scontrol") for call in stage.recorded(name) for word in call["words"]
    ]
    assert not any(secret in word for word in every)
    assert secret not in output
    # the recorders of `drmas serve-engines` run until they are ended: that the job has ended says that they were


def test_a_secret_is_made_for_every_job(stage, submit, free_port) -> None:
    for _ in range(2):
        ended(
            submit(
                "disaggregated", "quickstart", nodes=2, ENGINE_PORT=str(free_port() + 1), DRMAS_ENGINE_TOKEN="the last one's"
            )
        )
    assert len({call["environment"]["DRMAS_ENGINE_TOKEN"] for call in stage.recorded("torchrun")} - {"the last one's"}) == 2


def test_engines_on_all_nodes_leave_none_for_trainers(stage, submit) -> None:
    process = submit("disaggregated", "quickstart", nodes=2, ENGINE_NODES="2")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "at least one must be left for trainers" in output


@pytest.mark.parametrize("job", JOBS)
def test_the_end_of_its_time_stops_the_step_in_good_order_and_puts_the_job_back(stage, submit, job, free_port) -> None:
    process = submit(job, "quickstart", HOLD="torchrun", ENGINE_PORT=str(free_port() + 1))
    stage.await_record("torchrun", count={"one_node": 1, "several_nodes": 2, "disaggregated": 2}[job])
    os.kill(process.pid, signal.SIGUSR1)
    ended(process)  # every torchrun got SIGTERM
    job_id = stage.recorded("torchrun")[0]["environment"]["SLURM_JOB_ID"]
    assert stage.recorded("scontrol")[-1]["words"] == ["requeue", job_id]


def test_a_failure_in_the_first_minutes_is_final(stage, submit) -> None:
    (stage.folder / "early.sh").write_text("SECONDS=1000\n")  # bash reads it before the job: it waited long for its engines
    process = submit("one_node", "quickstart", FAIL="torchrun", BASH_ENV=str(stage.folder / "early.sh"))
    process.communicate(timeout=60)
    assert process.returncode == 7
    assert not any(call["words"][0] == "requeue" for call in stage.recorded("scontrol"))


def test_late_failures_in_a_row_are_tried_again_a_few_times(stage, submit) -> None:
    """PATIENCE -1: whenever it fails, it is late. What SLURM counts has the orderly stops, too, and doesn't matter."""
    variables = {"FAIL": "torchrun", "SLURM_RESTART_COUNT": "9", "PATIENCE": "-1", "SLURM_JOB_ID": "4711"}
    asked = []
    for _ in range(4):
        process = submit("one_node", "quickstart", **variables)
        process.communicate(timeout=60)
        assert process.returncode == 7
        asked.append(sum(call["words"] == ["requeue", "4711"] for call in stage.recorded("scontrol")))
    assert asked == [1, 2, 3, 3]
    assert list(stage.folder.rglob(".failures-*")) == []


def test_what_is_missing_is_named(stage, submit) -> None:
    process = submit("one_node")
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "a recipe name or file" in output
    assert stage.recorded("srun") == []
