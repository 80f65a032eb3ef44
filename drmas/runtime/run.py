"""Set a run up, hand it to the controller, and clean up after it, whatever happens.

`train` is what `drmas train` calls on every rank. Engines are children of rank 0 and die with it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from drmas.agents.team import TeamConfig, check_policies, load_team
from drmas.config.load import dump
from drmas.config.schema import PolicyConfig, RunConfig
from drmas.core.advantages import resolve
from drmas.envs.rewards import make_reward
from drmas.envs.source import TaskSource
from drmas.errors import ConfigError
from drmas.policy.broadcast import Broadcast
from drmas.policy.groups import Groups, destroy, init_distributed
from drmas.policy.host_platform import set_threads
from drmas.policy.trainer import PolicyTrainer
from drmas.rollout.collector import Collector
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.controller import Controller
from drmas.runtime.driver import Driver
from drmas.runtime.models import resolve_model
from drmas.runtime.placement import describe
from drmas.runtime.resume import Checkpoints
from drmas.runtime.warm_start import Teacher, warm_start
from drmas.telemetry.console import Console
from drmas.telemetry.environment import write_environment
from drmas.telemetry.report import write_report
from drmas.telemetry.sinks import MetricsLog
from drmas.weights.sync import WeightSync


def train(config: RunConfig, *, resume: bool = False, overwrite: bool = False, dry_run: bool = False) -> Path:
    """Run the whole job; returns the run's folder. Raises UserError kinds for what the user can mend."""
    team = load_team(config.team)
    unused = check_policies(team, config.policies)
    rule = resolve(**config.advantage.model_dump(exclude_none=True))
    run_dir = Path(config.output) / config.name
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    console = Console(quiet=rank != 0)
    if unused:
        console.note(f"no agent uses the policy {', '.join(unused)}; it costs memory and does nothing")
    if dry_run:
        console.start(describe(config, team, rule, world=world, folders=_folders(config)))
        return run_dir
    if rank == 0:
        prepare_folder(run_dir, resume=resume, overwrite=overwrite)
    with ExitStack() as stack:
        set_threads(config.train.threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        init_distributed()
        stack.callback(destroy)
        share = Broadcast(timedelta(seconds=10 * config.rollout.episode_timeout_seconds))
        Job(config, team, share, run_dir, console, stack, is_lead=rank == 0).run(rule, world, resume=resume)
    return run_dir


def prepare_folder(run_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """Make the run's folder, or refuse one that holds another run."""
    if overwrite and not resume:
        shutil.rmtree(run_dir, ignore_errors=True)
    elif (run_dir / "config.json").exists() and not resume:
        raise ConfigError(
            f"{run_dir} holds a run already; --resume continues it, --overwrite deletes it, --name NAME writes elsewhere"
        )
    run_dir.mkdir(parents=True, exist_ok=True)


class Job:
    """One run's parts, in the order in which they come to life. Every rank has one; rank 0's also drives the rollouts."""

    def __init__(
        self,
        config: RunConfig,
        team: TeamConfig,
        share: Callable[[Any], Any],
        run_dir: Path,
        console: Console,
        stack: ExitStack,
        *,
        is_lead: bool,
    ) -> None:
        self.config, self.team, self.share, self.run_dir = config, team, share, run_dir
        self.console, self.stack, self.is_lead = console, stack, is_lead
        self.checkpoints = Checkpoints(run_dir, config, share, is_lead=is_lead)
        self.groups = Groups()

    def run(self, rule: Any, world: int, *, resume: bool) -> None:
        state = self.share(self.checkpoints.read() if self.is_lead and resume else None)
        folders = {name: Path(path) for name, path in self.share(self._model_folders()).items()}
        if self.is_lead:
            (self.run_dir / "config.json").write_text(dump(self.config))
            write_environment(self.run_dir)
            self.console.start(describe(self.config, self.team, rule, world=world, folders=folders))
        if self.config.warm_start:
            folders = self.warm_start(folders)
        policies = {name: self.policy(name, policy, folders[name]) for name, policy in self.config.policies.items()}
        if state:
            self.checkpoints.load(state["step"], policies)
        driver = self.driver(folders, state) if self.is_lead else None
        syncs = {
            name: WeightSync(driver.engines[name] if driver else None, policy.weight_source(), is_sender=self.is_lead)
            for name, policy in policies.items()
        }
        controller = Controller(
            self.config,
            rule=rule,
            policies=policies,
            temperatures={name: agent.temperature for name, agent in self.team.agents.items()},
            syncs=syncs,
            driver=driver,
            share=self.share,
            checkpoints=self.checkpoints,
        )
        for policy in policies.values():
            if policy.version:  # a resumed policy: its engine still holds the model folder's weights
                controller.sync(policy)
        controller.run(state["step"] + 1 if state else 1)
        self.end(policies)

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

    def warm_start(self, folders: Mapping[str, Path]) -> dict[str, Path]:
        """The folders to start from after the supervised steps; done once per run folder."""
        warm = self.config.warm_start
        targets = {name: self.run_dir / "warm_start" / name for name in folders}
        if self.share(all((target / "config.json").is_file() for target in targets.values())):
            return targets
        schedule = {"lr": warm.lr, "lr_schedule": "cosine", "lr_warmup_steps": warm.steps // 20, "lr_min": warm.lr / 10}
        policies = {
            name: self.policy(name, policy.model_copy(update=schedule), folders[name], steps=warm.steps)
            for name, policy in self.config.policies.items()
        }
        with ExitStack() as stack:
            teacher = None
            if self.is_lead:
                reward = make_reward(self.config.reward)
                stack.callback(reward.close)
                source = TaskSource(self.config.data, seed=self.config.seed + 1)
                teacher = Teacher(self.config, self.team, _tokenizers(folders), source, reward)
            with self.console.progress("warm start", warm.steps) as advance:
                warm_start(warm, policies, teacher, self.share, targets, lambda step, loss: advance(1))
        return targets

    def driver(self, folders: Mapping[str, Path], state: dict[str, Any] | None) -> Driver:
        """Engines, grader, tasks and logs: what only rank 0 has. Closed when the run ends, however it ends."""
        config, tokenizers = self.config, _tokenizers(folders)
        reward = make_reward(config.reward)
        self.stack.callback(reward.close)
        engines = {}
        for name, policy in config.policies.items():
            engines[name] = VllmEngine(
                name,
                policy.engine,
                model_path=folders[name],
                log_dir=self.run_dir / "logs",
                seed=config.seed,
                deterministic=config.rollout.deterministic,
            )
            self.stack.callback(engines[name].close)
            engines[name].start()
        source = TaskSource(config.data, seed=config.seed)
        metrics = MetricsLog(self.run_dir, tensorboard=config.telemetry.tensorboard)
        self.stack.callback(metrics.close)
        if state:
            source.restore(state["driver"]["source"])
            metrics.truncate_after(state["step"])
        driver = Driver(
            config,
            source=source,
            collector=Collector(self.team, engines, tokenizers, reward, config.rollout, seed=config.seed),
            engines=engines,
            tokenizers=tokenizers,
            run_dir=self.run_dir,
            metrics=metrics,
            console=self.console,
        )
        driver.handle_interrupts()
        return driver

    def end(self, policies: Mapping[str, PolicyTrainer]) -> None:
        """Export, report, and say where everything is."""
        places = {"metrics": self.run_dir / "metrics.jsonl"}
        if self.config.checkpoint.export:
            for name, policy in policies.items():
                policy.export(self.run_dir / "export" / name)
                places[f"model {name}"] = self.run_dir / "export" / name
        if self.is_lead:
            if self.config.telemetry.report:
                places["report"] = write_report(self.run_dir)
            self.console.end(places)

    def _model_folders(self) -> dict[str, str]:
        if not self.is_lead:
            return {}
        return {name: str(path) for name, path in _folders(self.config).items()}


def _folders(config: RunConfig) -> dict[str, Path]:
    return {name: resolve_model(policy.model, seed=config.seed).absolute() for name, policy in config.policies.items()}


def _tokenizers(folders: Mapping[str, Path]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}
