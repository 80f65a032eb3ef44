"""Folders that appear whole or not at all.

A folder is written under a temporary name beside its place and renamed when it is complete, so that a killed process leaves
either the old one or the new one. Called by the checkpoint and the export.
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
    """Put what was written since `begin` in the place of `folder`."""
    replaced = _beside(folder, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(_beside(folder, "partial"), folder)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(folder: Path) -> None:
    """Bring the old folder back if a `commit` was killed between its two renames."""
    replaced = _beside(folder, "replaced")
    if replaced.exists() and not folder.exists():
        os.rename(replaced, folder)


def _beside(folder: Path, what: str) -> Path:
    return folder.parent / f".{folder.name}.{what}"
