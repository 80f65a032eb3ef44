from __future__ import annotations

import pytest

from drmas.agents.team import load_team

SETTINGS = {
    "router": {"prompt": "{question}{history}?", "parser": "verdict:yes,no"},
    "searcher": {"prompt": "{question}{history}!", "parser": "text"},
    "answerer": {"prompt": "{question}{history}=", "parser": "text"},
}


@pytest.fixture
def corpus(tool_rules):
    table = {"ba": "see ki", "ki": "7"}
    return tool_rules({"search": lambda arguments: f"[1] {arguments['query']}\n{table.get(arguments['query'], '')}".strip()})


def _spoken(episode) -> list[tuple[str, str]]:
    return [(turn.agent, turn.text) for turn in episode.turns]


async def test_the_hierarchy_reads_what_was_found_on_one_line(play, corpus) -> None:
    prompts: list[str] = []

    def rule(agent: str, prompt: str) -> str:
        prompts.append(prompt)
        if agent == "router":
            return "yes" if "7?" in prompt else "no"
        return "7" if agent == "answerer" else ("ki" if "see" in prompt else "ba")

    team = load_team({"name": "compact-search", "rounds": 4, **SETTINGS})
    episode = await play(team, rule, question="ba", tools=corpus)
    assert [agent for agent, _ in _spoken(episode)] == ["router", "searcher", "router", "searcher", "router", "answerer"]
    assert episode.answer == "7"
    assert "ba>ba see ki>ki 7=" in prompts[-1]


@pytest.mark.parametrize(
    ("said", "answer", "calls"),
    [
        (["7"], "7", 1),
        (["?ba", "?ki", "7"], "7", 3),
        (["?", "7"], "7", 2),  # nothing to search for passes the round
        (["?ba", "?ba", "?ba"], "?ba", 3),  # the last round answers
    ],
)
async def test_one_agent_searches_and_answers(play, corpus, said, answer, calls) -> None:
    texts, prompts = iter(said), []

    def rule(agent: str, prompt: str) -> str:
        prompts.append(prompt)
        return next(texts)

    team = load_team({"name": "search-alone", "rounds": 3, "solver": {"prompt": "{question}{history}:"}})
    episode = await play(team, rule, question="ba", tools=corpus)
    assert (episode.answer, len(episode.turns)) == (answer, calls)
    if said == ["?ba", "?ki", "7"]:
        assert "ba>ba see ki>ki 7:" in prompts[-1]
