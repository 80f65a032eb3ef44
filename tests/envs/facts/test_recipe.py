from __future__ import annotations

from drmas.config.load import load
from drmas.envs.facts import passages, questions


def test_the_recipe_shows_every_fact_that_it_asks_for() -> None:
    config = load("search-facts")
    search, data = config.tools["search"], config.data
    assert data.size is not None
    contents = {passage.id: passage.contents for passage in passages()}
    tasks = questions(data) + questions(config.eval.data)
    assert len(tasks) == data.size + config.eval.data.size
    for task in tasks:
        for passage, words in zip(task.extra["support"], task.extra["facts"], strict=True):
            assert words in contents[passage][: search.max_passage_chars], task
