"""The chemical elements, from the SQLite database of the package mendeleev; importing that package would take seconds.

Example: elements()["W"].number == 74
"""

from __future__ import annotations

import functools
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import quote

from drmas.envs.facts.names import DOUBTFUL_DISCOVERIES, PLACES, PREDICTED_MELTING
from drmas.envs.facts.text import clean, package_file, sentences
from drmas.errors import DataError

_QUERY = """
    SELECT e.atomic_number, e.symbol, e.name, e.group_id, e.period, s.name, e.discovery_year, e.discovery_location,
           e.discoverers, e.name_origin, e.uses, e.description,
           (SELECT CASE WHEN count(*) = 1 AND max(coalesce(is_sublimation_point, 0)) = 0 THEN max(melting_point) END
            FROM phasetransitions p WHERE p.atomic_number = e.atomic_number)
    FROM elements e JOIN series s ON s.id = e.series_id ORDER BY e.atomic_number"""

_INSTITUTION = re.compile(r"Laborator|Institute|Research|RIKEN|Argonne|, | and |et al|/")
_SECOND_SOURCE = re.compile(
    r"discover|isolat|identif|predict|produced by|named|first|\bgroup\b|\b1[5-9]\d\d\b|\b20\d\d\b", re.I
)
"""What a sentence of the description must not touch: the database's own columns say it, at times otherwise."""

_LAST_MEASURED = 95
"""The heaviest element whose melting point is measured, not predicted."""


@dataclass(frozen=True, slots=True)
class Element:
    """One element. `melting_point` in whole kelvin. Of a discovery that is doubtful or shared by several countries, nothing."""

    symbol: str
    number: int
    name: str
    group: int | None
    period: int
    series: str
    melting_point: int | None
    year: int | None
    place: str | None
    """Where it was discovered, as the source has it: a country or a part of one."""
    country: str | None
    """The name of the country of that place."""
    discoverers: str | None
    discoverer: str | None
    """The one person who discovered it."""
    ancient: bool
    origin: str
    """Of its name."""
    uses: str
    notes: tuple[str, ...]
    """Sentences that describe it."""


@functools.cache
def elements() -> Mapping[str, Element]:
    """Symbol -> element, by atomic number. DataError: the database isn't there, or has other tables."""
    file = package_file("mendeleev", "elements.db")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro&immutable=1", uri=True)) as database:
            rows = database.execute(_QUERY).fetchall()
    except sqlite3.Error as error:
        raise DataError(f"{file}: {error}; expected the database of mendeleev>=1.1,<2") from error
    return MappingProxyType({row[1]: _element(*row) for row in rows})


def _element(number, symbol, name, group, period, series, year, location, by, origin, uses, description, melting) -> Element:
    text = clean(by or "").rstrip(".")
    ancient = text == "Known to the ancients"
    known = not ancient and symbol not in DOUBTFUL_DISCOVERIES and bool(location) and "/" not in location
    measured = number <= _LAST_MEASURED and symbol not in PREDICTED_MELTING
    place = clean(location) if known else None
    names = re.sub(r"\.(?=[A-Z])", ". ", text.replace(";", ",")).replace("et al", "and others") if known else None
    notes = [note for note in sentences(clean(description or "")) if note and not _SECOND_SOURCE.search(note)]
    return Element(
        symbol=symbol,
        number=number,
        name=name,
        group=group,
        period=period,
        series=series.lower(),
        melting_point=round(melting) if melting is not None and measured else None,
        year=year if known else None,
        place=place,
        country=PLACES.get(place, place) if place else None,
        discoverers=names,
        discoverer=names if names and not _INSTITUTION.search(names) else None,
        ancient=ancient,
        origin=clean(origin or "").rstrip("."),
        uses=clean(uses or ""),
        notes=tuple(notes),
    )
