"""Evaluate a team: its episodes on tasks without any training, and again with one agent at a time on its base model.

    tasks -> the team's engines -> Scores                                               drmas eval RECIPE_OR_RUN
          -> an agent's model replaced by its base -> Scores, and the difference, task by task

Sampler, rewards, tools and seeds are those of training; a seed is a function of the run's, step 0, task, sample, agent and turn
(I9). No trainer is built, and Megatron isn't even imported. Called by the command `eval`:

    result = evaluate(config, {"main": folder}, output=Path("runs/tiny-eval"), console=Console())
    result.team.measures()["pass@4"]["micro"].value
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, check_policies, check_tools, load_team
from drmas.config.load import dump
from drmas.config.schema import RunConfig
from drmas.core.names import expected_names
from drmas.core.statistics import LEVEL
from drmas.envs.rewards import Reward, check_reward, make_reward
from drmas.envs.source import TaskSource
from drmas.envs.tasks import open_tasks
from drmas.errors import ConfigError, DataError, RolloutError
from drmas.rollout.collector import Collector
from drmas.rollout.engine import Sampling
from drmas.rollout.remote import Remote
from drmas.runtime.eval_engines import EngineFactory, Engines, Voice, training_engine
from drmas.runtime.gpus import check_fractions
from drmas.runtime.machine import Machine
from drmas.runtime.models import load_tokenizer, resolve_model
from drmas.runtime.preflight import ask_engine_hosts
from drmas.runtime.scores import SOLVED_AT, Scores
from drmas.runtime.tools import make_tools
from drmas.telemetry.console import Console
from drmas.telemetry.environment import write_environment
from drmas.telemetry.episodes import write_episodes
from drmas.telemetry.sinks import replace_text
from drmas.types import Episode, Task, rows_of

ALL = "all"
"""In `eval.ablate`: every agent whose model isn't its base."""
SETTINGS = "settings.json"
"""The evaluation's configuration, itself a recipe."""
MARKER, MARK = "drmas-eval.json", {"folder of": "drmas eval"}
"""The file, and what it says, by which a folder is known as an evaluation's, whose results the next one replaces. It is there
before anything else is, so that a killed evaluation's folder is known too."""
RESULTS = ("eval.json", "eval.md", "episodes", "without", "logs")


