"""Which passages fit a query best: by their words (BM25) or by their vectors (dense).

    index = open_index(read_corpus("facts"), "bm25")
    index.search(["element 74", "capital of Peru"], topk=3)     # a list of hits per query

Both kinds answer in one order: by score, then by the passages' order in the corpus. A query without a word gives no hits, and
`topk` may exceed the corpus. A folder can keep a built index; nothing in it is a pickle. Called by `tool` and by `server`, from
one thread at a time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drmas.envs.search.corpus import Passage, fingerprint
from drmas.envs.search.encoder import PACKAGED, Encoder
from drmas.envs.search.words import WORDS_VERSION, words_of
from drmas.errors import DataError

_FACTS_FILE = "index.json"
_VECTORS_FILE = "vectors.faiss"
_CHUNK = 4096
_TIE_ROOM = 8
"""How many passages more than asked for a dense search looks at, so that equal scores at the end are ordered by passage."""
_DIGITS = 5
"""Digits of a dense score: what lies beyond depends on which queries were encoded together."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that fits a query, with its score: higher is better, comparable within one query only."""

    passage: Passage
    score: float


class Index(Protocol):
    kind: str
    passages: Sequence[Passage]

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The at most `topk` best hits of each query, best first."""


class Bm25Index:
    """Okapi BM25 with Lucene's formula, k1 1.5 and b 0.75 (bm25s: Lù, arXiv 2407.03618). A word counts once in a query.

    Passages without any of a query's words are no hits of it.
    """

    kind = "bm25"

    def __init__(self, passages: Sequence[Passage], folder: Path | None = None) -> None:
        """Build the index, or read it from `folder`, where it was saved of the same passages."""
        import bm25s

        self.passages = passages
        if folder is not None:
            self._bm25 = bm25s.BM25.load(folder, show_progress=False)
            return
        ids_of: dict[str, int] = {"": 0}  # bm25s wants one word at least, also where the passages have none
        ids = [[ids_of.setdefault(word, len(ids_of)) for word in words_of(passage.text)] for passage in passages]
        self._bm25 = bm25s.BM25()
        self._bm25.index((ids, ids_of), show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self._hits(query, topk) for query in queries]

    def save(self, folder: Path) -> None:
        self._bm25.save(folder, show_progress=False)

    def _hits(self, query: str, topk: int) -> list[Hit]:
        ids = self._bm25.get_tokens_ids(list(dict.fromkeys(words_of(query))))
        if not ids:
            return []
        scores = self._bm25.get_scores_from_ids(ids)
        candidates = np.flatnonzero(scores)
        if len(candidates) > topk:
            least = -np.partition(-scores[candidates], topk - 1)[topk - 1]
            candidates = candidates[scores[candidates] >= least]
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:topk]
        return [Hit(self.passages[position], float(scores[position])) for position in best.tolist()]


class DenseIndex:
    """Cosine similarity of vectors, compared with every passage (FAISS, IndexFlatIP over vectors of norm 1)."""

    kind = "dense"

    def __init__(self, passages: Sequence[Passage], encoder: Encoder, vectors: Path | None = None) -> None:
        """Encode the passages, or take their vectors from a FAISS file such as Search-R1's `e5_Flat.index`.

        DataError: the file can't be read, has another number of vectors, of another size, or isn't made for inner products.
        """
        import faiss

        self.passages, self.encoder = passages, encoder
        if vectors is not None:
            self._vectors = _read_vectors(vectors, len(passages), encoder)
            return
        self._vectors = faiss.IndexFlatIP(encoder.size)
        for start in range(0, len(passages), _CHUNK):
            stop = min(start + _CHUNK, len(passages))
            self._vectors.add(encoder.passages([passages[position].text for position in range(start, stop)]))

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        found: list[list[Hit]] = [[] for _ in queries]
        asked = [position for position, query in enumerate(queries) if query.strip()]
        if asked:
            vectors = self.encoder.queries([_encodable(queries[position]) for position in asked])
            scores, places = self._vectors.search(vectors, min(len(self.passages), 2 * topk + _TIE_ROOM))
            for position, its_scores, its_places in zip(asked, np.round(scores, _DIGITS), places, strict=True):
                order = np.lexsort((its_places, -its_scores))[:topk]
                found[position] = [Hit(self.passages[int(its_places[i])], float(its_scores[i])) for i in order]
        return found

    def save(self, folder: Path) -> None:
        import faiss

        faiss.write_index(self._vectors, str(folder / _VECTORS_FILE))


def open_index(
    passages: Sequence[Passage],
    kind: str,
    *,
    encoder: str = PACKAGED,
    folder: Path | None = None,
    cache: Path | None = None,
    vectors: Path | None = None,
) -> Index:
    """The index of `passages`: read from `folder` where it was saved there, else built, and saved there.

    `cache` is a folder that keeps any number of indices, by what they were built of. `vectors` is a FAISS file of the passages'
    vectors, for a dense index. DataError: the folder holds an index of other passages, words or weights, or something else, or
    can't be written. ModelError: the encoder can't be used.
    """
    if vectors is not None and not vectors.is_file():
        raise DataError(f"{vectors}: no such file; expected a FAISS index of the passages' vectors")
    encodes = Encoder(encoder) if kind == "dense" else None
    if vectors is not None:
        assert encodes is not None
        return DenseIndex(passages, encodes, vectors)
    if folder is None and cache is None:
        return Bm25Index(passages) if encodes is None else DenseIndex(passages, encodes)
    made_of = encodes.fingerprint() if encodes else f"words {WORDS_VERSION}"
    facts = {"kind": kind, "passages": len(passages), "corpus": fingerprint(passages), "made_of": made_of}
    if folder is None:
        assert cache is not None
        folder = cache / blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        index = Bm25Index(passages) if encodes is None else DenseIndex(passages, encodes)
        _save(index, folder, facts)
        return index
    _check_saved(folder, facts)
    try:
        return Bm25Index(passages, folder) if encodes is None else DenseIndex(passages, encodes, folder / _VECTORS_FILE)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataError(f"{folder}: the saved index can't be read: {error}; delete the folder to have it built anew") from error


def _save(index: Bm25Index | DenseIndex, folder: Path, facts: dict[str, Any]) -> None:
    """Write beside the place and rename, so that a killed process leaves no half index."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as parent:
            temporary = Path(parent) / "index"
            temporary.mkdir()
            index.save(temporary)
            (temporary / _FACTS_FILE).write_text(json.dumps(facts) + "\n", encoding="utf-8")
            temporary.rename(folder)
    except (OSError, RuntimeError) as error:  # FAISS raises the latter
        if not (folder / _FACTS_FILE).is_file():  # otherwise another process was first, and its index is as good
            raise DataError(f"{folder}: the index can't be saved there: {error}; give a folder that can be written") from error


