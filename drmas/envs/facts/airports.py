"""Airports, from the package airportsdata.

Which: those with an IATA code, a four-letter ICAO code, a city and a name that ends in "Airport", in a country that has a
passage, whose name no other has. Of each country all whose name says "International", and of the others so many that there are
`AIRPORTS_PER_COUNTRY`, drawn by a hash of their codes.

Example: airports()["CDG"].country == "FR"
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import airportsdata

from drmas.envs.facts.countries import countries
from drmas.envs.facts.text import clean, digest, plain

AIRPORTS_PER_COUNTRY = 60

_NAME = re.compile(r"[\w .'\-]+ Airport")
_CITY = re.compile(r"[\w .'\-]+")


@dataclass(frozen=True, slots=True)
class Airport:
    """One airport. `country` is an ISO 3166 alpha-2 code, `subdivision` may be empty; degrees of latitude and longitude."""

    iata: str
    icao: str
    name: str
    city: str
    subdivision: str
    country: str
    latitude: float
    longitude: float
    timezone: str

    @property
    def international(self) -> bool:
        return "International" in self.name


@functools.cache
def airports() -> Mapping[str, Airport]:
    """IATA code -> airport, by country, then international ones first, then by the hash."""
    known = countries()
    found = [
        Airport(
            iata=code,
            icao=row["icao"],
            name=clean(row["name"]),
            city=clean(row["city"]),
            subdivision=clean(row["subd"]),
            country=row["country"],
            latitude=row["lat"],
            longitude=row["lon"],
            timezone=row["tz"],
        )
        for code, row in sorted(airportsdata.load("IATA").items())
    ]
    bearers = Counter(plain(airport.name).lower() for airport in found)
    by_country: dict[str, list[Airport]] = defaultdict(list)
    for airport in sorted(found, key=lambda airport: (airport.country, not airport.international, digest(airport.iata))):
        whole = _NAME.fullmatch(airport.name) and _CITY.fullmatch(airport.city) and airport.timezone
        unmistakable = bearers[plain(airport.name).lower()] == 1 and re.fullmatch("[A-Z]{4}", airport.icao)
        room = airport.international or len(by_country[airport.country]) < AIRPORTS_PER_COUNTRY
        if whole and unmistakable and airport.country in known and room:
            by_country[airport.country].append(airport)
    return MappingProxyType({airport.iata: airport for group in by_country.values() for airport in group})
