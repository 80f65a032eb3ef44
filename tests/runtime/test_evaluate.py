"""Evaluations with scripted engines, whose rates of success are known, against what they must come to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from drmas.config.load import load
from drmas.config.schema import RunConfig
from drmas.core.seeds import sample_seed
from drmas.envs.source import TaskSource
from drmas.errors import ConfigError, DataError, EngineDied, EngineError, ModelError, RolloutError
from drmas.rollout.scripted import ScriptedEngine
from drmas.runtime.eval_engines import Engines, Voice
from drmas.runtime.evaluate import eval_tasks, evaluate
from drmas.runtime.gpus import Seat
from drmas.runtime.models import write_tiny_qwen3
from drmas.telemetry.console import Console
from drmas.telemetry.episodes import read_episodes

RATES = {"a/1": 4, "a/2": 1, "b/1": 0, "b/2": 2, "b/3": 0}
"""Task -> how many of its four samples the trained model solves."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> SimpleNamespace:
    """Model folders: `base`, and `trained`, which scripted engines answer differently for."""
    place = tmp_path_factory.mktemp("models")
    for name in ("base", "trained"):
        write_tiny_qwen3(place / name, hidden=32, layers=1)
    return SimpleNamespace(base=place / "base", trained=place / "trained")


@pytest.fixture
def config(tmp_path: Path, folders) -> Callable[..., RunConfig]:
    """Five questions of two sources for one agent, four samples each; words override."""
    rows = [{"prompt": f"{task}", "answer": "yes", "id": task, "source": task[0]} for task in RATES]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    base = {
        "name": "toy",
        "seed": 5,
        "output": str(tmp_path),
        "policies": {"main": {"model": str(folders.base), "engine": {"max_model_tokens": 64}}},
        "team": {"name": "single", "solver": {"prompt": "{question}=", "parser": "text", "max_tokens": 8}},
        "data": {"type": "jsonl", "path": str(tmp_path / "tasks.jsonl")},
        "reward": {"type": "exact"},
        "eval": {"samples": 4, "bootstrap": 200},
    }
    (tmp_path / "toy.json").write_text(json.dumps(base))
    return lambda *words: load(str(tmp_path / "toy.json"), words)


PAIR = (
    *("--team.name", "solver-verifier", "--team.solver.parser", "text", "--team.solver.max-tokens", "8"),
    *("--team.solver.prompt", "{question}=", "--team.revise", "", "--team.verifier.prompt", "{question}={answer}?"),
    *("--team.verifier.parser", "verdict:yes,no", "--team.verifier.max-tokens", "8"),
)


def place(key: str) -> tuple[str, int, int, str]:
    """Task, sample, turn and agent of a request."""
    episode, index, agent = key.rsplit("/", 2)
    task, _, sample = episode.rpartition("#")
    return task, int(sample), int(index), agent


def rated(prompt: str, key: str) -> str:
    task, sample, _, _ = place(key)
    return "yes" if sample < RATES[task] else "no"


class Staff:
    """Makes scripted engines; a folder's name picks the rule. Remembers what was made, what ran together and what was asked."""

    def __init__(self, **rules: Callable[[str, str], str | None]) -> None:
        self.rules, self.made, self.open, self.together = rules, [], [], []
        self.asked: dict[str, list[tuple]] = {}

    def __call__(self, name: str, voice: Voice, config: RunConfig, logs: Path) -> ScriptedEngine:
        staff = self

        class Engine(ScriptedEngine):
            def start(self) -> None:
                staff.together.append(sorted(staff.open))
                super().start()

            async def generate(self, prompt_ids, sampling, *, seed, key):
                staff.asked.setdefault(name, []).append((key, seed, sampling))
                return await super().generate(prompt_ids, sampling, seed=seed, key=key)

            def close(self) -> None:
                staff.open.remove(name)
                super().close()

        engine = Engine(AutoTokenizer.from_pretrained(voice.folder), self.rules[voice.folder.name], max_model_tokens=64)
        engine._alive = False  # as a process that isn't started
        self.made.append((name, voice))
        self.open.append(name)
        return engine


def run(config: RunConfig, tmp_path: Path, staff: Staff, *, model: Path, console: Console | None = None):
    return evaluate(config, {"main": model}, output=tmp_path / "eval", console=console or Console(quiet=True), make=staff)


def micro(result, measure: str, agent: str = "") -> float:
    return (result.without[agent] if agent else result.team).measures()[measure]["micro"].value


