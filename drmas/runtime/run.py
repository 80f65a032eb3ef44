"""Set a run up, hand it to the controller, and clean up after it, whatever happens.

`train` is what `drmas train` calls on every rank. What exists once (the run's folder, engines, grader, logs) is rank 0's; its
errors reach every rank through `share`, those of a policy's ranks through `share.gather`. Engines are children of rank 0 and
die with it.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from drmas.agents.team import TeamConfig, check_policies, check_tools, load_team
from drmas.agents.user_code import split_spec
from drmas.config.schema import LossConfig, LossOverrides, PolicyConfig, RunConfig
from drmas.config.tasks import PythonTool
from drmas.core.estimators import Estimator
from drmas.envs.rewards import check_reward, make_reward
from drmas.envs.source import TaskSource
from drmas.errors import CheckpointError
from drmas.policy import host_platform
from drmas.policy.broadcast import Broadcast
from drmas.policy.critic import Critic
from drmas.policy.groups import Groups, PolicyGroups, destroy, init_distributed
from drmas.policy.peak import device_peak
from drmas.policy.reference import Reference
from drmas.policy.trainer import PolicyTrainer, mismatch_rule
from drmas.rollout.collector import Collector
from drmas.rollout.engine import Engine
from drmas.rollout.remote import Remote
from drmas.runtime.controller import Controller
from drmas.runtime.driver import Driver
from drmas.runtime.engines import open_engine
from drmas.runtime.epochs import in_steps
from drmas.runtime.folder import RunFolder
from drmas.runtime.gpus import Seat
from drmas.runtime.hub_models import commit_of, is_hub_name, read_commits, write_commits
from drmas.runtime.machine import Machine
from drmas.runtime.models import load_tokenizer, resolve_model
from drmas.runtime.placement import check, describe, has_critic, notes, policy_ranks, run_estimator
from drmas.runtime.preflight import ask_engine_hosts, preflight
from drmas.runtime.preview import planned_ranks, preview
from drmas.runtime.resume import Checkpoints
from drmas.runtime.tools import make_tools
from drmas.runtime.warm_start import Teacher, warm_start
from drmas.runtime.watch import watched
from drmas.runtime.weight_sync import make_sync
from drmas.telemetry.alarms import Alarms, keep_alarms_until
from drmas.telemetry.console import Console
from drmas.telemetry.nvml import GpuSampler, gpu_sampler
from drmas.telemetry.prometheus import EngineState, MetricsServer, is_loopback
from drmas.telemetry.report import write_report
from drmas.telemetry.sinks import MetricsLog, read_metrics
from drmas.telemetry.trace import Profile, Steps
from drmas.weights.sync import WeightSync


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    auto_resume: bool = False,
    dry_run: bool = False,
    gpus_per_host: int | None = None,
    gpu_memory_gib: float | None = None,
) -> Path:
    """Run the whole job; returns the run's folder. Raises UserError kinds for what the user can mend.

    `gpus_per_host` and `gpu_memory_gib` are of a dry run: the machines that it is to suppose.
    """
    team = load_team(config.team)
    estimator = run_estimator(config, team)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    world = (dry_run and planned_ranks(config)) or world
    console = Console(quiet=rank != 0)
    if unused := check_policies(team, [*config.policies, *config.remotes]):
        console.note(f"no agent uses the policy {', '.join(unused)}; it costs memory and does nothing")
    check_tools(team, config.tools)
    make_tools(config.tools)
    if dry_run:
        hosts = {"gpus_per_host": gpus_per_host, "gpu_memory_gib": gpu_memory_gib}
        preview(config, team, estimator, console, world=world, **hosts)
        return Path(config.output) / config.name
    check(config, team, world=world)
    if rank != 0:  # the first interrupt ends the run after its step, by rank 0's word; torchrun sends it to every rank
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ExitStack() as stack:
        host_platform.set_threads(
            config.train.threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        )
        init_distributed()
        stack.callback(destroy)
        folder = RunFolder(config)
        if rank == 0:
            stack.callback(folder.close)
        share = Broadcast()
        preflight(share, config)
        with watched(share, rank=rank, timeout=config.cluster.host_timeout_seconds, run_dir=folder.path):
            Job(config, team, estimator, share, folder, console, stack, world=world).run(
                resume=resume, overwrite=overwrite, auto_resume=auto_resume
            )
    return folder.path


class Job:
    """One run's parts, in the order in which they come to life. Every rank has one; source, seats and driver are rank 0's.

    `layouts` has a layout of every policy, None where this rank isn't one of its ranks; `policies` below are those that it is.
    """

    def __init__(
        self,
        config: RunConfig,
        team: TeamConfig,
        estimator: Estimator,
        share: Broadcast,
        folder: RunFolder,
        console: Console,
        stack: ExitStack,
        *,
        world: int,
    ) -> None:
        self.config, self.team, self.estimator, self.share, self.world = config, team, estimator, share, world
        self.folder, self.console, self.stack = folder, console, stack
        keeping = config.checkpoint
        self.checkpoints = Checkpoints(
            folder.path,
            team,
            share,
            keep=keeping.keep,
            keep_best=keeping.keep_best,
            asynchronous=keeping.asynchronous,
            on_failure=console.note,
            files=[split_spec(tool.path)[0] for tool in config.tools.values() if isinstance(tool, PythonTool)],
        )
        self.groups = Groups()
        self.ranks = policy_ranks(config, world)
        self.layouts = {name: self.layout(policy, self.ranks[name]) for name, policy in config.policies.items()}
        self.commits: dict[str, str] = {}
        self.references: dict[Any, Reference] = {}
        self.source: TaskSource | None = None
        self.seats: dict[str, tuple[Seat, ...]] = {}
        self.driver: Driver | None = None
        self.gpus: GpuSampler | None = None
        self.served: MetricsServer | None = None

    def run(self, **flags: bool) -> None:
        """With the flags of `RunFolder.open`."""
        start = self.share(lambda: self.prepare(**flags))
        state, folders = start["state"], {name: Path(path) for name, path in start["folders"].items()}
        self.config, self.commits = in_steps(self.config, start["tasks"]), start["commits"]
        if state:
            self.estimator.restore(state["driver"]["estimator"])
        if self.config.warm_start:
            folders = self.warm_start(folders)
        policies = self.build(self.config.policies, folders)
        first_step = 1
        if state:
            self.checkpoints.load(state["step"], policies)
            first_step = state["step"] + 1
            if first_step > self.config.train.steps:
                self.console.note(f"the run is at step {state['step']} already; --train.steps N makes it longer")
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 and (gpus := gpu_sampler()):  # one per host
            self.gpus = self.stack.enter_context(gpus)
        self.share.gather(host_platform.trim)  # engines may start on the ranks' GPUs
        self.share(lambda: self.start_driver(folders, state))
        controller = Controller(
            self.config,
            estimator=self.estimator,
            policies=policies,
            temperatures={name: agent.temperature for name, agent in self.team.agents.items()},
            syncs={name: self.weight_sync(name, policies.get(name)) for name in self.config.policies},
            driver=self.driver,
            share=self.share,
            checkpoints=self.checkpoints,
            console=self.console,
            profile=self.profile(),
        )
        controller.run(first_step)
        self.end(policies)

    def prepare(self, **flags: bool) -> dict[str, Any]:
        """Everything that can be refused before anything heavy starts; writes the run's settings when all of it is sound."""
        self.source = TaskSource(self.config.data, seed=self.config.seed, curriculum=self.config.curriculum)
        tasks = len(self.source)
        self.config = self.folder.config = in_steps(self.config, tasks)
        for note in notes(self.config, self.team, world=self.world):
            self.console.note(note)
        resume = self.folder.open(**flags)
        state = self.checkpoints.latest() if resume else None
        _check_reward(self.config, self.source)
        self.commits = read_commits(self.folder.path)
        folders = {
            name: self.find_model(policy.model, seed=self.config.seed, key=f"policies.{name}.model")
            for name, policy in self.config.policies.items()
        }
        config, world, machine = self.config, self.world, Machine.here(self.world)
        lines = describe(config, self.team, self.estimator, world=world, folders=folders, find=self.find_model, machine=machine)
        self.seats = machine.place(config, world=world)
        ask_engine_hosts(config, self.seats)
        self.console.start(lines)
        if resume and state is None:
            self.console.note("no checkpoint yet; starting at step 1")
        if state is not None:
            self.console.note(f"going on after step {state['step']}")
        self.served = self.serve_metrics()
        self.folder.settle()
        write_commits(self.folder.path, self.commits)
        paths = {name: str(path) for name, path in folders.items()}
        return {"state": state, "tasks": tasks, "commits": self.commits, "folders": paths}

    def serve_metrics(self) -> MetricsServer | None:
        """The endpoint of the run's numbers, where it is asked for. ConfigError: its address can't be had."""
        asked = self.config.telemetry
        if asked.metrics_port is None:
            return None
        about = {"run": self.config.name, "steps": self.config.train.steps, "stall_seconds": asked.stall_seconds}
        server = MetricsServer(asked.metrics_host, asked.metrics_port, **about)
        self.stack.callback(server.close)
        self.console.note(f"metrics at {server.url}/metrics, state at {server.url}/health")
        if not is_loopback(asked.metrics_host):
            self.console.note(f"telemetry.metrics_host is {asked.metrics_host}; whoever reaches it reads them, unasked")
        return server

    def engine_states(self) -> dict[str, EngineState]:
        """By policy; once the driver is there."""
        restarts, policies = self.driver.restarts, self.config.policies
        return {
            name: EngineState(engine.alive, restarts[name], policies[name].engine.max_restarts)
            for name, engine in self.driver.engines.items()
        }

    def find_model(self, spec: str, *, seed: int, key: str) -> Path:
        """The folder of a model, of the hub's the copy that the run began with: a newer one would be another model (I9)."""
        folder = resolve_model(spec, seed=seed, key=key, commit=self.commits.get(spec)).absolute()
        if (commit := commit_of(folder)) is not None and is_hub_name(spec):
            self.commits[spec] = commit
        return folder

    def layout(self, policy: PolicyConfig, ranks: Sequence[int]) -> PolicyGroups | None:
        sizes = {"tp": policy.tensor_parallel, "pp": policy.pipeline_parallel, "cp": policy.context_parallel}
        return self.groups.layout(**sizes, ranks=ranks)

    def build(
        self, configs: Mapping[str, PolicyConfig], folders: Mapping[str, Path], *, steps: int | None = None
    ) -> dict[str, PolicyTrainer]:
        """The policies that this rank holds. An error on the ranks of one ends the run on all."""
        policies: dict[str, PolicyTrainer] = {}

        def make() -> None:
            for name, config in configs.items():
                if self.layouts[name] is not None:
                    policies[name] = self.policy(name, config, folders[name], steps=steps)

        self.share.gather(make)
        return policies

    def policy(self, name: str, config: PolicyConfig, folder: Path, *, steps: int | None) -> PolicyTrainer:
        """With `steps`, one for that many supervised updates: without reference and critic, its loss the plain one."""
        warm = steps is not None
        total_steps = steps if warm else self.config.train.steps * self.config.train.updates_per_step
        return PolicyTrainer(
            name,
            config,
            model_path=folder,
            layout=self.layouts[name],
            seed=self.config.seed,
            total_steps=total_steps,
            agents=[agent for agent, settings in self.team.agents.items() if settings.policy == name],
            loss=LossConfig() if warm else self.config.loss.model_copy(update={"mismatch": mismatch_rule(self.config)}),
            reference=None if warm else self.reference(name, config, folder),
            critic=None if warm else self.critic(name, config, folder, total_steps),
        )

    def critic(self, name: str, config: PolicyConfig, folder: Path, total_steps: int) -> Critic | None:
        """The policy's critic, where advantages come from one."""
        if not has_critic(self.config, self.team, name):
            return None
        spec, layout, seed = config.critic.model, self.layouts[name], self.config.seed
        model = self.find_model(spec, seed=seed, key=f"policies.{name}.critic.model") if spec else folder
        return Critic(name, config, model_path=model, layout=layout, seed=seed, total_steps=total_steps)

    def reference(self, name: str, config: PolicyConfig, folder: Path) -> Reference | None:
        """The frozen model that the policy's KL term measures from, where it needs one; equal ones are loaded once."""
        if not config.trainable or config.lora is not None or (config.loss.kl or self.config.loss.kl) is None:
            return None
        spec, layout = config.reference, self.layouts[name]
        model = self.find_model(spec, seed=self.config.seed, key=f"policies.{name}.reference") if spec else folder
        how = ("dtype", "sequence_parallel", "attention", "fp8", "prefix_sharing", "tokens_per_microbatch")
        key = (model, layout.ranks, *layout.sizes().values(), *(getattr(config, each) for each in how))
        if key not in self.references:
            self.references[key] = Reference(name, config, model_path=model, layout=layout)
        return self.references[key]

    def profile(self) -> Profile:
        """Traces the steps that `telemetry.profile` asks for, on every rank; closed when the run ends, however it ends."""
        steps = self.config.telemetry.profile
        cuda = {} if host_platform.is_host() else {"nvtx": torch.cuda.nvtx, "wait": torch.cuda.synchronize}
        profile = Profile(
            Steps.parse(steps) if steps else None,
            self.folder.path / "profile",
            rank=int(os.environ.get("RANK", 0)),
            num_ranks=self.world,
            **cuda,
        )
        self.stack.callback(profile.close)
        return profile

    def weight_sync(self, name: str, policy: PolicyTrainer | None) -> WeightSync:
        """Every rank has one of every policy, whether it holds that policy or not."""
        engine = self.driver.engines[name] if self.driver else None
        ranks, folder = self.ranks[name], self.folder.path
        sync = make_sync(self.config, name, policy, engine, groups=self.groups, ranks=ranks, folder=folder)
        self.stack.callback(sync.close)
        return sync

    def warm_start(self, folders: Mapping[str, Path]) -> dict[str, Path]:
        """The folders to start from after the supervised steps, which are done once per run folder. Frozen policies stay."""
        warm = self.config.warm_start
        trained = {name: policy for name, policy in self.config.policies.items() if policy.trainable}
        targets = {name: self.folder.path / "warm_start" / name for name in trained}
        if not self.share(lambda: all((target / "config.json").is_file() for target in targets.values())):
            self.console.note(f"warm start: {warm.steps} supervised steps of {warm.batch_size} demonstrations")
            schedule = {"lr": warm.lr, "lr_schedule": "cosine", "lr_warmup_steps": warm.steps // 20, "lr_min": warm.lr / 10}
            supervised = schedule | {"loss": LossOverrides()}
            configs = {name: policy.model_copy(update=supervised) for name, policy in trained.items()}
            policies = self.build(configs, folders, steps=warm.steps)
            with ExitStack() as stack:
                teacher = Teacher(self.config, self.team, _tokenizers(folders), stack) if self.source else None
                with self.console.progress("warm start", warm.steps) as advance:
                    warm_start(warm, policies, teacher, self.share, targets, on_step=lambda: advance(1))
            del policies
            gc.collect()  # Megatron's hooks hold cycles; the optimiser's memory must be free before the next one is made
        return {**folders, **targets}

    def start_driver(self, folders: Mapping[str, Path], state: dict[str, Any] | None) -> None:
        """Engines, grader, tools, remote models and logs. Closed when the run ends, however it ends."""
        config, tokenizers = self.config, _tokenizers(folders)
        reward = make_reward(config.reward)
        self.stack.callback(reward.close)
        engines = {name: self.engine(name, policy, folders[name]) for name, policy in config.policies.items()}
        collector = Collector(
            self.team,
            engines,
            tokenizers,
            reward,
            config.rollout,
            seed=config.seed,
            tools=make_tools(config.tools),
            remotes={name: Remote(name, remote) for name, remote in config.remotes.items()},
            probes=self.estimator.probes,
        )
        self.stack.enter_context(collector)
        for engine in engines.values():
            engine.start()
        listener = self.served.write if self.served else None
        metrics = MetricsLog(self.folder.path, tensorboard=config.telemetry.tensorboard, listener=listener)
        self.stack.callback(metrics.close)
        last_step = state["step"] if state else 0
        metrics.truncate_after(last_step)
        keep_alarms_until(self.folder.path, last_step)
        alarms = Alarms(config.telemetry.alarms)
        alarms.replay(read_metrics(self.folder.path))
        self.driver = Driver(
            config,
            source=self.source,
            collector=collector,
            engines=engines,
            tokenizers=tokenizers,
            run_dir=self.folder.path,
            metrics=metrics,
            alarms=alarms,
            console=self.console,
            gpus=self.gpus,
            peaks={
                name: device_peak(config.policies[name]).flops_per_second * len(ranks) for name, ranks in self.ranks.items()
            },
        )
        if state:
            self.driver.feed.restore(state["driver"])
        if self.served:
            self.served.watch(self.engine_states, lambda: max(self.checkpoints.steps(), default=None))
        self.driver.handle_interrupts()

    def engine(self, name: str, policy: PolicyConfig, folder: Path) -> Engine:
        """The policy's engine or engines, not started yet."""
        engine = open_engine(
            name,
            policy.engine,
            model_path=folder,
            log_dir=self.folder.path / "logs",
            seed=self.config.seed,
            deterministic=self.config.rollout.deterministic,
            seats=self.seats[name],
            cluster=self.config.cluster,
            lora=policy.lora if policy.syncs_adapters else None,
        )
        self.stack.callback(engine.close)
        return engine

    def end(self, policies: Mapping[str, PolicyTrainer]) -> None:
        """Export, report, and say where everything is. CheckpointError: the run's end isn't saved, or can't be exported."""
        folder, troubles = self.folder.path, []
        places = {"metrics": folder / "metrics.jsonl"}
        try:
            self.checkpoints.finish()
        except CheckpointError as error:
            troubles.append(str(error))
        if self.config.checkpoint.export:
            try:
                self.share.gather(lambda: self.export(policies))
                places |= {f"model {name}": folder / "export" / name for name in self.config.policies}
            except CheckpointError as error:
                troubles.append(str(error))
        if self.driver and self.config.telemetry.report:
            places["report"] = write_report(folder)
        self.console.end(places)
        if troubles:
            raise CheckpointError("; ".join(troubles))

    def export(self, policies: Mapping[str, PolicyTrainer]) -> None:
        for name, policy in policies.items():
            target = self.folder.path / "export" / name
            try:
                policy.export(target)
            except OSError as error:
                raise CheckpointError(f"{target} can't be written: {error}") from error


def _check_reward(config: RunConfig, source: TaskSource) -> None:
    data = config.eval.data
    check_reward(config.reward, source.examples(), lambda: TaskSource(data, seed=config.seed).examples() if data else [])


def _tokenizers(folders: Mapping[str, Path]) -> dict[str, Any]:
    return {name: load_tokenizer(name, folder) for name, folder in folders.items()}
