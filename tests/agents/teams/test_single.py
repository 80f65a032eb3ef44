from __future__ import annotations

from drmas.agents.team import load_team


async def test_one_call_is_the_answer(play) -> None:
    episode = await play(load_team({"name": "single"}), lambda agent, prompt: r"\boxed{5}")
    assert [turn.agent for turn in episode.turns] == ["solver"]
    assert (episode.answer, episode.turns[0].parsed) == (r"\boxed{5}", "5")


async def test_a_single_agents_thought_is_not_graded(play) -> None:
    episode = await play(load_team({"name": "single"}), lambda agent, prompt: r"<think>or \boxed{9}</think>\boxed{5}")
    assert (episode.answer, episode.turns[0].parsed) == (r"\boxed{5}", "5")
    cut = await play(load_team({"name": "single"}), lambda agent, prompt: r"<think>or \boxed{9}")
    assert (cut.answer, cut.turns[0].valid) == ("", False)
