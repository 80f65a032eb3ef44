"""Stands in the place of torchrun, drmas, srun, scontrol, scancel, sbatch and kubectl, whichever name it is called by.

Writes its words, environment and input to a file in $RECORDS, and does as much of the original as the launchers rely on:
`drmas serve-engines` listens until it is ended, srun runs a task per node (all on this machine, where 127.0.0.N are the nodes)
and is a step of the job, which scancel sends signals to and SIGTERM ends.
$FAIL names a command that ends with status 7, $HOLD one that runs until SIGTERM, and ends with 0 then.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

NAME, WORDS = Path(sys.argv[0]).name, sys.argv[1:]


def option(name: str, otherwise: str = "") -> str:
    """The value of `--name value` or `--name=value`."""
    for place, word in enumerate(WORDS):
        if word == name:
            return WORDS[place + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return otherwise


def record() -> None:
    text = sys.stdin.read() if NAME == "kubectl" else ""
    entry = {"name": NAME, "words": WORDS, "environment": dict(os.environ), "input": text, "folder": os.getcwd()}
    with tempfile.NamedTemporaryFile("w", dir=os.environ["RECORDS"], prefix=".new", delete=False) as file:
        json.dump(entry, file)
    os.rename(file.name, Path(os.environ["RECORDS"]) / f"{NAME}-{os.getpid()}.json")


def serve() -> None:
    with socket.create_server((os.environ["SLURMD_NODENAME"], int(option("--port")))) as listener:
        while True:
            with suppress(ConnectionError):
                listener.accept()[0].close()


def run_tasks() -> int:
    first = next(place for place, word in enumerate(WORDS) if not word.startswith("-"))
    nodes = (option("--nodelist") or os.environ["SLURM_JOB_NODELIST"]).split(",")
    step = len(list(Path(os.environ["RECORDS"]).glob("srun-*"))) - 1
    tasks: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda number, frame: [task.terminate() for task in tasks])
    for place, node in enumerate(nodes):
        task = {**os.environ, "SLURM_PROCID": str(place), "SLURMD_NODENAME": node, "SLURM_STEP_ID": str(step)}
        tasks.append(subprocess.Popen(WORDS[first:], env=task))
    return max(abs(task.wait()) for task in tasks)


def signal_step() -> None:
    """To the processes that were recorded in the step."""
    for file in Path(os.environ["RECORDS"]).glob("*-*.json"):
        place = json.loads(file.read_text())["environment"]
        if f"{place.get('SLURM_JOB_ID')}.{place.get('SLURM_STEP_ID')}" == WORDS[-1]:
            os.kill(int(file.stem.rpartition("-")[2]), signal.Signals[f"SIG{option('--signal')}"])


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    record()
    if os.environ.get("FAIL") == NAME:
        return 7
    if os.environ.get("HOLD") == NAME:
        signal.pause()
    elif NAME == "drmas":
        serve()
    elif NAME == "srun":
        return run_tasks()
    elif NAME == "scancel":
        signal_step()
    elif NAME == "scontrol" and WORDS[:2] == ["show", "hostnames"]:
        sys.stdout.write(WORDS[2].replace(",", "\n") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
