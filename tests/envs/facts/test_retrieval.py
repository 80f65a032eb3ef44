"""The questions can be answered by searching: measured recall is in the README beside the package, bounds here are below it."""

from __future__ import annotations

import pytest

from drmas.config.tasks import FactsData
from drmas.envs.facts import passages, questions
from drmas.envs.search.index import Bm25Index


@pytest.fixture(scope="module")
def index() -> Bm25Index:
    return Bm25Index(passages())


@pytest.mark.parametrize(("hops", "share"), [(1, 0.95), (2, 0.90), (3, 0.60)])
def test_the_question_itself_finds_its_first_support(index: Bm25Index, hops: int, share: float) -> None:
    tasks = questions(FactsData(split="test", hops=[hops]))
    hits = index.search([task.question for task in tasks], topk=5)
    found = [task.extra["support"][0] in {hit.passage.id for hit in its} for task, its in zip(tasks, hits, strict=True)]
    assert sum(found) / len(found) >= share


def test_the_second_hop_is_found_by_what_the_first_one_says(index: Bm25Index) -> None:
    """A searcher that reads the country off the first passage finds the country's own."""
    tasks = [task for task in questions(FactsData(split="test", hops=[2])) if "-of-airport" in task.id]
    asked = [f"{task.id.split('/')[2].split('-of-')[0]} of {task.extra['facts'][0]}" for task in tasks]
    hits = index.search(asked, topk=3)
    found = [task.extra["support"][1] in {hit.passage.id for hit in its} for task, its in zip(tasks, hits, strict=True)]
    assert sum(found) / len(found) >= 0.95
