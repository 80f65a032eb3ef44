from __future__ import annotations

import asyncio
import logging
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer

from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, load_team
from drmas.config.schema import RolloutConfig
from drmas.core.estimators.base import Probe
from drmas.core.seeds import sample_seed
from drmas.errors import EngineDied, EngineError, GraderError, GraderTimeout, RolloutError
from drmas.rollout.collector import Collector, Rollout
from drmas.rollout.engine import Sampling
from drmas.rollout.scripted import ScriptedEngine
from drmas.types import Episode, Task, rows_of

TOY = {
    "name": "solver-verifier",
    "solver": {"prompt": "{question}=", "parser": "text", "max_tokens": 16},
    "revise": "{question}!=",
    "verifier": {"prompt": "{question}={answer}?", "parser": "verdict:yes,no", "max_tokens": 16},
}
TASKS = [Task(f"sums/{i}", f"{i}+1", str(i + 1)) for i in range(8)]


def arithmetic(prompt: str, key: str) -> str:
    """Solves wrongly at first for odd samples and all probes', checks and corrects without fault."""
    if prompt.endswith("?"):
        question, _, answer = prompt[:-1].partition("=")
        return "yes" if answer == str(sum(map(int, question.split("+")))) else "no"
    total = sum(map(int, prompt.rstrip("!=").split("+")))
    sample = key.partition("#")[2].partition("/")[0]
    odd = not sample.isdecimal() or int(sample) % 2
    return str(total + (odd and not prompt.endswith("!=")))


async def exact(task: Task, answer: str | None) -> float:
    return float(answer == task.truth)


MADE: list[Collector] = []


@pytest.fixture(autouse=True)
def _close_collectors():
    yield
    while MADE:
        MADE.pop().close()


class OneAgent(TeamConfig):
    """Asks one agent for the question and does what a test wants with the turn."""

    solver: AgentConfig = AgentConfig(max_tokens=16)
    after: Any = None

    async def run(self, task, agents):
        turn = await agents.solver(question=task.question)
        return self.after(task, agents, turn) if self.after else turn.text


def make(tokenizer, team=None, answer=arithmetic, reward=exact, *, engine=None, probes=(), **config):
    engine = engine or ScriptedEngine(tokenizer, answer, deterministic=config.get("deterministic", True))
    rollout = RolloutConfig(**{"group_size": 4, "episode_timeout_seconds": 60, **config})
    made = Collector(team or load_team(TOY), {"main": engine}, {"main": tokenizer}, reward, rollout, seed=3, probes=probes)
    MADE.append(made)
    return made, engine


def one_collect(tokenizer, team=None, tasks=TASKS, *, step: int = 1, only=None, **options) -> list[Episode]:
    collector = make(tokenizer, team, **options)[0]
    return collector.collect(tasks, step=step) if only is None else some(collector, tasks, step, only)


def some(collector: Collector, tasks: list[Task], step: int, cells) -> list[Episode]:
    """The episodes of these (task, sample) alone."""
    rollout = Rollout([Episode(tasks[index], sample) for index, sample in cells], step)
    collector.submit([rollout])
    assert collector.wait(lambda: rollout.done)
    return rollout.episodes


def kinds(episodes: list[Episode]) -> list[str]:
    return [episode.status for episode in episodes]


@pytest.mark.parametrize("deterministic", [True, False])
def test_episodes_come_in_the_order_of_tasks_and_samples(plain_tokenizer, deterministic: bool) -> None:
    seen: list[str] = []
    collector, engine = make(plain_tokenizer, deterministic=deterministic)
    episodes = collector.collect(TASKS, step=1, on_progress=lambda episode: seen.append(episode.id))
    assert [episode.id for episode in episodes] == [f"sums/{i}#{k}" for i in range(8) for k in range(4)]
    assert sorted(seen) == sorted(episode.id for episode in episodes)
    assert [episode.reward for episode in episodes] == [1.0] * 32
    # even samples are approved at once, odd ones are sent back
    assert [len(episode.turns) for episode in episodes[:4]] == [2, 3, 2, 3]
    assert all([turn.index for turn in episode.turns] == list(range(len(episode.turns))) for episode in episodes)
    assert engine.stats()["generated_tokens"] == sum(len(t.response_ids) for e in episodes for t in e.turns)


