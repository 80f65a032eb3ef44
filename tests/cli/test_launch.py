"""`drmas launch`: what it refuses, what it would start, and what it starts, with recorders in the place of the starters."""

import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from drmas.cli import main as cli
from drmas.cli.launch_kubernetes import cluster_name, to_text
from drmas.cli.launch_plans import launchers_folder
from drmas.errors import ConfigError
from tests.launchers.stage import Stage

RECIPE = """
name = "tiny"

[policies.main]
model = "tiny:qwen3"

[policies.main.engine]
max_model_tokens = 64

[team]
name = "solver-verifier"

[team.solver]
max_tokens = 4

[team.verifier]
max_tokens = 4

[data]
type = "sums"

[reward]
type = "exact"
"""
PAIR = """
from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, register_team


@register_team("pair")
class Pair(TeamConfig):
    solver: AgentConfig = AgentConfig(prompt="{question}")
    verifier: AgentConfig = AgentConfig(prompt="{draft}")

    async def run(self, task, agents):
        return (await agents.solver(question=task.question)).text
"""
AWKWARD = "a recipe; touch pwned $(touch pwned).toml"


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    (stage.folder / AWKWARD).write_text(RECIPE)
    yield stage
    stage.close()


@pytest.fixture
def launch(stage, monkeypatch, capfd):
    """The command in this process, in the stage's folder: (exit status, stdout, stderr)."""
    monkeypatch.chdir(stage.folder)
    monkeypatch.setenv("PATH", stage.environment["PATH"])
    monkeypatch.setenv("RECORDS", stage.environment["RECORDS"])

    def run(*words: str):
        monkeypatch.setattr("sys.argv", ["drmas", "launch", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capfd.readouterr()
        assert not (stage.folder / "pwned").exists()
        return ended.value.code or 0, captured.out, captured.err

    return run


def manifest_of(call: dict) -> dict[str, dict]:
    """Kind and name -> document."""
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(call["input"])}


def test_a_dry_run_starts_nothing_and_says_where_everything_would_be(launch, stage) -> None:
    status, out, _ = launch("slurm", AWKWARD, "--nodes", "2", "--ranks-per-node", "4", "--engine-nodes", "1", "--dry-run")
    assert status == 0
    assert "trainer TP 1 x DP 8 on ranks 0-7" in out
    lines = dict(line.split(maxsplit=1) if not line.startswith("node") else line.split("  ", 1) for line in out.splitlines())
    assert lines["node 0"].strip() == "trainer ranks 0-3"
    assert lines["node 1"].strip() == "trainer ranks 4-7"
    assert lines["node 2"].strip() == "engines: drmas serve-engines"
    assert "RANKS_PER_NODE=4 ENGINE_NODES=1" in lines["environment"]
    assert lines["command"].startswith("sbatch --job-name=tiny --nodes=3 ")
    assert list(stage.records.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["local", "nowhere"], "nowhere: no such recipe"),
        (["local", AWKWARD, "--train.stpes", "3"], "train.stpes: unknown key"),
        (["local", AWKWARD, "--nodes", "2"], "--nodes is 2 and local is one"),
        (["torchrun", AWKWARD, "--nodes", "2"], "--rendezvous is missing; expected HOST:PORT"),
        (["torchrun", AWKWARD, "--nodes", "2", "--rendezvous", "node1"], "--rendezvous is node1; expected HOST:PORT"),
        (["torchrun", AWKWARD, "--nodes", "2", "--rendezvous", "a:1", "--node-rank", "2"], "--node-rank is 2; expected 0 to 1"),
        (["torchrun", AWKWARD, "--engine-nodes", "1"], "--engine-nodes is of slurm and kubernetes"),
        (["slurm", AWKWARD, "--rendezvous", "a:1"], "--rendezvous is of torchrun, not of slurm"),
        (["slurm", AWKWARD, "--image", "x"], "--image is of kubernetes, not of slurm"),
        (
            ["slurm", AWKWARD, "--engine-nodes", "1", "--cluster.token_env", "FOO"],
            "cluster.token_env is FOO; the launchers make",
        ),
        (["slurm", AWKWARD, "--overwrite"], "--overwrite: slurm starts a job anew after a failure"),
        (["kubernetes", AWKWARD, "--resume"], "--resume: kubernetes starts a job anew"),
        (["slurm", AWKWARD, "--train.ranks", "8"], "policies.main.engine needs 1 replica x"),
        (["slurm", AWKWARD, "--nodes", "2", "--train.ranks", "3"], "train.ranks is 3, which --nodes 2 doesn't divide"),
        (
            ["slurm", AWKWARD, "--ranks-per-node", "4", "--train.ranks", "3"],
            "train.ranks is 3; --nodes 1 x --ranks-per-node 4 = 4 trainer rank(s): set --train.ranks 4",
        ),
        (["slurm", AWKWARD, "--policies.main.tensor-parallel", "16"], "it must divide the policy's 8 trainer rank(s)"),
        (["slurm", AWKWARD], "policies.main.engine needs 1 replica x tensor_parallel 1 = 1 GPU of its own"),
        (
            ["slurm", AWKWARD, "--engine-nodes", "2", "--policies.main.engine.replicas", "20"],
            "the engines at tcp://engine-node-0:8200 need 10 GPUs",
        ),
        (["kubernetes", AWKWARD, "--ranks-per-node", "4", "--name", "9-lives"], "begins with a letter"),
    ],
)
def test_a_job_that_cant_be_is_refused_before_anything_starts(launch, stage, words, said) -> None:
    status, _, err = launch(*words)
    assert status == 2
    assert said in err
    assert list(stage.records.iterdir()) == []


