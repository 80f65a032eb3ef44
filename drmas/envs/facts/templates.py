"""What is asked of the corpus: each function here turns its records into drafts of questions.

A draft names the passages that hold its hops, in order, with the words that answer each hop there; the last is the answer's.
`chain` are the entities that it goes through, the one that it starts from first, without those that it only compares with.
Called by `splits`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from drmas.envs.facts.airports import Airport, airports
from drmas.envs.facts.countries import Country, countries
from drmas.envs.facts.elements import Element, elements
from drmas.envs.facts.names import CURRENCIES, OTHER_ELEMENT_NAMES
from drmas.envs.facts.passages import airport_id, area_text, country_id, element_id
from drmas.envs.facts.text import digest, plain, spellings

AIRPORTS_ASKED_PER_COUNTRY = 12
"""The international ones first, then by hash, as `airports` has them."""

CLEAR = 1.1
"""How many times the runner-up's measure the winner's must be for a comparison to be asked."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A question before it has a split. `answers`: the accepted ones, the canonical one first."""

    hops: int
    template: str
    question: str
    answers: tuple[str, ...]
    chain: tuple[str, ...]
    support: tuple[str, ...]
    facts: tuple[str, ...]
    """Of each passage in `support`, the words in it that its hop needs."""


def drafts() -> Iterator[Draft]:
    """All of them, in an order that never changes."""
    yield from (draft for draft in _open_drafts() if not _gives_away(draft))
    yield from _element_pairs()
    yield from _country_pairs()


def _open_drafts() -> Iterator[Draft]:
    """The questions that don't name their answer as one of two."""
    for element in elements().values():
        yield from _of_element(element)
        yield from _of_discovery(element)
    for country in countries().values():
        if country.sovereign:
            yield from _of_country(country)
            yield from _of_neighbours(country)
    for airport in _asked_airports():
        yield from _of_airport(airport, countries()[airport.country])


def _gives_away(draft: Draft) -> bool:
    """Whether the answer stands in the question, as in "the capital of the country in which Dublin Airport lies"."""
    return re.search(rf"(?<!\w){re.escape(draft.answers[0])}(?!\w)", draft.question) is not None


def _draft(template: str, question: str, answers: Sequence[str], *links: tuple[str, str], hops: int = 0, chain=()) -> Draft:
    """`links`: passage and words of each hop; there are as many hops, and the chain is those passages, unless given."""
    support = tuple(passage for passage, _ in links)
    facts = tuple(words for _, words in links)
    return Draft(hops or len(links), template, question, tuple(spellings(*answers)), tuple(chain) or support, support, facts)


def _of_element(element: Element) -> Iterator[Draft]:
    here, name, low = element_id(element.symbol), element.name, element.name.lower()
    names = (name, *OTHER_ELEMENT_NAMES.get(element.symbol, ()))
    number = str(element.number)
    yield _draft("symbol", f"What is the chemical symbol of {low}?", [element.symbol], (here, element.symbol))
    yield _draft("number", f"What is the atomic number of {low}?", [number], (here, number))
    yield _draft("by-number", f"What is the name of element number {number}?", names, (here, name))
    yield _draft("by-symbol", f"What is the name of the element with the symbol {element.symbol}?", names, (here, name))
    if element.melting_point:
        kelvin = str(element.melting_point)
        yield _draft(
            "melting", f"At how many kelvin does {low} melt?", [kelvin, f"{kelvin} kelvin", f"{kelvin} K"], (here, kelvin)
        )


def _of_discovery(element: Element) -> Iterator[Draft]:
    here, low = element_id(element.symbol), element.name.lower()
    if element.year:
        year = str(element.year)
        yield _draft("discovery-year", f"In which year was the element {low} discovered?", [year], (here, year))
    if element.discoverer:
        person = element.discoverer.removeprefix("Sir ")
        answers = [element.discoverer, person, person.rsplit(" ", 1)[-1]]
        yield _draft("discoverer", f"Who discovered the element {low}?", answers, (here, element.discoverer))
    country = _discovery_country(element)
    if country is None:
        return
    places = [*country.names, *({element.place or country.name} - set(country.names))]
    there, where = (here, country.name), f"the country where the element {low} was discovered"
    chain = (here, country_id(country.code))
    yield _draft("discovery-country", f"In which country was the element {low} discovered?", places, there, chain=chain)
    for template, question, answers, fact in _asked_of(country, where):
        yield _draft(f"{template}-of-discovery", question, answers, there, (country_id(country.code), fact))
    yield from _beyond(country, where, there, "of-discovery")


