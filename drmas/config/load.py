"""A recipe and command-line overrides become one `RunConfig`; the inverse is `dump`.

`load` is called by the commands. The overrides are parsed here, in a few lines, because pydantic-settings' command line doesn't
reach into tables of named sections (`--policies.main.lr 1e-5`, `--team.solver.max-tokens 64`). The team's section is validated
by the team's own model (`drmas.agents.team`), which the caller asks.

Errors are `ConfigError`, one line per fault: the key, what was found, what is expected, and the file or flag it came from.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from drmas.config.derived import merged
from drmas.config.keys import ALIASES, NAME, ROOT, Node, find, suggest
from drmas.config.schema import AdvantageConfig, RunConfig
from drmas.errors import ConfigError

SUFFIXES = (".toml", ".yaml", ".yml", ".json")


Origins = dict[tuple[str, ...], str]
"""Where the value at a path came from, for the errors; the empty path is the recipe."""


@dataclass(frozen=True)
class Override:
    """One `--dotted.key value` of the command line, not yet checked. `text` is None for a bare flag."""

    flag: str
    path: tuple[str, ...]
    text: str | None


TEAM_NAME, TRAIN, STEPS = ("team", "name"), ("train",), ("train", "steps")


def recipes() -> dict[str, str]:
    """The packaged recipes: name -> the comment on top of the file, which says what the recipe is."""
    found = {}
    folder = resources.files("drmas") / "recipes"
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            lines = entry.read_text(encoding="utf-8").splitlines()
            comment = takewhile(lambda line: line.startswith("#"), lines)
            found[entry.name.removesuffix(".toml")] = " ".join(line.removeprefix("#").strip() for line in comment)
    return found


def load(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of `recipe` (a packaged name, or a path to .toml, .yaml or .json) with `overrides` on top.

    Overrides are command-line words: `--train.steps 5`, `--train.steps=5`, `--rollout.group-size 8`, `--telemetry.report`
    (true), `--loss.dual-clip null` (unset), `--policies.judge null` (leaves that policy out), `--data.options '{"min_terms":
    2}'`. Values are JSON or TOML literals, else text.

    Example: load("arithmetic-tiny", ["--train.steps", "5"]).train.steps == 5
    """
    data, source = read_recipe(recipe)
    origins: Origins = {(): source}
    _check(data, ROOT, (), origins)
    # what picks the shape of a section goes first: it drops the settings of the shape that the recipe had
    for override in sorted(parse_overrides(overrides), key=lambda item: item.path[-1] != "type" and item.path != TEAM_NAME):
        _apply(data, override, origins)
    return _validate(RunConfig, data, (), origins)


def load_advantage(overrides: Sequence[str], base: dict[str, Any] | None = None) -> AdvantageConfig:
    """The advantage section alone, for `drmas inspect`: `base` (of a run's config.json) with `--advantage.*` on top."""
    data: dict[str, Any] = {"advantage": dict(base or {})}
    origins: Origins = {(): "the run's config.json"}
    for override in parse_overrides(overrides):
        if override.path[0] != "advantage":
            raise ConfigError(f"{override.flag}: unknown option; expected --advantage.KEY value, or see --help")
        _apply(data, override, origins)
    return _validate(AdvantageConfig, data["advantage"], ("advantage",), origins)


def dump(config: BaseModel) -> str:
    """Every value as JSON: the run's config.json, itself a recipe that `load` reads."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


def read_recipe(recipe: str) -> tuple[dict[str, Any], str]:
    """The recipe's table and the name under which errors cite it."""
    path = Path(recipe)
    if path.suffix in SUFFIXES or path.name != recipe:
        if not path.is_file():
            raise ConfigError(f"{recipe}: no such file; expected a .toml, .yaml or .json file, or one of {_recipe_names()}")
        return _parse(path.read_text(encoding="utf-8"), path.suffix, recipe), recipe
    packaged = resources.files("drmas") / "recipes" / f"{recipe}.toml"
    if not packaged.is_file():
        raise ConfigError(f"{recipe}: no such recipe; expected one of {_recipe_names()}, or a path that ends in .toml or .yaml")
    return _parse(packaged.read_text(encoding="utf-8"), ".toml", recipe), f"the recipe {recipe}"