def test_slurm_gets_the_words_as_they_are(launch, stage) -> None:
    prompt = "$(touch pwned); `touch pwned` {question} 'x"
    status, _, err = launch("slurm", AWKWARD, "--ranks-per-node", "4", "--team.solver.prompt", prompt, "--name", "my_job")
    assert status == 0, err
    (call,) = stage.recorded("sbatch")
    script = launchers_folder() / "slurm" / "one_node.sbatch"
    assert call["words"] == [
        *("--job-name=my_job", "--nodes=1", str(script), AWKWARD),
        *("--team.solver.prompt", prompt, "--name", "my_job"),
    ]
    assert call["environment"]["DRMAS_LAUNCHERS"] == str(launchers_folder())
    assert call["environment"]["RANKS_PER_NODE"] == "4"


def test_slurm_gets_gpus_where_they_are_asked_for_and_its_status_is_ours(launch, stage, monkeypatch) -> None:
    monkeypatch.setenv("FAIL", "sbatch")
    status, _, _ = launch("slurm", AWKWARD, "--nodes", "3", "--gpus-per-node", "4", "--ranks-per-node", "2")
    assert status == 7
    (call,) = stage.recorded("sbatch")
    assert call["words"][:3] == ["--job-name=tiny", "--nodes=3", "--gpus-per-node=4"]
    assert call["words"][3].endswith("several_nodes.sbatch")


