"""The manifests: valid by Kubernetes' own schemas, and consistent in what one part says of another."""

import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
MANIFESTS = sorted(path.name for path in (LAUNCHERS / "kubernetes").glob("*.yaml"))
RUNS = ["one_node.yaml", "several_nodes.yaml", "disaggregated.yaml"]


def read(name: str) -> list[dict]:
    return list(yaml.safe_load_all((LAUNCHERS / "kubernetes" / name).read_text(encoding="utf-8")))


def pods(documents: list[dict]) -> list[dict]:
    """The pods' templates."""
    return [document["spec"]["template"] for document in documents if "template" in document["spec"]]


def containers(documents: list[dict]) -> list[dict]:
    return [each for pod in pods(documents) for each in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]]


def of_kind(documents: list[dict], kind: str) -> dict[str, dict]:
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


def test_there_are_manifests() -> None:
    assert set(MANIFESTS) == {*RUNS, "storage.yaml"}


@pytest.mark.parametrize(("name", "version"), [*((name, "1.33") for name in MANIFESTS), ("disaggregated.yaml", "1.37")])
def test_the_schemas_of_kubernetes_hold(name, version) -> None:
    for document in read(name):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_can_fail() -> None:
    (job,) = read("one_node.yaml")
    job["spec"]["template"]["spec"]["containers"][0]["arg"] = ["8"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.33", strict=True)


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_privileged(name) -> None:
    documents = read(name)
    for pod in pods(documents):
        own = pod["spec"]["securityContext"]
        assert own["runAsNonRoot"] is True
        assert own["runAsUser"] > 0
        assert own["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert not pod["spec"].keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert not any("hostPath" in volume for volume in pod["spec"]["volumes"])
    for container in containers(documents):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("name", RUNS)
def test_files_volumes_and_labels_are_there(name) -> None:
    documents = read(name)
    for pod in pods(documents):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert volumes["work"]["persistentVolumeClaim"]["claimName"] == read("storage.yaml")[0]["metadata"]["name"]
        files = {f"/launchers/{item['path']}" for item in volumes["launchers"]["configMap"]["items"]}
        for item in volumes["launchers"]["configMap"]["items"]:
            assert (LAUNCHERS / item["path"]).is_file()
            assert Path(item["path"]).name == item["key"]  # as `kubectl create configmap --from-file` names it
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
            command, script = container["command"]
            assert command == "bash"
            assert script in files
            needed = re.findall(r"\.\./?(\w+\.\w+)", (LAUNCHERS / script.removeprefix("/launchers/")).read_text())
            assert {f"/launchers/{file}" for file in needed} <= files
    for service in of_kind(documents, "Service").values():
        assert service["spec"]["clusterIP"] == "None"
        selected = [pod for pod in pods(documents) if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()]
        assert len(selected) == 1


@pytest.mark.parametrize("name", ["several_nodes.yaml", "disaggregated.yaml"])
def test_the_trainers_meet(name) -> None:
    documents = read(name)
    (job,) = of_kind(documents, "Job").values()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in trainer["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment["NODES"])
    assert spec["backoffLimit"] == 3 * spec["completions"]
    assert pod["subdomain"] in of_kind(documents, "Service")
    host, _, port = environment["RENDEZVOUS"].rpartition(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"  # Kubernetes calls the pods of such a job JOB-INDEX
    assert int(port) > 1024
    service = of_kind(documents, "Service")[pod["subdomain"]]
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"


def test_trainers_and_engines_agree() -> None:
    documents = read("disaggregated.yaml")
    (engines,), (job,) = of_kind(documents, "StatefulSet").values(), of_kind(documents, "Job").values()
    (trainer,), (server,) = job["spec"]["template"]["spec"]["containers"], engines["spec"]["template"]["spec"]["containers"]
    (waiter,) = job["spec"]["template"]["spec"]["initContainers"]
    name, service = engines["metadata"]["name"], engines["spec"]["serviceName"]
    port = server["args"][server["args"].index("--port") + 1]
    assert service in of_kind(documents, "Service")
    assert engines["spec"]["selector"]["matchLabels"].items() <= engines["spec"]["template"]["metadata"]["labels"].items()
    hosts = [f"{name}-{index}.{service}:{port}" for index in range(engines["spec"]["replicas"])]
    assert waiter["args"] == hosts
    assert json.loads(trainer["args"][trainer["args"].index("--cluster.engine_hosts") + 1]) == [
        f"tcp://{host}" for host in hosts
    ]
    (listening,) = server["ports"]
    assert str(listening["containerPort"]) == port
    assert server["readinessProbe"]["tcpSocket"]["port"] == listening["name"]
    tokens = [entry for each in (server, trainer) for entry in each["env"] if entry["name"] == "DRMAS_ENGINE_TOKEN"]
    assert tokens[0] == tokens[1]
    assert tokens[0]["valueFrom"]["secretKeyRef"] == {"name": "my-run-engine-token", "key": "token"}
    assert "Secret" not in [document["kind"] for document in documents]  # a secret in a file is none


@pytest.mark.parametrize("name", RUNS)
def test_ranks_fit_the_gpus_and_what_is_said_of_metrics_is_so(name) -> None:
    documents = read(name)
    (job,) = of_kind(documents, "Job").values()
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    gpus, words = int(trainer["resources"]["limits"]["nvidia.com/gpu"]), trainer["args"]
    assert int(words[0]) == (gpus if name == "disaggregated.yaml" else gpus // 2)  # engines have the others
    assert words[2] == "--auto-resume"
    (metrics,) = trainer["ports"]
    assert words[words.index("--telemetry.metrics_port") + 1] == str(metrics["containerPort"])
    assert job["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] == str(metrics["containerPort"])
    allowed = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)", (LAUNCHERS / "env.sh").read_text())[1]
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > int(allowed)