def _recipe_names() -> str:
    return ", ".join(recipes()) or "(no packaged recipes)"


def _parse(text: str, suffix: str, name: str) -> dict[str, Any]:
    try:
        if suffix == ".toml":
            data = tomllib.loads(text)
        elif suffix == ".json":
            data = json.loads(text)
        elif suffix in (".yaml", ".yml"):
            import yaml

            try:
                data = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
        else:
            raise ConfigError(f"{name}: ends in {suffix or 'nothing'}; expected one of {', '.join(SUFFIXES)}")
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{name}: not valid {suffix[1:].upper()}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: holds a {type(data).__name__}; expected sections such as [train]")
    return data


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Command-line words to those that belong to no option (a recipe, a run) and the overrides, wherever they stand."""
    plain, overrides, value_may_follow = list[str](), list[str](), False
    for word in words:
        is_flag = word.startswith("--")
        (overrides if is_flag or value_may_follow else plain).append(word)
        value_may_follow = is_flag and "=" not in word
    return plain, overrides


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Command-line words to overrides: `--a.b value`, `--a.b=value` or a bare `--a.b`."""
    plain, words = split_words(words)
    if plain:
        raise ConfigError(f"{plain[0]!r}: unexpected; expected --section.key value")
    found: list[Override] = []
    for word in words:
        if found and found[-1].text is None and not word.startswith("--"):
            found[-1] = replace(found[-1], text=word)
            continue
        name, equals, value = word[2:].partition("=")
        path = tuple(name.split("."))
        if not all(path):
            raise ConfigError(f"--{name}: has an empty part; expected --section.key")
        found.append(Override(f"--{name}", path, value if equals else None))
    return found


def literal(text: str) -> Any:
    """`text` as a JSON or TOML value; the text itself where it is neither."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return value["value"] if list(value) == ["value"] else text


def _value(node: Node, override: Override) -> Any:
    """The override's text as the value that `node` takes."""
    if override.text is None:
        if "true" not in node.type and not node.any_below:
            raise ConfigError(f"{override.flag}: has no value; expected {node.type}")
        return True
    value = literal(override.text)
    # a number given for a text key is that text (`--name 5`)
    keep = isinstance(value, str) or not node.takes_text or (value is None and node.optional)
    return value if keep else override.text


def _apply(data: dict[str, Any], override: Override, origins: Origins) -> None:
    """Put the override's value where its key points; sections on the way are made as needed."""
    table, node, path = data, ROOT, list[str]()
    for position, part in enumerate(override.path):
        snake = part.replace("-", "_")
        # a name that the file uses stays as it is; schema keys have underscores
        name = part if part in table or (NAME in node.children and snake not in table) else snake
        below = node if node.any_below else node.child(name)
        if below is None:
            _refuse((*path, name, *override.path[position + 1 :]), override.flag)
        path.append(name)
        if position == len(override.path) - 1:
            value = _value(below, override)
            if value is None and NAME in node.children:
                _leave_out(table, name, override)
                return
            if ((node.variants and name == "type") or tuple(path) == TEAM_NAME) and table.get(name) != value:
                # another shape of the section, another team: the settings of the old one don't carry over
                table.clear()
            # epochs that the recipe sets would go before the steps
            sets_steps = tuple(path) == STEPS or (
                tuple(path) == TRAIN and isinstance(value, dict) and "steps" in value and "epochs" not in value
            )
            reshaped = below.variants and isinstance(value, dict) and "type" in value
            if isinstance(value, dict) and isinstance(table.get(name), dict):
                old = {} if reshaped and value["type"] != table[name].get("type") else table[name]
                value = merged(old, value)
            _check({name: value}, node, tuple(path[:-1]), {(): override.flag})
            table[name] = value
            origins[tuple(path)] = override.flag
            if sets_steps:
                (table if tuple(path) == STEPS else table[name]).pop("epochs", None)
            return
        if not below.is_section and not below.any_below:
            raise ConfigError(f"{override.flag}: {'.'.join(path)} is a value ({below.type}); it has no keys below it")
        inner = table.get(name)
        if not isinstance(inner, dict):
            inner = table[name] = {}
        table, node = inner, below


