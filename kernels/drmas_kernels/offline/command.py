"""What can be known and done about the shipped kernels without a GPU: python -m drmas_kernels.offline COMMAND

    report    compile, print what the machine code holds (columns: `measure`; what the work loop is: `machine_code`)
    check     compare that with `budgets.json` and with what each spec expects; print each difference
    update    write `budgets.json`
    prefill   fill Triton's cache, so that a job compiles nothing
    build     write cubins and a manifest for a launcher without Python (`cubins` has the schema)

Exit status: 0; 1 for a finding of `check` or `update`; 2 if kernels can't be compiled here; 3 if the budgets were measured with
another compiler, so that `check` held the kernels to what their specs expect (no spills, 128-bit accesses, tensor cores) and
found nothing, but compared no numbers.

Ranks of a job that find an empty cache all compile the same kernels at once. `prefill` makes exactly the entries that the JIT
looks for. In a container image:

    ENV TRITON_CACHE_DIR=/opt/drmas/triton
    RUN python -m drmas_kernels.offline prefill --arch sm_90

The cache names its files by their full path, so fill it where it will be read. Keep it on a disk of the node: on a shared file
system ranks wait for each other and meet stale handles. Its keys hold Triton, the kernels' source and the environment variables
that change code (such as TRITON_DISABLE_LINE_INFO and DISABLE_PTXAS_OPT): set these alike in the image and in the job.
sm_80 is compiled by the wheel's `ptxas`, sm_90 and later by its `ptxas-blackwell`, whose cubins need a driver of CUDA 13.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from drmas_kernels import spec as specs
from drmas_kernels.offline import budgets, cubins
from drmas_kernels.offline.compilation import CannotCompile, DoesNotCompile, compile_spec, faults, refuse_interpreter
from drmas_kernels.offline.measure import compiler, measure
from drmas_kernels.spec import KernelSpec

OTHER_COMPILER = 3
_WORTH_A_PROCESS = 4
"""Kernels from which on the start of more processes pays."""


class Task(NamedTuple):
    """One kernel for one architecture."""

    name: str
    arch: str

    @property
    def key(self) -> str:
        return f"{self.name}@{self.arch}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        refuse_interpreter()
        with _cache(options.cache, private=options.private):
            return options.run(options)
    except CannotCompile as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drmas_kernels.offline", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, arch, private, text in (
        ("report", _report, "sm_90", True, "print what the machine code of the kernels holds"),
        ("check", _check, "all", True, "compare it with the budgets"),
        ("update", _update, "all", True, "write the budgets"),
        ("prefill", _prefill, "sm_90", False, "fill Triton's cache"),
        ("build", _build, "sm_90", True, "write cubins and their manifest"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run, private=private)
        default = "a private one" if private else "Triton's own"
        every = "" if name == "build" else ", or all that each kernel lists"
        command.add_argument("--arch", default=arch, help=f"an architecture{every} (default: {arch})")
        command.add_argument("--only", default="*", metavar="GLOB", help="kernels whose name matches")
        command.add_argument(
            "--cache", type=Path, metavar="DIR", help=f"Triton's cache (default: TRITON_CACHE_DIR, else {default})"
        )
        command.add_argument("--jobs", type=int, default=2, help="processes that compile (default: 2)")
        command.add_argument("--module", action="append", help="a module with SPECS, in place of the package's (repeatable)")
        if name in ("check", "update"):
            command.add_argument("--budgets", type=Path, default=budgets.PATH, metavar="FILE", help="default: the package's")
        if name == "build":
            command.add_argument("--out", type=Path, required=True, metavar="DIR")
    return parser


def load(modules: Sequence[str] | None = None) -> dict[str, KernelSpec]:
    """The shipped specs, or those of `modules`, by name. CannotCompile: two have the same."""
    found: dict[str, KernelSpec] = {}
    for spec in specs.shipped() if modules is None else [spec for name in modules for spec in import_module(name).SPECS]:
        if spec.name in found:
            raise CannotCompile(f"two specs are called {spec.name}")
        found[spec.name] = spec
    return found


def tasks(kernels: dict[str, KernelSpec], arch: str = "all", only: str = "*") -> list[Task]:
    """Kernels whose names match `only`, for `arch` or, where it is "all", for every architecture that each lists."""
    found = []
    for name, spec in kernels.items():
        if fnmatch.fnmatchcase(name, only):
            found.extend(Task(name, listed) for listed in spec.archs if arch in ("all", listed))
    return found


def _wanted(options: argparse.Namespace) -> list[Task]:
    found = tasks(load(options.module), options.arch, options.only)
    if not found and (options.only != "*" or options.arch != "all"):
        raise CannotCompile(f"no kernel matches --only {options.only} --arch {options.arch}")
    return found


def _each(function: Callable[..., Any], options: argparse.Namespace, wanted: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
    """function(modules, task) for every task, in order."""
    bound = partial(function, options.module)
    if options.jobs < 2 or len(wanted) < _WORTH_A_PROCESS:
        yield from ((task, bound(task)) for task in wanted)
        return
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        yield from zip(wanted, pool.map(bound, wanted), strict=True)


def _measured(modules: Sequence[str] | None, task: Task) -> dict[str, Any]:
    """The kernel's record; of one that does not compile only the reason, under "missing"."""
    spec = load(modules)[task.name]
    try:
        compiled = compile_spec(spec, task.arch)
    except DoesNotCompile as error:
        return {"missing": [str(error)]}
    record = measure(spec, compiled, task.arch)
    record["missing"] += faults(spec)
    return record


