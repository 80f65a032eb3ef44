"""The command line of bench/kernels.py: the kernels beside plain torch and other libraries, in one run.

Correctness tests of the chosen operations run first. The sides of a case alternate, the best time of each counts, and the ratio
to torch eager is the number to compare: other work on the machine moves all sides alike.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.kernel_bench import bars, report
from bench.kernel_bench.cases import cases
from bench.kernel_bench.gate import run_gate
from bench.kernel_bench.measure import MMAP_THRESHOLD, Peaks, best_seconds, limit_memory, machine, peak_bytes, peaks
from bench.kernel_bench.sides import EAGER, OURS, PRESETS, Case, Measured, Side, clear
from bench.suite.record import add_json
from drmas_kernels.backend import OPS, choose

ANSWER_TOLERANCE = 0.02
"""Sides of a case must agree so far; it catches a peer that is asked for something else, not a rounding."""
PACKAGES = ("torch", "triton", "megatron-core", "liger-kernel", "cut-cross-entropy")
FACTORS = (1, 2, 4)
SCRIPT = Path(__file__).parents[1] / "kernels.py"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/kernels.py", description=__doc__.splitlines()[0].partition(": ")[2])
    parser.add_argument("--shapes", choices=tuple(PRESETS), help="default: smollm2 on the CPU, qwen on a GPU")
    parser.add_argument("--op", choices=OPS, action="append", help="several are allowed; default: all")
    parser.add_argument("--implementation", action="append", metavar="NAME", help="sides to run beside drmas; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the head; default: float32 on the CPU, else bfloat16"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path, metavar="PATH")
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="PATH", help="svg or png")
    parser.add_argument("--check", type=Path, metavar="CSV", help="compare the ratios with a baseline; exit status 1: worse")
    parser.add_argument("--sweep", action="store_true", help="instead: peak memory of linear_policy_loss at T, 2T and 4T")
    parser.add_argument("--skip-gate", action="store_true", help="run no tests first")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--tokens-factor", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "SIDE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    gpu = args.device == "cuda"
    args.shapes = args.shapes or ("qwen" if gpu else "smollm2")
    args.dtype = args.dtype or ("bfloat16" if gpu else "float32")
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; expected at least 1")
    if gpu and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch.cuda finds no GPU")
    if args.plot and bars.missing():
        parser.error(bars.missing())
    if args.check and not args.check.is_file():
        parser.error(f"--check is {args.check}; there is no such file")
    if args.check and args.implementation and EAGER not in args.implementation:
        parser.error(f"--check compares ratios to {EAGER}, which isn't among --implementation; please add it")
    if args.sweep and (args.check or args.csv or args.plot or args.json):
        parser.error("--sweep prints its numbers alone; please leave out --check, --csv, --json and --plot")
    return args


def chosen(args: argparse.Namespace) -> list[tuple[Case, list[Side]]]:
    """The cases of the chosen operations, each with the chosen sides."""
    made = [
        case for case in cases(args.shapes, args.device, args.dtype, args.tokens_factor) if not args.op or case.op in args.op
    ]
    if not made:
        raise SystemExit(f"--shapes {args.shapes} has no case of --op {' '.join(args.op or ())}")
    known = {side.implementation for case in made for side in case.sides}
    wanted = {OURS, *(args.implementation or known)}
    unknown = sorted(wanted - known)
    if unknown:
        raise SystemExit(f"--implementation is {unknown[0]!r}; expected one of {', '.join(sorted(known))}")
    return [(case, [side for side in case.sides if side.implementation in wanted]) for case in made]


def run_case(case: Case, sides: list[Side], args: argparse.Namespace, top: Peaks) -> list[Measured]:
    """All sides of a case, alternating; those that can't run say why."""
    floor = case.cost.floor_seconds(top.flops, top.bytes)
    measured = {
        side.implementation: Measured(
            case, side.implementation, floor_seconds=floor, note=side.computes, reason=side.missing() or ""
        )
        for side in sides
    }
    runnable = [side for side in sides if not measured[side.implementation].reason]
    if PRESETS[args.shapes].memory_only:
        for side in runnable:
            _measure_apart(measured[side.implementation], args, keep_time=True)
    else:
        _alternate(case, runnable, measured, args)
    eager = measured.get(EAGER)
    for row in measured.values():
        if eager and eager.seconds and row.seconds:
            row.ratio = row.seconds / eager.seconds
    return list(measured.values())


