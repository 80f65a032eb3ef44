"""Every configuration key and option that a document, a launcher or a recipe writes exists (and its value fits)."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer

from drmas.agents.team import check_policies, load_team
from drmas.cli.main import app
from drmas.config.keys import find
from drmas.config.load import load, recipes
from drmas.core.estimators import ESTIMATORS, resolve

COMMANDS = {name or info.callback.__name__.strip("_") for info in app.registered_commands for name in [info.name]} | {"config"}


CALL = re.compile(rf"\bdrmas(\.cli)? ({'|'.join(sorted(COMMANDS))})\b")
SECTIONS = ("policies", "team", "data", "rollout", "advantage", "loss", "train", "cluster", "checkpoint", "telemetry")


def launchers(root: Path) -> list[Path]:
    return [path for kind in ("sh", "sbatch", "yaml", "yml", "md") for path in sorted((root / "launchers").rglob(f"*.{kind}"))]


def documents(root: Path) -> list[Path]:
    folders = (root / "launchers", root / "bench", root / "drmas")
    return [root / "README.md", *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def drmas_commands(text: str) -> list[str]:
    """The command lines that call drmas, continuation lines joined."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    return [line for line in joined.splitlines() if CALL.search(line)]


@cache
def options() -> set[str]:
    """Those of the commands themselves, without dashes. (Of all, since a line of prose may speak of several.)"""
    commands = typer.main.get_command(app).commands.values()
    parts = [part for command in commands for part in (command, *getattr(command, "commands", {}).values())]
    return {"help"} | {name.lstrip("-") for part in parts for parameter in part.params for name in parameter.opts}


def flags(line: str) -> list[str]:
    """What a command line has beside options of the commands: keys of the configuration."""
    after = line[CALL.search(line).end() :]
    return [flag for flag in re.findall(r"--([A-Za-z_][\w.-]*)", after) if flag not in options()]


def toml_keys(table: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in table.items():
        below = find((*path, name))
        is_section = isinstance(value, dict) and below is not None and not below.any_below
        found += toml_keys(value, (*path, name)) if is_section and value else [(*path, name)]
    return found


def check(key: str) -> None:
    """The key exists in the schema; one of a team in one of the teams that drmas brings."""
    path = [part.replace("-", "_") for part in key.split(".")]
    node = find(path)
    assert node is not None, f"--{key} is not a key of the configuration"
    if path[0] == "team" and len(path) > 1:
        teams = [load_team({"name": name}) for name in ("solver-verifier", "single", "search-router", "debate")]
        owners = [team for team in teams if path[1] == "name" or path[1] in type(team).model_fields]
        assert owners, f"--{key}: no team has {path[1]}"
        if len(path) > 2:
            assert any(path[2] in type(getattr(team, path[1])).model_fields for team in owners), f"--{key}"


def test_flags_in_documents_exist(root):
    for path in documents(root):
        for line in drmas_commands(path.read_text(encoding="utf-8")):
            for flag in flags(line):
                check(flag)


def test_keys_and_options_in_launchers_exist(root):
    seen = set()
    for path in launchers(root):
        text = path.read_text(encoding="utf-8")
        for line in drmas_commands(text):
            for flag in flags(line):
                check(flag)
        for key in re.findall(rf"\b((?:{'|'.join(SECTIONS)})\.[A-Za-z][\w.-]*\w)", text):
            check(key)
            seen.add(key)
    assert {"cluster.engine_hosts", "cluster.host_timeout_seconds", "telemetry.metrics_port"} <= seen


def test_toml_blocks_in_documents_exist(root):
    for path in documents(root):
        for block in re.findall(r"```toml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            table = tomllib.loads(block)
            for key in toml_keys(table):
                assert find(key) is not None, f"{path.name}: {'.'.join(key)} is not a key of the configuration"
            if "name" in table.get("team", {}):
                load_team(table["team"])


def test_the_check_itself_can_fail():
    assert flags("drmas train quickstart --train.stpes 3 --resume") == ["train.stpes"]
    assert flags("drmas serve-engines --host a --port 1 --gpu 0-3") == ["gpu"]
    assert flags("drmas launch slurm quickstart --nodes 2 --engine-hosts 1") == ["engine-hosts"]
    with pytest.raises(AssertionError, match=r"train\.stpes"):
        check("train.stpes")
    with pytest.raises(AssertionError, match=r"team\.slover"):
        check("team.slover.max-tokens")
    check("team.solver.max-tokens")
    assert toml_keys({"train": {"stpes": 1}}) == [("train", "stpes")]
    assert drmas_commands("x\n$ torchrun -m drmas.cli train a \\\n   --train.steps 3\n") == [
        "$ torchrun -m drmas.cli train a --train.steps 3"
    ]


@pytest.mark.parametrize("name", list(recipes()))
def test_every_recipe_loads_whole(name):
    config = load(name)
    assert config.name == name
    team = load_team(config.team)
    assert check_policies(team, config.policies) == []
    resolve(**config.advantage.model_dump(exclude_none=True), team=list(team.agents))
    assert config.rollout.tasks_per_step * config.rollout.group_size > 1


def test_the_documented_preset_names_are_the_ones_there_are():
    help_text = find(["advantage", "preset"]).help
    assert [name for name in ESTIMATORS if f"{name}," not in help_text and f"{name}." not in help_text] == []
