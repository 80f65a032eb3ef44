"""`drmas eval`: from the command's words to an evaluation, its tables and its files.

What is evaluated is a recipe (its models as they are), a run's folder (its exported models, or a checkpoint, exported to a
folder that is gone afterwards), or either with a policy's model replaced by a Hugging Face folder (`--model POLICY=FOLDER`).
The base models of ablations are always those that the configuration names.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table as RichTable
from rich.text import Text

from drmas.agents.team import load_team
from drmas.config.load import load, read_recipe, recipes
from drmas.config.schema import RunConfig
from drmas.core.names import expected_names
from drmas.errors import CheckpointError, ConfigError, ModelError
from drmas.runtime.evaluate import check_output, evaluate
from drmas.runtime.models import resolve_model
from drmas.telemetry.console import Console
from drmas.telemetry.eval_report import summary, tables, write_eval


@dataclass(frozen=True)
class Model:
    """The folder that an engine is to load, and where its weights come from, in words."""

    folder: Path
    origin: str


def run_eval(
    source: str,
    overrides: Sequence[str],
    *,
    models: Sequence[str] = (),
    checkpoint: int | None = None,
    output: Path | None = None,
    as_json: bool = False,
) -> Path:
    """The whole command; returns the folder with the results. UserError kinds for what the user can mend."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("eval is the work of one process; start it without torchrun")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, with nothing left behind
    console = Console(quiet=as_json)
    config, run = read_source(source, overrides)
    given = parse_models(models, config)
    place = output or _default_output(config, run, checkpoint)
    check_output(place)
    with _beside(place) as scratch:
        found = resolve(config, run, given, checkpoint, scratch)
        console.start({f"model {name}": model.origin for name, model in found.items()})
        result = evaluate(config, {name: model.folder for name, model in found.items()}, output=place, console=console)
    numbers = {"models": {name: model.origin for name, model in found.items()}} | result.to_dict()
    places = write_eval(place, numbers)
    print(json.dumps(numbers, indent=2) if as_json else render(numbers))
    console.end(places)
    return place


