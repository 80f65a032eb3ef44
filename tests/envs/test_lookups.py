from __future__ import annotations

import re

import pytest

from drmas.config.tasks import LookupsData, SearchTool
from drmas.envs.lookups import KEYS, demonstrate, lookup_tasks, passages, table, value
from drmas.envs.search.tool import Search


def test_every_key_leads_to_one_digit_in_at_most_two_steps() -> None:
    said = table()
    assert list(said) == KEYS
    behind = [key for key, found in said.items() if found.startswith("see ")]
    assert len(behind) == int(0.4 * len(KEYS))
    for key, found in said.items():
        last = said[found.removeprefix("see ")] if key in behind else found
        assert re.fullmatch("[0-9]", last)
        assert value(key) == last


def test_tasks_are_the_same_for_the_same_seed() -> None:
    tasks = lookup_tasks(LookupsData(size=50, seed=3))
    assert tasks == lookup_tasks(LookupsData(size=50, seed=3))
    assert [task.question for task in tasks] != [task.question for task in lookup_tasks(LookupsData(size=50, seed=4))]
    assert all(task.truth == value(task.question) for task in tasks)
    assert len({task.id for task in tasks}) == 50


async def test_the_search_tool_finds_each_keys_own_passage() -> None:
    search = Search(SearchTool(corpus="lookups", topk=1))
    await search.start()
    try:
        for passage in passages():
            text, ok = await search.call("search", {"query": passage.title})
            assert (text, ok) == (f"[1] {passage.title}\n{passage.contents}", True)
    finally:
        await search.close()


def _plain(prompt: str) -> str:
    return demonstrate(prompt, "k", seed=0, error_rate=0.0)


def test_the_teacher_follows_the_passages_and_knows_when_it_is_done() -> None:
    key = next(key for key, found in table().items() if found.startswith("see "))
    other = table()[key].removeprefix("see ")
    digit = table()[other]
    stranger = next(each for each in KEYS if each not in (key, other))
    start, middle = f"<user>{key}", f"<user>{key}>{stranger} 3>{key} see {other}"
    end = f"{middle}>{other} {digit}"
    assert [_plain(start + mark) for mark in "?!:"] == ["no", key, f"?{key}"]
    assert [_plain(middle + mark) for mark in "?!:"] == ["no", other, f"?{other}"]
    assert [_plain(end + mark) for mark in "?=:"] == ["yes", digit, digit]
    assert _plain(f"<user>{key}>{stranger} 3!<agent>") == key  # another key's digit is no answer


def test_a_wrong_teacher_is_wrong_and_the_same_every_time() -> None:
    prompt = f"<user>{KEYS[0]}?"
    answers = [demonstrate(prompt, f"k{i}", seed=0, error_rate=0.5) for i in range(400)]
    assert answers == [demonstrate(prompt, f"k{i}", seed=0, error_rate=0.5) for i in range(400)]
    assert 160 < answers.count("yes") < 240
    with pytest.raises(ValueError, match="no lookup in the prompt"):
        _plain("What is 3 + 4?")