def test_known_rates_give_the_scores_by_hand(config, tmp_path, folders):
    """Solved 4, 1, 0, 2 and 0 times of 4: avg 1, 1/4, 0, 1/2, 0; pass@2 1, 1/2, 0, 5/6, 0."""
    staff = Staff(base=rated)
    result = run(config(), tmp_path, staff, model=folders.base)
    assert result.tasks == 5
    assert micro(result, "avg@4") == pytest.approx(1.75 / 5)
    assert micro(result, "pass@2") == pytest.approx((1 + 1 / 2 + 5 / 6) / 5)
    assert micro(result, "pass@4") == pytest.approx(3 / 5)
    assert result.team.measures()["pass@4"]["macro"].value == pytest.approx((1 + 1 / 3) / 2)
    # "<user>a/1=<agent>" is 6 tokens, "yes" and the end 4, "no" and the end 3
    assert result.team.per_agent()["solver"]["read_tokens"] == 20 * 6
    assert result.team.per_agent()["solver"]["generated_tokens"] == 7 * 4 + 13 * 3
    assert staff.open == []


def test_I9_seeds_are_of_step_0_and_two_evaluations_give_the_same_numbers(config, tmp_path, folders):
    staffs = [Staff(base=rated), Staff(base=rated)]
    first, second = (run(config(), tmp_path, staff, model=folders.base).to_dict() for staff in staffs)
    assert staffs[0].asked == staffs[1].asked
    seeds = {key: seed for key, seed, _ in staffs[0].asked["main"]}
    assert len(seeds) == 20
    assert seeds["b/2#3/000/solver"] == sample_seed(5, 0, "b/2", 3, "solver", 0)
    for numbers in (first, second):
        del numbers["seconds"]
        for timed in ("seconds_mean", "seconds_p50", "seconds_p95"):
            del numbers["team"]["solved"][timed]
        del numbers["team"]["agents"]["solver"]["seconds_mean"]
    assert first == second
    assert json.loads(json.dumps(first, allow_nan=False)) == first


def test_I3_a_failed_episode_is_no_try(config, tmp_path, folders):
    def troubled(prompt: str, key: str) -> str:
        if key.startswith(("a/1#3/", "b/3#")):
            raise EngineError("refused by the test")
        return rated(prompt, key)

    result = run(config(), tmp_path, Staff(base=troubled), model=folders.base)
    measures = result.team.measures()
    assert result.to_dict()["team"]["failed"] == {"engine": 5}
    assert measures["avg@4"]["micro"].value == pytest.approx((1 + 1 / 4 + 0 + 1 / 2) / 4)
    assert measures["pass@4"]["micro"].value == pytest.approx((1 + 0 + 1) / 3)
    assert (measures["pass@3"]["left_out"], measures["pass@4"]["left_out"]) == (1, 2)
    statuses = [episode["status"] for episode in read_episodes(tmp_path / "eval", 0)]
    assert (len(statuses), statuses.count("engine")) == (20, 5)


def test_only_failures_end_the_command_with_the_first_reason(config, tmp_path, folders):
    def refused(prompt: str, key: str) -> str:
        raise EngineError(f"no answer to {key}")

    staff = Staff(base=refused)
    with pytest.raises(RolloutError, match=r"all 20 episodes \(team\) failed; the first with engine: no answer to a/1#0"):
        run(config(), tmp_path, staff, model=folders.base)
    assert staff.open == []
    assert {episode["status"] for episode in read_episodes(tmp_path / "eval", 0)} == {"engine"}


def test_an_engine_that_dies_is_started_again_as_often_as_it_may(config, tmp_path, folders):
    deaths = []

    def mortal(prompt: str, key: str) -> str:
        if key.startswith("a/2#1/") and len(deaths) < limit:
            deaths.append(key)
            raise EngineDied("killed by the test")
        return rated(prompt, key)

    limit = 2
    staff = Staff(base=mortal)
    result = run(config(), tmp_path, staff, model=folders.base)
    assert (len(deaths), len(staff.together)) == (2, 3)
    assert (micro(result, "avg@4"), len(result.team.finished)) == (pytest.approx(1.75 / 5), 20)
    limit = 1000
    with pytest.raises(RolloutError, match=r"died 3 times; policies\.main\.engine\.max_restarts is 2"):
        run(config(), tmp_path, Staff(base=mortal), model=folders.base)


