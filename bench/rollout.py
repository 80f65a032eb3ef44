"""What the collector costs and saves: `python bench/rollout.py [scripted] [concurrent] [overhead] [vllm]`, all by default.

    scripted     a step of the search team with long-tailed answers: wall time beside a loop with barriers, and its lower bound
    concurrent   10,000 episodes at the same time: episodes per second, memory per episode
    overhead     CPU time per turn of our own work: templates, tokens, parsers, bookkeeping
    vllm         generated tokens per second through the collector beside the same requests as one flat batch

Each part is a process of its own and prints one table; what has a bound says whether it was reached. Exit status 1 where one
was missed. Compare ratios: they are of one run. `vllm` wants a quiet machine. `--json PATH` keeps the tables of all parts.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages

from transformers import AutoTokenizer

from bench.schedules import critical_seconds, lockstep_seconds, plan, run_lockstep
from bench.suite.record import Ratio, Result, Table, about, add_json
from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, load_team
from drmas.agents.tools import Toolbox
from drmas.config.load import load
from drmas.config.schema import RolloutConfig, RunConfig
from drmas.core.seeds import sample_seed
from drmas.envs.rewards import make_reward
from drmas.rollout.collector import Collector
from drmas.rollout.engine import Engine, Sampling
from drmas.rollout.scripted import ScriptedEngine
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import PACKAGED, resolve_model
from drmas.types import Episode, Task, Turn

PARTS = ("scripted", "concurrent", "overhead", "vllm")
CPU_BOUND_MS = 1.0
SLEEPS = "nearly all of the time is slept by a fixed plan; the rest is our own work, at the mercy of what else runs"
DECODES = "two engines decode on the same cores in turn; other work on the machine hits the one or the other"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table. `bound`: the most that `value` may be; with `at_least`, the least."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    at_least: bool = False
    tolerance: float = 0.0
    """Of a ratio: the share by which another run's may be worse. Lines without one are no ratios."""
    why: str = ""

    @property
    def ratio(self) -> Ratio | None:
        if not self.tolerance:
            return None
        better = "higher" if self.at_least else "lower"
        given = {"tolerance": self.tolerance, "why": self.why, "target": self.bound}
        return Ratio(name=self.name, value=self.value, better=better, **given)

    @property
    def missed(self) -> bool:
        if self.bound is None:
            return False
        return self.value < self.bound if self.at_least else self.value > self.bound

    def __str__(self) -> str:
        text = f"  {self.name:44} {self.value:10.3f} {self.unit:12}"
        if self.bound is None:
            return text.rstrip()
        return f"{text} {'>=' if self.at_least else '<='} {self.bound:g}  {'missed' if self.missed else 'reached'}"


Part = tuple[str, list[Line]]
"""What was measured, and its numbers."""


class Lookup:
    """A search tool in this process that finds the same short passage at once."""

    timeout_seconds = 10.0
    specs = (
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Look something up.",
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
            },
        },
    )

    async def start(self) -> None: ...

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        return "Tungsten is the element with the number 74.", True

    async def close(self) -> None: ...


class Pair(TeamConfig):
    """Two turns: one drafts, the other improves."""

    writer: AgentConfig = AgentConfig(prompt="{question}", max_tokens=64)
    critic: AgentConfig = AgentConfig(prompt="{question}\n\nA draft:\n{draft}\n\nImprove it.", max_tokens=64)

    async def run(self, task: Task, agents: Any) -> str | None:
        draft = await agents.writer(question=task.question)
        return (await agents.critic(question=task.question, draft=draft.text)).text


async def no_reward(task: Task, answer: str | None) -> float:
    return 0.0