def test_I1_a_row_holds_the_ids_that_the_engine_read_and_sampled(plain_tokenizer) -> None:
    episode = one_collect(plain_tokenizer, only=[(3, 1)])[0]
    texts = [(plain_tokenizer.decode(t.prompt_ids), plain_tokenizer.decode(t.response_ids)) for t in episode.turns]
    assert texts == [("3+1=", "5<|im_end|>"), ("3+1=5?", "no<|im_end|>"), ("3+1!=", "4<|im_end|>")]


class Watched(ScriptedEngine):
    """Notes how each request is sampled, and with which seed."""

    def __init__(self, tokenizer, answer=arithmetic) -> None:
        super().__init__(tokenizer, answer)
        self.sampled: dict[str, tuple[Sampling, int]] = {}

    async def generate(self, prompt_ids, sampling, *, seed, key):
        self.sampled[key] = (sampling, seed)
        return await super().generate(prompt_ids, sampling, seed=seed, key=key)


def test_I9_seeds_and_batches_are_the_same_in_every_run(plain_tokenizer) -> None:
    runs = []
    for slots in (3, 3, 256):
        engine = Watched(plain_tokenizer)
        episodes = one_collect(plain_tokenizer, engine=engine, max_concurrent_episodes=slots, step=5)
        for episode in episodes:
            episode.seconds = 0.0
        seeds = {key: seed for key, (_, seed) in engine.sampled.items()}
        runs.append((seeds, episodes, engine.keys))
    assert runs[0] == runs[1]
    assert runs[0][:2] == runs[2][:2]
    assert max(map(len, runs[0][2])) == 3
    assert len(runs[2][2][0]) == 32
    assert runs[0][0]["sums/2#1/002/solver"] == sample_seed(3, 5, "sums/2", 1, "solver", 2)
    assert len(set(runs[0][0].values())) == len(runs[0][0])


def test_collecting_some_again_gives_the_same_episodes(plain_tokenizer) -> None:
    whole = one_collect(plain_tokenizer)
    again = one_collect(plain_tokenizer, only=[(7, 3), (0, 1)])
    assert [episode.id for episode in again] == ["sums/7#3", "sums/0#1"]
    assert [episode.turns for episode in again] == [whole[31].turns, whole[1].turns]


