"""Teams in the real collector: what they do wrong, what goes wrong under them, and what they leave to be trained."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import Any, ClassVar

import pytest

from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, load_team
from drmas.agents.tools import Toolbox
from drmas.config.schema import RolloutConfig
from drmas.errors import ToolError
from drmas.rollout.collector import Collector
from drmas.rollout.scripted import ScriptedEngine
from drmas.types import Episode, Task, rows_of

ROUTES = {
    "router": "<verdict>search</verdict>",
    "searcher": "<search>element 74</search>",
    "answerer": "<answer>tungsten</answer>",
}


class Asking(TeamConfig):
    """Asks one agent and does what a test wants."""

    solver: AgentConfig = AgentConfig(max_tokens=32)
    does: Any = None

    async def run(self, task, agents):
        return await self.does(task, agents)


class Retriever:
    """A tool `search`; `fails` in the place of an answer."""

    timeout_seconds = 5.0
    specs: ClassVar[Sequence[dict]] = [
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "",
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
            },
        }
    ]

    def __init__(self, fails: Exception | None = None) -> None:
        self.fails = fails

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def call(self, name: str, arguments: dict) -> tuple[str, bool]:
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return f"[1] {arguments['query']} is tungsten", True


async def exact(task: Task, answer: str | None) -> float:
    return float(answer == task.truth)


@pytest.fixture
def collect(byte_tokenizer):
    """`collect(team, say)` runs the team `samples` times on one task; `say(agent, prompt)` is what an agent says."""

    def run(
        team: TeamConfig,
        say: Callable[[str, str], str] = lambda agent, prompt: "4",
        *,
        samples: int = 1,
        tools: Toolbox | None = None,
        room: int = 10_000,
        **config,
    ) -> list[Episode]:
        engine = ScriptedEngine(byte_tokenizer, lambda prompt, key: say(key.rpartition("/")[2], prompt), max_model_tokens=room)
        rollout = RolloutConfig(**{"group_size": samples, "episode_timeout_seconds": 60, **config})
        with Collector(team, {"main": engine}, {"main": byte_tokenizer}, exact, rollout, seed=1, tools=tools) as collector:
            return collector.collect([Task("t", "1+3", "4")], step=1)

    return run


async def nothing(task, agents):
    await agents.solver(question=task.question)


async def raising(task, agents):
    await agents.solver(question=task.question)
    raise KeyError("answer")


async def wrong_type(task, agents):
    return await agents.solver(question=task.question)


async def unknown_agent(task, agents):
    return await agents.verifier(question=task.question)


async def unknown_tool(task, agents):
    return await agents.tools.search(query="x")


async def never(task, agents):
    await agents.solver(question=task.question)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("does", "kind", "message"),
    [
        (raising, "team", r"KeyError: 'answer' \(.*test_in_collector.py:\d+\)"),
        (wrong_type, "team", "`run` returned Turn; expected"),
        (unknown_agent, "team", "the team calls the agent 'verifier'; .*expected one of solver"),
        (unknown_tool, "team", r"calls the tool 'search', and the run has none; add a section \[tools.search\]"),
        (never, "timeout", "rollout.episode_timeout_seconds"),
    ],
)
def test_I3_what_a_team_does_wrong_fails_its_own_episode(collect, does, kind: str, message: str) -> None:
    turns = []

    async def sometimes(task, agents):
        turns.append(1)
        return await does(task, agents) if len(turns) == 1 else "4"

    bad, good = collect(Asking(does=sometimes), samples=2, episode_timeout_seconds=1)
    assert (bad.status, bad.reward, bad.answer, good.reward) == (kind, None, None, 1.0)
    assert re.search(message, bad.failure.message)
    assert all(row.reward is None for row in rows_of([bad]))


def test_no_answer_is_graded_and_no_failure(collect) -> None:
    (episode,) = collect(Asking(does=nothing))
    assert (episode.status, episode.answer, episode.reward) == ("ok", None, 0.0)


@pytest.mark.parametrize("said", ["\N{RIGHT-TO-LEFT OVERRIDE}4", "a\0b", "e\u0301\N{ZERO WIDTH JOINER}", "", "x" * 20_000])
def test_whatever_is_said_becomes_a_row_and_a_prompt(collect, said: str) -> None:
    prompts = []

    async def twice(task, agents):
        first = await agents.solver(question=task.question)
        return (await agents.solver(question=first.text)).text

    def say(agent: str, prompt: str) -> str:
        prompts.append(prompt)
        return said

    team = Asking(does=twice, solver=AgentConfig(max_tokens=30_000))
    (episode,) = collect(team, say, room=100_000)
    assert (episode.status, episode.answer) == ("ok", said)
    assert f"<|im_start|>user\n{said}<|im_end|>" in prompts[1]
    assert len(rows_of([episode])) == 2


def test_a_retry_is_a_row_with_its_penalty(collect) -> None:
    team = load_team({"name": "single", "solver": {"retries": 2, "invalid_penalty": 0.5, "prompt": "{question}"}})
    texts = iter(["4", r"\boxed{4}"])
    (episode,) = collect(team, lambda agent, prompt: next(texts))
    assert [(row.turn, row.penalty, row.reward) for row in rows_of([episode])] == [(0, 0.5, 0.0), (1, 0.0, 0.0)]


def test_a_team_searches_and_its_uses_are_recorded(collect) -> None:
    team = load_team({"name": "search-router", "rounds": 2})
    episodes = collect(team, lambda agent, prompt: ROUTES[agent], tools=Toolbox({"search": Retriever()}), samples=4)
    for episode in episodes:
        assert (episode.status, episode.answer) == ("ok", "tungsten")
        assert [turn.agent for turn in episode.turns] == ["router", "searcher", "answerer"]
        assert [(use.tool, use.result, use.ok) for use in episode.tool_uses] == [("search", "[1] element 74 is tungsten", True)]


def test_I3_a_retriever_that_is_down_is_no_reward_of_zero(collect) -> None:
    team = load_team({"name": "search-router", "rounds": 2})
    down = Toolbox({"search": Retriever(ToolError("tools.search: 503 for ever"))})
    (episode,) = collect(team, lambda agent, prompt: ROUTES[agent], tools=down)
    assert (episode.status, episode.reward, episode.failure.message) == ("tool", None, "tools.search: 503 for ever")


def test_I3_a_team_cannot_hide_that_a_tool_was_down(collect) -> None:
    async def hiding(task, agents):
        try:
            await agents.tools.search(query="x")
        except ToolError:
            return "4"

    (episode,) = collect(Asking(does=hiding), tools=Toolbox({"search": Retriever(ToolError("down"))}))
    assert (episode.status, episode.reward) == ("tool", None)


def test_an_agent_calls_tools_wrongly_and_rightly(collect) -> None:
    call = '<tool_call>{"name": "search", "arguments": {"query": "element 74"}}</tool_call>'
    texts = iter(['<tool_call>{"name": "serch", "arguments": {}}</tool_call>', call, r"\boxed{4}"])
    prompts = []

    def say(agent: str, prompt: str) -> str:
        prompts.append(prompt)
        return next(texts)

    team = load_team({"name": "single", "solver": {"tools": ["search"], "prompt": "{question}"}})
    (episode,) = collect(team, say, tools=Toolbox({"search": Retriever()}))
    assert (episode.status, [turn.valid for turn in episode.turns]) == ("ok", [True] * 3)
    assert [(use.ok, use.turn) for use in episode.tool_uses] == [(False, 0), (True, 1)]
    assert "the nearest is 'search'" in prompts[1]
    assert "element 74 is tungsten" in prompts[2]
    rows = rows_of([episode])
    for row, following in pairwise(rows):
        start = row.prompt_ids + row.response_ids
        assert following.prompt_ids[: len(start)] == start


def test_a_prompt_that_is_too_long_fails_its_episode_or_is_cut(collect) -> None:
    for overlong, status in (("drop", "overlong"), ("truncate", "ok")):
        section = {"name": "single", "solver": {"overlong": overlong, "prompt": "x" * 500, "max_tokens": 64}}
        (episode,) = collect(load_team(section), room=256)
        assert episode.status == status
        if episode.failure:
            assert "policies.main.engine.max_model_tokens" in episode.failure.message
            assert "team.solver.overlong" in episode.failure.message


def test_a_debate_in_parallel_is_the_same_every_time(collect) -> None:
    team = load_team({"name": "debate", "solver": {"prompt": "{question}"}, "revise": "{own}|{others}"})
    runs = []
    for numbers in (count(), count()):

        def say(agent: str, prompt: str, numbers=numbers) -> str:
            return "2" if agent == "judge" else rf"\boxed{{{next(numbers)}}}"

        episodes = collect(team, say, samples=3)
        assert all(len(episode.turns) == 7 and episode.status == "ok" for episode in episodes)
        runs.append([[(turn.index, turn.agent, turn.text) for turn in episode.turns] for episode in episodes])
    assert runs[0] == runs[1]
