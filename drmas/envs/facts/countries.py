"""Countries and territories, from the JSON files of the package countryinfo.

Example: countries()["FR"].capital == "Paris"
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from drmas.envs.facts.names import (
    CORRECTED,
    CURRENCIES,
    DISSOLVED,
    FUNDS,
    LANGUAGES,
    LEFT_OUT,
    OTHER_NAMES,
    RENAMED,
    TERRITORIES,
    UNSETTLED,
)
from drmas.envs.facts.text import clean, package_file, plain, spellings
from drmas.errors import DataError

_ARTICLE = re.compile(
    r"^(United |Republic of|Democratic |Central African|Czech |Dominican Rep|Isle of)| Islands$| Territory$| Lands$|"
    r"^(Bahamas|Comoros|Gambia|Maldives|Netherlands|Philippines|Seychelles)$"
)
_OFFICIAL = re.compile(
    r"\b(Republic|Kingdom|Commonwealth|Principality|Federation|Sultanate|Duchy|State|States|Union) of\b|Republic$"
)


@dataclass(frozen=True, slots=True)
class Country:
    """One state or territory. What is missing, contested or doubtful in the source is None or empty."""

    code: str
    """ISO 3166 alpha-2."""
    name: str
    names: tuple[str, ...]
    """`name`, then the other accepted ones: official, former, native in Latin letters, without diacritics."""
    official: str | None
    sovereign: bool
    region: str
    capital: str | None
    currencies: tuple[str, ...]
    """ISO 4217 codes."""
    languages: tuple[str, ...]
    """Names of the official ones."""
    area: float
    """Square kilometres, whole ones from 10 on."""
    population: int
    borders: tuple[str, ...] | None
    """Codes of its neighbours. None where a claim of a border isn't mutual, or a neighbour has no passage."""
    domain: str | None
    calling_code: str | None
    demonym: str | None

    @property
    def the(self) -> str:
        """Its name as a sentence has it, with its article: "the Netherlands"."""
        return f"the {self.name}" if _ARTICLE.search(self.name) else self.name


@functools.cache
def countries() -> Mapping[str, Country]:
    """Alpha-2 code -> country, by code. DataError: the package's files aren't there, or one isn't what is expected."""
    folder = package_file("countryinfo", "data")
    rows: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            row = json.loads(file.read_text(encoding="utf-8"))
            code = row["ISO"]["alpha2"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}: {type(error).__name__}: {error}; expected a country of countryinfo>=1.0,<2") from error
        if code not in rows or not rows[code].get("area"):
            rows[code] = row | CORRECTED.get(code, {})
    borders = _mutual_borders(rows)
    kept = [code for code in sorted(rows) if _is_whole(rows[code])]
    spoken = {name for code in kept for name in (_name(rows[code]), rows[code].get("demonym") or "")}
    return MappingProxyType({code: _country(rows[code], borders.get(code), spoken) for code in kept})


def _is_whole(row: dict[str, Any]) -> bool:
    """Whether it has a passage."""
    return row["ISO"]["alpha2"] not in LEFT_OUT and all(row.get(key) for key in ("area", "population", "region"))


def _mutual_borders(rows: Mapping[str, dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Code -> neighbours, for those whose neighbours all name them too and whom nobody else names."""
    rows = {code: row for code, row in rows.items() if code not in DISSOLVED}
    code_of = {row["ISO"]["alpha3"]: code for code, row in rows.items()}
    claims = {code: {code_of.get(other, other) for other in row.get("borders") or []} for code, row in rows.items()}
    claimed: dict[str, set[str]] = {code: set() for code in rows}
    for code, others in claims.items():
        for other in others & rows.keys():
            claimed[other].add(code)
    return {
        code: tuple(sorted(others))
        for code, others in claims.items()
        if others == claimed[code] and code not in UNSETTLED["borders"] and all(_is_whole(rows[other]) for other in others)
    }


def _name(row: dict[str, Any]) -> str:
    return RENAMED.get(row["ISO"]["alpha2"]) or clean(row["name"])


def _country(row: dict[str, Any], borders: tuple[str, ...] | None, spoken: set[str]) -> Country:
    """`spoken`: the names and demonyms of all; another country's is no other name of this one."""
    code, name = row["ISO"]["alpha2"], _name(row)
    listed = [clean(other) for other in (row["name"], *row["altSpellings"])]
    latin = [other for other in listed if other and plain(other).isascii() and other[0].isupper()]
    usable = [other for other in latin if other not in spoken and other not in row["ISO"].values()]
    names = [name, *OTHER_NAMES.get(code, ()), *usable]
    used = tuple(unit for unit in row.get("currencies") or [] if unit not in FUNDS)
    tongues = ["no" if tongue in ("nb", "nn") else tongue for tongue in row.get("languages") or []]
    domains = [domain for domain in row.get("tld") or [] if re.fullmatch(r"\.[a-z]+", domain)]
    dialled = row.get("callingCodes") or []
    demonym = clean(row.get("demonym") or "")
    capital = clean(row["capital"]) if isinstance(row.get("capital"), str) else ""
    return Country(
        code=code,
        name=name,
        names=tuple(spellings(*names)),
        official=next((other for other in names[1:] if _OFFICIAL.search(other) and "," not in other), None),
        sovereign=code not in TERRITORIES,
        region=row.get("intermediateregion") or row.get("subregion") or row["region"],
        capital=capital if capital and code not in UNSETTLED["capital"] else None,
        currencies=used if all(unit in CURRENCIES for unit in used) and code not in UNSETTLED["currency"] else (),
        languages=tuple(dict.fromkeys(LANGUAGES[tongue] for tongue in tongues))
        if all(tongue in LANGUAGES for tongue in tongues) and code not in UNSETTLED["language"]
        else (),
        area=round(row["area"]) if row["area"] >= 10 else row["area"],
        population=row["population"],
        borders=borders,
        domain=domains[0] if len(domains) == 1 else None,
        calling_code=dialled[0] if len(dialled) == 1 and dialled[0].isdigit() else None,
        demonym=demonym if re.fullmatch(r"[A-Z][A-Za-z\- ]+", demonym) else None,
    )