def _leave_out(table: dict[str, Any], name: str, override: Override) -> None:
    """`--policies.judge null`: the run has no such policy."""
    if name not in table:
        raise ConfigError(f"{override.flag} null: there is none to leave out; expected one of {', '.join(table) or '(none)'}")
    del table[name]


def _check(table: dict[str, Any], node: Node, path: tuple[str, ...], origins: Origins) -> None:
    """Refuse unknown keys of `table`, and read "null" as unset where a key may be unset (TOML has no word for it)."""
    for name, value in table.items():
        below = node if node.any_below else node.child(str(name))
        if below is None:
            inner = [key for key in value if key in ALIASES] if isinstance(value, dict) else []
            _refuse((*path, str(name), *inner[:1]), origins[()])
        if below.any_below:
            continue
        if isinstance(value, dict) and below.is_section:
            _check(value, below, (*path, str(name)), origins)
        elif value == "null" and below.optional:
            table[name] = None


def _refuse(path: tuple[str, ...], origin: str) -> None:
    raise ConfigError(f"{'.'.join(path)}: unknown key (from {origin}); {suggest(path)}")


def _validate(model: type[BaseModel], data: dict[str, Any], prefix: tuple[str, ...], origins: Origins) -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(fault, prefix, data, origins) for fault in error.errors())) from error


def _line(fault: Any, prefix: tuple[str, ...], data: dict[str, Any], origins: Origins) -> str:
    """One pydantic error as `key: what was found; what is expected (from where)`."""
    path = _without_tags((*prefix, *map(str, fault["loc"])))
    origin = _origin(path, origins)
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        section = find(path[:-1])
        if section is not None and section.variants:
            shape = _at(data, path[len(prefix) : -1])["type"]
            keys = ", ".join(section.variants[shape])
            return f"{key}: unknown key of {section.key}.type {shape} (from {origin}); it takes {keys}"
        return f"{key}: unknown key (from {origin}); {suggest(path)}"
    if fault["type"] == "missing":
        names = data.get("policies") if path[0] == "policies" else None
        known = f"; the policies are {', '.join(names)}" if isinstance(names, dict) and len(names) > 1 else ""
        node = find(path)
        return f"{key}: missing (from {origin}); expected {node.type if node else 'a value'}{known}"
    if fault["type"] == "value_error":
        message = fault["msg"].removeprefix("Value error, ")
        return f"{key}: {message} (from {origin})" if key else f"{message} (from {origin})"
    if fault["type"].startswith("union_tag"):
        tag = fault.get("ctx", {}).get("tag")
        return f"{key}.type: {'missing' if tag is None else tag}; expected {find((*path, 'type')).type} (from {origin})"
    node = find(path)
    expected = fault["msg"].removeprefix("Input should be ")
    if node is not None and not node.any_below:
        keys = "a table of named entries" if NAME in node.children else f"the keys {', '.join(node.children)}"
        expected = keys if node.is_section else node.type
    return f"{key}: {fault['input']!r}; expected {expected} (from {origin})"


def _origin(path: tuple[str, ...], origins: Origins) -> str:
    """The flags that set the value at `path`, something in it, or something beside it where it is missing; else the recipe."""
    for size in range(len(path), 0, -1):
        if path[:size] in origins:
            return origins[path[:size]]
    for start in (path, path[:-1]):
        if start and (below := [flag for key, flag in origins.items() if key[: len(start)] == start]):
            return ", ".join(below)
    return origins[()]


def _at(data: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        data = data[part]
    return data


def _without_tags(loc: tuple[str, ...]) -> tuple[str, ...]:
    """pydantic puts the shape of a section into the path (data.sums.size); the user's key has no such part."""
    path: list[str] = []
    for part in loc:
        node = find(path)
        if node is None or part not in node.variants:
            path.append(part)
    return tuple(path)
