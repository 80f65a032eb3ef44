"""The corpus: a paragraph for each element, country or territory, and airport, in the style of an encyclopaedia.

A fact that the source lacks or that is doubtful has no sentence. What questions ask about stands in the first
`PASSAGE_CHARS` characters, which is all there is: the search tool's default shows passages whole.

Called by `drmas.envs.search.corpus`, `templates` and `drmas prepare-data facts`. Example: passages()[0].id == "element/H"
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path

from drmas.envs.facts.airports import Airport, airports
from drmas.envs.facts.countries import Country, countries
from drmas.envs.facts.elements import Element, elements
from drmas.envs.facts.names import CURRENCIES
from drmas.envs.facts.text import ended, listed
from drmas.envs.search.corpus import Passage

CORPUS_FILE = "corpus.jsonl"
PASSAGE_CHARS = 600
"""The most a passage's contents have."""


def passages() -> list[Passage]:
    """All passages, elements first, in an order that never changes; read once per process. DataError: see `package_file`."""
    return list(_passages())


def write_corpus(folder: str | Path) -> Path:
    """Write the passages into `folder`, which is made if need be: one object per line with `id`, `title` and `contents`.

    Returns the file, in the format that `tools.NAME.corpus` reads. OSError: it can't be written.
    """
    file = Path(folder) / CORPUS_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(asdict(passage), ensure_ascii=False) + "\n" for passage in passages())
    return file


def element_id(symbol: str) -> str:
    return f"element/{symbol}"


def country_id(code: str) -> str:
    return f"country/{code}"


def airport_id(iata: str) -> str:
    return f"airport/{iata}"


def area_text(country: Country) -> str:
    """Its area as its passage has it: "640,679"."""
    return f"{country.area:,}"


@functools.cache
def _passages() -> tuple[Passage, ...]:
    known = countries()
    return (
        *(Passage(element_id(one.symbol), one.name, _element(one)) for one in elements().values()),
        *(Passage(country_id(one.code), one.name, _country(one)) for one in known.values()),
        *(Passage(airport_id(one.iata), one.name, _airport(one, known[one.country])) for one in airports().values()),
    )


def _paragraph(*parts: str | None) -> str:
    """The parts there are, one after the other, as far as `PASSAGE_CHARS` allows; those that don't fit are passed over."""
    text = ""
    for part in parts:
        if part and len(text) + 1 + len(part) <= PASSAGE_CHARS:
            text = f"{text} {part}" if text else part
    return text


def _element(element: Element) -> str:
    name = element.name
    place = element.place if element.place in (element.country, "United States") else f"{element.place} ({element.country})"
    by = f" by {element.discoverers}" if element.discoverers else ""
    the = "the " if element.place == "United States" else ""
    group = f"group {element.group} and " if element.group else ""
    return _paragraph(
        f"{name} is the chemical element with the symbol {element.symbol} and the atomic number {element.number}.",
        f"It belongs to {group}period {element.period} of the periodic table and counts among the {element.series}.",
        ended(f"It was discovered in {the}{place} in {element.year}{by}") if element.place and element.year else None,
        "It has been known since antiquity." if element.ancient else None,
        f"It melts at {element.melting_point} kelvin." if element.melting_point else None,
        ended(f"Origin of the name: {element.origin}") if element.origin else None,
        ended(f"Uses: {element.uses}") if element.uses else None,
        *(ended(note) for note in element.notes),
    )


def _country(country: Country) -> str:
    called = f" (officially the {country.official})" if country.official else ""
    kind = "country" if country.sovereign else "territory"
    units = [f"the {CURRENCIES[code][0]} ({code})" for code in country.currencies]
    tongues = country.languages
    names = countries()
    return _paragraph(
        f"{country.the[0].upper()}{country.the[1:]}{called} is a {kind} in {_region(country)}.",
        ended(f"Its capital is {country.capital}") if country.capital else None,
        f"The currency is {listed(units)}." if len(units) == 1 else f"The currencies are {listed(units)}." if units else None,
        f"The official language is {tongues[0]}." if len(tongues) == 1 else None,
        f"The official languages are {listed(tongues)}." if len(tongues) > 1 else None,
        f"It covers an area of {area_text(country)} square kilometres and has about {country.population:,} inhabitants.",
        f"It borders {listed(names[code].the for code in country.borders)}." if country.borders else None,
        "It has no land borders." if country.borders == () else None,
        f"Its internet domain is {country.domain}." if country.domain else None,
        f"Its international calling code is +{country.calling_code}." if country.calling_code else None,
        f"Its demonym is {country.demonym}." if country.demonym else None,
    )


def _region(country: Country) -> str:
    return f"the {country.region}" if country.region == "Caribbean" else country.region


def _airport(airport: Airport, country: Country) -> str:
    north = "north" if airport.latitude >= 0 else "south"
    east = "east" if airport.longitude >= 0 else "west"
    within = f", {airport.subdivision}" if airport.subdivision not in ("", airport.city, country.name) else ""
    return _paragraph(
        f"{airport.name} (IATA code {airport.iata}, ICAO code {airport.icao}) serves {airport.city}{within} in {country.the}.",
        f"It lies at {abs(airport.latitude):.2f} degrees {north} and {abs(airport.longitude):.2f} degrees {east}.",
        f"Its clocks follow the time zone {airport.timezone}.",
    )
