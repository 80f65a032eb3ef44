from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents, Calls
from drmas.agents.chat import ChatRenderer
from drmas.errors import EngineError, TeamError
from drmas.types import Episode, Task


class Desk:
    """Stands in for the collector: records requests, answers each when told to."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked: list[tuple[str, int]] = []
        self.prompts: list[str] = []
        self.answers: dict[str, asyncio.Future] = {}
        self.response = [72, 105]

    async def __call__(self, agent, prompt_ids, *, seed: int, key: str):
        self.asked.append((key, seed))
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        if key in self.answers:
            await self.answers[key]
        ids = self.response
        return SimpleNamespace(token_ids=ids, logprobs=[-0.5] * len(ids), versions=[3] * len(ids), finish_reason="stop")


@pytest.fixture
def desk(byte_tokenizer) -> Desk:
    return Desk(byte_tokenizer)


def calls_of(desk: Desk, **agents: AgentConfig) -> tuple[Calls, Agents, Episode]:
    episode = Episode(task=Task("sums/1", "1+1", "2"), sample=2)
    renderers = {"main": ChatRenderer(desk.tokenizer)}
    calls = Calls(agents, renderers, desk, episode, lambda agent, turn: 100 * turn + len(agent))
    return calls, Agents(calls), episode


async def test_a_call_becomes_a_turn_and_returns_it(desk: Desk) -> None:
    _, agents, episode = calls_of(desk, solver=AgentConfig(prompt="{question}=", system="Add {question}."))
    turn = await agents.solver(question="1+1")
    assert episode.turns == [turn]
    assert (turn.agent, turn.policy, turn.index, turn.finish_reason) == ("solver", "main", 0, "stop")
    assert (turn.logprobs, turn.versions) == ([-0.5, -0.5], [3, 3])
    assert desk.asked == [("sums/1#2/000/solver", 6)]
    assert desk.prompts == ["<|im_start|>system\nAdd 1+1.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"]


async def test_I1_the_sampled_ids_survive_whatever_they_decode_to(desk: Desk) -> None:
    _, agents, episode = calls_of(desk, solver=AgentConfig())
    half_a_character = desk.tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    desk.response = [*half_a_character, desk.tokenizer.eos_token_id, *half_a_character]
    for _ in range(3):
        turn = await agents.solver(question=episode.turns[-1].text if episode.turns else "?")
        assert turn.response_ids == desk.response
        assert turn.text == "\N{REPLACEMENT CHARACTER}" * 2


async def test_an_agent_is_found_by_name_whatever_the_name(desk: Desk) -> None:
    _, agents, episode = calls_of(desk, **{name: AgentConfig() for name in ("call", "close", "configs")})
    for name in ("call", "close"):
        await getattr(agents, name)(question="x")
    await agents["configs"](question="x")
    assert [turn.agent for turn in episode.turns] == ["call", "close", "configs"]


async def test_values_may_have_any_name_and_a_template_may_be_given(desk: Desk) -> None:
    _, agents, _ = calls_of(desk, solver=AgentConfig(prompt="unused"))
    await agents.solver("{template}/{self}/{name}", template="a", self="b", name="c")
    assert "\na/b/c<|im_end|>" in desk.prompts[0]


async def test_an_unknown_agent_names_the_nearest(desk: Desk) -> None:
    _, agents, _ = calls_of(desk, solver=AgentConfig(), verifier=AgentConfig())
    with pytest.raises(TeamError, match="calls the agent 'sover'; the nearest is 'solver'"):
        await agents.sover(question="x")
    assert desk.asked == []


async def test_a_placeholder_without_a_value_is_a_team_error(desk: Desk) -> None:
    _, agents, _ = calls_of(desk, solver=AgentConfig(prompt="{critique}"))
    with pytest.raises(TeamError, match=r"agent solver asks for \{critique\}, which the team doesn't pass; .*question"):
        await agents.solver(question="x")
    assert desk.asked == []


async def test_parallel_calls_are_numbered_in_call_order(desk: Desk) -> None:
    calls, agents, episode = calls_of(desk, left=AgentConfig(), right=AgentConfig())
    first = desk.answers["sums/1#2/000/left"] = asyncio.get_running_loop().create_future()
    both = asyncio.gather(agents.left(question="1"), agents.right(question="2"))
    await asyncio.sleep(0.01)
    assert [turn.agent for turn in episode.turns] == ["right"]
    first.set_result(None)
    left, right = await both
    await calls.close()
    assert (left.index, right.index) == (0, 1)
    assert episode.turns == [left, right]


async def test_calls_that_the_team_left_behind_are_cancelled_and_later_ones_refused(desk: Desk) -> None:
    calls, agents, episode = calls_of(desk, solver=AgentConfig())
    desk.answers["sums/1#2/000/solver"] = asyncio.get_running_loop().create_future()
    left_behind = asyncio.create_task(agents.solver(question="x"))
    await asyncio.sleep(0)
    await calls.close()
    assert left_behind.cancelled()
    with pytest.raises(TeamError, match="called after the team had returned"):
        await agents.solver(question="x")
    assert episode.turns == []


async def test_I3_an_engine_error_is_remembered_even_if_the_team_catches_it(desk: Desk) -> None:
    calls, agents, _ = calls_of(desk, solver=AgentConfig())
    desk.answers["sums/1#2/000/solver"] = refused = asyncio.get_running_loop().create_future()
    refused.set_exception(EngineError("too long"))
    with pytest.raises(EngineError):
        await agents.solver(question="x")
    assert str(calls.engine_error) == "too long"


async def test_invalid_text_costs_its_penalty_and_keeps_the_turn(desk: Desk) -> None:
    _, agents, _ = calls_of(desk, solver=AgentConfig(parser="boxed", invalid_penalty=0.25))
    turn = await agents.solver(question="x")
    assert (turn.valid, turn.parsed, turn.penalty, turn.response_ids) == (False, None, 0.25, desk.response)
    desk.response = desk.tokenizer(r"\boxed{4}", add_special_tokens=False)["input_ids"]
    turn = await agents.solver(question="x")
    assert (turn.valid, turn.parsed, turn.penalty) == (True, "4", 0.0)


async def test_an_empty_response_is_a_turn_without_tokens(desk: Desk) -> None:
    _, agents, _ = calls_of(desk, solver=AgentConfig())
    desk.response = []
    turn = await agents.solver(question="x")
    assert (turn.text, turn.valid, turn.response_ids) == ("", False, [])