def search_step(tokenizer: Any, tasks: int, samples: int, *, median: float, sigma: float, seed: int) -> tuple[list[Line], int]:
    """The table of `scripted`, and how many calls were made by either loop."""
    team = load_team({"name": "search-router"})
    questions = [Task(id=f"t{i}", question=f"Which element has the number {i}?", truth="") for i in range(tasks)]
    names = [Episode(task=task, sample=sample).id for task in questions for sample in range(samples)]
    plans = plan(names, rounds=team.rounds, median=median, sigma=sigma, seed=seed)
    calls = {call.key: call for planned in plans.values() for call in planned}
    searches = {name: sum(call.agent == "searcher" for call in planned) for name, planned in plans.items()}

    def answer(prompt: str, key: str) -> str:
        call, episode = calls[key], key.rsplit("/", 2)[0]
        if call.agent == "router":
            return f"<verdict>{'search' if call.round < searches[episode] else 'answer'}</verdict>"
        return "<search>element 74</search>" if call.agent == "searcher" else "<answer>tungsten</answer>"

    engine = ScriptedEngine(
        tokenizer, answer, deterministic=False, max_model_tokens=4096, seconds=lambda prompt, key: calls[key].seconds
    )
    options = RolloutConfig(tasks_per_step=tasks, group_size=samples, deterministic=False)
    collector = Collector(
        team, {"main": engine}, {"main": tokenizer}, no_reward, options, seed=seed, tools=Toolbox({"search": Lookup()})
    )
    with collector:
        ours, episodes = timed(lambda: collector.collect(questions, step=0))
    check(episodes)
    theirs, count = timed(lambda: asyncio.run(run_lockstep(plans)))
    turns = sum(len(episode.turns) for episode in episodes)
    if turns != count:
        raise SystemExit(f"the collector made {turns} calls, the loop with barriers {count}; expected as many")
    bound = critical_seconds(plans)
    return [
        Line("collector", ours, "s"),
        Line("loop with barriers, run", theirs, "s"),
        Line("loop with barriers, computed", lockstep_seconds(plans), "s"),
        Line("longest episode, computed", bound, "s"),
        Line("collector / loop with barriers", ours / theirs, "", 0.5, tolerance=0.1, why=SLEEPS),
        Line("collector / longest episode", ours / bound, "", 1.1, tolerance=0.1, why=SLEEPS),
    ], turns


def scripted(args: argparse.Namespace) -> Part:
    lines, turns = search_step(smollm2(), args.tasks, 4, median=0.15, sigma=1.0, seed=0)
    return (
        f"{4 * args.tasks} episodes of search-router, {turns} calls; seconds of a call: lognormal, median 0.15, sigma 1",
        lines,
    )


def concurrent(args: argparse.Namespace) -> Part:
    count, tokenizer = args.episodes, smollm2()
    draw = random.Random(0)
    seconds = {f"t{i}#0": draw.lognormvariate(math.log(8.0), 0.2) for i in range(count)}
    open_now, most = set(), 0

    def delay(prompt: str, key: str) -> float:
        nonlocal most
        episode = key.rsplit("/", 2)[0]
        open_now.add(episode)
        most = max(most, len(open_now))
        return seconds[episode]

    answer = "A short answer of a few words."
    engine = ScriptedEngine(tokenizer, lambda prompt, key: answer, deterministic=False, seconds=delay)
    options = RolloutConfig(group_size=1, max_concurrent_episodes=count, deterministic=False)
    tasks = [Task(id=f"t{i}", question=f"What is {i} + {i + 1}?", truth="") for i in range(count)]
    reset_high_water()
    before = status("VmRSS")
    with Collector(Pair(), {"main": engine}, {"main": tokenizer}, no_reward, options, seed=0) as collector:
        wall, episodes = timed(
            lambda: collector.collect(tasks, step=0, on_progress=lambda episode: open_now.discard(episode.id))
        )
    peak = status("VmHWM")
    check(episodes)
    return f"{count} episodes of two turns at the same time; seconds of a turn: lognormal, median 8, sigma 0.2", [
        Line("wall", wall, "s"),
        Line("longest episode, computed", 2 * max(seconds.values()), "s"),
        Line("most episodes in flight", most, ""),
        Line("episodes per second", count / wall, ""),
        Line("peak memory over the start", (peak - before) / 2**20, "MB"),
        Line("memory per episode", (peak - before) / count / 1024, "KB"),
    ]


