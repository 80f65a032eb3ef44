"""A job's shape, and the command that starts it: torchrun on hosts, or SLURM. `launch_kubernetes` has the third way.

What starts is a file of `launchers/`, which a person may start just as well. No shell reads the words of a plan: each is an
argument or an environment variable of its own. Called by `launch`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import drmas
from drmas.config.schema import RunConfig
from drmas.errors import ConfigError

ENGINE_PORT = 8200


@dataclass(frozen=True)
class Options:
    """What the command line says; what is None stands in the launcher's file."""

    nodes: int = 1
    """With trainers."""
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    engine_nodes: int = 0
    rendezvous: str | None = None
    node_rank: int | None = None
    image: str | None = None
    namespace: str | None = None

    @property
    def shape(self) -> str:
        """The file in launchers/slurm and launchers/kubernetes that is for such a job."""
        if self.engine_nodes:
            return "disaggregated"
        return "one_node" if self.nodes == 1 else "several_nodes"


@dataclass(frozen=True)
class Job:
    """A recipe that fits `nodes` hosts of `gpus` GPUs with `ranks` trainer ranks each, and `engine_nodes` more."""

    recipe: str
    words: tuple[str, ...]
    """What follows the recipe in `drmas train`."""
    config: RunConfig
    nodes: int
    ranks: int
    gpus: int
    engine_nodes: int = 0

    def on(self, node: int) -> str:
        """What runs on a node with trainers."""
        first = node * self.ranks
        ranks = f"rank {first}" if self.ranks == 1 else f"ranks {first}-{first + self.ranks - 1}"
        return f"trainer {ranks}" + (", engines" if node == 0 and not self.config.cluster.engine_hosts else "")


@dataclass(frozen=True)
class Plan:
    """One command here, and what comes of it on which host."""

    command: list[str]
    places: list[tuple[str, str]]
    environment: dict[str, str] = field(default_factory=dict)
    """Beside launchers/env.sh."""
    stdin: str | None = None
    printed: str = ""
    """What a dry run shows of `stdin`: all but secrets."""
    on_failure: str = ""


def launchers_folder(package: Path | None = None) -> Path:
    """Inside the installed package, or beside it in a checkout."""
    package = package or Path(drmas.__file__).parent
    for folder in (package / "launchers", package.parent / "launchers"):
        if (folder / "env.sh").is_file():
            return folder
    raise ConfigError(f"the launchers are neither in {package} nor beside it; install drmas again, or use a checkout")


def plan_torchrun(job: Job, folder: Path, options: Options) -> Plan:
    """This host's part of the job: all of it, or one of its nodes'."""
    if job.nodes == 1:
        command = ["bash", str(folder / "torchrun" / "single_node.sh"), str(job.ranks), job.recipe, *job.words]
        return Plan(command, [("this host", job.on(0))])
    if options.rendezvous is None or not re.fullmatch(r"[^\s:]+:\d+|\[[^\s\]]+\]:\d+", options.rendezvous):
        raise ConfigError(
            f"--rendezvous is {options.rendezvous or 'missing'}; expected HOST:PORT, where the {job.nodes} hosts meet: one of "
            "them, by a name that all know, and a port that is free there"
        )
    if not 0 <= (options.node_rank or 0) < job.nodes:
        raise ConfigError(f"--node-rank is {options.node_rank}; expected 0 to {job.nodes - 1}, 0 at the rendezvous")
    command = ["bash", str(folder / "torchrun" / "multi_node.sh"), str(job.ranks), job.recipe, *job.words]
    shared = {"NODES": str(job.nodes), "RENDEZVOUS": options.rendezvous}
    mine = {} if options.node_rank is None else {"NODE_RANK": str(options.node_rank)}
    places = [(f"node {i}", f"{job.on(i)}: NODE_RANK={i} and the same command") for i in range(job.nodes)]
    return Plan(command, places, shared | mine)


def slurm_script(folder: Path, options: Options) -> Path:
    return folder / "slurm" / f"{options.shape}.sbatch"


def slurm_gpus(script: Path) -> int:
    """GPUs per node as the file's directives have them."""
    found = re.search(r"^#SBATCH --gpus-per-node=(?:\w+:)?(\d+)\s*$", script.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 0


def plan_slurm(job: Job, folder: Path, options: Options) -> Plan:
    script = slurm_script(folder, options)
    command = ["sbatch", f"--job-name={job.config.name}", f"--nodes={job.nodes + job.engine_nodes}"]
    command += [f"--gpus-per-node={job.gpus}"] if options.gpus_per_node is not None else []
    command += [str(script), job.recipe, *job.words]
    environment = {"DRMAS_LAUNCHERS": str(folder), "RANKS_PER_NODE": str(job.ranks)}
    places = [(f"node {i}", job.on(i)) for i in range(job.nodes)]
    if job.engine_nodes:
        environment |= {"ENGINE_NODES": str(job.engine_nodes), "ENGINE_PORT": str(ENGINE_PORT)}
        places += [(f"node {job.nodes + i}", "engines: drmas serve-engines") for i in range(job.engine_nodes)]
    return Plan(command, places, environment)


def as_words(environment: dict[str, str]) -> str:
    """As a shell takes them before a command."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
