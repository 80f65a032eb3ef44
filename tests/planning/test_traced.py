"""What stubs find of a team's calls: their order, what they wait for, and what their prompts are made of."""

from __future__ import annotations

import asyncio

import pytest

from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, load_team
from drmas.planning.traced import CHAT_TOKENS, Piece, trace


def test_a_piece_grows_with_what_it_repeats():
    piece = Piece(10.0, ((0, 1.0), (2, 0.5)))
    assert piece.length([4, 100, 6]) == 10 + 4 + 3


def test_a_verifier_that_approves_or_not_gives_two_shapes():
    shapes = trace(load_team({"name": "solver-verifier", "rounds": 2}), samples=200)
    found = {tuple(step.agent for step in shape): share for shape, share in shapes.items()}
    assert set(found) == {("solver", "verifier"), ("solver", "verifier", "solver")}
    assert found["solver", "verifier"] == pytest.approx(0.5, abs=0.12)
    assert sum(found.values()) == pytest.approx(1.0)
    longest = max(shapes, key=len)
    assert [step.after for step in longest] == [(), (0,), (1,)]
    assert [step.prompt.heard for step in longest] == [(), ((0, 1.0),), ((0, 1.0), (1, 1.0))]


def test_questions_and_templates_are_counted_by_their_characters():
    team = load_team({"name": "single", "solver": {"prompt": "abcd{question}efgh"}})
    ((step,),) = trace(team, question_tokens=50, samples=1)
    assert step.prompt.tokens == pytest.approx(CHAT_TOKENS + 50 + 9 / 4)  # eight letters and a line's end
    assert step.shared == pytest.approx(step.prompt.tokens)
    assert step.own.tokens == 0


def test_a_debate_speaks_at_once_and_its_judge_waits_for_all():
    (shape,) = trace(load_team({"name": "debate", "solvers": 3, "rounds": 2}))
    assert [step.agent for step in shape] == ["solver"] * 6 + ["judge"]
    assert [step.after for step in shape] == [()] * 3 + [(0, 1, 2)] * 3 + [(3, 4, 5)]
    assert [call for call, _ in shape[6].prompt.heard] == [3, 4, 5]


def test_tools_stand_after_the_call_that_asked_and_their_text_is_the_episodes_own():
    shapes = trace(load_team({"name": "search-router", "rounds": 3}), tool_characters=4000)
    longest = max(shapes, key=len)
    assert [step.tools for step in longest if step.agent == "searcher"] == [1, 1]
    assert not any(step.tools for step in longest if step.agent != "searcher")
    second = longest[2]
    assert second.agent == "router"
    assert second.prompt.tokens > 1000 > second.shared
    assert longest[-1].prompt.tokens > 2000


class Branches(TeamConfig):
    left: AgentConfig = AgentConfig(prompt="{question}")
    right: AgentConfig = AgentConfig(prompt="{text}")

    async def run(self, task, agents):
        async def branch():
            return await agents.right(text=(await agents.left(question=task.question)).text)

        return (await asyncio.gather(branch(), branch()))[0].text


def test_calls_of_two_branches_wait_for_their_own():
    (shape,) = trace(Branches(), samples=1)
    assert [(step.agent, step.after) for step in shape] == [("left", ()), ("left", ()), ("right", (0,)), ("right", (1,))]
    assert shape[3].own.tokens < 30  # what the other branch said differs


class Broken(Branches):
    async def run(self, task, agents):
        raise ValueError("no")


class Sleeps(Branches):
    async def run(self, task, agents):
        await asyncio.sleep(3600)


class Asks(Branches):
    async def run(self, task, agents):
        while True:
            await agents.left(question=task.question)


@pytest.mark.parametrize("team", [Broken(), Sleeps()])
def test_a_team_that_cannot_be_stubbed_has_no_shapes(team):
    assert trace(team, samples=3) == {}


def test_a_team_that_never_ends_is_cut():
    (shape,) = trace(Asks(), samples=1)
    assert len(shape) == 500
    assert shape[-1].after == (498,)


def test_the_same_seed_gives_the_same_shapes():
    team = load_team({"name": "search-router"})
    assert trace(team, seed=3) == trace(team, seed=3) != trace(team, seed=4)
