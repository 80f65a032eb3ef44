"""Search with a router: it decides in each round whether what was found is enough to answer.

    router -> (search)  searcher writes a query -> the tool `search` -> router with what was found -> ...
           -> (answer)  answerer -> done                      the last of `rounds` rounds answers without asking the router

Queries and passages reach the agents as data in their prompts. The answer is what the answerer's parser finds in its own last
response: nothing that was retrieved or that others said can pass for it. A router response without a decision searches on, or
answers where `router.on_invalid` is fail_open; a searcher response without a query passes the round without a search, or the
whole text is the query where `searcher.on_invalid` is fail_open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
from drmas.agents.parsers import spoken
from drmas.agents.prompts import quote
from drmas.agents.team import TeamConfig, register_team
from drmas.types import Task

_KNOWN = frozenset({"question", "history", "round", "rounds"})
_SLOTS = frozenset({"query", "information"})


@dataclass(frozen=True, slots=True)
class Found:
    """One search of an episode."""

    query: str
    passages: str


@register_team("search-router")
class SearchRouter(TeamConfig):
    """A router, a searcher that writes queries, and an answerer."""

    values: ClassVar[Mapping[str, frozenset[str]]] = {
        "router": _KNOWN,
        "searcher": _KNOWN | {"advice"},
        "answerer": _KNOWN,
    }
    uses: ClassVar[frozenset[str]] = frozenset({"search"})

    rounds: PositiveInt = 4
    """Most rounds per episode: so many decisions and searches, less the last one, which answers."""
    router: AgentConfig = AgentConfig(
        prompt=(
            "Question: {question}\n\n{history}\n\nThis is round {round} of {rounds}. Is that enough to answer the question for "
            "sure? Think briefly. End with <verdict>answer</verdict> if it is, or <verdict>search</verdict> if something has "
            "to be looked up first."
        ),
        parser="verdict:answer,search",
    )
    searcher: AgentConfig = AgentConfig(
        prompt=(
            "Question: {question}\n\n{history}\n\nA colleague said:\n<advice>\n{advice}\n</advice>\n\nWrite the next query for "
            "a search engine. Think briefly. End with the query alone between <search> and </search>."
        ),
        parser="tag:search",
    )
    answerer: AgentConfig = AgentConfig(
        prompt=(
            "Question: {question}\n\n{history}\n\nAnswer the question. Think briefly. End with the answer alone, as short as "
            "possible, between <answer> and </answer>."
        ),
        parser="tag:answer",
    )

    async def run(self, task: Task, agents: Agents) -> str | None:
        history: list[Found] = []
        round_ = 1
        while round_ < self.rounds:
            decision = await agents.router(**self._known(task, history, round_, self.router))
            if decision.parsed:
                break
            advice = quote(spoken(decision.text), self.searcher.tags)
            query = await agents.searcher(advice=advice, **self._known(task, history, round_, self.searcher))
            if query.parsed:
                result = await agents.tools.search(query=query.parsed)
                history.append(Found(query.parsed, result.text))
            round_ += 1
        answer = await agents.answerer(**self._known(task, history, round_, self.answerer))
        return answer.parsed

    def _known(self, task: Task, history: list[Found], round_: int, reader: AgentConfig) -> dict[str, object]:
        """What every agent is told, with the searches so far as text whose tags `reader` can't mistake for its prompt's."""
        marks = reader.tags | _SLOTS
        found = "\n".join(
            f"Search {number}: <query>{quote(one.query, marks)}</query>\n"
            f"<information>\n{quote(one.passages, marks)}\n</information>"
            for number, one in enumerate(history, start=1)
        )
        return {
            "question": task.question,
            "history": found or "Nothing has been searched yet.",
            "round": round_,
            "rounds": self.rounds,
        }
