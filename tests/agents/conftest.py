"""A team's run without engines: `play` answers every call by rule."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from drmas.agents.calls import Agents, Calls
from drmas.agents.chat import ChatRenderer
from drmas.agents.team import TeamConfig
from drmas.types import Episode, Task


@pytest.fixture
def play(byte_tokenizer):
    """`await play(team, answer)` runs the team once; `answer(agent, prompt)` is what an agent says. Returns the episode."""
    renderer = ChatRenderer(byte_tokenizer)

    async def run(team: TeamConfig, answer: Callable[[str, str], str], question: str = "2+3?") -> Episode:
        async def generate(agent, prompt_ids, *, seed: int, key: str):
            ids = byte_tokenizer(answer(key.rpartition("/")[2], byte_tokenizer.decode(prompt_ids)), add_special_tokens=False)
            tokens = [*ids["input_ids"], byte_tokenizer.eos_token_id]
            return SimpleNamespace(
                token_ids=tokens, logprobs=[-1.0] * len(tokens), versions=[0] * len(tokens), finish_reason="stop"
            )

        episode = Episode(task=Task("t", question, "5"), sample=0)
        calls = Calls(team.agents, {"main": renderer}, generate, episode, lambda agent, turn: turn)
        episode.answer = await team.run(episode.task, Agents(calls))
        await calls.close()
        return episode

    return run
