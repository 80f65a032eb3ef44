"""The table that the README of the facts quotes is the one that the script prints."""

from __future__ import annotations

from pathlib import Path

import drmas.envs.facts
from bench.facts_recall import main


def test_the_readme_has_the_table_that_is_printed(capsys) -> None:
    main()
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 5
    assert printed in Path(drmas.envs.facts.__file__).with_name("README.md").read_text(encoding="utf-8")
