"""Saves that are killed at every file operation, each in a process of its own; test_checkpoint.py looks at what they left.

The parent forks before any communicator or thread exists. A child builds the policy, makes its weights and version other ones,
saves over the checkpoint in SHARED/N/latest, and is killed by SIGKILL at the N-th operation on files. The last N is the first
save that nothing was left to kill. Every fourth is written by a thread.

Usage: killed_saves.py MODEL SHARED CHECKPOINT
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from conftest import make_trainer

from drmas.policy import checkpoint, host_platform
from drmas.policy.groups import Groups, init_distributed

OPERATIONS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def kill_at(number: int, place: Path) -> None:
    """Let this process die at the operation `number` (from 0) below `place` from now on, before it is carried out."""
    seen = 0

    def count(path: str) -> None:
        nonlocal seen
        if path.startswith(str(place)):
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    def hook(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in OPERATIONS or writes:
            count(str(arguments[0]))

    fsync = os.fsync

    def watched(descriptor: int) -> None:  # not an audited event
        count(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    sys.addaudithook(hook)
    os.fsync = watched


def save_over(model: Path, folder: Path, number: int) -> None:
    init_distributed(timeout_seconds=60)
    trainer = make_trainer(model, Groups())
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    trainer.version = 1
    kill_at(number, folder.parent)
    if number % 4 == 3:
        with trainer.active():
            pending = checkpoint.save_async(trainer, folder)
        pending.finish()
    else:
        trainer.save(folder)


def was_killed(model: Path, folder: Path, number: int) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            save_over(model, folder, number)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def main(model: Path, shared: Path, older: Path) -> None:
    host_platform.set_threads(1)
    for number in range(100):
        folder = shared / str(number) / "latest"
        shutil.copytree(older, folder)
        if not was_killed(model, folder, number):
            return


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