def _discovery_country(element: Element) -> Country | None:
    return next((country for country in countries().values() if country.name == element.country), None)


def _asked_of(country: Country, where: str) -> Iterator[tuple[str, str, Sequence[str], str]]:
    """Template, question, answers and the words in the passage, for each fact of `country` that a question can end in."""
    if country.capital:
        names = [country.capital, country.capital.removesuffix(" D.C.").removeprefix("City of ")]
        yield "capital", f"What is the capital of {where}?", names, country.capital
    if len(country.currencies) == 1:
        code = country.currencies[0]
        yield "currency", f"What is the currency of {where}?", [*CURRENCIES[code], code], CURRENCIES[code][0]
    if len(country.languages) == 1:
        yield "language", f"What is the official language of {where}?", country.languages, country.languages[0]
    if country.domain:
        yield "domain", f"What is the internet domain of {where}?", [country.domain], country.domain
    if country.calling_code:
        code = country.calling_code
        yield "calling-code", f"What is the international calling code of {where}?", [f"+{code}", code], f"+{code}"


def _of_country(country: Country) -> Iterator[Draft]:
    here = country_id(country.code)
    for template, question, answers, fact in _asked_of(country, country.the):
        yield _draft(template, question, answers, (here, fact))
    yield _draft("region", f"In which region of the world is {country.the}?", [country.region], (here, country.region))
    if _capital_is_unique(country):
        yield _draft("by-capital", f"Which country has {country.capital} as its capital?", country.names, (here, country.name))


def _capital_is_unique(country: Country) -> bool:
    """Whether its capital tells it from the others, and isn't named like the country itself."""
    bearers = [other for other in countries().values() if other.capital and country.capital == other.capital]
    return bearers == [country] and plain(country.name).lower() not in plain(country.capital or "").lower()


def _of_neighbours(country: Country) -> Iterator[Draft]:
    here = country_id(country.code)
    yield from _beyond(country, country.the, None, "")
    if _capital_is_unique(country):
        seat = f"the country whose capital is {country.capital}"
        yield from _beyond(country, seat, (here, country.capital or ""), "of-capital", merge=True)


def _beyond(
    country: Country, where: str, first: tuple[str, str] | None, suffix: str, *, merge: bool = False
) -> Iterator[Draft]:
    """Questions about the neighbours of `country`, which the sentence calls `where`; `first` is the hop that leads to it.

    `merge`: that hop is in the country's own passage, so it is a hop without a passage of its own.
    """
    here = country_id(country.code)
    before = () if first is None else (first,)
    start = () if first is None or merge else (first[0],)
    links = () if merge else before
    hops = len(before)
    name = f"-{suffix}" if suffix else ""
    neighbours = [countries()[code] for code in country.borders or ()]
    if len(neighbours) == 1 and neighbours[0].sovereign:
        (only,) = neighbours
        chain = (*start, here, country_id(only.code))
        for template, question, answers, fact in _asked_of(only, f"the only country that borders {where}"):
            if template in ("capital", "currency"):
                to = (country_id(only.code), fact)
                yield _draft(
                    f"{template}-of-only-neighbour{name}",
                    question,
                    answers,
                    *links,
                    (here, only.name),
                    to,
                    hops=hops + 2,
                    chain=chain,
                )
    largest = _largest(neighbours)
    if largest is None:
        return
    chain = (*start, here, country_id(largest.code))
    others = [(country_id(other.code), area_text(other)) for other in neighbours if other is not largest]
    asked = f"Of the countries that border {where}, which has the largest area?"
    path = (*links, (here, largest.name), *others)
    to = (country_id(largest.code), area_text(largest))
    yield _draft(f"largest-neighbour{name}", asked, largest.names, *path, to, hops=hops + 2, chain=chain)
    if largest.capital and hops == 0:
        asked = f"What is the capital of the largest by area of the countries that border {where}?"
        to = (country_id(largest.code), largest.capital)
        answers = [largest.capital, largest.capital.removesuffix(" D.C.")]
        yield _draft(f"capital-of-largest-neighbour{name}", asked, answers, *path, to, hops=3, chain=chain)


