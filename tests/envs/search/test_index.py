from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import faiss
import numpy as np
import pytest

from drmas.envs.search.corpus import Passage
from drmas.envs.search.encoder import Encoder
from drmas.envs.search.index import Bm25Index, DenseIndex, open_index
from drmas.errors import DataError


@pytest.fixture(scope="module")
def encoder():
    return Encoder()


@pytest.fixture(params=["bm25", "dense"])
def build(request, encoder):
    """Builds an index of either kind."""
    return Bm25Index if request.param == "bm25" else lambda passages: DenseIndex(passages, encoder)


def ids(hits):
    return [hit.passage.id for hit in hits]


def test_the_fitting_passage_comes_first(build, passages):
    found = build(passages).search(["atomic number of tungsten", "capital of Peru", "sao tome lake", "東京 日本"], 2)
    assert [ids(hits)[0] for hits in found] == ["w", "l", "s", "k"]
    assert all(len(hits) <= 2 and all(a.score >= b.score for a, b in pairwise(hits)) for hits in found)


def test_queries_of_a_batch_are_answered_like_queries_alone(build, passages):
    index, queries = build(passages), ["tungsten lamps", "", "Peru", "a plain passage about the coast", "Peru"]
    together = index.search(queries, 3)
    alone = [index.search([query], 3)[0] for query in queries]
    assert [ids(hits) for hits in together] == [ids(hits) for hits in alone]
    for one, other in zip(together, alone, strict=True):
        assert [hit.score for hit in one] == pytest.approx([hit.score for hit in other], abs=2e-5)


@pytest.mark.parametrize("query", ["", "  \n"])
def test_a_query_without_a_word_gives_no_hits(build, passages, query):
    assert build(passages).search([query], 3) == [[]]
    assert build(passages).search([], 3) == []


def test_bm25_has_no_hits_for_unknown_words(passages):
    assert Bm25Index(passages).search(["zyzzyva the of", "!!!", "\ud800"], 3) == [[], [], []]


def test_a_query_with_half_a_surrogate_pair_and_one_without_end_are_searched(build, passages):
    found = build(passages).search(["tungsten \ud800", "tungsten " * 20_000], 1)
    assert all(ids(hits)[0] in ("w", "u") for hits in found)


def test_more_passages_than_there_are(build, passages):
    (hits,) = build(passages).search(["tungsten element passage capital lakes 東京"], 100)
    assert sorted(ids(hits)) == ["k", "l", "s", "u", "w"]


def test_equal_passages_come_in_their_order_whatever_the_cut(build):
    copies = [Passage(str(number), "", "Tungsten melts at 3422 degrees.") for number in range(12)]
    other = [Passage("x", "", "Lima is the capital of Peru.")]
    index = build([*other, *copies])
    for topk in (1, 3, 12):
        assert ids(index.search(["melts tungsten"], topk)[0])[:12] == [str(number) for number in range(topk)]


def test_a_word_counts_once_in_a_query(passages):
    once, twice = Bm25Index(passages).search(["lakes of Peru", "Peru lakes lake LAKES Peru peru"], 3)
    assert {hit.passage.id: hit.score for hit in once} == pytest.approx({hit.passage.id: hit.score for hit in twice})


def test_vectors_that_differ_by_rounding_alone_are_equal_also_at_the_cut():
    class Rounding:
        size = 2

        def queries(self, texts):
            return np.array([[1.0, 0.0]] * len(texts), np.float32)

        def passages(self, texts):
            return np.array([[0.5 + 1e-7 * number, 0.0] for number in range(len(texts))], np.float32)

    index = DenseIndex([Passage(str(number), "", "x") for number in range(5)], Rounding())
    for topk in (1, 2, 5):
        assert ids(index.search(["x"], topk)[0]) == [str(number) for number in range(topk)]


def test_bm25_scores_are_lucenes_formula(passages):
    words = [
        ["tungsten", "tungsten", "chemical", "element", "atomic", "number", "74", "melt", "3422", "degree"],
        ["lima", "lima", "capital", "peru", "pacific", "coast"],
    ]
    index = Bm25Index(passages[:2])
    (hit,) = index.search(["tungsten 74"], 5)[0]
    average = sum(map(len, words)) / 2
    expected = 0.0
    for word in ("tungsten", "74"):
        count, holding = words[0].count(word), sum(word in one for one in words)
        idf = math.log(1 + (2 - holding + 0.5) / (holding + 0.5))
        expected += idf * count / (count + 1.5 * (0.25 + 0.75 * len(words[0]) / average))
    assert (hit.passage.id, hit.score) == ("w", pytest.approx(expected, rel=1e-5))


def test_bm25s_cut_is_the_whole_order_cut():
    draw = random.Random(0)
    vocabulary = [f"w{number}" for number in range(12)]
    index = Bm25Index([Passage(str(n), "", " ".join(draw.choices(vocabulary, k=6))) for n in range(200)])
    queries = [" ".join(draw.choices(vocabulary, k=3)) for _ in range(20)]
    for hits, query in zip(index.search(queries, 200), queries, strict=True):
        assert hits == sorted(hits, key=lambda hit: (-hit.score, int(hit.passage.id)))
        for topk in (1, 5, 50):
            assert index.search([query], topk)[0] == hits[:topk]