def _check_saved(folder: Path, facts: dict[str, Any]) -> None:
    """DataError unless the folder's index was built of what `facts` say."""
    try:
        saved = json.loads((folder / _FACTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: is no saved index ({error}); give another folder, or one that isn't there yet") from error
    for key, expected in facts.items():
        if not isinstance(saved, dict) or saved.get(key) != expected:
            found = saved.get(key) if isinstance(saved, dict) else saved
            raise DataError(
                f"{folder}: the saved index has {key} {found!r}, expected {expected!r}; delete the folder to have it built "
                "anew, or give another"
            )


def _read_vectors(file: Path, passages: int, encoder: Encoder) -> Any:
    import faiss

    try:
        vectors = faiss.read_index(str(file))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:300]
        raise DataError(f"{file}: FAISS can't read it: {reason}; expected an index that faiss.write_index wrote") from error
    for what, found, expected in (
        ("vectors", vectors.ntotal, passages),
        ("numbers in a vector", vectors.d, encoder.size),
        ("metric", vectors.metric_type, faiss.METRIC_INNER_PRODUCT),
    ):
        if found != expected:
            raise DataError(
                f"{file}: {what}: {found}, expected {expected}; the file must hold the vectors of this corpus by the encoder "
                f"{encoder.spec}, for inner products (metric {faiss.METRIC_INNER_PRODUCT})"
            )
    return vectors


def _encodable(text: str) -> str:
    """`text` without halves of surrogate pairs, which no tokenizer reads."""
    return text.encode("utf-8", "replace").decode("utf-8")