def _alternate(case: Case, sides: list[Side], measured: dict[str, Measured], args: argparse.Namespace) -> None:
    inputs, steps = case.inputs(), {}
    for side in sides:
        row = measured[side.implementation]
        try:
            step = side.make(inputs)
            answer = step()
        except torch.OutOfMemoryError:
            row.reason = "out of memory"
            torch.cuda.empty_cache()
            continue
        steps[side.implementation] = step
        row.answer = None if answer is None else float(answer)
    for name, seconds in best_seconds(steps, args.repeats, args.device).items():
        measured[name].seconds = seconds
    if args.skip_memory:
        return
    if args.device == "cuda":
        for name, step in steps.items():
            measured[name].peak_bytes = peak_bytes(step, lambda: clear(inputs), args.device)[0]
        return
    inputs = steps = None  # the processes that measure memory need it
    for side in sides:
        _measure_apart(measured[side.implementation], args)


def _measure_apart(row: Measured, args: argparse.Namespace, keep_time: bool = False) -> None:
    """Peak memory of one step in a fresh process; with `keep_time` its seconds and answer too."""
    position = [case.title for case, _ in chosen(args)].index(row.case.title)
    command = [sys.executable, str(SCRIPT), *_same(args), "--measure", str(position), row.implementation]
    child = subprocess.run(command, capture_output=True, text=True, env=os.environ | MMAP_THRESHOLD)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["without a word"])[-1]
        lacking = child.returncode == -signal.SIGKILL or "can't allocate memory" in child.stderr
        reason = "out of memory" if lacking else f"failed: {last}"
        if keep_time:
            row.reason = reason
        else:
            row.note = "; ".join(part for part in (row.note, f"its memory: {reason}") if part)
        return
    found = json.loads(child.stdout.splitlines()[-1])
    row.peak_bytes = found["bytes"]
    if keep_time:
        row.seconds, row.answer = found["seconds"], found["answer"]


def _same(args: argparse.Namespace) -> list[str]:
    """The options that decide which cases there are."""
    ops = [word for op in args.op or () for word in ("--op", op)]
    fixed = {"shapes": args.shapes, "device": args.device, "dtype": args.dtype, "tokens-factor": args.tokens_factor}
    return ops + [word for name, value in fixed.items() for word in (f"--{name}", str(value))]


def measure_here(args: argparse.Namespace) -> None:
    """What `_measure_apart` starts: one side of one case, twice, the second run measured."""
    if args.device == "cpu":
        limit_memory()
    position, name = args.measure
    case, sides = chosen(args)[int(position)]
    side = next(side for side in sides if side.implementation == name)
    inputs = case.inputs()
    step = side.make(inputs)
    step()
    peak, seconds, answer = peak_bytes(step, lambda: clear(inputs), args.device)
    print(json.dumps({"bytes": peak, "seconds": seconds, "answer": answer}))


def agreement(measured: Sequence[Measured]) -> str | None:
    """What to say where the answers weren't compared with torch eager's. SystemExit: two sides of the case disagree."""
    answered = [row for row in measured if row.answer is not None]
    if len(answered) < 2:
        return f"not compared: {f'only {answered[0].implementation}' if answered else 'no side'} gives a number to compare"
    base = next((row for row in answered if row.implementation == EAGER), answered[0])
    for row in answered:
        if not abs(row.answer - base.answer) <= ANSWER_TOLERANCE * max(1.0, abs(base.answer)):
            raise SystemExit(
                f"{row.case.title}: {row.implementation} gives {row.answer}, {base.implementation} {base.answer}; "
                "they don't do the same"
            )
    return None if base.implementation == EAGER else f"compared with {base.implementation}: {EAGER} gives no number here"


