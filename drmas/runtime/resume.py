"""Checkpoints of a whole run.

`checkpoints/step_N/` holds `run.json` (the step, a fingerprint of the team, the metric that checkpoints are compared by),
`driver.json` (where the task source stands, the episodes on their way, the estimator's state) and one folder per policy and
critic. A checkpoint appears by one rename when it is whole; a killed save leaves nothing that could be taken for one, and a
failed one, such as on a full disk, leaves the older ones as they were.

For the controller, which calls all of this on every rank:

    checkpoints.save(step, policies, driver_state, value=metrics.get(config.checkpoint.best_metric))
    checkpoints.poll()     # once a step: an asynchronous save that is written becomes a checkpoint
    checkpoints.finish()   # at the end, and before giving up on a run: waits; CheckpointError if the newest save failed
"""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from drmas.agents.team import TeamConfig
from drmas.agents.user_code import is_file_spec, split_spec
from drmas.errors import CheckpointError
from drmas.policy import checkpoint, folders
from drmas.policy.broadcast import Broadcast
from drmas.policy.checkpoint_writer import PendingSave
from drmas.policy.trainer import PolicyTrainer


@dataclass
class _Pending:
    """A checkpoint between its start and its rename."""

    step: int
    folder: Path
    parts: list[PendingSave]
    value: float | None
    driver: dict[str, Any] | None
    """On rank 0."""


class Checkpoints:
    """The checkpoints of one run folder. All but `latest` and `steps` are called by every rank together.

    `policies` are those that this rank holds a part of. `failed` counts the saves that came to nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        team: TeamConfig,
        share: Broadcast,
        *,
        keep: int,
        keep_best: int = 0,
        asynchronous: bool = False,
        on_failure: Callable[[str], None] | None = None,
        files: Sequence[str | Path] = (),
    ) -> None:
        """Keep the newest `keep` and, of the others, the `keep_best` whose value is largest.

        `files` are further files of code that the run's episodes depend on, as they depend on the team's.

        With `asynchronous`, `save` copies and returns, and a thread writes. `on_failure` hears of a save that failed, and the
        run goes on; without it the CheckpointError is raised where the failure is noticed.
        """
        self.folder, self.share, self.keep, self.keep_best = run_dir / "checkpoints", share, keep, keep_best
        self.team, self.asynchronous, self.failed = fingerprint(team, files), asynchronous, 0
        self._on_failure, self._lost = on_failure, ""
        self._pending: _Pending | None = None

    def save(
        self,
        step: int,
        policies: Mapping[str, PolicyTrainer],
        driver_state: Callable[[], dict[str, Any]],
        *,
        value: float | None = None,
    ) -> None:
        """Keep the run as it is after `step`. What counts of `driver_state` and `value`, the larger the better, is rank 0's.

        An older save that is still being written is finished first. A value of None or NaN is never among the best.
        CheckpointError: see `on_failure`.
        """
        self._try(self._settle)
        self._try(lambda: self._start(step, policies, driver_state, value))
        if not self.asynchronous:
            self._try(self._settle)

    def poll(self) -> None:
        """Make a checkpoint of an asynchronous save once every rank has written its part; waits for nobody."""
        pending = self._pending
        if pending is not None and all(self.share.gather(lambda: all(part.done() for part in pending.parts))):
            self._try(self._settle)

    def finish(self) -> None:
        """Wait for what is being written. CheckpointError: the newest save failed, so the run's last state is not on disk."""
        self._try(self._settle)
        if self._lost:
            raise CheckpointError(f"the last save failed, so the run's end is not kept: {self._lost}")

    def latest(self) -> dict[str, Any] | None:
        """`run.json` of the newest checkpoint, and what its `driver.json` holds as `driver`; None if there is none. On rank 0.

        CheckpointError: it is damaged, and which older one is whole; or the team has changed since.
        """
        steps = self.steps()
        if not steps:
            return None
        newest = self.folder / f"step_{steps[-1]}"
        try:
            state = read_whole(self.folder.parent, steps[-1])
        except CheckpointError as error:
            older = next((step for step in reversed(steps[:-1]) if self._is_whole(step)), None)
            advice = "no older one is whole" if older is None else f"step {older} is whole: delete {newest} to go on from there"
            raise CheckpointError(f"{error}; {advice}") from error
        if state["team"] != self.team:
            raise CheckpointError(
                f"the team has changed since {newest} was saved (its settings or its file); "
                "set it back, or start another run under another --name"
            )
        return state | {"driver": json.loads((newest / "driver.json").read_text())}

    def load(self, step: int, policies: Mapping[str, PolicyTrainer]) -> None:
        """Continue from the checkpoint of `step`. CheckpointError, on every rank: one of the policies can't."""

        def read() -> None:
            for name, part in _parts(policies):
                part.load(self.folder / f"step_{step}" / name)

        self.share.gather(read)

    def steps(self) -> list[int]:
        return saved_steps(self.folder.parent)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CheckpointError as error:
            self.failed += 1
            self._lost = str(error)
            if self._on_failure is None:
                raise
            self._on_failure(f"a checkpoint was not saved, training goes on: {error}")

    def _start(
        self,
        step: int,
        policies: Mapping[str, PolicyTrainer],
        driver_state: Callable[[], dict[str, Any]],
        value: float | None,
    ) -> None:
        pending = _Pending(step, self.folder / f".step_{step}", [], value, None)

        def begin() -> bool:
            if step in self.steps() and self._is_whole(step):  # the same run at the same step: the one there is as good
                return False
            pending.driver = driver_state()
            for left in self.folder.glob(".step_*"):
                shutil.rmtree(left)
            pending.folder.mkdir(parents=True)
            return True

        def write() -> None:
            for name, part in _parts(policies):
                with part.active():
                    if self.asynchronous:
                        pending.parts.append(checkpoint.save_async(part, pending.folder / name))
                    else:
                        checkpoint.save(part, pending.folder / name)

        self._lost = ""
        if self.share(lambda: _guarded(begin, pending.folder)):
            with self._removed_on_failure(pending):
                self.share.gather(write)
            self._pending = pending

    def _settle(self) -> None:
        """Finish the pending save: every rank's part, then the rename."""
        pending, self._pending = self._pending, None
        if pending is None:
            return

        def finish() -> None:
            for part in pending.parts:
                part.finish()

        with self._removed_on_failure(pending):
            self.share.gather(finish)
            self.share(lambda: _guarded(lambda: self._commit(pending), pending.folder))

    @contextmanager
    def _removed_on_failure(self, pending: _Pending) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            for part in pending.parts:
                part.abandon()
            self.share(lambda: shutil.rmtree(pending.folder, ignore_errors=True))
            raise

    def _commit(self, pending: _Pending) -> None:
        value = pending.value
        (pending.folder / "driver.json").write_text(json.dumps(pending.driver))
        state = {
            "step": pending.step,
            "team": self.team,
            "driver_bytes": (pending.folder / "driver.json").stat().st_size,
            "policies": sorted(path.name for path in pending.folder.iterdir() if path.is_dir()),
            "value": float(value) if value is not None and math.isfinite(value) else None,
        }
        (pending.folder / "run.json").write_text(json.dumps(state, indent=1))
        for path in (pending.folder / "driver.json", pending.folder / "run.json", pending.folder):
            folders.flush(path)
        place = self.folder / f"step_{pending.step}"
        if place.exists():  # it is damaged
            self._remove(pending.step)
        pending.folder.rename(place)
        with suppress(OSError):  # what can't be deleted now is tried again after the next save; this one stands
            self._prune()

    def _prune(self) -> None:
        """Delete all but the newest `keep` and the best `keep_best` of the others."""
        older = self.steps()[: -self.keep]
        values = {step: self._value(step) for step in older}
        ranked = sorted((step for step in older if values[step] is not None), key=lambda step: (values[step], step))
        best = ranked[-self.keep_best :] if self.keep_best else []
        for step in set(older) - set(best):
            self._remove(step)

    def _remove(self, step: int) -> None:
        """By a rename first, so that a killed process leaves no half of it under its name."""
        removed = self.folder / f".step_{step}.removed"
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(self.folder / f"step_{step}", removed)
        shutil.rmtree(removed)

    def _value(self, step: int) -> float | None:
        try:
            return json.loads((self.folder / f"step_{step}" / "run.json").read_text()).get("value")
        except (OSError, ValueError):
            return None

    def _is_whole(self, step: int) -> bool:
        try:
            read_whole(self.folder.parent, step)
        except CheckpointError:
            return False
        return True