def test_ablation_has_the_agent_speak_with_its_base_and_the_others_with_theirs(config, tmp_path, folders):
    """The trained solver solves as rated and the base never does; the trained verifier approves, the base sends back."""

    def trained(prompt: str, key: str) -> str:
        return "yes" if prompt.endswith("?<agent>") else rated(prompt, key)

    staff = Staff(trained=trained, base=lambda prompt, key: "no")
    result = run(config(*PAIR, "--eval.ablate", "['all']"), tmp_path, staff, model=folders.trained)
    assert list(result.without) == ["solver", "verifier"]
    assert micro(result, "avg@4") == micro(result, "avg@4", "verifier") == pytest.approx(1.75 / 5)
    assert micro(result, "avg@4", "solver") == 0.0
    gains = {agent: each["gain"] for agent, each in result.to_dict()["without"].items()}
    assert gains["solver"]["avg@4"]["micro"]["value"] == pytest.approx(1.75 / 5)
    assert gains["solver"]["pass@4"]["sources"]["a"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert gains["verifier"]["pass@4"]["micro"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    calls = [scores.per_agent()["solver"]["calls"] for scores in (result.team, *result.without.values())]
    assert calls == [20, 20, 40]  # the base verifier never approves
    for agent in ("solver", "verifier"):
        (episode, *_) = read_episodes(tmp_path / "eval" / "without" / agent, 0)
        assert {turn["agent"]: turn["policy"] for turn in episode["turns"]} == {
            name: "base of main" if name == agent else "main" for name in ("solver", "verifier")
        }


def test_an_agent_of_a_sub_team_is_ablated_under_its_dotted_name(config, tmp_path, folders):
    (tmp_path / "nested.py").write_text(
        "from drmas.agents.team import TeamConfig, register_team\n"
        "from drmas.agents.teams.single import Single\n\n\n"
        "@register_team('nested')\n"
        "class Nested(TeamConfig):\n"
        "    inner: Single = Single()\n\n"
        "    async def run(self, task, agents):\n"
        "        return await self.inner.run(task, agents.inner)\n"
    )
    inner = "{solver = {prompt = '{question}=', parser = 'text', max_tokens = 8}}"
    words = ("--team.name", f"{tmp_path / 'nested.py'}:nested", "--team.inner", inner, "--eval.ablate", "['inner.solver']")
    result = run(config(*words), tmp_path, Staff(trained=rated, base=lambda *_: "no"), model=folders.trained)
    assert (micro(result, "avg@4"), micro(result, "avg@4", "inner.solver")) == (pytest.approx(1.75 / 5), 0.0)
    assert result.team.per_agent()["inner.solver"]["calls"] == 20


def test_what_a_base_model_says_in_an_ablation_has_the_price_of_its_policy(config, tmp_path, folders):
    words = ("--policies.main.price-per-million-tokens", "2", "--eval.ablate", "['solver']")
    result = run(config(*words), tmp_path, Staff(trained=rated, base=lambda *_: "no"), model=folders.trained)
    alone = result.without["solver"]
    assert alone.per_agent()["solver"]["cost"] == pytest.approx(20 * (6 + 3) * 2e-6)
    assert (alone.solved()["cost"], alone.solved()["unpriced"]) == (pytest.approx(20 * (6 + 3) * 2e-6), [])
    assert result.team.solved()["cost"] == pytest.approx((20 * 6 + 7 * 4 + 13 * 3) * 2e-6)


def test_I9_an_ablation_has_the_tasks_and_seeds_of_the_whole_team(config, tmp_path, folders):
    staff = Staff(trained=rated, base=rated)
    run(config("--eval.ablate", "['solver']", "--eval.max-tasks", "3"), tmp_path, staff, model=folders.trained)
    whole, base = ({(key, seed) for key, seed, _ in staff.asked[name]} for name in ("main", "base of main"))
    assert whole == base
    assert len(whole) == 12


def test_only_the_engines_that_a_team_needs_run_at_a_time(config, tmp_path, folders):
    """One agent: the base follows the trained model. Two agents of one policy: they share its part of the GPU."""
    alone = Staff(trained=rated, base=rated)
    run(config("--eval.ablate", "['solver']"), tmp_path, alone, model=folders.trained)
    assert alone.together == [["main"], ["base of main"]]
    assert [voice.config.gpu_memory_fraction for _, voice in alone.made] == [0.5, 0.5]
    shared = Staff(trained=rated, base=rated)
    run(config(*PAIR, "--eval.ablate", "['all']"), tmp_path, shared, model=folders.trained)
    assert shared.together == [["main"], ["base of main", "main"]]
    assert [voice.config.gpu_memory_fraction for _, voice in shared.made] == [0.25, 0.25]
    assert (alone.open, shared.open) == ([], [])


def test_engines_on_other_hosts_have_gpus_of_their_own_and_share_none(config, tmp_path):
    def fractions(seat: Seat) -> list[float]:
        voices = {name: Voice("main", config().policies["main"].engine, tmp_path, (seat,)) for name in ("main", "base")}
        made = []
        engines = Engines(lambda name, voice, *_: made.append(voice), voices, config(), tmp_path, plan=[{"main", "base"}])
        engines.take({"main", "base"})
        return [voice.config.gpu_memory_fraction for voice in made]

    assert fractions(Seat(None, (0,))) == [0.25, 0.25]
    assert fractions(Seat("tcp://far:8200", None)) == [0.5, 0.5]


def test_I9_an_engine_that_goes_on_to_the_next_team_forgets_its_prefixes_first(config, tmp_path):
    """What a pause does to an engine (`Engine.pause`): its prefix cache is empty after it."""
    done = []

    class Noting:
        alive = False

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, call: str):
            def note() -> None:
                done.append(f"{call} {self._name}")
                self.alive = call != "close"

            return note

    engine = config().policies["main"].engine
    voices = {name: Voice("main", engine, tmp_path, ()) for name in ("main", "base")}
    plan = [{"main"}, {"main", "base"}, {"base"}]
    with Engines(lambda name, *_: Noting(name), voices, config(), tmp_path, plan=plan) as engines:
        for names in plan:
            engines.take(names)
            engines.start()
            done.append("play")
    teams = " ".join(done).split(" play ")
    assert teams == [
        "start main",
        "pause main resume main start base",
        "close main pause base resume base",
        "close base",
    ]


REWARDS = json.dumps({"type": "exact", "by_source": {"a": "exact", "c": "exact"}})


def test_a_reward_that_does_not_fit_is_refused_before_an_engine_starts(config, tmp_path, folders):
    staff = Staff(base=rated)
    for words, message in (
        (("--reward", REWARDS), "reward.by_source names 'c', and no task has that source; expected one of a, b"),
        (("--reward.type", "gym"), "reward.type is gym, and the task .* isn't made by a reasoning-gym generator"),
        (
            ("--reward.by-source", "{sums = 'gym'}", "--eval.data", "{type = 'sums', size = 3}"),
            "reward.by_source.sums is gym, and the task sums/2 isn't made by",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            run(config(*words), tmp_path, staff, model=folders.base)
    assert staff.made == []
    assert not (tmp_path / "eval").exists()


def test_sources_that_only_training_has_keep_their_rewards_and_its_data_need_not_be_there(config, tmp_path, folders):
    words = ("--reward.by-source", "{a = 'exact'}", "--eval.data", "{type = 'sums', size = 3}")
    solved = Staff(base=lambda prompt, key: "yes")
    assert run(config(*words), tmp_path, solved, model=folders.base).tasks == 3
    typed = ("--reward.by-source", "{aa = 'exact'}", *words[2:])
    with pytest.raises(ConfigError, match=r"by_source names 'aa', and no task has that source; .*expected one of a, b, sums"):
        run(config(*typed), tmp_path, solved, model=folders.base)
    (tmp_path / "tasks.jsonl").unlink()
    assert run(config(*words), tmp_path, solved, model=folders.base).tasks == 3


@pytest.mark.parametrize(
    ("words", "trained", "message"),
    [
        (("--eval.ablate", "['slover']"), True, "eval.ablate names the agent 'slover'; the nearest is 'solver'"),
        (("--eval.ablate", "['solver']"), False, "eval.ablate names solver, whose policy main is at its base"),
        (("--eval.ablate", "['all']"), False, "eval.ablate is all, and every agent speaks with its base model"),
        (
            (
                *("--eval.ablate", "['solver']", "--team.solver.policy", "far"),
                *("--remotes", "{far = {url = 'http://127.0.0.1:9/v1', model = 'm'}}"),
            ),
            True,
            "speaks with the remote model far; it has no base model",
        ),
        (("--team.solver.policy", "other"), True, "team.solver.policy is 'other'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_an_engine_starts(config, tmp_path, folders, words, trained, message):
    staff = Staff(trained=rated, base=rated)
    with pytest.raises(ConfigError, match=message):
        run(config(*words), tmp_path, staff, model=folders.trained if trained else folders.base)
    assert staff.made == []
    assert not (tmp_path / "eval").exists()


def test_a_folder_without_a_tokenizer_is_named(config, tmp_path, folders):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text((folders.base / "config.json").read_text())
    with pytest.raises(ModelError, match=f"policies.main.model: {folder} has no usable tokenizer"):
        run(config(), tmp_path, Staff(bare=rated), model=folder)


def test_no_tasks_are_an_error(config, tmp_path, folders):
    (tmp_path / "none.jsonl").write_text("\n")
    words = ("--eval.data", json.dumps({"type": "jsonl", "path": str(tmp_path / "none.jsonl")}))
    with pytest.raises(DataError, match="has no lines with a task"):
        run(config(*words), tmp_path, Staff(base=rated), model=folders.base)


def ids(config: RunConfig) -> list[str]:
    return [task.id for task in eval_tasks(config)]


def test_tasks_are_all_or_the_first_in_the_order_of_training_each_of_them_once(config):
    assert ids(config()) == ids(config("--eval.max-tasks", "99")) == list(RATES)
    trained = [task.id for task in TaskSource(config().data, seed=5).take(3)]
    assert ids(config("--eval.max-tasks", "3")) == trained != list(RATES)[:3]
    assert ids(config("--eval.data", "{type = 'sums', size = 3}")) == ["sums/0", "sums/1", "sums/2"]


def test_tasks_of_a_mix_come_in_its_shares_and_never_twice(config):
    parts = "few = {weight = 3.0, data = {type = 'sums', size = 2}}, many = {data = {type = 'sums', size = 9}}"
    mix = ("--eval.data", f"{{type = 'mix', parts = {{{parts}}}}}")
    assert len(set(ids(config(*mix)))) == len(ids(config(*mix))) == 11
    first = ids(config(*mix, "--eval.max-tasks", "6"))
    assert len(set(first)) == 6
    assert {name for name in first if name.startswith("few/")} == {"few/sums/0", "few/sums/1"}
    assert all(name.count("@") == 0 for name in first)


def test_I11_sampling_is_the_agents_own_unless_the_evaluation_sets_it(config, tmp_path, folders):
    def sampled(*words: str) -> set[tuple[float, float, int]]:
        staff = Staff(base=rated)
        run(config("--team.solver.temperature", "0.7", *words), tmp_path, staff, model=folders.base)
        return {(sampling.temperature, sampling.top_p, sampling.max_tokens) for _, _, sampling in staff.asked["main"]}

    assert sampled() == {(0.7, 1.0, 8)}
    assert sampled("--eval.temperature", "0") == {(0.0, 1.0, 8)}
    assert sampled("--eval.temperature", "0.6", "--eval.top-p", "0.95") == {(0.6, 0.95, 8)}
    with pytest.raises(ConfigError, match="can't mirror top_p"):
        run(config("--team.solver.top-p", "0.9"), tmp_path, Staff(base=rated), model=folders.base)


def test_tokens_and_cost_of_a_remote_model_are_counted(config, tmp_path, folders, monkeypatch):
    class Far:
        def __init__(self, name, settings) -> None:
            self.name = name

        async def start(self) -> None: ...
        async def close(self) -> None: ...
        async def ask(self, agent, messages, *, seed, key):
            text = "yes" if agent.temperature == 0 else "no"
            return SimpleNamespace(text=text, finish_reason="stop", prompt_tokens=100, response_tokens=10)

    monkeypatch.setattr("drmas.runtime.evaluate.Remote", Far)
    remotes = "{far = {url = 'http://127.0.0.1:9/v1', model = 'm', price_per_million_tokens = 3.0}}"
    words = (*PAIR, "--remotes", remotes, "--team.verifier.policy", "far", "--policies.main.price-per-million-tokens", "1")
    result = run(config(*words, "--eval.temperature", "0"), tmp_path, Staff(base=rated), model=folders.base)
    agents = result.team.per_agent()
    assert (agents["verifier"]["read_tokens"], agents["verifier"]["generated_tokens"]) == (2000, 200)
    assert agents["verifier"]["cost"] == pytest.approx(2200 * 3e-6)
    (episode, *_) = read_episodes(tmp_path / "eval", 0)
    assert [(turn["policy"], turn["prompt"]) for turn in episode["turns"]][1] == ("far", "user:\na/1=yes?")
    solver = 20 * 6 + 7 * 4 + 13 * 3
    assert result.team.solved()["cost_each"] == pytest.approx((2200 * 3e-6 + solver * 1e-6) / 7)


def test_the_folder_holds_settings_that_evaluate_again_and_nothing_of_before(config, tmp_path, folders):
    first = config(*PAIR, "--eval.ablate", "['solver']")
    run(first, tmp_path, Staff(trained=rated, base=rated), model=folders.trained)
    assert load(str(tmp_path / "eval" / "settings.json")) == first
    assert (tmp_path / "eval" / "without" / "solver" / "episodes" / "step_0.jsonl").is_file()
    (tmp_path / "eval" / "note.txt").write_text("mine")
    run(config(), tmp_path, Staff(base=rated), model=folders.base)
    assert not (tmp_path / "eval" / "without").exists()
    assert (tmp_path / "eval" / "note.txt").read_text() == "mine"


def test_a_folder_with_something_else_in_it_stays_as_it_is(config, tmp_path, folders):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds no evaluation; give another --output"):
        run(config(), tmp_path, Staff(base=rated), model=folders.base)
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("settings.json", "{}"),
        ("eval.json", '{"name": "toy"}'),
        ("drmas-eval.json", ""),
        ("drmas-eval.json", '{"folder of": "something else"}'),
        ("drmas-eval.json", "\\xff"),
    ],
)
def test_a_folder_that_only_looks_like_an_evaluations_stays_as_it_is(config, tmp_path, folders, name, text):
    place = tmp_path / "eval"
    (place / "logs").mkdir(parents=True)
    (place / "logs" / "years.log").write_text("mine")
    (place / name).write_text(text)
    with pytest.raises(ConfigError, match="holds no evaluation"):
        run(config(), tmp_path, Staff(base=rated), model=folders.base)
    assert sorted(path.name for path in place.rglob("*")) == sorted(["logs", "years.log", name])
    assert (place / "logs" / "years.log").read_text() == "mine"


@pytest.mark.parametrize("where", ["write_environment", "dump", "write_episodes"])
def test_the_folder_of_a_killed_evaluation_is_the_next_ones(config, tmp_path, folders, monkeypatch, where):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"drmas.runtime.evaluate.{where}", killed)
        with pytest.raises(KeyboardInterrupt):
            run(config(), tmp_path, Staff(base=rated), model=folders.base)
    assert any((tmp_path / "eval").iterdir())
    assert run(config(), tmp_path, Staff(base=rated), model=folders.base).tasks == 5


def test_an_interrupt_closes_the_engines(config, tmp_path, folders):
    class Interrupted(Console):
        def progress(self, title, total):
            raise KeyboardInterrupt

    staff = Staff(base=rated)
    with pytest.raises(KeyboardInterrupt):
        run(config(), tmp_path, staff, model=folders.base, console=Interrupted(quiet=True))
    assert (len(staff.made), staff.open) == (1, [])


def test_an_engine_that_does_not_start_is_closed_with_the_others(config, tmp_path):
    closed = []

    class Broken:
        alive = False

        def __init__(self, name: str) -> None:
            self.name = name

        def start(self) -> None:
            if self.name == "second":
                raise EngineDied("no memory")

        def close(self) -> None:
            closed.append(self.name)

    engine = config().policies["main"].engine
    voices = {name: Voice(name, engine, tmp_path, ()) for name in ("first", "second")}

    def start() -> None:
        with Engines(lambda name, *_: Broken(name), voices, config(), tmp_path, plan=[voices.keys()]) as engines:
            engines.take(voices.keys())
            engines.start()

    with pytest.raises(EngineDied, match="no memory"):
        start()
    assert closed == ["first", "second"]


def test_an_evaluation_builds_no_trainer(config, tmp_path, folders):
    """A process of its own: what is imported by the end is what the evaluation of a Hugging Face folder needs."""
    config("--name", "apart")
    program = f"""
import sys
from pathlib import Path
from transformers import AutoTokenizer
from drmas.config.load import load
from drmas.rollout.scripted import ScriptedEngine
from drmas.runtime.evaluate import evaluate
from drmas.telemetry.console import Console

def make(name, voice, config, logs):
    return ScriptedEngine(AutoTokenizer.from_pretrained(voice.folder), ["yes"], max_model_tokens=64)

result = evaluate(
    load({str(tmp_path / "toy.json")!r}), {{"main": Path({str(folders.base)!r})}},
    output=Path({str(tmp_path / "apart")!r}), console=Console(quiet=True), make=make,
)
print(result.team.measures()["avg@4"]["micro"].value)
print([name for name in ("megatron", "vllm", "drmas.policy", "drmas.runtime.run") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["1.0", "[]"]
