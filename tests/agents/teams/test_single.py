from __future__ import annotations

from drmas.agents.team import load_team


async def test_one_call_is_the_answer(play) -> None:
    episode = await play(load_team({"name": "single"}), lambda agent, prompt: r"\boxed{5}")
    assert [turn.agent for turn in episode.turns] == ["solver"]
    assert (episode.answer, episode.turns[0].parsed) == (r"\boxed{5}", "5")
