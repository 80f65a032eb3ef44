"""What the machine code of the shipped kernels may cost: `budgets.json`, one entry per "kernel@arch", and the comparison.

Numbers are those of one compiler, named in the file: another one's say nothing about a change of the kernels.
Registers, stack, spills, shared memory, 64-bit floats, atomics and narrow accesses may not exceed the budget at all; counts of
instructions may by `ALLOWANCE`; programs per multiprocessor may not become fewer; no kind of tensor core instruction or TMA
copy may vanish.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_name("budgets.json")

ALLOWANCE = 0.1
"""Relative excess of a count of instructions that is no finding."""

_AT_MOST = ("registers", "stack", "spills", "shared", "fp64", "atomics")
_ABOUT = ("instructions", "instructions_per_element", "ex2_per_element")
_AT_LEAST = ("ctas_per_sm",)
_WIDTHS = ("loads", "stores", "work_loads", "work_stores")
_PRESENT = ("tma_loads", "tma_stores", "tensor_core")
KEYS = (*_AT_MOST, *_ABOUT, *_AT_LEAST, *_WIDTHS, *_PRESENT)
"""Of a record of `measure.measure`, what a budget holds."""

Records = Mapping[str, Mapping[str, Any]]


class Verdict(NamedTuple):
    problems: list[str]
    better: list[str]
    """Where the budget could be lowered."""


class Budgets(NamedTuple):
    compiler: dict[str, str]
    kernels: dict[str, dict[str, Any]]


def read(path: Path = PATH) -> Budgets:
    """No budgets where there is no file."""
    if not path.exists():
        return Budgets({}, {})
    content = json.loads(path.read_text(encoding="utf-8"))
    return Budgets(content["compiler"], content["kernels"])


def write(budgets: Budgets, path: Path = PATH) -> None:
    """One kernel a line, sorted: a change of one kernel is a change of its lines."""
    lines = [f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(budgets.kernels.items())]
    kernels = "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"
    path.write_text(f'{{\n  "compiler": {json.dumps(budgets.compiler)},\n  "kernels": {kernels}\n}}\n', encoding="utf-8")


def entry(record: Mapping[str, Any]) -> dict[str, Any]:
    """The budget that a record just meets."""
    return {key: record[key] for key in KEYS if key in record}


def missing(records: Records) -> list[str]:
    """What the machine code lacks of what the specs expect, and kernels that don't compile: whatever the compiler."""
    return [f"{key}: {text}" for key, record in records.items() for text in record.get("missing", ())]


def compare(kernels: Records, records: Records, known: Collection[str]) -> Verdict:
    """`records` against the budgets of `kernels`; `known` are the keys of all specs, measured or not: each must have a budget.

    What a record names as missing is a problem whatever the budget; a kernel that did not compile has nothing else.
    """
    verdict = Verdict([], [])
    for key, record in records.items():
        verdict.problems.extend(missing({key: record}))
        if "registers" in record and key in kernels:
            _compare(key, entry(record), kernels[key], verdict)
    verdict.problems.extend(f"{key}: no budget" for key in known if key not in kernels)
    verdict.problems.extend(f"{key}: a budget without a kernel" for key in sorted(set(kernels) - set(known)))
    return verdict


def _compare(key: str, record: Mapping[str, Any], budget: Mapping[str, Any], verdict: Verdict) -> None:
    for name in KEYS:
        label = name.replace("_", " ")
        if (name in record) != (name in budget):
            there = "measured" if name in record else "budgeted"
            verdict.problems.append(f"{key}: {label} is {there} only")
        elif name not in record:
            continue
        elif name in _WIDTHS:
            for width in sorted(set(record[name]) | set(budget[name]), key=int):
                if int(width) < 128:
                    both = record[name].get(width, 0), budget[name].get(width, 0)
                    _judge(verdict, f"{key}: {label} of {width} bits", *both)
        elif name == "tensor_core":
            for opcode in sorted(set(budget[name]) - set(record[name])):
                verdict.problems.append(f"{key}: {opcode} 0, budget {budget[name][opcode]}")
        elif name in _PRESENT:
            if budget[name] and not record[name]:
                verdict.problems.append(f"{key}: {label} 0, budget {budget[name]}")
        elif name in _AT_LEAST:
            _judge(verdict, f"{key}: {label}", record[name], budget[name], more_is_better=True)
        else:
            _judge(verdict, f"{key}: {label}", record[name], budget[name], ALLOWANCE if name in _ABOUT else 0.0)


def _judge(
    verdict: Verdict, label: str, value: float, budget: float, allowance: float = 0.0, *, more_is_better: bool = False
) -> None:
    excess = budget - value if more_is_better else value - budget
    text = f"{label} {value}, budget {budget}"
    if excess > allowance * budget:
        verdict.problems.append(text)
    elif excess < -allowance * budget:
        verdict.better.append(text)