def saved_steps(run_dir: Path) -> list[int]:
    """The steps that have a checkpoint, oldest first."""
    names = (path.name.removeprefix("step_") for path in (run_dir / "checkpoints").glob("step_*"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_whole(run_dir: Path, step: int) -> dict[str, Any]:
    """The `run.json` of a checkpoint. CheckpointError: something of the checkpoint is missing or short."""
    folder = run_dir / "checkpoints" / f"step_{step}"
    try:
        state = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {str(folder)!r} has no whole run.json ({error})") from error
    try:
        size = (folder / "driver.json").stat().st_size
    except OSError as error:
        raise CheckpointError(f"checkpoint {str(folder)!r} has no driver.json ({error})") from error
    if size != state.get("driver_bytes"):
        raise CheckpointError(f"{folder / 'driver.json'} has {size} bytes, not {state.get('driver_bytes')}")
    for name in state.get("policies", []):
        checkpoint.check_whole(folder / name)
    return state


def _parts(policies: Mapping[str, PolicyTrainer]) -> Iterator[tuple[str, PolicyTrainer]]:
    """What is saved of each policy, under the name of its folder: the policy itself unless it is frozen, and its critic."""
    for name, policy in policies.items():
        if policy.config.trainable:
            yield f"policy-{name}", policy
            critic = getattr(policy, "critic", None)
            if critic is not None:
                yield f"critic-{name}", critic


def _guarded(action: Callable[[], Any], folder: Path) -> Any:
    try:
        return action()
    except OSError as error:
        raise CheckpointError(f"{folder} can't be written: {error}") from error


def fingerprint(team: TeamConfig, files: Sequence[str | Path] = ()) -> str:
    """A hash of what decides a team's conduct: its settings, defaults included, the sources of its class and of its sub-teams',
    the files of its parsers, and `files`."""
    parsers = [split_spec(agent.parser)[0] for agent in team.agents.values() if is_file_spec(agent.parser)]
    sources = [inspect.getsource(inspect.getmodule(type(each)) or type(each)) for each in team.teams]
    sources += [Path(file).read_text(encoding="utf-8") for file in [*parsers, *files]]
    return blake2b("\n".join([team.model_dump_json(), *sources]).encode(), digest_size=16).hexdigest()