def _largest(neighbours: Sequence[Country]) -> Country | None:
    """The one with the largest area by far, of two or more states."""
    if len(neighbours) < 2 or not all(neighbour.sovereign for neighbour in neighbours):
        return None
    first, second, *_ = sorted(neighbours, key=lambda neighbour: -neighbour.area)
    return first if first.area >= CLEAR * second.area else None


def _element_pairs() -> Iterator[Draft]:
    """Each element with the one that follows it by hash: which was discovered earlier, which melts at more kelvin."""
    order = sorted(elements().values(), key=lambda element: digest(element_id(element.symbol)))
    dated = [element for element in order if element.year]
    for one, other in pairwise(dated):
        early, late = sorted((one, other), key=lambda element: element.year or 0)
        if (late.year or 0) - (early.year or 0) >= 5:
            asked = f"Which element was discovered earlier, {one.name.lower()} or {other.name.lower()}?"
            yield _pair("discovered-earlier", asked, one, late, str(late.year), early, str(early.year))
    measured = [element for element in order if element.melting_point]
    for one, other in pairwise(measured):
        low, high = sorted((one, other), key=lambda element: element.melting_point or 0)
        if (high.melting_point or 0) >= CLEAR * (low.melting_point or 0):
            asked = f"Which element melts at the higher temperature, {one.name.lower()} or {other.name.lower()}?"
            yield _pair("melts-higher", asked, one, low, str(low.melting_point), high, str(high.melting_point))


def _pair(template: str, asked: str, root: Element, loser: Element, measure: str, winner: Element, best: str) -> Draft:
    names = (winner.name, *OTHER_ELEMENT_NAMES.get(winner.symbol, ()))
    ends = (element_id(loser.symbol), element_id(winner.symbol))
    chain = sorted(ends, key=lambda end: end != element_id(root.symbol))
    return _draft(template, asked, names, (ends[0], measure), (ends[1], best), chain=chain)


def _country_pairs() -> Iterator[Draft]:
    """Each country with the three that follow it by hash: which is larger."""
    states = (country for country in countries().values() if country.sovereign)
    order = sorted(states, key=lambda country: digest(country_id(country.code)))
    for place, one in enumerate(order):
        for other in order[place + 1 : place + 4]:
            small, large = sorted((one, other), key=lambda country: country.area)
            if large.area >= CLEAR * small.area:
                asked = f"Which country has the larger area, {one.the} or {other.the}?"
                links = ((country_id(small.code), area_text(small)), (country_id(large.code), area_text(large)))
                chain = (country_id(one.code), country_id(other.code))
                yield _draft(f"larger-of-{other.code}", asked, large.names, *links, chain=chain)


def _asked_airports() -> Iterator[Airport]:
    counts: dict[str, int] = {}
    for airport in airports().values():
        counts[airport.country] = counts.get(airport.country, 0) + 1
        if counts[airport.country] <= AIRPORTS_ASKED_PER_COUNTRY and countries()[airport.country].sovereign:
            yield airport


def _of_airport(airport: Airport, country: Country) -> Iterator[Draft]:
    """One question of one hop and one of two, chosen by hash, and those about the neighbours of its country."""
    here, chosen = airport_id(airport.iata), digest(airport_id(airport.iata))
    coded = f"the airport with the IATA code {airport.iata}"
    there, chain = (here, country.name), (here, country_id(country.code))
    single = [
        _draft("country", f"In which country does {coded} lie?", country.names, there, chain=chain),
        _draft("city", f"Which city does {coded} serve?", [airport.city], (here, airport.city)),
        _draft("icao", f"What is the ICAO code of {airport.name}?", [airport.icao], (here, airport.icao)),
        _draft(
            "timezone", f"Which time zone do the clocks at {airport.name} follow?", [airport.timezone], (here, airport.timezone)
        ),
    ]
    yield single[chosen % len(single)]
    where = f"the country in which {coded if chosen % 2 else airport.name} lies"
    double = list(_asked_of(country, where))
    if double:
        template, question, answers, fact = double[chosen // 8 % len(double)]
        yield _draft(f"{template}-of-airport", question, answers, there, (country_id(country.code), fact))
    yield from _beyond(country, where, there, "of-airport")
