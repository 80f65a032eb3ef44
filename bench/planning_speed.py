"""How long a rank needs to plan an update and to pack its share: `python bench/planning_speed.py [--rows N] [--json PATH]`.

Every rank knows all rows and computes the same plan, so that what counts is one rank's time: for checking the rows, for the
whole plan, and for packing its own microbatches. No model and no other process runs; the ranks are numbers.

    turns      tasks of 8 episodes of 3 turns by two agents: a prompt has the question, then what was said before
    one agent  the same by one agent whose next prompt starts with its last row, so that rows share long starts
    apart      `turns` without sharing of prefixes

Lengths are lognormal: of a question 100 tokens in the median, of a response 150. Seconds are CPU seconds of one thread, the
best of some rounds. Reading every id once, into an array, is the yardstick: compare the ratio to that.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages

import numpy as np
import torch

from bench.suite.record import Ratio, Result, Table, about, add_json, printed
from drmas.core.batching import TokenCost, plan_microbatches
from drmas.policy.batch import check_rows
from drmas.policy.packing import pack
from drmas.types import Row

GROUP, TURNS = 8, 3
COST = TokenCost(token=810_000_000, pair=210_000, response=170_000_000)
"""Of a model of about 135 million parameters; another one moves rows between ranks, not the time."""
VOCABULARY = 49152
TARGET_SECONDS = 1.0
CASES = ("turns", "one agent", "apart")


def episodes_rows(count: int, *, nested: bool, seed: int = 0) -> list[Row]:
    """So many rows, each with ids of its own, as they come from a rollout."""
    draw = np.random.default_rng(seed)

    def text(median: float, sigma: float) -> list[int]:
        return draw.integers(0, VOCABULARY, int(draw.lognormal(math.log(median), sigma)) + 1).tolist()

    systems = [text(32, 0.0) for _ in range(2)]
    asked = [[] if nested else text(8, 0.0) for _ in range(TURNS)]
    rows: list[Row] = []
    while len(rows) < count:
        task, question = f"t{len(rows)}", text(100, 0.5)
        for sample in range(GROUP):
            said: list[int] = []
            for turn in range(TURNS):
                system = systems[0 if nested else turn % 2]
                prompt = np.array(system + question + asked[turn] + said).tolist()
                response = text(150, 0.8)
                known = [0] * len(response)
                agent = "solver" if nested or turn % 2 == 0 else "verifier"
                rows.append(Row(task, f"{task}#{sample}", agent, "main", turn, prompt, response, known, known, 1.0))
                said += response
    return rows[:count]


def best_seconds(action: Callable[[], object], rounds: int) -> float:
    found = []
    for _ in range(rounds):
        started = time.process_time()
        action()
        found.append(time.process_time() - started)
    return min(found)


def read_all(rows: Sequence[Row]) -> None:
    for row in rows:
        array("I", row.prompt_ids).tobytes()
        array("I", row.response_ids).tobytes()


def case(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of each part, and what the plan is like."""
    rows, share = episodes_rows(args.rows, nested=name == "one agent"), name != "apart"
    gc.collect()
    gc.freeze()  # hundreds of millions of objects that nothing here changes
    plans = []

    def plan() -> None:
        plans[:] = plan_microbatches(rows, budget=args.budget, num_ranks=args.ranks, cost=COST, share_prefixes=share)

    def packs() -> None:
        for microbatch in plans[0]:
            if microbatch:
                pack([rows[i] for i in microbatch], device=torch.device("cpu"), share_prefixes=share)

    found = {
        "rows": len(rows),
        "tokens": sum(row.num_tokens for row in rows),
        "read": best_seconds(lambda: read_all(rows), args.rounds),
        "check": best_seconds(lambda: check_rows(rows, policy="main", vocab=VOCABULARY), args.rounds),
        "plan": best_seconds(plan, args.rounds),
        "pack": best_seconds(packs, args.rounds),
        "microbatches": len(plans[0]),
    }
    gc.unfreeze()
    return found


def table_of(found: dict[str, dict[str, float]], args: argparse.Namespace) -> Table:
    rows = [
        [
            name,
            each["rows"],
            each["tokens"] / 1e6,
            each["microbatches"],
            each["read"],
            each["check"],
            each["plan"],
            each["pack"],
            each["plan"] / each["read"],
        ]
        for name, each in found.items()
    ]
    columns = [
        "case",
        "rows",
        "M tokens",
        "microbatches per rank",
        "read ids s",
        "check s",
        "plan s",
        "pack a share s",
        "plan / read",
    ]
    return Table(title=f"{args.ranks} ranks, {args.budget} tokens per microbatch", columns=columns, rows=rows)


def ratios_of(found: dict[str, dict[str, float]]) -> list[Ratio]:
    memory = "both are bound by memory, where other work on the machine and the sizes of its caches count"
    return [
        Ratio(
            name=f"{name}: plan by reading all ids",
            value=each["plan"] / each["read"],
            better="lower",
            tolerance=0.5,
            why=memory,
        )
        for name, each in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--budget", type=int, default=16384, help="tokens per microbatch")
    parser.add_argument("--rounds", type=int, default=3)
    add_json(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {name: case(name, args) for name in args.cases or CASES}
    notes = []
    if "turns" in found:
        verdict = "reached" if found["turns"]["plan"] <= TARGET_SECONDS else "missed"
        notes = [
            f"The plan of `turns` took {found['turns']['plan']:.2f} s; at most {TARGET_SECONDS:g} s is asked for: {verdict}"
        ]
    tables, ratios = [table_of(found, args)], ratios_of(found)
    result = Result(benchmark="planning_speed", about=about(1), tables=tables, ratios=ratios, notes=notes)
    print(f"{result.about.machine}, {result.about.date}, one thread{printed(result)}")
    if args.json:
        result.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