def test_kubernetes_gets_a_whole_job(launch, stage) -> None:
    words = ["--nodes", "3", "--engine-nodes", "2", "--name", "Maths_4B.v2", "--image", "mine:1", "--gpus-per-node", "4"]
    words += ["--policies.main.lr", "1e-5", "--team.solver.prompt", "yes"]
    status, _, err = launch("kubernetes", AWKWARD, *words, "--namespace", "rl")
    assert status == 0, err
    (call,) = stage.recorded("kubectl")
    assert call["words"] == ["create", "-n", "rl", "-f", "-"]
    found = manifest_of(call)
    assert list(found) == [
        "Secret/maths-4b-v2-engine-token",
        "ConfigMap/maths-4b-v2-launchers",
        "Service/maths-4b-v2-engines",
        "StatefulSet/maths-4b-v2-engines",
        "Service/maths-4b-v2",
        "Job/maths-4b-v2",
    ]
    for document in found.values():
        kubernetes_validate.validate(document, "1.33", strict=True)
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "maths-4b-v2"
    assert "my-run" not in call["input"].replace("`my-run`", "")
    job, engines = found["Job/maths-4b-v2"]["spec"], found["StatefulSet/maths-4b-v2-engines"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"], engines["replicas"]) == (3, 3, 9, 2)
    (trainer,), (waiter,) = job["template"]["spec"]["containers"], job["template"]["spec"]["initContainers"]
    hosts = [f"maths-4b-v2-engines-{i}.maths-4b-v2-engines:8200" for i in range(2)]
    assert waiter["args"] == hosts
    assert trainer["args"][:3] == ["4", "/launchers/recipe.toml", "--auto-resume"]
    assert json.loads(trainer["args"][trainer["args"].index("--cluster.engine_hosts") + 1]) == [
        f"tcp://{host}" for host in hosts
    ]
    assert trainer["args"][-6:] == ["--name", "Maths_4B.v2", "--policies.main.lr", "1e-5", "--team.solver.prompt", "yes"]
    assert {entry["name"]: entry.get("value") for entry in trainer["env"]}["NODES"] == "3"
    assert {container["image"] for container in (trainer, waiter, engines["template"]["spec"]["containers"][0])} == {"mine:1"}
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == "4"
    config_map = found["ConfigMap/maths-4b-v2-launchers"]
    assert config_map["immutable"] is True
    assert config_map["data"]["recipe.toml"] == RECIPE
    assert config_map["data"]["env.sh"] == (launchers_folder() / "env.sh").read_text()
    volume = next(volume for volume in job["template"]["spec"]["volumes"] if "configMap" in volume)["configMap"]
    assert volume["name"] == config_map["metadata"]["name"]
    assert {item["key"] for item in volume["items"]} <= config_map["data"].keys()
    assert {"key": "recipe.toml", "path": "recipe.toml"} in volume["items"]


def test_the_token_is_in_the_secret_alone_and_new_every_time(launch, stage, capfd) -> None:
    tokens = []
    for _ in range(2):
        status, out, err = launch("kubernetes", AWKWARD, "--engine-nodes", "1")
        assert status == 0
        call = stage.recorded("kubectl")[-1]
        secret = manifest_of(call)["Secret/tiny-engine-token"]
        assert secret["immutable"] is True
        tokens.append(secret["stringData"]["token"])
        assert len(tokens[-1]) == 64
        assert call["input"].count(tokens[-1]) == 1
        assert tokens[-1] not in out + err + " ".join(call["words"])
    assert tokens[0] != tokens[1]
    _, out, err = launch("kubernetes", AWKWARD, "--engine-nodes", "1", "--dry-run")
    assert "kind: Secret" not in out
    assert "# The Secret tiny-engine-token" in out
    assert {each["kind"] for each in yaml.safe_load_all(out)} == {"ConfigMap", "Service", "StatefulSet", "Job"}
    assert "pod tiny-engines-0" in err


def test_one_pod_runs_a_packaged_recipe_by_its_name(launch, stage) -> None:
    assert launch("kubernetes", "arithmetic-tiny", "--ranks-per-node", "2")[0] == 0
    found = manifest_of(stage.recorded("kubectl")[0])
    assert list(found) == ["ConfigMap/arithmetic-tiny-launchers", "Job/arithmetic-tiny"]
    (trainer,) = found["Job/arithmetic-tiny"]["spec"]["template"]["spec"]["containers"]
    assert trainer["args"][:2] == ["2", "arithmetic-tiny"]
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "recipe.toml" not in found["ConfigMap/arithmetic-tiny-launchers"]["data"]


def test_kubectls_failure_says_how_to_clean_up(launch, monkeypatch) -> None:
    monkeypatch.setenv("FAIL", "kubectl")
    status, _, err = launch("kubernetes", AWKWARD, "--engine-nodes", "1", "--namespace", "rl")
    assert status == 7
    assert "kubectl delete -n rl job,statefulset,service,configmap,secret -l app.kubernetes.io/instance=tiny" in err


@pytest.mark.parametrize(
    ("old", "new"), [("--cluster.engine_hosts", "--cluster.hosts"), ("name: NODES", "name: HOSTS"), ("limits:", "requests:")]
)
def test_a_manifest_that_lost_what_is_set_in_it_is_named(launch, stage, monkeypatch, old, new) -> None:
    own = stage.folder / "own"
    shutil.copytree(launchers_folder(), own)
    file = own / "kubernetes" / "disaggregated.yaml"
    file.write_text(file.read_text().replace(old, new))
    monkeypatch.setattr("drmas.cli.launch.launchers_folder", lambda: own)
    status, _, err = launch("kubernetes", AWKWARD, "--engine-nodes", "1", "--dry-run")
    assert status == 2
    assert f"{file} lacks what drmas launch sets in it" in err


def test_files_that_pods_must_have_are_named(launch, stage) -> None:
    (stage.folder / "pair.py").write_text(PAIR)
    short = ["--team.solver.max-tokens", "4", "--team.verifier.max-tokens", "4"]
    status, _, err = launch("kubernetes", AWKWARD, "--team.name", "pair.py:pair", *short, "--ranks-per-node", "4", "--dry-run")
    assert status == 0, err
    assert re.search(r"the pods' disk +must have pair\.py under /work", err)


@pytest.mark.parametrize(("target", "command"), [("slurm", "sbatch"), ("kubernetes", "kubectl"), ("local", "torchrun")])
def test_what_is_not_installed_is_named(launch, stage, monkeypatch, target, command) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    words = [] if target == "local" else ["--ranks-per-node", "4"]
    status, _, err = launch(target, AWKWARD, *words)
    assert status == 2
    assert f"{command} is not on the PATH" in err


@pytest.mark.parametrize("words", [[], ["--nodes", "2", "--rendezvous", "node1:29500", "--node-rank", "1"]])
def test_this_process_becomes_the_launcher(stage, words) -> None:
    flags = ["--auto-resume", "--team.solver.prompt", "{question}; touch pwned"]
    main = f"import sys; sys.executable = {str(stage.bin / 'python')!r}; from drmas.cli.main import main; main()"
    command = [sys.executable, "-c", main, "launch", "torchrun" if words else "local", AWKWARD, *flags]
    environment = {**os.environ, **stage.environment, "HOLD": "", "DRMAS_CACHE": os.environ.get("DRMAS_CACHE", "")}
    process = stage.start(*command, "--ranks-per-node", "2", *words, **environment)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    (call,) = stage.recorded("torchrun")
    given = call["words"][call["words"].index("train") + 1 :]
    assert given == [AWKWARD, "--team.solver.prompt", "{question}; touch pwned", "--auto-resume"]
    assert call["words"][:4] == (
        ["--nnodes", "2", "--nproc-per-node", "2"] if words else ["--standalone", "--nproc-per-node", "2", "--module"]
    )
    assert not (stage.folder / "pwned").exists()


def test_the_launchers_are_found_in_a_checkout_and_in_a_wheel(tmp_path) -> None:
    root = Path(__file__).resolve().parents[2]
    assert launchers_folder() == root / "launchers"
    package = tmp_path / "site-packages" / "drmas"
    package.mkdir(parents=True)
    with pytest.raises(ConfigError, match="the launchers are neither in"):
        launchers_folder(package)
    shutil.copytree(root / "launchers", package / "launchers")
    assert launchers_folder(package) == package / "launchers"
    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    assert packages == {"drmas": "drmas", "drmas_kernels": "kernels/drmas_kernels", "drmas/launchers": "launchers"}


def test_names_in_kubernetes() -> None:
    assert [cluster_name(name) for name in ("quickstart", "a_B.c-1", "x--y_")] == ["quickstart", "a-b-c-1", "x-y"]
    for name in ("1", "9a", "x" * 41):
        with pytest.raises(ConfigError, match="at most 40 characters"):
            cluster_name(name)


def test_words_that_yaml_could_take_for_something_else_are_quoted() -> None:
    """Its versions differ in what they take for numbers and switches: 1e-5 is one for kubectl and none for PyYAML."""
    words = ["1e-5", "8", "0x1", "yes", "on", "~", "null", "true", "", "a: b", "- x", "1_000", "12:30", "y", "n", "#"]
    text = to_text([{"args": words, "plain": "quickstart"}])
    assert yaml.safe_load(text)["args"] == words
    assert all(f'"{word}"' in text for word in words)
    assert "plain: quickstart\n" in text
    script = "#!/bin/bash\necho 'x'  \n"
    assert yaml.safe_load(to_text([{"file": script}]))["file"] == script