@dataclass(frozen=True)
class EvalResult:
    """`without`: agent -> the scores of the team in which that agent spoke with its base model."""

    config: RunConfig
    tasks: int
    team: Scores
    without: dict[str, Scores]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON's types; an interval is an object with value, low and high.

        `gain` of an ablation is the whole team minus it, task by task: what the agent's training is worth to the team.
        """
        settings = self.config.eval
        without = {agent: scores.to_dict() | {"gain": self.team.gain(scores)} for agent, scores in self.without.items()}
        return _plain(
            {
                "name": self.config.name,
                "seed": self.config.seed,
                "data": settings.data or self.config.data,
                "training_data": settings.data is None,
                "tasks": self.tasks,
                "samples": settings.samples,
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "solved_at": SOLVED_AT,
                "level": LEVEL,
                "seconds": self.seconds,
                "team": self.team.to_dict(),
                "without": without,
            }
        )


def evaluate(
    config: RunConfig,
    models: Mapping[str, Path],
    *,
    output: Path,
    console: Console,
    make: EngineFactory = training_engine,
) -> EvalResult:
    """Run the evaluation that `config.eval` describes. `models`: policy -> the Hugging Face folder of the weights to evaluate.

    Episodes go to `output`/episodes, those of an ablation to `output`/without/AGENT/episodes, as soon as they are there; what
    an earlier evaluation left in the folder is gone once this one starts. UserError kinds for what the user can mend;
    RolloutError: all episodes failed, and why the first one did.
    """
    started = time.perf_counter()
    team = load_team(config.team)
    check_policies(team, [*config.policies, *config.remotes])
    check_tools(team, config.tools)
    teams = {"": team} | {agent: _changed(team, agent, policy=_base_of(team, agent)) for agent in ablated(config, team, models)}
    voices = _voices(config, models, teams.values())
    tokenizers = {name: load_tokenizer(name, voice.folder) for name, voice in voices.items()}
    tasks = eval_tasks(config)
    check_reward(config.reward, list({task.source: task for task in tasks}.values()), lambda: _examples(config))
    _prepare(output, config)
    plan = [_spoken(each) & voices.keys() for each in teams.values()]
    scores = {}
    with closing(make_reward(config.reward)) as reward, Engines(make, voices, config, output / "logs", plan=plan) as engines:
        for agent, each in teams.items():
            title, folder = (f"without {agent}", output / "without" / agent) if agent else ("team", output)
            play = _Play(config, each, engines, {name: tokenizers[name] for name in _spoken(each) & voices.keys()}, reward)
            episodes = play.run(tasks, console, title)
            write_episodes(folder, 0, episodes, tokenizers, _NoAdvantages([None] * len(rows_of(episodes))))
            scores[agent] = play.scores(episodes)
            if not scores[agent].finished:
                first = episodes[0].failure
                raise RolloutError(
                    f"all {len(episodes)} episodes ({title}) failed; the first with {first.kind}: {first.message}"
                )
    return EvalResult(config, len(tasks), scores.pop(""), scores, time.perf_counter() - started)


def eval_tasks(config: RunConfig) -> list[Task]:
    """The tasks of `eval.data`, or of the run's own data, each of them once: the first `eval.max_tasks` in the order of
    training (in a mix, in its shares), all of them if unset. DataError or ConfigError: there are no such tasks."""
    data, most = config.eval.data or config.data, config.eval.max_tasks
    every = open_tasks(data)
    if most is None or most >= len(every):
        return every
    first_time, source, tasks = {task.id for task in every}, TaskSource(data, seed=config.seed), []
    while len(tasks) < most:
        tasks += [task for task in source.take(1) if task.id in first_time]
    return tasks


def _examples(config: RunConfig) -> list[Task] | None:
    """A task of each source that the configuration has; None where its data can't be read, as those of training needn't be."""
    sections = [data for data in (config.data, config.eval.data) if data]
    try:
        return [task for data in sections for task in TaskSource(data, seed=config.seed).examples()]
    except DataError:
        return None


def ablated(config: RunConfig, team: TeamConfig, models: Mapping[str, Path]) -> list[str]:
    """The agents that `eval.ablate` asks for. ConfigError: no such agent, or one whose model is its base already."""
    agents, asked = team.agents, list(dict.fromkeys(config.eval.ablate))
    if ALL in asked and ALL not in agents:
        found = [agent for agent, settings in agents.items() if _trained(config, models, settings.policy)]
        if not found:
            raise ConfigError("eval.ablate is all, and every agent speaks with its base model; evaluate trained models")
        return found
    for agent in asked:
        if agent not in agents:
            raise ConfigError(f"eval.ablate names the agent {agent!r}; {expected_names(agent, [*agents, ALL])}")
        policy = agents[agent].policy
        if policy in config.remotes:
            raise ConfigError(f"eval.ablate names {agent}, which speaks with the remote model {policy}; it has no base model")
        if not _trained(config, models, policy):
            raise ConfigError(
                f"eval.ablate names {agent}, whose policy {policy} is at its base {config.policies[policy].model} already; "
                f"evaluate a run, or give --model {policy}=FOLDER"
            )
    return asked


def check_output(folder: Path) -> None:
    """ConfigError where something is in the folder that no evaluation left there."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not _is_marked(folder))):
        raise ConfigError(f"{folder} is there and holds no evaluation; give another --output")


def _is_marked(folder: Path) -> bool:
    try:
        return json.loads((folder / MARKER).read_bytes()) == MARK
    except (OSError, ValueError):
        return False


def _prepare(output: Path, config: RunConfig) -> None:
    check_output(output)
    output.mkdir(parents=True, exist_ok=True)
    replace_text(output / MARKER, json.dumps(MARK) + "\n")
    for name in RESULTS:
        left = output / name
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    (output / SETTINGS).write_text(dump(config))
    write_environment(output)