def sweep(args: argparse.Namespace) -> None:
    """Peak memory of `linear_policy_loss` at T, 2T and 4T: what is left beside the gradients stays below a chunk."""
    args.op = ["linear_policy_loss"]
    widths = (7, 9, 9, 8)
    print(report.table_line("", ("T", "peak MB", "gradients", "rest"), widths))
    for side in (OURS, EAGER):
        for factor in FACTORS:
            args.tokens_factor = factor
            case = chosen(args)[0][0]
            inputs = case.inputs()
            gradients = sum(leaf.numel() * leaf.element_size() for leaf in inputs.leaves)
            tokens = inputs.hidden.shape[0]
            del inputs
            row = Measured(case, side)
            _measure_apart(row, args)
            if row.reason or row.peak_bytes is None:
                print(report.table_line(side, (str(tokens),), widths[:1], row.reason or "the kernel does not tell"))
                continue
            megabytes = [f"{size / 1e6:.1f}" for size in (row.peak_bytes, gradients, row.peak_bytes - gradients)]
            print(report.table_line(side, (str(tokens), *megabytes), widths))


def header(args: argparse.Namespace, top: Peaks) -> dict[str, str]:
    versions = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} not installed")
    backend = choose("linear_policy_loss", args.device)
    once = PRESETS[args.shapes].memory_only
    return {
        "machine": machine(args.device),
        "date": datetime.date.today().isoformat(),
        "versions": ", ".join(versions),
        "threads": str(torch.get_num_threads()),
        "backend": f"{backend.name} ({backend.reason})",
        "times": "one run each in a process of its own" if once else f"best of {args.repeats} rounds of alternating sides",
        "floor": f"{top.flops / 1e12:.3g} TFLOP/s and {top.bytes / 1e9:.4g} GB/s, {top.origin}",
        "command": _command(args),
    }


def _command(args: argparse.Namespace) -> str:
    """What measures the same again: every option that decides what is measured, and how often."""
    words = ["bench/kernels.py", "--shapes", args.shapes, "--device", args.device, "--dtype", args.dtype]
    words += ["--repeats", str(args.repeats)]
    words += [word for op in args.op or () for word in ("--op", op)]
    words += [word for side in args.implementation or () for word in ("--implementation", side)]
    return shlex.join(words + ["--skip-memory"] * args.skip_memory)


def disclaimer(device: str, backend: str) -> str:
    if device == "cuda":
        return f"Measured is the {backend} backend on this GPU, with a cold L2 cache."
    return (
        f"Measured is the {backend} backend on the CPU, not the Triton kernels on a GPU.\n"
        "Times and ratios on a CPU say nothing about a GPU; they show what this code costs where there is none."
    )


def check(path: Path, now: dict[str, str], table: list[report.Row], *, memory: bool) -> bool:
    """Print every comparison; True if nothing is worse. SystemExit: the baseline is of another backend."""
    before, baseline = report.read_csv(path)
    if before.get("backend", "").split(" ")[0] != now["backend"].split(" ")[0]:
        raise SystemExit(f"{path} is of the backend {before.get('backend')}, this run of {now['backend']}: nothing to compare")
    verdicts = report.compare(baseline, table, memory=memory)
    print(f"\nbeside {path} ({before.get('machine')}, {before.get('date')}):")
    for verdict in verdicts:
        print(f"  {verdict.text}")
    return not any(verdict.worse for verdict in verdicts)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.measure:
        measure_here(args)
        return 0
    if args.sweep:
        sweep(args)
        return 0
    selected = chosen(args)
    if not args.skip_gate:
        run_gate(sorted({case.op for case, _ in selected}), args.device)
    top = peaks(args.device, getattr(torch, args.dtype), quick=args.shapes == "small")
    head = header(args, top)
    print(disclaimer(args.device, head["backend"].split(" ")[0]))
    print("\n".join(f"{key}: {value}" for key, value in head.items()))
    measured = []
    for case, sides in selected:
        rows = run_case(case, sides, args, top)
        print("\n".join(report.lines(case, rows, head["machine"] if args.device == "cuda" else None)), flush=True)
        said = agreement(rows)
        if said:
            print(f"  {said}", flush=True)
        measured += rows
    table = report.rows(measured)
    if args.csv:
        report.write_csv(args.csv, head, table)
    if args.json:
        report.result(head, table, torch.get_num_threads()).write(args.json)
    if args.plot and table:
        backend = head["backend"].split(" ")[0]
        bars.draw(args.plot, f"{head['machine']}, {head['date']}, {backend} backend, {head['threads']} threads", table)
    lost = [row for row in measured if row.implementation == OURS and row.reason]
    for row in lost:
        print(f"{row.case.title}: {OURS} has no numbers: {row.reason}")
    fine = not args.check or check(args.check, head, table, memory=not args.skip_memory)
    return 0 if fine and not lost else 1