def overhead(args: argparse.Namespace) -> Part:
    config, tokenizer = load("quickstart", []), smollm2()
    team, tasks = load_team(config.team), sums(args.turns // 2)
    answers = {"solver": "The sum of both numbers is nineteen, as one can count.", "verifier": "yes"}
    lines = []
    for deterministic in (False, True):
        best = (math.inf, math.inf, math.inf)
        for _ in range(args.repeats):
            engine = ScriptedEngine(tokenizer, lambda prompt, key: answers[key.rpartition("/")[2]], deterministic=deterministic)
            options = RolloutConfig(group_size=1, deterministic=deterministic)
            with Collector(team, {"main": engine}, {"main": tokenizer}, no_reward, options, seed=0) as collector:
                ours, episodes = cpu_timed(lambda: collector.collect(tasks, step=0))
            turns = [turn for _, turn in turns_of(check(episodes))]
            engines_own, _ = cpu_timed(partial(asyncio.run, served(engine, turns, deterministic)))
            own = 1000 * (ours - engines_own) / len(turns)
            best = min(best, (own, 1000 * ours / len(turns), 1000 * engines_own / len(turns)))
        mode = "deterministic" if deterministic else "free-running"
        lines += [
            Line(f"{mode}: CPU per turn", best[1], "ms"),
            Line(f"{mode}: the scripted engine's", best[2], "ms"),
            Line(f"{mode}: our own", best[0], "ms", CPU_BOUND_MS),
        ]
    return f"{len(turns)} turns of the quickstart's team, SmolLM2's tokenizer and template; best of {args.repeats}", lines


async def served(engine: Engine, turns: Sequence[Turn], deterministic: bool) -> None:
    """What a scripted engine itself spends on the requests behind `turns`, as many at a time as the collector has."""
    sampling, most = Sampling(max_tokens=64), RolloutConfig().max_concurrent_episodes
    for start in range(0, len(turns), most):
        calls = [
            asyncio.ensure_future(engine.generate(turn.prompt_ids, sampling, seed=0, key=f"{start + i}/000/{turn.agent}"))
            for i, turn in enumerate(turns[start : start + most])
        ]
        await asyncio.sleep(0)
        while deterministic and await engine.advance():
            pass
        await asyncio.gather(*calls)


def vllm(args: argparse.Namespace) -> Part:
    config = load("quickstart", [])
    folder = resolve_model(config.policies["main"].model)
    tokenizer, reward = AutoTokenizer.from_pretrained(folder), make_reward(config.reward)
    tasks = sums(args.tasks)
    sides = {"deterministic": True, "free-running": False, "flat batch": False}
    with tempfile.TemporaryDirectory() as logs:
        make = partial(VllmEngine, config=config.policies["main"].engine, model_path=folder, log_dir=Path(logs), seed=0)
        engines = {name: make(name.replace(" ", "-"), deterministic=mode) for name, mode in sides.items()}
        try:
            for engine in engines.values():
                engine.start()
            rates, counts = measure_vllm(config, tokenizer, reward, tasks, engines, args.repeats)
        finally:
            for engine in engines.values():
                engine.close()
            reward.close()
    flat = rates["flat batch"]
    title = f"SmolLM2, the quickstart's team, {4 * args.tasks} episodes, {counts} turns, "
    title += f"{config.policies['main'].engine.max_concurrent} sequences at a time; best of {args.repeats}"
    return title, [
        *(Line(f"{name}", rate, "tokens/s") for name, rate in rates.items()),
        *(
            Line(f"{name} / flat batch", rates[name] / flat, "", 0.9, at_least=True, tolerance=0.15, why=DECODES)
            for name in ("deterministic", "free-running")
        ),
    ]


def measure_vllm(
    config: RunConfig, tokenizer: Any, reward: Any, tasks: Sequence[Task], engines: Mapping[str, Engine], repeats: int
) -> tuple[dict[str, float], int]:
    """Generated tokens per second of each side, and the turns of a rollout.

    The sides take turns, with empty prefix caches each; the best of each counts, after a round that doesn't. The flat batch has
    the prompts, seeds and sampling of all turns that the deterministic side has just made.
    """
    team, episodes = load_team(config.team), {}

    def rollout(name: str, collector: Collector) -> list[list[int]]:
        episodes[name] = check(collector.collect(tasks, step=0))
        return [turn.response_ids for _, turn in turns_of(episodes[name])]

    async def flat_batch() -> list[list[int]]:
        calls = []
        for index, (episode, turn) in enumerate(turns_of(episodes["deterministic"])):
            agent = team.agents[turn.agent]
            sampling = Sampling(max_tokens=agent.max_tokens, temperature=agent.temperature, stop=agent.stop)
            seed = sample_seed(0, 0, episode.task.id, episode.sample, turn.agent, turn.index)
            calls.append(engines["flat batch"].generate(turn.prompt_ids, sampling, seed=seed, key=f"{index:05d}"))
        return [completion.token_ids for completion in await asyncio.gather(*calls)]

    best = dict.fromkeys(engines, 0.0)
    with ExitStack() as stack:
        sides: dict[str, Callable[[], list[list[int]]]] = {}
        for name, deterministic in (("deterministic", True), ("free-running", False)):
            options = RolloutConfig(deterministic=deterministic)
            collector = Collector(team, {"main": engines[name]}, {"main": tokenizer}, reward, options, seed=0)
            sides[name] = partial(rollout, name, stack.enter_context(collector))
        sides["flat batch"] = lambda: asyncio.run(flat_batch())
        for repeat, (name, side) in product(range(repeats + 1), sides.items()):
            engines[name].pause()  # forgets the prefixes
            engines[name].resume()
            seconds, responses = timed(side)
            if repeat:
                best[name] = max(best[name], sum(map(len, responses)) / seconds)
    return best, len(turns_of(episodes["deterministic"]))


def turns_of(episodes: Sequence[Episode]) -> list[tuple[Episode, Turn]]:
    return [(episode, turn) for episode in episodes for turn in episode.turns]


def check(episodes: Sequence[Episode]) -> Sequence[Episode]:
    """The same; ends the benchmark where one of them failed, since its time means nothing then."""
    failed = [episode.failure for episode in episodes if episode.failure]
    if failed:
        first = f"the first with {failed[0].kind}: {failed[0].message}"
        raise SystemExit(f"{len(failed)} of {len(episodes)} episodes failed, {first}")
    return episodes


def sums(count: int) -> list[Task]:
    """Tasks such as those of the quickstart, which needs a package for its own."""
    return [Task(f"sums/{i}", f"Calculate {i % 9 + 1} + {i // 9 % 9 + 1}.", str(i % 9 + i // 9 % 9 + 2)) for i in range(count)]


def smollm2() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model(PACKAGED))


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    started = clock()
    result = run()
    return clock() - started, result


def cpu_timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Of all threads of this process."""
    return timed(run, time.process_time)


def status(name: str) -> int:
    """Bytes, from /proc."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def reset_high_water() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def result(name: str, title: str, lines: Sequence[Line]) -> Result:
    verdicts = {True: "missed", False: "reached"}
    rows = [
        [line.name, line.value, line.unit, line.bound, "" if line.bound is None else verdicts[line.missed]] for line in lines
    ]
    table = Table(title=f"{name}: {title}", columns=["", "measured", "unit", "bound", "verdict"], rows=rows)
    ratios = [ratio for line in lines if (ratio := line.ratio)]
    return Result(benchmark="rollout", about=about(len(os.sched_getaffinity(0))), tables=[table], ratios=ratios)


def each_apart(parts: Sequence[str], args: argparse.Namespace) -> int:
    """Every part in a process of its own; their results in one file."""
    options = [f"--{name}={getattr(args, name)}" for name in ("tasks", "episodes", "turns", "repeats")]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.json" for part in parts]
        commands = [[part, *options, f"--json={file}"] for part, file in zip(parts, files, strict=True)]
        status = max([subprocess.run([sys.executable, __file__, *words], check=False).returncode for words in commands])
        found = [Result.read(file) for file in files if file.exists()]
    if args.json and len(found) == len(parts):
        tables, ratios = ([each for one in found for each in getattr(one, name)] for name in ("tables", "ratios"))
        here = about(len(os.sched_getaffinity(0)))
        Result(benchmark="rollout", about=here, tables=tables, ratios=ratios).write(args.json)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--tasks", type=int, default=16, help="of scripted and vllm, with 4 episodes each")
    parser.add_argument("--episodes", type=int, default=10_000, help="of concurrent")
    parser.add_argument("--turns", type=int, default=2_000, help="of overhead")
    parser.add_argument("--repeats", type=int, default=3, help="of overhead and vllm")
    add_json(parser)
    args = parser.parse_args()
    parts = args.parts or PARTS
    if len(parts) > 1:
        return each_apart(parts, args)
    title, lines = {"scripted": scripted, "concurrent": concurrent, "overhead": overhead, "vllm": vllm}[parts[0]](args)
    print(f"{parts[0]}: {title}", *lines, sep="\n")
    if args.json:
        result(parts[0], title, lines).write(args.json)
    return int(any(line.missed for line in lines))


if __name__ == "__main__":
    sys.exit(main())
