"""How often BM25 finds the first passage that a question about the facts needs, for the question itself: a table, by hops.

python bench/facts_recall.py        # the test split; the table of drmas/envs/facts/README.md
"""

from __future__ import annotations

from drmas.config.tasks import FactsData
from drmas.envs.facts import passages, questions
from drmas.envs.search.index import Bm25Index

FIRST = (3, 5)


def recall(index: Bm25Index, hops: int, first: int) -> float:
    """The share of the test split's questions of these hops whose first support is among the first passages."""
    tasks = questions(FactsData(split="test", hops=[hops]))
    hits = index.search([task.question for task in tasks], topk=first)
    found = [task.extra["support"][0] in {hit.passage.id for hit in its} for task, its in zip(tasks, hits, strict=True)]
    return sum(found) / len(found)


def main() -> None:
    index = Bm25Index(passages())
    print(f"| hops | {' | '.join(f'among the first {first}' for first in FIRST)} |")
    print(f"|{' --- |' * (len(FIRST) + 1)}")
    for hops in (1, 2, 3):
        print(f"| {hops} | {' | '.join(f'{recall(index, hops, first):.0%}'.replace('%', ' %') for first in FIRST)} |")


if __name__ == "__main__":
    main()
