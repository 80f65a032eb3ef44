"""How far plans of this machine are off: `python bench/plan_validation.py [--cluster FILE] [--steps N] [--case NAME ...]`.

    calibrate (unless --cluster has a description) -> run every case for a few steps -> predicted beside measured

The calibration sees none of the runs. "given lengths": how many calls an episode made, and how long prompts and responses were,
is taken from the run; time is predicted. "from the configuration": nothing is. The first step of each run is left out. The exit
status is 1 where a step that is predicted with the run's lengths is off by more than --bound. Wants a quiet machine: what else
runs makes measured steps longer, and predictions too short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages

from drmas.planning.cluster import load_cluster
from drmas.planning.validation import Comparison, compare, table, to_dict

MODEL = "packaged:smollm2-135m-instruct"
CASES = {
    "quickstart": ["quickstart"],
    "long groups": [
        "quickstart",
        *("--rollout.tasks-per-step", "4", "--rollout.group-size", "6"),
        *("--team.solver.max-tokens", "64", "--team.solver.stop", "[]", "--team.rounds", "1"),
    ],
    "search": ["search-facts"],
}
"""Name -> recipe and overrides. Of "long groups" the solver writes up to 64 tokens, and nobody verifies."""


def run(name: str, words: list[str], steps: int, output: Path) -> Path:
    """The run's folder. SystemExit: it failed; what it said stands above."""
    folder = name.replace(" ", "-")
    options = ["--name", folder, "--output", str(output), "--train.steps", str(steps), "--telemetry.report", "false"]
    options += ["--checkpoint.export", "false"]
    print(f"run: {name}", flush=True)
    command = [sys.executable, "-m", "drmas.cli", "train", *words, *options, "--overwrite"]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}")
    return output / folder


def calibrated(path: Path, model: str) -> None:
    """Measure this machine in a process of its own, whose memory is free before anything runs."""
    code = "import sys; from pathlib import Path; from drmas.planning.calibration import calibrate; "
    code += "calibrate(Path(sys.argv[1]), sys.argv[2], note=lambda line: print(line, flush=True))"
    done = subprocess.run([sys.executable, "-c", code, str(path), model], check=False)
    if done.returncode:
        raise SystemExit(f"the calibration ended with status {done.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="a description of this machine; measured anew if not given")
    parser.add_argument("--steps", type=int, default=4, help="of every run")
    parser.add_argument("--case", action="append", choices=CASES, help="run these only; several times")
    parser.add_argument("--runs", type=Path, help="keep the runs' folders here; those that are there are not run again")
    parser.add_argument("--json", type=Path, help="write the table, the steps and the description here")
    parser.add_argument("--bound", type=float, default=0.15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drmas-validation-") as scratch:
        path = args.cluster or Path(scratch) / "cluster.toml"
        if args.cluster is None:
            calibrated(path, MODEL)
        cluster = load_cluster(str(path))
        comparisons: list[Comparison] = []
        for name in args.case or CASES:
            output = args.runs or Path(scratch)
            folder = output / name.replace(" ", "-")
            if args.runs is None or not (folder / "metrics.jsonl").is_file():
                folder = run(name, CASES[name], args.steps, output)
            comparisons.append(compare(cluster, folder))
        print(f"\n{cluster.device.name}, {date.today()}, {args.steps} steps, the first left out\n\n{table(comparisons)}")
        if args.json:
            written = {
                "device": cluster.device.name,
                "date": str(date.today()),
                "steps": args.steps,
                "description": path.read_text(encoding="utf-8"),
                "table": table(comparisons),
                "comparisons": [to_dict(one) for one in comparisons],
            }
            args.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    missed = [one.name for one in comparisons if abs(one.error("step")) > args.bound]
    for name in missed:
        print(f"missed: the step of {name} is off by more than {args.bound:.0%}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
