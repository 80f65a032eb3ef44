"""`drmas launch`: check a job as a dry run does, then print what would run on which host, or start it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Literal

from drmas.agents.team import check_policies, load_team
from drmas.cli.launch_kubernetes import Manifest
from drmas.cli.launch_plans import (
    ENGINE_PORT,
    Job,
    Options,
    Plan,
    as_words,
    launchers_folder,
    plan_slurm,
    plan_torchrun,
    slurm_gpus,
    slurm_script,
)
from drmas.config.cluster import ClusterConfig
from drmas.config.load import load
from drmas.config.schema import RunConfig
from drmas.errors import ConfigError
from drmas.runtime.gpus import needs_of_hosts
from drmas.runtime.machine import Machine
from drmas.runtime.placement import run_estimator
from drmas.runtime.preview import preview
from drmas.telemetry.console import Console

Target = Literal["local", "torchrun", "slurm", "kubernetes"]

TOKEN_ENV = ClusterConfig().token_env
"""Of the files that start engines on nodes of their own."""


def launch(
    target: Target, recipe: str, overrides: Sequence[str], flags: Sequence[str], options: Options, *, dry_run: bool
) -> int:
    """Exit status of what was started; `flags` are those of `drmas train`. ConfigError: the job can't be started so."""
    _check_options(target, flags, options)
    folder = launchers_folder()
    if target == "slurm":
        job = _checked(recipe, overrides, options, Machine(0, slurm_gpus(slurm_script(folder, options))))
        plan = plan_slurm(job, folder, options)
    elif target == "kubernetes":
        manifest = Manifest(folder, options)
        plan = manifest.plan(_checked(recipe, overrides, options, Machine(0, manifest.gpus), out=sys.stderr))
    else:
        job = _checked(recipe, overrides, options, Machine.here(options.nodes))
        plan = plan_torchrun(replace(job, words=(*job.words, *flags)), folder, options)
    if dry_run:
        _print(plan)
        return 0
    return _start(plan, become=target in ("local", "torchrun"))


def _check_options(target: Target, flags: Sequence[str], options: Options) -> None:
    """ConfigError: an option that is another target's."""
    if target in ("slurm", "kubernetes") and flags:
        raise ConfigError(f"{flags[0]}: {target} starts a job anew after a failure, always with --auto-resume; leave it away")
    if target == "local" and options.nodes > 1:
        raise ConfigError(f"--nodes is {options.nodes} and local is one; the others are torchrun, slurm and kubernetes")
    if target in ("local", "torchrun") and options.engine_nodes:
        raise ConfigError(
            "--engine-nodes is of slurm and kubernetes; start launchers/torchrun/engine_node.sh on the engines' hosts and name "
            f"""them: drmas launch {target} RECIPE --cluster.engine_hosts '["tcp://HOST:{ENGINE_PORT}"]'"""
        )
    owners = {"rendezvous": "torchrun", "node_rank": "torchrun", "image": "kubernetes", "namespace": "kubernetes"}
    for name, owner in owners.items():
        if getattr(options, name) is not None and target != owner:
            raise ConfigError(f"--{name.replace('_', '-')} is of {owner}, not of {target}; leave it away")


def _checked(recipe: str, overrides: Sequence[str], options: Options, machine: Machine, *, out: IO[str] | None = None) -> Job:
    """The job, once a dry run of it has been printed. `machine`: a node, where no option says otherwise. ConfigError: it can't
    be."""
    if options.gpus_per_node is not None:
        machine = Machine(0, options.gpus_per_node)
    config = load(recipe, overrides)
    if options.engine_nodes:  # where they are is known when they run
        hosts = [f"tcp://engine-node-{i}:{ENGINE_PORT}" for i in range(options.engine_nodes)]
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"engine_hosts": hosts})})
        if config.cluster.token_env != TOKEN_ENV:
            raise ConfigError(
                f"cluster.token_env is {config.cluster.token_env}; the launchers make the engine nodes' secret themselves, in "
                f"{TOKEN_ENV}: leave it out"
            )
    ranks = options.ranks_per_node or _ranks(config, options.nodes, machine.gpus)
    world = options.nodes * ranks
    if config.train.ranks not in (None, world):
        raise ConfigError(
            f"train.ranks is {config.train.ranks}; --nodes {options.nodes} x --ranks-per-node {ranks} = {world} trainer "
            f"rank(s): set --train.ranks {world}"
        )
    machine = replace(machine, ranks=ranks)
    planned = config.model_copy(update={"train": config.train.model_copy(update={"ranks": None})})
    team = load_team(planned.team)
    check_policies(team, [*planned.policies, *planned.remotes])
    preview(planned, team, run_estimator(planned, team), Console(stream=out), world=world, machine=machine)
    if options.engine_nodes and machine.gpus:
        _check_engine_nodes(planned, machine, world)
    return Job(recipe, tuple(overrides), config, options.nodes, ranks, machine.gpus, options.engine_nodes)


def _ranks(config: RunConfig, nodes: int, gpus: int) -> int:
    """Trainer ranks per node where no option says so: those of the recipe, or one per GPU."""
    if config.train.ranks is None:
        return gpus or 1
    if config.train.ranks % nodes:
        raise ConfigError(f"train.ranks is {config.train.ranks}, which --nodes {nodes} doesn't divide")
    return config.train.ranks // nodes


def _check_engine_nodes(config: RunConfig, machine: Machine, world: int) -> None:
    """ConfigError: the engines of one node need more GPUs than it has."""
    for host, need in needs_of_hosts(config, machine.place(config, world=world)).items():
        if need > machine.gpus:
            raise ConfigError(
                f"the engines at {host} need {need} GPUs (replicas take the engine nodes in turn, of tensor_parallel GPUs) and "
                f"a node has {machine.gpus}; raise --engine-nodes, or lower policies.NAME.engine.replicas"
            )


def _print(plan: Plan) -> None:
    """What is `printed` goes to stdout alone, so that it can be piped."""
    out = sys.stderr if plan.printed else sys.stdout
    width = max(len("environment"), *(len(place) for place, _ in plan.places))
    lines = [*plan.places, ("environment", f"{as_words(plan.environment)} and launchers/env.sh".removeprefix(" and "))]
    for label, text in [*lines, ("command", shlex.join(plan.command))]:
        print(f"{label:<{width}}  {text}", file=out)
    print(plan.printed, end="")


def _start(plan: Plan, *, become: bool) -> int:
    """Run the command; `become`: this process is it from now on."""
    beside = str(Path(sys.executable).parent)  # its torchrun and no other's, also where nobody activated the environment
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    needed = "torchrun" if become else plan.command[0]
    if shutil.which(needed, path=path) is None:
        raise ConfigError(f"{needed} is not on the PATH; launch the job from where it is (--dry-run shows what would start)")
    environment = {**os.environ, **plan.environment, "PATH": path}
    sys.stdout.flush()
    if become:
        os.execvpe(plan.command[0], plan.command, environment)
    done = subprocess.run(plan.command, env=environment, input=plan.stdin, text=True, check=False)
    if done.returncode and plan.on_failure:
        print(plan.on_failure, file=sys.stderr)
    return done.returncode
