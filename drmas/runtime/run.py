"""Set a run up, hand it to the controller, and clean up after it, whatever happens.

`train` is what `drmas train` calls on every rank. What exists once (the run's folder, engines, grader, logs) is rank 0's; its
errors reach every rank through `share`. Engines are children of rank 0 and die with it.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drmas.agents.team import TeamConfig, check_policies, load_team
from drmas.config.schema import PolicyConfig, RunConfig
from drmas.core.advantages import AdvantageRule, resolve
from drmas.envs.rewards import make_reward
from drmas.envs.source import TaskSource
from drmas.errors import ModelError
from drmas.policy.broadcast import Broadcast
from drmas.policy.groups import Groups, destroy, init_distributed
from drmas.policy.host_platform import set_threads
from drmas.policy.trainer import PolicyTrainer
from drmas.rollout.collector import Collector
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.controller import Controller
from drmas.runtime.driver import Driver
from drmas.runtime.folder import RunFolder
from drmas.runtime.models import resolve_model
from drmas.runtime.placement import check, describe
from drmas.runtime.resume import Checkpoints, Share
from drmas.runtime.warm_start import Teacher, warm_start
from drmas.telemetry.console import Console
from drmas.telemetry.report import write_report
from drmas.telemetry.sinks import MetricsLog
from drmas.weights.sync import WeightSync


def train(config: RunConfig, *, resume: bool = False, overwrite: bool = False, dry_run: bool = False) -> Path:
    """Run the whole job; returns the run's folder. Raises UserError kinds for what the user can mend."""
    team = load_team(config.team)
    rule = resolve(**config.advantage.model_dump(exclude_none=True))
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    console = Console(quiet=rank != 0)
    if unused := check_policies(team, config.policies):
        console.note(f"no agent uses the policy {', '.join(unused)}; it costs memory and does nothing")
    check(config, team, world=world)
    if dry_run:
        TaskSource(config.data, seed=config.seed)
        console.start(describe(config, team, rule, world=world, folders=_folders(config)))
        return Path(config.output) / config.name
    if rank != 0:  # the first interrupt ends the run after its step, by rank 0's word; torchrun sends it to every rank
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ExitStack() as stack:
        set_threads(config.train.threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        init_distributed()
        stack.callback(destroy)
        folder = RunFolder(config)
        if rank == 0:
            stack.callback(folder.close)
        Job(config, team, rule, Broadcast(), folder, console, stack).run(resume=resume, overwrite=overwrite, world=world)
    return folder.path


class Job:
    """One run's parts, in the order in which they come to life. Every rank has one; `source` and `driver` are rank 0's."""

    def __init__(
        self,
        config: RunConfig,
        team: TeamConfig,
        rule: AdvantageRule,
        share: Share,
        folder: RunFolder,
        console: Console,
        stack: ExitStack,
    ) -> None:
        self.config, self.team, self.rule, self.share = config, team, rule, share
        self.folder, self.console, self.stack = folder, console, stack
        self.checkpoints = Checkpoints(folder.path, team, share, keep=config.checkpoint.keep)
        self.groups = Groups()
        self.source: TaskSource | None = None
        self.driver: Driver | None = None

    def run(self, *, resume: bool, overwrite: bool, world: int) -> None:
        start = self.share(lambda: self.prepare(resume=resume, overwrite=overwrite, world=world))
        state, folders = start["state"], {name: Path(path) for name, path in start["folders"].items()}
        if self.config.warm_start:
            folders = self.warm_start(folders)
        policies = {name: self.policy(name, policy, folders[name]) for name, policy in self.config.policies.items()}
        first_step = 1
        if state:
            self.checkpoints.load(state["step"], policies)
            first_step = state["step"] + 1
            if first_step > self.config.train.steps:
                self.console.note(f"the run is at step {state['step']} already; --train.steps N makes it longer")
        self.share(lambda: self.start_driver(folders, state))
        controller = Controller(
            self.config,
            rule=self.rule,
            policies=policies,
            temperatures={name: agent.temperature for name, agent in self.team.agents.items()},
            syncs={name: self.weight_sync(name, policy) for name, policy in policies.items()},
            driver=self.driver,
            share=self.share,
            checkpoints=self.checkpoints,
            console=self.console,
        )
        controller.run(first_step)
        self.end(policies)

    def prepare(self, *, resume: bool, overwrite: bool, world: int) -> dict[str, Any]:
        """Everything that can be refused before anything heavy starts; writes the run's settings when all of it is sound."""
        self.folder.open(resume=resume, overwrite=overwrite)
        state = self.checkpoints.latest() if resume else None
        self.source = TaskSource(self.config.data, seed=self.config.seed)
        folders = _folders(self.config)
        self.console.start(describe(self.config, self.team, self.rule, world=world, folders=folders))
        if resume and state is None:
            self.console.note("no checkpoint yet; starting at step 1")
        self.folder.settle()
        return {"state": state, "folders": {name: str(path) for name, path in folders.items()}}

    def policy(self, name: str, config: PolicyConfig, folder: Path, *, steps: int | None = None) -> PolicyTrainer:
        return PolicyTrainer(
            name,
            config,
            model_path=folder,
            groups=self.groups,
            seed=self.config.seed,
            total_steps=steps or self.config.train.steps * self.config.train.updates_per_step,
            agents=[agent for agent, settings in self.team.agents.items() if settings.policy == name],
            loss=self.config.loss,
        )

    def weight_sync(self, name: str, policy: PolicyTrainer) -> WeightSync:
        engine = self.driver.engines[name] if self.driver else None
        sync = WeightSync(engine, policy.weight_source(), is_sender=self.driver is not None)
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
            policies = {
                name: self.policy(name, policy.model_copy(update=schedule), folders[name], steps=warm.steps)
                for name, policy in trained.items()
            }
            with ExitStack() as stack:
                teacher = Teacher(self.config, self.team, _tokenizers(folders), stack) if self.source else None
                with self.console.progress("warm start", warm.steps) as advance:
                    warm_start(warm, policies, teacher, self.share, targets, on_step=lambda: advance(1))
            del policies
            gc.collect()  # Megatron's hooks hold cycles; the optimiser's memory must be free before the next one is made
        return {**folders, **targets}

    def start_driver(self, folders: Mapping[str, Path], state: dict[str, Any] | None) -> None:
        """Engines, grader and logs. Closed when the run ends, however it ends."""
        config, tokenizers = self.config, _tokenizers(folders)
        reward = make_reward(config.reward)
        self.stack.callback(reward.close)
        engines = {}
        for name, policy in config.policies.items():
            engines[name] = VllmEngine(
                name,
                policy.engine,
                model_path=folders[name],
                log_dir=self.folder.path / "logs",
                seed=config.seed,
                deterministic=config.rollout.deterministic,
            )
            self.stack.callback(engines[name].close)
            engines[name].start()
        metrics = MetricsLog(self.folder.path, tensorboard=config.telemetry.tensorboard)
        self.stack.callback(metrics.close)
        metrics.truncate_after(state["step"] if state else 0)
        if state:
            self.source.restore(state["driver"]["source"])
        self.driver = Driver(
            config,
            source=self.source,
            collector=Collector(self.team, engines, tokenizers, reward, config.rollout, seed=config.seed),
            engines=engines,
            tokenizers=tokenizers,
            run_dir=self.folder.path,
            metrics=metrics,
            console=self.console,
        )
        self.driver.handle_interrupts()

    def end(self, policies: Mapping[str, PolicyTrainer]) -> None:
        """Export, report, and say where everything is."""
        folder = self.folder.path
        places = {"metrics": folder / "metrics.jsonl"}
        if self.config.checkpoint.export:
            for name, policy in policies.items():
                policy.export(folder / "export" / name)
                places[f"model {name}"] = folder / "export" / name
        if self.driver and self.config.telemetry.report:
            places["report"] = write_report(folder)
        self.console.end(places)


def _folders(config: RunConfig) -> dict[str, Path]:
    return {name: resolve_model(policy.model, seed=config.seed).absolute() for name, policy in config.policies.items()}


def _tokenizers(folders: Mapping[str, Path]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizers = {}
    for name, folder in folders.items():
        try:
            tokenizers[name] = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ModelError(f"policies.{name}.model: {folder} has no usable tokenizer: {error}") from error
    return tokenizers
