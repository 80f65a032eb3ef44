"""A team's run without engines: `play` answers every call by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from drmas.agents.calls import Agents, Calls
from drmas.agents.chat import ChatRenderer
from drmas.agents.team import TeamConfig
from drmas.types import Episode, Outcome, Task


class ToolRules:
    """The tools of an episode by rule: `tools[name](arguments)` is the text that a tool answers."""

    def __init__(self, tools: Mapping[str, Callable[[dict], str]]) -> None:
        self.tools = tools
        self.used: list[tuple[str, dict]] = []

    def specs(self, allowed: Sequence[str]) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in allowed]

    async def call(self, name: str, arguments: dict) -> SimpleNamespace:
        self.used.append((name, arguments))
        return SimpleNamespace(text=self.tools[name](arguments), ok=True)

    async def answers(self, text: str, config, agent: str, turn: int, spent: int) -> list[dict[str, str]] | None:
        return None


@pytest.fixture
def play(byte_tokenizer):
    """`await play(team, answer)` runs the team once; `answer(agent, prompt)` is what an agent says. Returns the episode."""
    renderer = ChatRenderer(byte_tokenizer)

    async def run(
        team: TeamConfig, answer: Callable[[str, str], str], question: str = "2+3?", tools: ToolRules | None = None
    ) -> Episode:
        async def generate(agent, prompt_ids, *, seed: int, key: str):
            ids = byte_tokenizer(answer(key.rpartition("/")[2], byte_tokenizer.decode(prompt_ids)), add_special_tokens=False)
            tokens = [*ids["input_ids"], byte_tokenizer.eos_token_id]
            return SimpleNamespace(
                token_ids=tokens, logprobs=[-1.0] * len(tokens), versions=[0] * len(tokens), finish_reason="stop"
            )

        async def ask_remote(agent, messages, *, seed: int, key: str):
            text = answer(key.rpartition("/")[2], "\n".join(message["content"] for message in messages))
            return SimpleNamespace(text=text, finish_reason="stop")

        episode = Episode(task=Task("t", question, "5"), sample=0)
        calls = Calls(
            team.agents,
            {"main": renderer},
            generate,
            episode,
            lambda agent, turn: turn,
            limits={},
            ask_remote=ask_remote,
            tools=tools,
        )
        result = await team.run(episode.task, Agents(calls))
        outcome = result if isinstance(result, Outcome) else Outcome(result)
        episode.answer, episode.agent_rewards = outcome.answer, outcome.rewards
        await calls.close()
        return episode

    return run


@pytest.fixture
def tool_rules() -> type[ToolRules]:
    return ToolRules