def read_source(source: str, overrides: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """The configuration of a recipe or a run, and the run's folder. ConfigError: a folder that is no run's."""
    folder, settings = Path(source), Path(source) / "config.json"
    if not folder.is_dir() or (source in recipes() and not settings.is_file()):
        return load(source, overrides), None
    if not settings.is_file():
        raise ConfigError(f"{source} is not the folder of a run; it has no config.json")
    if "policies" not in read_recipe(str(settings))[0]:
        raise ConfigError(
            f"{source} is not the folder of a run, its config.json has no policies; a model is evaluated with a recipe: "
            f"drmas eval RECIPE --model POLICY={source}"
        )
    return load(str(settings), overrides), folder


def parse_models(words: Sequence[str], config: RunConfig) -> dict[str, Path]:
    """The words of `--model`, POLICY=FOLDER each. ConfigError: another form, no such policy; ModelError: no model there."""
    given: dict[str, Path] = {}
    for word in words:
        policy, equals, folder = word.partition("=")
        if not equals or not folder:
            raise ConfigError(f"--model {word}: expected POLICY=FOLDER")
        if policy not in config.policies:
            raise ConfigError(f"--model {word}: the policy is {policy!r}; {expected_names(policy, config.policies)}")
        if not (Path(folder).expanduser() / "config.json").is_file():
            raise ModelError(f"--model {word}: there is no {folder}/config.json; expected a Hugging Face folder")
        given[policy] = Path(folder).expanduser().absolute()
    return given


def resolve(
    config: RunConfig, run: Path | None, given: Mapping[str, Path], checkpoint: int | None, scratch: Path
) -> dict[str, Model]:
    """The model of every policy that the team speaks with; those of a checkpoint are exported to `scratch`.

    CheckpointError: the run has no such checkpoint, or neither checkpoints nor exported models.
    """
    if checkpoint is not None and run is None:
        raise ConfigError(f"--checkpoint {checkpoint} is of a run; give the run's folder in the place of the recipe")
    spoken = {agent.policy for agent in load_team(config.team).agents.values()}
    names = [name for name in config.policies if name in spoken]
    trained = [name for name in names if name not in given and config.policies[name].trainable] if run else []
    found = {name: Model(folder, str(folder)) for name, folder in given.items() if name in names}
    if trained and checkpoint is None and _export_is_newest(run, trained):
        found |= {name: Model((run / "export" / name).absolute(), str(run / "export" / name)) for name in trained}
    elif trained:
        step = _step(run, checkpoint)
        _export(run, step, scratch)
        found |= {name: Model((scratch / name).absolute(), f"{run}, checkpoint of step {step}") for name in trained}
    for name in names:
        if name not in found:
            spec = config.policies[name].model
            found[name] = Model(resolve_model(spec, seed=config.seed, key=f"policies.{name}.model").absolute(), spec)
    return {name: found[name] for name in names}


def render(numbers: dict[str, Any]) -> str:
    """The summary and the tables as text for a terminal."""
    lines = {label: text for label, text in summary(numbers).items() if not label.startswith("model ")}
    width = max(map(len, lines))
    parts = ["\n".join(f"{label:<{width}}  {text}" for label, text in lines.items())]
    for table in tables(numbers):
        drawn = RichTable(title=table.title, title_justify="left")
        for position, name in enumerate(table.headers):
            drawn.add_column(name, justify="right" if position else "left", no_wrap=True)
        for row in table.rows:
            drawn.add_row(*map(Text, row))
        wide = RichConsole(file=io.StringIO(), width=1000, highlight=False, emoji=False)
        wide.print(drawn)
        parts.append("\n".join(line.rstrip() for line in wide.file.getvalue().splitlines()))
    return "\n\n".join(parts) + "\n"


def _default_output(config: RunConfig, run: Path | None, checkpoint: int | None) -> Path:
    if run is None:
        return Path(config.output) / f"{config.name}-eval"
    return run / "eval" / ("newest" if checkpoint is None else f"step_{checkpoint}")


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """A folder beside `place`, gone afterwards, as are those above it that were made for it and are empty then."""
    made = [folder for folder in place.absolute().parents if not folder.exists()]
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{place.name}.models-", dir=place.parent) as scratch:
            yield Path(scratch)
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _export_is_newest(run: Path, policies: Sequence[str]) -> bool:
    """Whether the run's exported models are there and no checkpoint has changed since."""
    exported = [run / "export" / name / "config.json" for name in policies]
    if not all(file.is_file() for file in exported):
        return False
    saved = [path for step in _checkpoints(run).values() for path in (step, *step.iterdir())]
    return not saved or min(file.stat().st_mtime for file in exported) >= max(path.stat().st_mtime for path in saved)


def _checkpoints(run: Path) -> dict[int, Path]:
    folders = {path.name.removeprefix("step_"): path for path in (run / "checkpoints").glob("step_*")}
    return {int(step): folder for step, folder in folders.items() if step.isdecimal()}


def _step(run: Path, checkpoint: int | None) -> int:
    steps = sorted(_checkpoints(run))
    if not steps or (checkpoint is not None and checkpoint not in steps):
        there = f"it has steps {', '.join(map(str, steps))}" if steps else "it has none"
        raise CheckpointError(f"{run} has no checkpoint{'' if checkpoint is None else f' of step {checkpoint}'}; {there}")
    return steps[-1] if checkpoint is None else checkpoint


def _export(run: Path, step: int, scratch: Path) -> None:
    """`drmas export` in a process of its own, so that the memory of Megatron's models is free again before engines start."""
    command = [sys.executable, "-m", "drmas.cli", "export", str(run), "--step", str(step), "--output", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise CheckpointError(done.stderr.strip().removeprefix("drmas: "))
    if done.returncode:
        raise RuntimeError(f"drmas export ended with status {done.returncode}:\n{done.stderr}")