def test_passages_without_a_word_can_be_indexed():
    index = Bm25Index([Passage("0", "", "!!!"), Passage("1", "", "the"), Passage("2", "", "word")])
    assert [ids(hits) for hits in index.search(["the", "word", "!!!"], 3)] == [[], ["2"], []]


def test_dense_scores_are_cosines_of_unit_vectors(passages, encoder):
    vectors = encoder.passages([passage.text for passage in passages])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    query = "Which metal is in lamps?"
    expected = vectors @ encoder.queries([query])[0]
    (hits,) = DenseIndex(passages, encoder).search([query], 5)
    assert {hit.passage.id: hit.score for hit in hits} == {
        passage.id: pytest.approx(score, abs=2e-5) for passage, score in zip(passages, expected.tolist(), strict=True)
    }


@pytest.mark.parametrize("kind", ["bm25", "dense"])
def test_a_saved_index_answers_as_the_built_one(passages, tmp_path, kind):
    folder = tmp_path / "kept" / "index"
    built = open_index(passages, kind, folder=folder)
    read = open_index(passages, kind, folder=folder)
    queries = ["tungsten", "capital of Peru", ""]
    assert read.search(queries, 3) == built.search(queries, 3)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["index"]
    for file in folder.iterdir():
        data = file.read_bytes()
        assert b"pickle" not in data
        assert not data.startswith(b"\x80")


def test_a_cache_folder_keeps_indices_by_what_they_were_built_of(passages, tmp_path):
    for corpus in (passages, passages, passages[:3]):
        assert open_index(corpus, "bm25", cache=tmp_path).search(["Peru"], 1)[0][0].passage.id == "l"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_saved_index_of_something_else_is_refused(passages, tmp_path):
    folder = tmp_path / "index"
    open_index(passages, "bm25", folder=folder)
    with pytest.raises(DataError, match="has kind 'bm25', expected 'dense'; delete the folder"):
        open_index(passages, "dense", folder=folder)
    with pytest.raises(DataError, match="has passages 5, expected 4"):
        open_index(passages[:4], "bm25", folder=folder)
    with pytest.raises(DataError, match="has corpus "):
        open_index(passages[::-1], "bm25", folder=folder)
    facts = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**facts, "made_of": "words 0"}))
    with pytest.raises(DataError, match="has made_of 'words 0', expected 'words 1'"):
        open_index(passages, "bm25", folder=folder)


def test_a_folder_that_is_no_index_is_refused_and_kept(passages, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="is no saved index"):
        open_index(passages, "bm25", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("file", ["data.csc.index.npy", "params.index.json", "vocab.index.json"])
def test_a_damaged_index_is_named(passages, tmp_path, file):
    folder = tmp_path / "index"
    open_index(passages, "bm25", folder=folder)
    (folder / file).write_bytes(b"{")
    with pytest.raises(DataError, match=r"the saved index can't be read: .*; delete the folder"):
        open_index(passages, "bm25", folder=folder)


def test_a_place_that_cannot_be_written_is_named(passages, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the index can't be saved there"):
        open_index(passages, "bm25", folder=tmp_path / "file" / "index")


def write_vectors(path, vectors, kind=faiss.IndexFlatIP):
    index = kind(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


def test_vectors_of_a_faiss_file_are_taken_as_they_are(passages, encoder, tmp_path):
    vectors = encoder.passages([passage.text for passage in passages])[::-1].copy()
    file = write_vectors(tmp_path / "flat.index", vectors)
    assert ids(open_index(passages, "dense", vectors=file).search(["capital of Peru"], 1)[0]) == ["k"]


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ((4, 384), faiss.IndexFlatIP, "vectors: 4, expected 5"),
        ((5, 768), faiss.IndexFlatIP, "numbers in a vector: 768, expected 384"),
        ((5, 384), faiss.IndexFlatL2, "metric: 1, expected 0"),
    ],
)
def test_a_faiss_file_that_does_not_fit_is_refused(passages, tmp_path, shape, kind, message):
    file = write_vectors(tmp_path / "flat.index", np.zeros(shape, np.float32), kind)
    with pytest.raises(DataError, match=message):
        open_index(passages, "dense", vectors=file)


def test_a_file_that_faiss_did_not_write_is_named(passages, tmp_path):
    (tmp_path / "bad.index").write_bytes(b"IxFI" + b"\xff" * 40)
    with pytest.raises(DataError, match=r"bad.index: FAISS can't read it"):
        open_index(passages, "dense", vectors=tmp_path / "bad.index")
    with pytest.raises(DataError, match=r"none.index: no such file"):
        open_index(passages, "dense", vectors=tmp_path / "none.index")