class Part:
    """A tool box or a remote model that can't be had, or that notes that it was closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.closed = error, 0

    async def start(self) -> None:
        if self.error:
            raise self.error

    async def close(self) -> None:
        self.closed += 1


PROBES = (Probe("greedy", greedy=True), Probe("without solver", episodes=2, without="solver"))


def test_probes_run_beside_each_group_with_samples_of_their_own(plain_tokenizer) -> None:
    alone, watched = Watched(plain_tokenizer), Watched(plain_tokenizer)
    expected = one_collect(plain_tokenizer, tasks=TASKS[:2], engine=alone, step=5)
    episodes = one_collect(plain_tokenizer, tasks=TASKS[:2], engine=watched, step=5, probes=PROBES)
    names = ["0", "1", "2", "3", "greedy/0", "without solver/1", "without solver/2"]
    assert [episode.id for episode in episodes] == [f"sums/{i}#{name}" for i in range(2) for name in names]
    assert [(episode.probe, episode.sample) for episode in episodes[4:7]] == [
        ("greedy", -1),
        ("without solver", -2),
        ("without solver", -3),
    ]
    own = [episode for episode in episodes if episode.probe is None]
    assert [episode.turns for episode in own] == [episode.turns for episode in expected]
    assert {key: watched.sampled[key] for key in alone.sampled} == alone.sampled  # I9: their seeds are as without probes
    assert rows_of(episodes) == rows_of(expected)
    seeds = [seed for _, seed in watched.sampled.values()]
    assert len(set(seeds)) == len(seeds)
    assert watched.sampled["sums/1#greedy/0/000/solver"][1] == sample_seed(3, 5, "sums/1", -1, "solver", 0)


def test_a_greedy_probe_samples_at_temperature_0_and_nobody_else(plain_tokenizer) -> None:
    engine = Watched(plain_tokenizer)
    (*_, greedy) = one_collect(plain_tokenizer, tasks=TASKS[:1], engine=engine, probes=PROBES[:1])
    assert [turn.text for turn in greedy.turns] == ["2", "no", "1"]
    assert greedy.reward == 1.0
    cold = {key for key, (sampling, _) in engine.sampled.items() if sampling.temperature == 0.0}
    assert cold == {f"sums/0#greedy/0/{turn.index:03d}/{turn.agent}" for turn in greedy.turns}
    assert {sampling.temperature for key, (sampling, _) in engine.sampled.items() if key not in cold} == {1.0}
    assert {sampling.max_tokens for sampling, _ in engine.sampled.values()} == {16}


def test_a_greedy_probe_asks_remote_models_at_temperature_0_too(plain_tokenizer) -> None:
    class Far(Part):
        asked: ClassVar[dict[str, float]] = {}

        async def ask(self, agent, messages, *, seed, key):
            self.asked[key] = agent.temperature
            return SimpleNamespace(text="1", finish_reason="stop")

    team = OneAgent(solver=AgentConfig(policy="far", prompt="{question}=", temperature=0.7, max_tokens=16))
    engines, options = {"main": ScriptedEngine(plain_tokenizer, ["1"])}, RolloutConfig(group_size=1)
    more = {"remotes": {"far": Far()}, "probes": PROBES[:1]}
    with Collector(team, engines, {"main": plain_tokenizer}, exact, options, seed=0, **more) as collector:
        collector.collect(TASKS[:1], step=1)
    assert Far.asked == {"sums/0#0/000/solver": 0.7, "sums/0#greedy/0/000/solver": 0.0}


def test_a_silent_agent_makes_no_request_and_the_others_play_on(plain_tokenizer) -> None:
    engine = Watched(plain_tokenizer)
    episodes = one_collect(plain_tokenizer, tasks=TASKS[:1], engine=engine, probes=PROBES[1:])
    for episode in episodes[4:]:
        assert [(turn.agent, plain_tokenizer.decode(turn.prompt_ids)) for turn in episode.turns] == [("verifier", "0+1=?")]
        assert (episode.answer, episode.reward, episode.failure) == ("", 0.0, None)
    asked = {key.partition("/")[2] for key in engine.sampled if "without" in key}
    assert asked == {f"0#without solver/{number}/000/verifier" for number in (0, 1)}


def test_I3_a_probe_that_fails_costs_no_other_episode(plain_tokenizer) -> None:
    def answer(prompt: str, key: str) -> str:
        if "#greedy/" in key:
            raise EngineError("refused by the test")
        return arithmetic(prompt, key)

    episodes = one_collect(plain_tokenizer, tasks=TASKS[:2], answer=answer, probes=PROBES)
    assert {episode.probe for episode in episodes if episode.failure} == {"greedy"}
    assert kinds(episodes).count("engine") == 2


def test_what_was_opened_is_closed_where_a_start_fails_and_closing_may_be_repeated(plain_tokenizer) -> None:
    engines, options = {"main": ScriptedEngine(plain_tokenizer, ["1"])}, RolloutConfig(group_size=1)
    opened, broken = Part(), Part(EngineError("remotes.judge: no answer"))
    remotes = {"good": opened, "judge": broken}
    collector = Collector(OneAgent(), engines, {"main": plain_tokenizer}, exact, options, seed=0, remotes=remotes)
    with pytest.raises(RolloutError, match=r"remotes\.judge: no answer"):
        collector.start()
    assert opened.closed == 1
    collector.close()
    assert opened.closed == 1


def test_nothing_to_collect(plain_tokenizer) -> None:
    assert one_collect(plain_tokenizer, tasks=[]) == []
    assert one_collect(plain_tokenizer, only=[]) == []


def test_I4_an_episode_twice_is_refused(plain_tokenizer) -> None:
    with pytest.raises(ValueError, match="two of the tasks have the same id"):
        one_collect(plain_tokenizer, tasks=[TASKS[0], TASKS[0]])
    with pytest.raises(ValueError, match="episode sums/0#1 is submitted while it runs"):
        one_collect(plain_tokenizer, only=[(0, 1), (0, 1)])


def test_I3_one_raising_episode_of_32_costs_no_other(plain_tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    def after(task: Task, agents, turn) -> str:
        if task.id == "sums/5" and turn.text == "7":
            raise ValueError("x marks the spot")
        return turn.text

    team = OneAgent(solver=AgentConfig(prompt="{question}=", max_tokens=16), after=after)
    with caplog.at_level(logging.WARNING):
        episodes = one_collect(plain_tokenizer, team, tasks=[Task(f"sums/{i}", f"{i}+1", str(i + 1)) for i in range(8)])
    # samples 1 and 3 of task 5 say 7
    assert kinds(episodes) == ["ok"] * 21 + ["team", "ok", "team"] + ["ok"] * 8
    failed = episodes[21]
    assert failed.reward is None
    assert failed.answer is None
    assert failed.failure.message.startswith("ValueError: x marks the spot (")
    assert "test_collector.py:" in failed.failure.message
    assert len(failed.turns) == 1
    assert "x marks the spot" in caplog.text


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda task, agents, turn: 12, "`run` returned int; expected str, None or Outcome"),
        (lambda task, agents, turn: turn, "`run` returned Turn"),
        (lambda task, agents, turn: agents.sover, "the team calls the agent 'sover'; the nearest is 'solver'"),
        (lambda task, agents, turn: agents["verifier"], "the team calls the agent 'verifier'"),
    ],
)
def test_I3_a_team_that_breaks_its_contract_fails_its_episodes(plain_tokenizer, after, message: str) -> None:
    team = OneAgent(solver=AgentConfig(prompt="{question}=", max_tokens=16), after=after)
    (episode,) = one_collect(plain_tokenizer, team, only=[(0, 0)])
    assert episode.status == "team"
    assert message in episode.failure.message


def test_I3_a_team_or_a_reward_that_exits_fails_its_episode_alone(plain_tokenizer) -> None:
    class Exits(OneAgent):
        async def run(self, task, agents):
            if task.id == "sums/0":
                sys.exit("no answer to that")
            if task.id == "sums/1":

                async def branch():
                    sys.exit(2)

                await asyncio.gather(branch(), agents.solver(question=task.question))
            return (await agents.solver(question=task.question)).text

    async def reward(task: Task, answer: str | None) -> float:
        return sys.exit(1) if task.id == "sums/2" else 1.0

    team = Exits(solver=AgentConfig(prompt="{question}=", max_tokens=16))
    episodes = one_collect(plain_tokenizer, team, tasks=TASKS[:4], group_size=1, reward=reward)
    assert kinds(episodes) == ["team", "team", "grader", "ok"]
    assert episodes[0].failure.message.startswith("SystemExit: no answer to that")


def test_I3_a_team_that_never_returns_times_out_alone(plain_tokenizer) -> None:
    class Stuck(OneAgent):
        async def run(self, task, agents):
            if task.id == "sums/0":
                await asyncio.Event().wait()
            return await super().run(task, agents)

    team = Stuck(solver=AgentConfig(prompt="{question}=", max_tokens=16))
    options = {"tasks": TASKS[:3], "group_size": 1, "episode_timeout_seconds": 1.5}
    episodes = one_collect(plain_tokenizer, team, deterministic=False, **options)
    assert kinds(episodes) == ["timeout", "ok", "ok"]
    assert episodes[0].failure.message == "not done after rollout.episode_timeout_seconds = 1.5"


def test_I3_a_stuck_episode_costs_deterministic_neighbours_a_wait_and_nothing_else(plain_tokenizer, caplog) -> None:
    class Stuck(OneAgent):
        async def run(self, task, agents):
            if task.id == "sums/0":
                await asyncio.Event().wait()
            return await super().run(task, agents)

    team = Stuck(solver=AgentConfig(prompt="{question}=", max_tokens=16))
    collector, engine = make(plain_tokenizer, team, group_size=1, episode_timeout_seconds=2.0, max_concurrent_episodes=2)
    episodes = collector.collect(TASKS[:4], step=1)
    assert kinds(episodes) == ["timeout", "ok", "ok", "ok"]
    assert engine.keys == [["sums/1#0/000/solver"], ["sums/2#0/000/solver"], ["sums/3#0/000/solver"]]
    assert "engines go on without ['sums/0#0']" in caplog.text


def test_a_timeout_of_the_teams_own_is_the_teams(plain_tokenizer) -> None:
    class Hasty(OneAgent):
        async def run(self, task, agents):
            raise TimeoutError("a tool took too long")

    (episode,) = one_collect(plain_tokenizer, Hasty(), only=[(0, 0)])
    assert episode.status == "team"
    assert episode.failure.message.startswith("TimeoutError: a tool took too long")


def test_a_team_that_raises_a_cancellation_is_a_failed_episode(plain_tokenizer) -> None:
    class Cancelling(OneAgent):
        async def run(self, task, agents):
            inner = asyncio.ensure_future(asyncio.sleep(60))
            inner.cancel()
            await inner

    episodes = one_collect(plain_tokenizer, Cancelling(), only=[(0, 0), (1, 0)])
    assert kinds(episodes) == ["team", "team"]


def test_a_hanging_request_times_out_and_leaves_the_engine(plain_tokenizer) -> None:
    def answer(prompt: str, key: str) -> str | None:
        return None if key.startswith("sums/1#") else arithmetic(prompt, key)

    episodes = one_collect(plain_tokenizer, answer=answer, tasks=TASKS[:3], group_size=1, episode_timeout_seconds=1.5)
    assert kinds(episodes) == ["ok", "timeout", "ok"]


def test_I3_a_dead_engine_fails_what_needs_it_at_once_and_a_restart_mends_it(plain_tokenizer) -> None:
    deadly = {"sums/4#0/001/verifier"}

    def answer(prompt: str, key: str) -> str:
        if key in deadly:
            raise EngineDied("killed by signal 9")
        return arithmetic(prompt, key)

    for deterministic in (True, False):
        collector, engine = make(plain_tokenizer, answer=answer, deterministic=deterministic, max_concurrent_episodes=4)
        episodes = collector.collect(TASKS, step=1)
        finished = [episode for episode in episodes if episode.status == "ok"]
        assert {episode.status for episode in episodes} == {"ok", "engine"}
        assert all(episode.reward == 1.0 for episode in finished)
        assert 12 <= len(finished) <= 16
        failed = [divmod(i, 4) for i, episode in enumerate(episodes) if episode.status == "engine"]
        # only that one request kills it; without it the restarted engine serves the rest
        engine.start()
        collector.revive("main")
        again = some(collector, TASKS, 1, [cell for cell in failed if cell != (4, 0)])
        assert kinds(again) == ["ok"] * (len(failed) - 1)


def test_I3_a_team_cannot_turn_engine_trouble_into_an_answer(plain_tokenizer) -> None:
    class Swallowing(OneAgent):
        async def run(self, task, agents):
            try:
                return await super().run(task, agents)
            except Exception:
                return "I don't know"

    def answer(prompt: str, key: str) -> str:
        raise EngineError("bad ids")

    (episode,) = one_collect(plain_tokenizer, Swallowing(), answer=answer, only=[(0, 0)])
    assert (episode.status, episode.reward, episode.answer) == ("engine", None, None)


def test_a_prompt_that_is_too_long_names_the_key_to_change(plain_tokenizer) -> None:
    team = OneAgent(solver=AgentConfig(prompt="{question}", max_tokens=24))
    tasks = [Task("long", "x" * 1001, "1"), Task("fits", "x" * 1000, "1")]
    long, fits = one_collect(plain_tokenizer, team, tasks=tasks, answer=["1"], group_size=1)
    assert long.status == "overlong"
    assert long.failure.message.startswith(
        "the prompt of agent solver has 1001 tokens and max_tokens is 24; together at most 1024 "
        "(policies.main.engine.max_model_tokens)"
    )
    assert (fits.status, fits.reward) == ("ok", 1.0)


@pytest.mark.parametrize("error", [GraderTimeout("no verdict after 1 s"), GraderError("died"), ZeroDivisionError("mine")])
def test_I3_grader_trouble_is_never_a_reward(plain_tokenizer, error: Exception) -> None:
    async def reward(task: Task, answer: str | None) -> float:
        if task.id == "sums/0":
            raise error
        return 1.0

    episodes = one_collect(plain_tokenizer, reward=reward, tasks=TASKS[:2], group_size=1)
    assert kinds(episodes) == ["grader", "ok"]
    assert episodes[0].reward is None
    assert str(error) in episodes[0].failure.message


def test_I3_a_reward_that_is_no_number_is_grader_trouble(plain_tokenizer) -> None:
    async def reward(task: Task, answer: str | None) -> float:
        return float("nan")

    (episode,) = one_collect(plain_tokenizer, reward=reward, only=[(0, 0)])
    assert (episode.status, episode.failure.message) == ("grader", "the reward is nan; expected a finite number")


def test_no_answer_is_graded_and_an_agent_without_calls_costs_nothing(plain_tokenizer) -> None:
    class Silent(OneAgent):
        async def run(self, task, agents):
            return None

    collector, engine = make(plain_tokenizer, Silent())
    episodes = collector.collect(TASKS[:1], step=1)
    assert [(episode.status, episode.reward, episode.turns) for episode in episodes] == [("ok", 0.0, [])] * 4
    assert engine.keys == []


def test_grading_holds_neither_a_slot_nor_the_gate(plain_tokenizer) -> None:
    async def run_all_then_grade(task: Task, answer: str | None) -> float:
        graded.append(task.id)
        # the first grade ends only when the last episode has been played, which needs the one slot that there is
        while len(graded) < 4:
            await asyncio.sleep(0.001)
        return 1.0

    graded: list[str] = []
    episodes = one_collect(plain_tokenizer, reward=run_all_then_grade, tasks=TASKS[:4], group_size=1, max_concurrent_episodes=1)
    assert [episode.reward for episode in episodes] == [1.0] * 4


def test_a_parallel_team_has_its_turns_in_call_order(plain_tokenizer) -> None:
    class Pair(TeamConfig):
        left: AgentConfig = AgentConfig(prompt="{x}", max_tokens=16)
        right: AgentConfig = AgentConfig(prompt="{x}", max_tokens=16)

        async def run(self, task, agents):
            left, right = await asyncio.gather(agents.left(x=task.question), agents.right(x=task.question))
            both = await agents.left(x=left.text + right.text)
            return both.text

    def answer(prompt: str, key: str) -> str:
        return "longer" if key.endswith("left") else "r"

    for episode in one_collect(plain_tokenizer, Pair(), answer=answer):
        assert [(turn.index, turn.agent) for turn in episode.turns] == [(0, "left"), (1, "right"), (2, "left")]
        assert plain_tokenizer.decode(episode.turns[2].prompt_ids) == "longerr"


def test_a_failing_branch_leaves_no_other_branch_behind(plain_tokenizer) -> None:
    class Racing(TeamConfig):
        fast: AgentConfig = AgentConfig(prompt="{x}", max_tokens=16)
        slow: AgentConfig = AgentConfig(prompt="{x}", max_tokens=16)

        async def run(self, task, agents):
            async def failing() -> None:
                await agents.fast(x=1)
                raise RuntimeError("branch failed")

            await asyncio.gather(failing(), agents.slow(x=2))

    def answer(prompt: str, key: str) -> str | None:
        return "1" if key.endswith("fast") else None

    episodes = one_collect(plain_tokenizer, Racing(), answer=answer, tasks=TASKS[:2])
    assert kinds(episodes) == ["team"] * 8
    assert all([turn.agent for turn in episode.turns] == ["fast"] for episode in episodes)


def test_agents_may_speak_with_policies_of_different_tokenizers(plain_tokenizer, byte_tokenizer) -> None:
    team = load_team({**TOY, "verifier": {**TOY["verifier"], "policy": "small"}})
    engines = {
        "main": ScriptedEngine(plain_tokenizer, arithmetic),
        "small": ScriptedEngine(byte_tokenizer, lambda prompt, key: "no"),
    }
    tokenizers = {"main": plain_tokenizer, "small": byte_tokenizer}
    collector = Collector(team, engines, tokenizers, exact, RolloutConfig(group_size=1), seed=3)
    (episode,) = collector.collect(TASKS[:1], step=1)
    assert [turn.policy for turn in episode.turns] == ["main", "small", "main"]
    assert byte_tokenizer.decode(episode.turns[1].prompt_ids).startswith("<|im_start|>user\n0+1=1?<|im_end|>")


def test_a_mistake_in_a_scripted_rule_ends_the_rollout(plain_tokenizer) -> None:
    def answer(prompt: str, key: str) -> str:
        raise ValueError("no sum in the prompt")

    with pytest.raises(ValueError, match="no sum in the prompt"):
        one_collect(plain_tokenizer, answer=answer)


def test_an_error_in_on_progress_is_raised_as_it_is(plain_tokenizer) -> None:
    def progress(episode: Episode) -> None:
        raise KeyError("bar")

    with pytest.raises(KeyError, match="bar"):
        make(plain_tokenizer)[0].collect(TASKS, step=1, on_progress=progress)


def test_I9_two_rollouts_on_the_real_engine_are_bit_equal(deterministic_engine, engine_model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(engine_model)
    runs = []
    for _ in range(2):
        deterministic_engine.pause()  # forgets cached prefixes, as the sync before every step does
        deterministic_engine.resume()
        collector, _ = make(tokenizer, engine=deterministic_engine, group_size=3, max_concurrent_episodes=10)
        runs.append(collector.collect(TASKS, step=2))
        assert kinds(runs[-1]) == ["ok"] * 24
    turns = [[episode.turns for episode in run] for run in runs]
    assert turns[0] == turns[1]
    assert sum(len(turn.response_ids) for episode in turns[0] for turn in episode) > 100
