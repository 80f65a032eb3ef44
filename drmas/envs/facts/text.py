"""Words: cleaning what the packages ship, other spellings of a name, lists and articles in a sentence.

Used by the other modules of `facts`. Example: spellings("Malé") == ["Malé", "Male"]; listed(["a", "b", "c"]) == "a, b and c"
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from drmas.errors import DataError

_LETTERS = str.maketrans(
    {
        "ø": "o",
        "Ø": "O",
        "ł": "l",
        "Ł": "L",
        "đ": "d",
        "Đ": "D",
        "ı": "i",
        "ß": "ss",
        "æ": "ae",
        "Æ": "Ae",
        "œ": "oe",
        "Œ": "Oe",
    }
    | {"ð": "d", "Ð": "D", "þ": "th", "Þ": "Th", "ə": "a", "ʻ": "'", "ʼ": "'", "‘": "'", "’": "'", "–": "-", "−": "-"}
)
"""Letters without a decomposition into a plain one and an accent, and the typographic forms of a quote and a dash."""


def package_file(package: str, name: str) -> Path:
    """Where the installed `package` keeps its file or folder `name`, without importing the package.

    DataError: the package isn't installed, or its version keeps its data elsewhere.
    """
    found = find_spec(package)
    folder = Path(found.submodule_search_locations[0]) if found is not None and found.submodule_search_locations else None
    if folder is None or not (folder / name).exists():
        place = "it isn't installed" if folder is None else f"{folder} has none"
        raise DataError(
            f"the corpus of facts reads {name} of the package {package}, and {place}; install the version in pyproject.toml"
        )
    return folder / name


def clean(text: str) -> str:
    """`text` composed (NFC), without invisible marks, with single spaces, none at its ends or before a full stop or comma."""
    visible = "".join(char for char in unicodedata.normalize("NFC", text) if unicodedata.category(char) != "Cf")
    return re.sub(r" (?=[.,;])", "", " ".join(visible.split()))


def plain(text: str) -> str:
    """`text` without diacritics; letters of other scripts stay."""
    parts = unicodedata.normalize("NFKD", text.translate(_LETTERS))
    return "".join(char for char in parts if not unicodedata.combining(char))


def digest(key: str) -> int:
    """A number of 64 bits that depends on `key` alone: the order and the split of what the corpus holds."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8, person=b"drmas.facts").digest(), "big")


def spellings(*names: str) -> list[str]:
    """`names`, each followed by its form without diacritics where that differs; each once, in order."""
    return list(dict.fromkeys(form for name in names for form in (name, plain(name))))


def listed(items: Iterable[str]) -> str:
    """`items` as a sentence has them: "a", "a and b", "a, b and c"."""
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last


def ended(sentence: str) -> str:
    """`sentence` with one full stop at its end."""
    return f"{sentence.rstrip('.')}."


def sentences(text: str) -> Sequence[str]:
    """The sentences of `text`: it is cut after a full stop that a blank and a capital follow, but not after an initial."""
    found, start = [], 0
    for place in range(1, len(text) - 2):
        if text[place] == "." and text[place + 1] == " " and text[place + 2].isupper() and not text[place - 1].isupper():
            found.append(text[start : place + 1])
            start = place + 2
    return [*found, text[start:]]