def _cached(modules: Sequence[str] | None, task: Task) -> bool:
    """Compile where the cache lacks it. Whether it was there."""
    from triton import knobs

    hits: list[bool] = []
    knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    try:
        compile_spec(load(modules)[task.name], task.arch)
    finally:
        knobs.compilation.listener = None
    return all(hits)


@contextmanager
def _cache(folder: Path | None, *, private: bool) -> Iterator[None]:
    """Triton's cache for this process and those that it starts."""
    variable = "TRITON_CACHE_DIR"
    before = os.environ.get(variable)
    if folder is None and (before or not private):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="drmas-kernels-") as own:
        os.environ[variable] = str(folder.resolve() if folder else own)
        try:
            yield
        finally:
            os.environ.pop(variable)
            if before:
                os.environ[variable] = before


_COLUMNS = ("kernel", "regs", "stack", "spill", "shared", "CTA/SM", "loads", "stores", "loop loads", "loop stores", "TMA ld+st")
_COLUMNS += ("tensor core", "F64", "atom", "instr", "instr/el", "ex2/el")


def _report(options: argparse.Namespace) -> int:
    rows, remarks = [_COLUMNS], []
    for task, record in _each(_measured, options, _wanted(options)):
        rows.append(_row(task, record) if "registers" in record else (task.key, *"-" * (len(_COLUMNS) - 1)))
        remarks += [f"{task.key}: {text}" for text in record["missing"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    _say(*remarks)
    return 0


def _row(task: Task, record: dict[str, Any]) -> tuple[str, ...]:
    def listed(name: str) -> str:
        return " ".join(f"{number}x{key}" for key, number in record[name].items()) or "-"

    numbers = [str(record[name]) for name in ("registers", "stack", "spills", "shared", "ctas_per_sm")]
    accesses = [listed(name) for name in ("loads", "stores", "work_loads", "work_stores")]
    tail = [listed("tensor_core"), *(str(record[name]) for name in ("fp64", "atomics", "instructions"))]
    per_element = [f"{record[name]:.2f}" if name in record else "-" for name in ("instructions_per_element", "ex2_per_element")]
    return (task.key, *numbers, *accesses, f"{record['tma_loads']}+{record['tma_stores']}", *tail, *per_element)


def _check(options: argparse.Namespace) -> int:
    known, ours = budgets.read(options.budgets), compiler()
    comparable = not known.kernels or known.compiler == ours
    wanted = _wanted(options)
    records = {task.key: record for task, record in _each(_measured, options, wanted)}
    if comparable:
        verdict = budgets.compare(known.kernels, records, [task.key for task in tasks(load(options.module))])
    else:
        verdict = budgets.Verdict(budgets.missing(records), [])
    _say(*verdict.problems, *(f"better than the budget: {text}" for text in verdict.better))
    if not comparable:
        words = f"{options.budgets} was measured with {_words(known.compiler)}; here is {_words(ours)}"
        _say(f"{words}. No numbers were compared; {len(records)} kernels were held to what their specs expect.")
    if verdict.problems:
        meant = " If they are meant: python -m drmas_kernels.offline update" if comparable else ""
        _say(f"{len(verdict.problems)} findings.{meant}")
        return 1
    if not comparable:
        return OTHER_COMPILER
    _say(f"{len(records)} kernels are within their budgets")
    return 0


def _update(options: argparse.Namespace) -> int:
    known, ours = budgets.read(options.budgets), compiler()
    wanted, everything = _wanted(options), {task.key for task in tasks(load(options.module))}
    kept = {key: entry for key, entry in known.kernels.items() if key in everything - {task.key for task in wanted}}
    if kept and known.compiler != ours:
        raise CannotCompile(
            f"the other budgets are of {_words(known.compiler)}, here is {_words(ours)}: please update them all"
        )
    records = {task.key: record for task, record in _each(_measured, options, wanted)}
    measured = {key: budgets.entry(record) for key, record in records.items() if "registers" in record}
    budgets.write(budgets.Budgets(ours, kept | measured), options.budgets)
    _say(f"{options.budgets}: {len(measured)} kernels measured, {len(kept)} kept")
    remarks = budgets.missing(records)
    _say(*remarks)
    return 1 if remarks else 0


def _prefill(options: argparse.Namespace) -> int:
    from triton import knobs

    found = [there for _, there in _each(_cached, options, _wanted(options))]
    _say(f"{knobs.cache.dir}: {found.count(False)} kernels compiled, {found.count(True)} were there")
    return 0


def _build(options: argparse.Namespace) -> int:
    if options.arch == "all":
        raise CannotCompile("--arch is 'all'; expected one architecture: a folder holds the cubins of one")
    kernels, wanted = load(options.module), _wanted(options)
    with cubins.without_line_info():
        list(_each(_cached, options, wanted))
    written = cubins.build(options.out, options.arch, {task.name: kernels[task.name] for task in wanted})
    _say(f"{written[-1]}: {len(written) - 1} kernels for {options.arch}")
    return 0


def _words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
