from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from drmas.envs.facts import countries as countries_module
from drmas.envs.facts import elements as elements_module
from drmas.envs.facts.text import clean, digest, ended, listed, package_file, plain, sentences, spellings
from drmas.errors import DataError


def test_words() -> None:
    assert clean(" \u200fCafe\u0301  de\n Paris ") == "Café de Paris"
    assert plain("Reykjavík Łódź Tórshavn Hagåtña") == "Reykjavik Lodz Torshavn Hagatna"
    assert spellings("Malé", "Male") == ["Malé", "Male"]
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert ended("Washington D.C.") == "Washington D.C."
    assert ended("Paris") == "Paris."
    assert sentences("By W. Gregor. It is 3.5 long. Ends here") == ["By W. Gregor.", "It is 3.5 long.", "Ends here"]


def test_the_hash_is_the_same_on_every_machine() -> None:
    assert digest("element/W") == 16358610788054720302
    assert digest("element/W") != digest("element/X")


def test_a_missing_package_and_a_missing_file_are_named() -> None:
    with pytest.raises(DataError, match=r"nothing\.db of the package no_such_package, and it isn't installed"):
        package_file("no_such_package", "nothing.db")
    with pytest.raises(DataError, match=r"nothing\.db of the package mendeleev, and .* has none; install"):
        package_file("mendeleev", "nothing.db")


@pytest.fixture
def another_file(monkeypatch: pytest.MonkeyPatch):
    def instead(module, file: Path) -> None:
        monkeypatch.setattr(module, "package_file", lambda package, name: file)

    return instead


def test_a_database_with_other_tables_is_named(another_file, tmp_path: Path) -> None:
    file = tmp_path / "elements.db"
    sqlite3.connect(file).execute("CREATE TABLE elements (symbol)").connection.close()
    another_file(elements_module, file)
    with pytest.raises(DataError, match=r"elements\.db: no such table.*expected the database of mendeleev"):
        elements_module.elements.__wrapped__()


@pytest.mark.parametrize("text", ["{", "[1]", json.dumps({"name": "Nowhere"})])
def test_a_file_that_is_no_country_is_named(another_file, tmp_path: Path, text: str) -> None:
    (tmp_path / "nowhere.json").write_text(text, encoding="utf-8")
    another_file(countries_module, tmp_path)
    with pytest.raises(DataError, match=r"nowhere\.json: .*expected a country of countryinfo"):
        countries_module.countries.__wrapped__()
