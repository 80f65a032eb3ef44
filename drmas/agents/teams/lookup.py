"""Search for models that read a few dozen characters: the hierarchy of `search-router`, and one agent who does it all.

`compact-search` differs from `search-router` in what its agents read: `{history}` is a `>` and the passage for every search, on
one line. `search-alone` has one agent: a response `?WORDS` searches for these words, any other is the answer; in the last of
`rounds` rounds every response is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveInt

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
from drmas.agents.prompts import quote
from drmas.agents.team import TeamConfig, register_team
from drmas.agents.teams.search_router import Found, SearchRouter
from drmas.types import Task


@register_team("compact-search")
class CompactSearch(SearchRouter):
    """A router, a searcher and an answerer, with a history of one line."""

    def _known(self, task: Task, history: list[Found], round_: int, reader: AgentConfig) -> dict[str, object]:
        found = "".join(_line(one.passages, reader) for one in history)
        return {"question": task.question, "history": found, "round": round_, "rounds": self.rounds}


@register_team("search-alone")
class SearchAlone(TeamConfig):
    """One agent that searches and answers: single-agent reinforcement learning, the baseline of the hierarchy."""

    values: ClassVar[Mapping[str, frozenset[str]]] = {"solver": frozenset({"question", "history"})}
    uses: ClassVar[frozenset[str]] = frozenset({"search"})

    rounds: PositiveInt = 4
    """Most responses per episode; the last one answers."""
    solver: AgentConfig = AgentConfig(prompt="{question}{history}")

    async def run(self, task: Task, agents: Agents) -> str | None:
        history = ""
        for round_ in range(1, self.rounds + 1):
            said = await agents.solver(question=task.question, history=history)
            words = said.text.removeprefix("?").strip()
            if round_ == self.rounds or not said.text.startswith("?"):
                return said.text
            if words:
                history += _line((await agents.tools.search(query=words)).text, self.solver)
        return None


def _line(passages: str, reader: AgentConfig) -> str:
    """What was found, on one line, without the number that the search tool gives a single passage."""
    return ">" + quote(" ".join(passages.removeprefix("[1]").split()), reader.tags)
