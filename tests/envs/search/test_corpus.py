from __future__ import annotations

import json

import pytest

from drmas.envs.search.corpus import Passage, fingerprint, read_corpus
from drmas.errors import DataError


@pytest.fixture
def write(tmp_path):
    def to_file(*lines: object) -> str:
        file = tmp_path / "corpus.jsonl"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
        return str(file)

    return to_file


def test_passages_of_a_file_in_its_order(write):
    path = write(
        {"id": 7, "title": " Lima ", "contents": "Lima is the capital of Peru."},
        "",
        {"contents": "東京は日本の首都です。", "url": "ignored"},
    )
    corpus = read_corpus(path)
    expected = [Passage("7", "Lima", "Lima is the capital of Peru."), Passage("1", "", "東京は日本の首都です。")]
    assert list(corpus) == expected
    assert (len(corpus), corpus[-1]) == (2, expected[1])
    with pytest.raises(IndexError):
        corpus[2]


def test_a_line_of_search_r1s_corpus_is_read_unchanged(write):
    contents = '"Tungsten"\nTungsten is the chemical element with atomic number 74.'
    (passage,) = read_corpus(write({"id": "0", "contents": contents}))
    assert passage == Passage("0", "", contents)
    assert passage.text == contents


def test_a_passage_with_a_title_has_search_r1s_text():
    assert Passage("0", "New\n York", "A city.").text == '"New York"\nA city.'
    assert Passage("0", "", "A city.").text == "A city."


def test_the_packaged_facts_are_passages_with_unlike_ids():
    facts = read_corpus("facts")
    assert len({passage.id for passage in facts}) == len(facts) > 1000
    assert all(passage.title and passage.contents for passage in facts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"contents": "x", ', "not JSON: .* at column"),
        ('["x"]', "holds a list; expected an object with contents"),
        ({"text": "x"}, "`contents` is empty or missing; found the keys text"),
        ({"contents": " \n"}, "`contents` is empty or missing"),
        ({"contents": ["x"]}, "`contents` is a list; expected text"),
        ({"contents": "x", "title": True}, "`title` is a bool; expected text"),
        ({"contents": "x", "id": {}}, "`id` is a dict; expected text"),
        ('{"contents": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "can't be read: .*; expected an object with contents per line"),
    ],
)
def test_a_bad_line_is_named_with_its_file(write, line, message):
    path = write({"contents": "good"}, "", line)
    with pytest.raises(DataError, match=message) as caught:
        read_corpus(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_files_that_hold_no_passages(write, tmp_path):
    with pytest.raises(DataError, match=r"nothing.jsonl: No such file"):
        read_corpus(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(DataError, match="Is a directory"):
        read_corpus(str(tmp_path))
    with pytest.raises(DataError, match="has no lines with a passage"):
        read_corpus(write("", " "))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"contents": "good"}\n{"contents": "\xe9"}')
    with pytest.raises(DataError, match=r"latin.jsonl:2: not UTF-8 at byte 14 of the line"):
        read_corpus(str(latin))


def test_the_fingerprint_knows_texts_and_their_order(passages):
    first = fingerprint(passages)
    assert fingerprint(list(passages)) == first
    assert fingerprint(passages[::-1]) != first
    assert fingerprint([Passage("a", "", "xy"), Passage("b", "", "z")]) != fingerprint(
        [Passage("a", "", "x"), Passage("b", "", "yz")]
    )
