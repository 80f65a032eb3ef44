"""Which words of a text the BM25 index counts. Called by `index` for passages and queries alike.

Compatibility forms, case and Latin accents are taken away (`São` is `sao`); words of other scripts stay as they are, and a
character of Chinese or Japanese is a word of its own, since no space stands between their words. The 33 stop words of Lucene's
English analyser are left out. Plurals lose their ending by the three rules of the S-stemmer (Harman, "How effective is
suffixing?", JASIS 42(1), 1991): fewer wrong merges than Porter's, and names keep their form.

    words_of("The lakes of São Tomé") == ["lake", "sao", "tome"]
"""

from __future__ import annotations

import re
import unicodedata

WORDS_VERSION = 1
"""Changes when the same text gives other words; stands in saved indices."""
STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of"),
        *("on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with"),
    )
)
_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")
_ACCENT = re.compile(r"[\u0300-\u036f]")


def words_of(text: str) -> list[str]:
    """The words of `text` in their order, repeats included."""
    plain = unicodedata.normalize("NFKC", _ACCENT.sub("", unicodedata.normalize("NFKD", text))).casefold()
    return [_singular(word) for word in _WORD.findall(plain) if word not in STOP_WORDS]


def _singular(word: str) -> str:
    if len(word) < 4 or not word.endswith("s"):
        return word
    if word.endswith("ies"):
        return word if word.endswith(("eies", "aies")) else word[:-3] + "y"
    if word.endswith("es"):
        return word if word.endswith(("aes", "ees", "oes")) else word[:-1]
    return word if word.endswith(("us", "ss")) else word[:-1]
