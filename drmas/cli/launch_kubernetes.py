"""The manifests of launchers/kubernetes for one job: what `drmas launch kubernetes` gives to kubectl.

A manifest is taken as a person edited it. Its run is called `my-run`, wherever that stands; here it gets the job's name, and
what the command line says of nodes, ranks, GPUs and image. A ConfigMap with the launchers themselves comes with it, with the
recipe if that is a file, and a Secret where there are engine pods. All of them are created and nothing is changed: a second
launch under one name is refused by the cluster.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from drmas.cli.launch_plans import ENGINE_PORT, Job, Options, Plan
from drmas.config.load import SUFFIXES
from drmas.config.schema import RunConfig
from drmas.errors import ConfigError

NAME = "my-run"
GPU = "nvidia.com/gpu"
LONGEST_NAME = 40
"""Names of pods and services are made from it, which have at most 63 letters."""
ENGINE_HOSTS = "--cluster.engine_hosts"
Document = dict[str, Any]


class Manifest:
    """The file that fits the options."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder, self.options = folder, options
        self.path = folder / "kubernetes" / f"{options.shape}.yaml"
        self.text = self.path.read_text(encoding="utf-8")
        with self._explained():
            self.gpus = int(_trainer(list(yaml.safe_load_all(self.text)))["resources"]["limits"].get(GPU, 0))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """ConfigError: somebody edited the file, and what is set here isn't there any more."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(
                f"{self.path} lacks what drmas launch sets in it ({type(error).__name__}: {error}); compare it with the one "
                "that drmas comes with, or give it to kubectl yourself"
            ) from error

    def plan(self, job: Job) -> Plan:
        name = cluster_name(job.config.name)
        with self._explained():
            documents = self.render(job, name)
        token = [_secret(name)] if job.engine_nodes else []
        hidden = f"# The Secret {name}-engine-token, with a new random token, goes here.\n" if token else ""
        where = ["-n", self.options.namespace] if self.options.namespace else []
        places = [(f"pod {name}-{i}" if self.options.shape != "one_node" else "pod", job.on(i)) for i in range(job.nodes)]
        places += [(f"pod {name}-engines-{i}", "engines: drmas serve-engines") for i in range(job.engine_nodes)]
        places += [("the pods' disk", f"must have {path} under /work") for path in _own_files(job.config)]
        left = f"job,statefulset,service,configmap,secret -l app.kubernetes.io/instance={name}"
        return Plan(
            ["kubectl", "create", *where, "-f", "-"],
            places,
            stdin=to_text([*token, *documents]),
            printed=hidden + to_text(documents),
            on_failure=f"what an earlier launch left goes with: {' '.join(['kubectl delete', *where])} {left}",
        )

    def render(self, job: Job, name: str) -> list[Document]:
        """All documents but the Secret."""
        documents = list(yaml.safe_load_all(self.text.replace(NAME, name)))
        kinds = {document["kind"]: document for document in documents}
        trainer = _trainer(documents)
        recipe, files = self._files(kinds, job.recipe)
        own = trainer["args"][2:]  # the manifest's, after ranks and recipe
        if job.engine_nodes:
            hosts = [f"{name}-engines-{i}.{name}-engines:{ENGINE_PORT}" for i in range(job.engine_nodes)]
            own[own.index(ENGINE_HOSTS) + 1] = json.dumps([f"tcp://{host}" for host in hosts])
            kinds["StatefulSet"]["spec"]["replicas"] = job.engine_nodes
            _pod(kinds["Job"])["initContainers"][0]["args"] = hosts
        trainer["args"] = [str(job.ranks), recipe, *own, *job.words]
        if self.options.shape != "one_node":
            kinds["Job"]["spec"] |= {"completions": job.nodes, "parallelism": job.nodes, "backoffLimit": 3 * job.nodes}
            {entry["name"]: entry for entry in trainer["env"]}["NODES"]["value"] = str(job.nodes)
        for container in _containers(documents):
            if self.options.image:
                container["image"] = self.options.image
            if self.options.gpus_per_node is not None and "resources" in container:
                container["resources"]["limits"].pop(GPU, None)
                container["resources"]["limits"] |= {GPU: str(job.gpus)} if job.gpus else {}
        return [_named("ConfigMap", f"{name}-launchers", name) | {"immutable": True, "data": files}, *documents]

    def _files(self, kinds: dict[str, Document], recipe: str) -> tuple[str, dict[str, str]]:
        """What the recipe is called in the pods, and the files that the ConfigMap brings there, by its keys."""
        volumes = [volume for kind in ("Job", "StatefulSet") if kind in kinds for volume in _pod(kinds[kind])["volumes"]]
        mounted = [volume["configMap"]["items"] for volume in volumes if "configMap" in volume]
        files = {item["key"]: self._read(item["path"]) for items in mounted for item in items}
        path = Path(recipe)
        if path.suffix not in SUFFIXES:
            return recipe, files
        key = f"recipe{path.suffix}"
        files[key] = path.read_text(encoding="utf-8")
        mounted[0].append({"key": key, "path": key})  # the Job's
        return f"/launchers/{key}", files

    def _read(self, path: str) -> str:
        return (self.folder / path).read_text(encoding="utf-8")


def _own_files(config: RunConfig) -> Iterator[str]:
    """What the run reads from paths of this machine that the pods know as well, where they are told."""
    team, separator, _ = str(config.team["name"]).rpartition(":")
    if separator:
        yield team
    for section in (config.data, config.eval.data):
        if (path := getattr(section, "path", None)) is not None:
            yield str(path)


def cluster_name(name: str) -> str:
    """A run's name as Kubernetes takes it: small letters, digits and dashes.

    Example: cluster_name("Maths_4B.v2") == "maths-4b-v2"
    """
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not found or not found[0].isalpha() or len(found) > LONGEST_NAME:
        raise ConfigError(
            f"--name is {name!r}, in Kubernetes {found!r}; expected one that begins with a letter and has at most "
            f"{LONGEST_NAME} characters"
        )
    return found


def to_text(documents: list[Document]) -> str:
    """As YAML that is read alike by all versions of it: whatever isn't a plain word is quoted, such as 1e-5 and no."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000, explicit_start=True)


class _Dumper(yaml.SafeDumper):
    def represent_text(self, text: str) -> yaml.Node:
        if "\n" in text:
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|")
        style = None if re.fullmatch(r"[A-Za-z/][\w./-]{2,}", text) and yaml.safe_load(text) == text else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _named(kind: str, name: str, run: str) -> Document:
    labels = {"app.kubernetes.io/name": "drmas", "app.kubernetes.io/instance": run}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels}}


def _secret(run: str) -> Document:
    token = {"token": secrets.token_hex(32)}
    return _named("Secret", f"{run}-engine-token", run) | {"immutable": True, "type": "Opaque", "stringData": token}


def _pod(document: Document) -> Document:
    return document["spec"]["template"]["spec"]


def _containers(documents: list[Document]) -> list[Document]:
    pods = [_pod(document) for document in documents if document["kind"] in ("Job", "StatefulSet")]
    return [container for pod in pods for container in [*pod.get("initContainers", []), *pod["containers"]]]


def _trainer(documents: list[Document]) -> Document:
    return {container["name"]: container for container in _containers(documents)}["trainer"]