class _Play:
    """One team's episodes."""

    def __init__(
        self, config: RunConfig, team: TeamConfig, engines: Engines, tokenizers: Mapping[str, Any], reward: Reward
    ) -> None:
        team = _at_temperature(team, config.eval.temperature)
        self._config, self._team, self._engines = config, team, engines
        self._remotes = {name: _Metered(Remote(name, config.remotes[name])) for name in _spoken(team) & config.remotes.keys()}
        self._collector = Collector(
            team,
            engines.take(tokenizers.keys()),
            tokenizers,
            reward,
            config.rollout.model_copy(update={"group_size": config.eval.samples, "max_staleness": 0, "carry_over": False}),
            seed=config.seed,
            tools=make_tools(config.tools),
            remotes=self._remotes,
            sampling=self._sampling,
        )

    def run(self, tasks: Sequence[Task], console: Console, title: str) -> list[Episode]:
        """RolloutError: a tool isn't there, or an engine died more often than it may."""
        with closing(self._collector) as collector:
            collector.start()
            self._engines.start()
            with console.progress(title, len(tasks) * self._config.eval.samples) as advance:
                rollout = collector.rollout(tasks, step=0, on_progress=lambda episode: advance(1))
                collector.submit([rollout])
                while not collector.wait(lambda: rollout.done):
                    for name in sorted(collector.dead):
                        console.note(self._engines.restart(name))
                        collector.revive(name)
        return rollout.episodes

    def scores(self, episodes: Sequence[Episode]) -> Scores:
        config = self._config
        prices = {name: policy.price_per_million_tokens for name, policy in (config.policies | config.remotes).items()}
        prices |= {_base(name): price for name, price in prices.items()}
        return Scores(
            episodes,
            agents=list(self._team.agents),
            samples=config.eval.samples,
            prices=prices,
            remote_tokens={key: count for remote in self._remotes.values() for key, count in remote.tokens.items()},
            bootstrap=config.eval.bootstrap,
            seed=config.seed,
        )

    def _sampling(self, agent: AgentConfig) -> Sampling:
        top_p = self._config.eval.top_p
        return Sampling(max_tokens=agent.max_tokens, temperature=agent.temperature, stop=agent.stop, top_p=top_p)


class _Metered:
    """A remote model that notes the tokens of every answered request, as its server counts them: key -> (read, written)."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.tokens: dict[str, tuple[int, int]] = {}

    async def start(self) -> None:
        await self._remote.start()

    async def ask(self, agent: AgentConfig, messages: Sequence[Any], *, seed: int, key: str) -> Any:
        answer = await self._remote.ask(agent, messages, seed=seed, key=key)
        if answer.prompt_tokens:
            self.tokens[key] = (answer.prompt_tokens, answer.response_tokens)
        return answer

    async def close(self) -> None:
        await self._remote.close()


@dataclass(frozen=True)
class _NoAdvantages:
    """What the file of episodes gets in the place of advantages: nobody computed any."""

    values: list[None]
    segments: tuple[()] = ()
    anchors: tuple[()] = ()


def _base(policy: str) -> str:
    """The name of the engine of a policy's base model; no policy can be called so."""
    return f"base of {policy}"


def _base_of(team: TeamConfig, agent: str) -> str:
    return _base(team.agents[agent].policy)


def _base_folder(config: RunConfig, policy: str) -> Path:
    return resolve_model(config.policies[policy].model, seed=config.seed, key=f"policies.{policy}.model").absolute()


def _trained(config: RunConfig, models: Mapping[str, Path], policy: str) -> bool:
    return policy in models and models[policy].resolve() != _base_folder(config, policy).resolve()


def _spoken(team: TeamConfig) -> set[str]:
    return {settings.policy for settings in team.agents.values()}


def _voices(config: RunConfig, models: Mapping[str, Path], teams: Iterable[TeamConfig]) -> dict[str, Voice]:
    """What the engines serve that these teams need, and where.

    ConfigError: there are too few GPUs for them, or engines that speak in one team want more than a whole one.
    """
    spoken = [_spoken(team) for team in teams]
    everyone = set().union(*spoken)
    used = {name: policy for name, policy in config.policies.items() if {name, _base(name)} & everyone}
    seats = Machine.here(0).place(config.model_copy(update={"policies": used}), world=0)
    ask_engine_hosts(config, seats)
    for names in spoken:
        speaking = {name: policy.engine for name, policy in used.items() if {name, _base(name)} & names}
        check_fractions(speaking, seats)
    voices = {}
    for name, policy in used.items():
        if name in everyone:
            voices[name] = Voice(name, policy.engine, models[name], seats[name])
        if _base(name) in everyone:
            voices[_base(name)] = Voice(name, policy.engine, _base_folder(config, name), seats[name])
    return voices


def _changed(team: TeamConfig, agent: str, **changes: Any) -> TeamConfig:
    """The team with other settings of one agent, that of a sub-team included (`inner.solver`)."""
    field, _, rest = agent.partition(".")
    held = getattr(team, field)
    return team.model_copy(update={field: _changed(held, rest, **changes) if rest else held.model_copy(update=changes)})


def _at_temperature(team: TeamConfig, temperature: float | None) -> TeamConfig:
    for agent in team.agents if temperature is not None else ():
        team = _changed(team, agent, temperature=temperature)
    return team


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value):
        return asdict(value)
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value
