"""Checkpoints of a whole run.

`checkpoints/step_N/` holds `run.json` (the step, where the task source stands, a fingerprint of the team) and one folder per
policy. A checkpoint appears by one rename when it is whole; a killed save leaves nothing that could be taken for one.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from drmas.agents.team import TeamConfig
from drmas.errors import CheckpointError
from drmas.policy.trainer import PolicyTrainer

Share = Callable[[Callable[[], Any]], Any]


class Checkpoints:
    """The checkpoints of one run folder. `save` and `load` are called by every rank."""

    def __init__(self, run_dir: Path, team: TeamConfig, share: Share, *, keep: int) -> None:
        self.folder, self.share, self.keep = run_dir / "checkpoints", share, keep
        self.team = fingerprint(team)

    def save(self, step: int, policies: Mapping[str, PolicyTrainer], driver_state: Callable[[], dict[str, Any]]) -> None:
        """Keep the run as it is after `step`. `driver_state` is asked on rank 0."""
        temporary = self.folder / f".step_{step}"
        if not self.share(lambda: self._begin(step, temporary)):
            return
        for name, policy in policies.items():
            if policy.config.trainable:
                policy.save(temporary / f"policy-{name}")
        self.share(lambda: self._commit(step, temporary, driver_state()))

    def latest(self) -> dict[str, Any] | None:
        """`run.json` of the newest checkpoint; None if there is none. CheckpointError: the team has changed since."""
        steps = self.steps()
        if not steps:
            return None
        state = json.loads((self.folder / f"step_{steps[-1]}" / "run.json").read_text())
        if state["team"] != self.team:
            raise CheckpointError(
                f"the team has changed since {self.folder}/step_{steps[-1]} was saved (its settings or its file); "
                "set it back, or start another run under another --name"
            )
        return state

    def load(self, step: int, policies: Mapping[str, PolicyTrainer]) -> None:
        for name, policy in policies.items():
            if policy.config.trainable:
                policy.load(self.folder / f"step_{step}" / f"policy-{name}")

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, oldest first."""
        whole = (path.name for path in self.folder.glob("step_*") if (path / "run.json").is_file())
        return sorted(int(name.removeprefix("step_")) for name in whole)

    def _begin(self, step: int, temporary: Path) -> bool:
        if step in self.steps():  # a run is the same run at the same step, so the one that is there is as good
            return False
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        return True

    def _commit(self, step: int, temporary: Path, driver: dict[str, Any]) -> None:
        state = {"step": step, "team": self.team, "driver": driver}
        (temporary / "run.json").write_text(json.dumps(state, indent=1))
        temporary.rename(self.folder / f"step_{step}")
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step_{old}")


def fingerprint(team: TeamConfig) -> str:
    """A hash of what decides a team's conduct: its settings, defaults included, and the source of its class."""
    source = inspect.getsource(inspect.getmodule(type(team)) or type(team))
    return blake2b(f"{team.model_dump_json()}\n{source}".encode(), digest_size=16).hexdigest()
