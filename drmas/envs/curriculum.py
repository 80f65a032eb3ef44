"""Which task of a source comes next: one after the other (`InOrder`), or by how often it was solved (`BySuccess`).

Called by `source`, with a seed's text. What is drawn is a function of that text, the number of draws before, and the success
rates reported before, in their order (I9). `state` is JSON, and `restore` goes on from it.
"""

from __future__ import annotations

import random
from typing import Any

from drmas.config.tasks import CurriculumConfig

_TRIES = 1000
"""Candidates of one draw; where none is taken, there is next to nothing near the target."""


class InOrder:
    """Every task once an epoch, in an order of its own each epoch: a function of (seed, epoch)."""

    def __init__(self, size: int, seed: str) -> None:
        self._size, self._seed = size, seed
        self._taken = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self) -> tuple[int, int]:
        """A task's index, and how often it came before."""
        epoch, position = divmod(self._taken, self._size)
        if self._order[0] != epoch:
            order = list(range(self._size))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        self._taken += 1
        return self._order[1][position], epoch

    def report(self, index: int, success: float | None) -> None:
        """An order that looks at nothing."""

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def restore(self, state: dict[str, Any]) -> None:
        self._taken = state["taken"]


class BySuccess:
    """Tasks by their success rate, most often at `config.target`; a share of the draws goes through all of them in order.

    A task's rate starts at the target, and each report moves it: rate += smoothing * (success - rate). A draw takes tasks at
    random and keeps one with probability `appeal(rate)`, so that tasks come in proportion to it, those that never came at the
    highest. A task that is drawn and not reported yet is left out, unless all are.
    """

    def __init__(self, size: int, seed: str, config: CurriculumConfig) -> None:
        self._size, self._seed, self._config = size, seed, config
        self._all = InOrder(size, seed)
        self._draws = 0
        self._rates: dict[int, float] = {}
        self._times: dict[int, int] = {}
        self._out: set[int] = set()

    def next(self) -> tuple[int, int]:
        """A task's index, and how often it came before."""
        draw = random.Random(f"{self._seed}/draw/{self._draws}")
        self._draws += 1
        index = self._in_order() if draw.random() < self._config.explore else self._by_rate(draw)
        self._out.add(index)
        self._times[index] = (times := self._times.get(index, 0)) + 1
        return index, times

    def report(self, index: int, success: float | None) -> None:
        """The success rate of a group of task `index`, 0 to 1; None where none of its episodes got a reward."""
        self._out.discard(index)
        if success is not None:
            rate = self._rates.get(index, self._config.target)
            self._rates[index] = rate + self._config.smoothing * (success - rate)

    def state(self) -> dict[str, Any]:
        """Grows with the tasks that were drawn, not with the draws: [index, times drawn, rate or null] each."""
        drawn = [[index, times, self._rates.get(index)] for index, times in sorted(self._times.items())]
        return {"draws": self._draws, "in_order": self._all.state(), "drawn": drawn, "out": sorted(self._out)}

    def restore(self, state: dict[str, Any]) -> None:
        self._draws = state["draws"]
        self._all.restore(state["in_order"])
        self._times = {index: times for index, times, _ in state["drawn"]}
        self._rates = {index: rate for index, _, rate in state["drawn"] if rate is not None}
        self._out = set(state["out"])

    def _in_order(self) -> int:
        index, _ = self._all.next()
        while index in self._out and len(self._out) < self._size:
            index, _ = self._all.next()
        return index

    def _by_rate(self, draw: random.Random) -> int:
        all_out = len(self._out) == self._size
        for _ in range(_TRIES):
            index = draw.randrange(self._size)
            rate = self._rates.get(index, self._config.target)
            if (all_out or index not in self._out) and draw.random() < appeal(rate, self._config.target):
                return index
        return self._in_order()


def appeal(rate: float, target: float) -> float:
    """How readily a task with the success rate `rate` is drawn: 1 at `target`, 0 where it is always or never solved.

    (rate / target)^(2 target) * ((1 - rate) / (1 - target))^(2 (1 - target)). At the target 0.5 it is 4 rate (1 - rate): the
    variance of the outcome, called learnability in arXiv 2408.15099; another target moves the peak there.

    Example: appeal(0.5, 0.5) == 1.0
    """
    return (rate / target) ** (2 * target) * ((1 - rate) / (1 - target)) ** (2 * (1 - target))
