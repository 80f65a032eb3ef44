"""Scoring of short answers by their words, as SQuAD does. Called by `drmas.envs.rewards` and by evaluation.

    exact_match("<answer>The Beatles</answer>", ["Beatles"]) == 1.0

The definitions are those of the SQuAD evaluation (Rajpurkar et al., arXiv 1606.05250, section 6.1): text is lowered,
punctuation is removed, then the articles a, an and the, then needless spaces; an answer gets the best score over the accepted
ones. Beyond it, compatibility forms of Unicode are made equal (NFKC), its punctuation counts like ASCII's, a number keeps its
decimal point and its minus (9.9 isn't 99, nor -5 5), and a text of articles or punctuation alone keeps them, so that an empty
answer doesn't match the accepted answer "A".

Only the team's answer is scored: what a tool wrote can't earn a reward.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

from drmas.core.tags import last_tagged

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER_SIGNS = re.compile(r"(?<=\d)\.(?=\d)|(?<![^\W_])-(?=\.?\d)|(?<![^\W_.])\.(?=\d)")


def final_answer(text: str) -> str:
    """What stands in the last complete `<answer>` pair after the last `</think>`; without a pair, all that stands there."""
    said = text.rpartition("</think>")[2]
    tagged = last_tagged(said, "answer")
    return (said if tagged is None else tagged).strip()


def normalise(text: str) -> str:
    """The words that are compared, with one space between them."""
    plain = unicodedata.normalize("NFKC", text).lower().replace("\u2212", "-")
    kept = {match.start() for match in _NUMBER_SIGNS.finditer(plain)}
    words = "".join(sign for place, sign in enumerate(plain) if place in kept or not _is_punctuation(sign))
    for candidate in (_ARTICLES.sub(" ", words), words, plain):
        if candidate.strip():
            return " ".join(candidate.split())
    return ""


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1.0 where the final answer in `answer` has the words of one of the `accepted`, in their order, else 0.0."""
    said = normalise(final_answer(answer))
    return float(any(said == normalise(truth) for truth in accepted) and said != "")


def f1(answer: str, accepted: Sequence[str]) -> float:
    """The best F1, over the `accepted`, of the final answer's words against theirs, as bags: 2 P R / (P + R), 0.0 to 1.0."""
    said = normalise(final_answer(answer)).split()
    return max((_f1(said, normalise(truth).split()) for truth in accepted), default=0.0)


def _f1(said: list[str], truth: list[str]) -> float:
    common = sum((Counter(said) & Counter(truth)).values())
    return 2 * common / (len(said) + len(truth)) if common else 0.0


def _is_punctuation(sign: str) -> bool:
    return sign in string.punctuation or unicodedata.category(sign).startswith("P")
