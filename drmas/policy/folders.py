"""Folders that a killed process leaves whole or not at all.

A folder is written under a temporary name beside its place and renamed when it is complete, so that a process killed at any
point leaves either the old one or the new one; between the two renames the old one is under another name, and `recover` brings
it back. Files are flushed to the disk before the rename, so that a machine that goes down doesn't leave an empty file under the
new name; whether the renames themselves survive that is the file system's affair. Called by the checkpoint and the export.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def begin(folder: Path) -> Path:
    """An empty temporary folder for `folder`, on the same file system; what a killed writer left there is removed."""
    temporary = _beside(folder, "partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(folder: Path) -> None:
    """Put what was written since `begin` in the place of `folder`, flushed to the disk first. For flat folders."""
    partial, replaced = _beside(folder, "partial"), _beside(folder, "replaced")
    for path in [*partial.iterdir(), partial]:
        flush(path)
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def abandon(folder: Path) -> None:
    """Remove what was written since `begin`; `folder` stays as it was."""
    shutil.rmtree(_beside(folder, "partial"), ignore_errors=True)


def recover(folder: Path) -> None:
    """Bring the old folder back if a `commit` was killed between its two renames."""
    replaced = _beside(folder, "replaced")
    if replaced.exists() and not folder.exists():
        os.rename(replaced, folder)


def flush(path: Path) -> None:
    """Have the system write a file or a folder's list of names to the disk, whoever of this host wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(folder: Path, what: str) -> Path:
    return folder.parent / f".{folder.name}.{what}"
