from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from drmas.envs.facts import passages, write_corpus
from drmas.envs.facts.airports import AIRPORTS_PER_COUNTRY, airports
from drmas.envs.facts.countries import countries
from drmas.envs.facts.passages import PASSAGE_CHARS
from drmas.envs.search.corpus import Passage, read_corpus

BY_ID = {passage.id: passage for passage in passages()}


def test_the_corpus_has_thousands_of_passages_of_three_kinds_with_ids_of_their_own() -> None:
    kinds = Counter(passage.id.split("/")[0] for passage in passages())
    assert kinds["element"] == 118
    assert 200 <= kinds["country"] <= 240
    assert 3000 <= kinds["airport"] <= 4500
    assert sum(kinds.values()) == len(BY_ID) == len(passages())


def test_no_text_is_empty_missing_untidy_or_longer_than_a_search_shows() -> None:
    for passage in passages():
        assert passage.title
        assert 80 <= len(passage.contents) <= PASSAGE_CHARS, passage
        assert passage.contents.endswith("."), passage
        for text in (passage.title, passage.contents):
            assert text == " ".join(text.split()), passage
            assert not re.search(r"\bNone\b|\bnan\b|\(\)|\.\.|[\u200b-\u200f\ufeff]| [,;]| \.(?!\w)", text), passage


@pytest.mark.parametrize(
    ("passage", "sentence"),
    [
        ("element/W", "symbol W and the atomic number 74"),
        ("element/W", "discovered in Spain in 1783"),
        ("element/W", "melts at 3687 kelvin"),
        ("element/Ar", "discovered in Scotland (United Kingdom) in 1894"),
        ("element/Pm", "discovered in the United States in 1945"),
        ("element/Au", "known since antiquity"),
        ("country/FR", "The currency is the euro (EUR)."),
        ("country/KE", "The official languages are English and Swahili."),
        ("country/KE", "It borders Ethiopia, Somalia, South Sudan, Tanzania and Uganda."),
        ("country/US", "Its capital is Washington D.C. The currency"),
        ("country/JP", "It has no land borders."),
        ("country/RS", "Serbia (officially the Republic of Serbia) is a country in Southern Europe."),
        ("country/RS", "an area of 77,474 square kilometres"),
        ("country/SK", "an area of 49,037 square kilometres"),
        ("country/IE", "about 4,609,600 inhabitants"),
        ("country/NL", "The Netherlands (officially the Kingdom of the Netherlands) is a country in Western Europe."),
        ("country/SZ", "Eswatini (officially the Kingdom of Eswatini)"),
        ("country/GL", "Greenland is a territory in Northern America."),
        ("airport/CDG", "(IATA code CDG, ICAO code LFPG) serves Paris"),
        ("airport/JFK", "in the United States."),
    ],
)
def test_passages_say_what_is_so(passage: str, sentence: str) -> None:
    assert sentence in BY_ID[passage].contents


@pytest.mark.parametrize(
    ("passage", "left_out"),
    [
        ("element/Nd", "1925"),  # misdated in the source
        ("element/O", "It was discovered"),  # by several countries
        ("element/H", "1776"),  # the description's year isn't the column's
        ("element/Cf", "kelvin"),  # predicted
        ("country/BO", "capital"),
        ("country/IL", "capital"),
        ("country/HR", "currency"),  # withdrawn in the source
        *((f"country/{code}", "language") for code in ("PH", "PG", "MK", "BO", "CH")),  # the source misses one
        *((f"country/{code}", "language") for code in ("AZ", "CZ", "AM", "TM", "UZ", "CY")),  # it has one that isn't official
        *((f"element/{symbol}", "It was discovered") for symbol in ("Am", "Ho", "Lu", "Lr")),  # misdated, or contested
        ("element/Fr", "kelvin"),  # predicted
        ("country/FR", "borders"),  # Suriname names France, which doesn't name Suriname
        ("country/MM", "borders"),  # the source has it border Bhutan
    ],
)
def test_doubtful_facts_are_left_out(passage: str, left_out: str) -> None:
    assert left_out not in BY_ID[passage].contents


@pytest.mark.parametrize("code", ["AN", "AQ", "CS", "EH", "PS"])
def test_dissolved_disputed_and_empty_places_have_no_passage(code: str) -> None:
    assert f"country/{code}" not in BY_ID


def test_no_two_places_have_the_same_area() -> None:
    """Where two have, one of them has the other's, as Serbia has Slovakia's in the source."""
    bearers = Counter(country.area for country in countries().values())
    assert [area for area, count in bearers.items() if count > 1] == []


def test_no_two_states_have_the_same_population_or_capital() -> None:
    states = [country for country in countries().values() if country.sovereign]
    assert len({country.population for country in states}) == len(states)
    seats = [country.capital for country in states if country.capital]
    assert len(set(seats)) == len(seats) > 150


def test_borders_are_mutual() -> None:
    known = countries()
    settled = [country for country in known.values() if country.borders]
    assert len(settled) > 100
    for country in settled:
        for code in country.borders or ():
            assert known[code].borders is None or country.code in (known[code].borders or ()), (country.code, code)
    assert countries()["PT"].borders == ("ES",)


def test_no_other_name_of_a_country_is_a_name_of_another() -> None:
    bearers = Counter(name.lower() for country in countries().values() for name in set(country.names))
    assert [name for name, count in bearers.items() if count > 1] == []


def test_airports_are_drawn_by_the_stated_rule() -> None:
    of = Counter(airport.country for airport in airports().values())
    for code, count in of.items():
        local = sum(not airport.international for airport in airports().values() if airport.country == code)
        assert count <= AIRPORTS_PER_COUNTRY or local == 0, code
    names = Counter(airport.name for airport in airports().values())
    assert max(names.values()) == 1


def test_the_list_is_the_callers_own() -> None:
    passages().clear()
    assert len(passages()) == len(BY_ID)


def test_a_written_corpus_reads_back_equal(tmp_path: Path) -> None:
    file = write_corpus(tmp_path / "new" / "folder")
    assert file == tmp_path / "new" / "folder" / "corpus.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [Passage(**json.loads(line)) for line in lines] == passages()
    assert [passage.text for passage in read_corpus(str(file))] == [passage.text for passage in passages()]
