"""Questions about the corpus, of one, two or three hops, in two splits that share no entity.

The split is by entity: a hash puts every country on the side of training (about four fifths) or of the test; an airport is on
the side of its country, and so is an element on that of the country of its discovery, where the corpus names one. A question
belongs to a split if all entities that it goes through are on that side, from the one that it starts from to the one that
answers it; a question that changes sides is in neither. So no training question asks about, leads through or answers with an
entity of which a test question does so; at most the test compares with such an entity (the smaller neighbours of a country).
Currencies, languages, years and the like are answers, not entities: both splits may have "euro".

Called by `drmas.envs.source` and by `drmas prepare-data facts`. Example:

    questions(FactsData(split="test", hops=[2], size=100))[0]
"""

from __future__ import annotations

import random

from drmas.config.tasks import FactsData
from drmas.envs.facts.airports import airports
from drmas.envs.facts.countries import countries
from drmas.envs.facts.elements import elements
from drmas.envs.facts.passages import country_id
from drmas.envs.facts.templates import Draft, drafts
from drmas.envs.facts.text import digest
from drmas.errors import ConfigError
from drmas.types import Task

_TEST_SHARE = 5
"""One key in so many is on the side of the test."""
_SALT = 2
"""One of the first 300, chosen for an even split: the test has 23, 21 and 15 % of the questions of 1, 2 and 3 hops."""


def questions(config: FactsData) -> list[Task]:
    """The split's questions of those hops, shuffled by `config.seed`; the first `config.size` of them, if set.

    `Task.extra`: `answers` (accepted, the truth first), `hops`, `entity` (where the question starts), `entities` (all that it
    goes through), `support` (ids of the passages that hold the hops, in order), `facts` (the words in each that its hop needs).
    ConfigError: `config.size` is more than there are.
    """
    tasks = [_task(draft) for draft in drafts() if draft.hops in config.hops and side(draft) == config.split]
    size = len(tasks) if config.size is None else config.size
    if size > len(tasks):
        raise ConfigError(
            f"data.size is {size}; there are {len(tasks)} questions of hops {config.hops} in the split {config.split}"
        )
    random.Random(config.seed).shuffle(tasks)
    return tasks[:size]


def side(draft: Draft) -> str | None:
    """The split that the draft belongs to; None where its entities are on both sides."""
    sides = {_side_of(entity) for entity in draft.chain}
    return sides.pop() if len(sides) == 1 else None


def _side_of(entity: str) -> str:
    return "train" if digest(f"split {_SALT}/{_key(entity)}") % _TEST_SHARE else "test"


def _key(entity: str) -> str:
    """The entity whose hash decides: itself, or the country that it belongs to."""
    kind, code = entity.split("/", 1)
    if kind == "airport":
        return country_id(airports()[code].country)
    if kind == "element":
        name = elements()[code].country
        return next((country_id(country.code) for country in countries().values() if country.name == name), entity)
    return entity


def _task(draft: Draft) -> Task:
    extra = {
        "answers": list(draft.answers),
        "hops": draft.hops,
        "entity": draft.chain[0],
        "entities": list(draft.chain),
        "support": list(draft.support),
        "facts": list(draft.facts),
    }
    key = f"facts/{draft.hops}/{draft.template}/{draft.chain[0].split('/', 1)[1]}"
    return Task(key, draft.question, draft.answers[0], f"facts/{draft.hops}", extra)
