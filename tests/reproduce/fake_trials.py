"""Trials that do as their method says, for the tests of the runner; imported by the server that forks them.

They meet through files in the folder ROOT/../stage: a trial leaves its process id there, and waits for `go`.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from drmas.reproduce.plan import Trial

IMPORTED_BY = os.getpid()
FINISHED = {"status": "ok", "steps": 2, "reward": [0.1, 1 / 3]}


def run_trial(trial: Trial, root: Path, *, quick: bool) -> None:
    folder, stage = root / "trials" / trial.key, root.parent / "stage"
    stage.mkdir(exist_ok=True)
    (folder / "half.txt").write_text("begun")
    sys.stdout.write(f"{trial.key} prints\n")
    methods = {"wait": _wait, "meet": _meet, "parent": _parent, "raise": _raise, "exit": _exit, "threads": _threads}
    if trial.method in methods and not (stage / "go").exists():
        methods[trial.method](trial, stage)
    if trial.method == "silent":
        return
    seen = {"quick": quick, "threads": os.environ["OMP_NUM_THREADS"], "forked": os.getppid() == IMPORTED_BY}
    result = {"scenario": trial.scenario, "method": trial.method, "seed": trial.seed, **FINISHED, "seen": seen}
    (folder / "result.json").write_text(json.dumps(result))


def _leave(path: Path, pid: int) -> None:
    """Atomic, since a test waits for it."""
    temporary = path.with_suffix(".part")
    temporary.write_text(str(pid))
    temporary.rename(path)


if "IMPORT_STAGE" in os.environ:  # an import that takes its time
    _leave(Path(os.environ["IMPORT_STAGE"], "import"), os.getpid())
    while not Path(os.environ["IMPORT_STAGE"], "go").exists():
        time.sleep(0.01)


def run_bandit(*, quick: bool) -> dict:
    return {"quick": quick, "factor": 4.0}


def _wait(trial: Trial, stage: Path) -> None:
    _leave(stage / str(trial.seed), os.getpid())
    while not (stage / "go").exists():
        time.sleep(0.01)


def _meet(trial: Trial, stage: Path) -> None:
    """Two of them wait for each other, and so does a third for a fourth."""
    _leave(stage / f"met-{trial.seed}", os.getpid())
    while not (stage / f"met-{trial.seed ^ 1}").exists():
        time.sleep(0.01)


def _parent(trial: Trial, stage: Path) -> None:
    """With a process of its own."""
    _leave(stage / "child", subprocess.Popen(["sleep", "1000"]).pid)
    _wait(trial, stage)


def _raise(trial: Trial, stage: Path) -> None:
    raise ValueError("the first line\nand the second")


def _exit(trial: Trial, stage: Path) -> None:
    os._exit(3)


def _threads(trial: Trial, stage: Path) -> None:
    """Leaves a thread that never ends."""
    threading.Thread(target=time.sleep, args=(1000,)).start()
