"""Facts: a corpus to search, and questions that it answers one or more hops away. Nothing is downloaded or shipped here.

    passages()                                   # about 3,900: elements, countries and territories, airports
    questions(FactsData(split="train", hops=[1, 2], size=500, seed=0))

The facts are read from installed packages, each under the MIT licence; README.md beside this file says whose they are and what
is left out:

- mendeleev (Lukasz Mentel): the chemical elements
- countryinfo (Porimol Chandro): countries and territories, mostly from Wikipedia
- airportsdata (Mike Borsetti): airports, checked against national aeronautical publications

Called by `drmas.envs.source`, `drmas.envs.search.corpus` and `drmas prepare-data facts`.
"""

from drmas.envs.facts.passages import passages, write_corpus
from drmas.envs.facts.splits import questions

__all__ = ["passages", "questions", "write_corpus"]
