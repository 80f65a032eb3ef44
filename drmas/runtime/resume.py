"""Checkpoints of a whole run, and what it takes to continue one as if it had never stopped.

`checkpoints/step_N/` holds `run.json` (the step, the configuration, where the task source stands) and one folder per policy. A
checkpoint appears by one rename when it is whole; a killed save leaves nothing that could be taken for one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drmas.config.schema import RunConfig
from drmas.errors import CheckpointError
from drmas.policy.trainer import PolicyTrainer

FREE_TO_CHANGE = ("name", "output", "train.steps", "train.threads", "checkpoint", "telemetry")
"""Sections and keys that a resumed run may set anew; any other difference would make it another run."""


class Checkpoints:
    """The checkpoints of one run folder. `save` and `load` are called by every rank."""

    def __init__(self, run_dir: Path, config: RunConfig, share: Callable[[Any], Any], *, is_lead: bool) -> None:
        self.folder, self.config, self.share, self.is_lead = run_dir / "checkpoints", config, share, is_lead

    def save(self, step: int, policies: Mapping[str, PolicyTrainer], driver: dict[str, Any] | None) -> None:
        final, temporary = self.folder / f"step_{step}", self.folder / f".step_{step}"
        if self.is_lead:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.share(None)  # the folder is there before any rank writes into it
        for name, policy in policies.items():
            if policy.config.trainable:
                policy.save(temporary / f"policy-{name}")
        if self.is_lead:
            state = {"step": step, "config": self.config.model_dump(mode="json"), "driver": driver}
            (temporary / "run.json").write_text(json.dumps(state, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            for old in self.steps()[: -self.config.checkpoint.keep]:
                shutil.rmtree(self.folder / f"step_{old}")
        self.share(None)  # no rank goes on, and perhaps ends the job, before the rename

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, oldest first."""
        return sorted(
            int(path.name.removeprefix("step_")) for path in self.folder.glob("step_*") if (path / "run.json").is_file()
        )

    def read(self) -> dict[str, Any]:
        """`run.json` of the newest checkpoint. CheckpointError: there is none, or it is of a run with other settings."""
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.folder} holds no checkpoint to resume from; start without --resume")
        state = json.loads((self.folder / f"step_{steps[-1]}" / "run.json").read_text())
        then, now = _flat(state["config"]), _flat(self.config.model_dump(mode="json"))
        if any(policy.lr_schedule != "constant" for policy in self.config.policies.values()):
            free = tuple(key for key in FREE_TO_CHANGE if key != "train.steps")
        else:
            free = FREE_TO_CHANGE
        for key in sorted(then.keys() | now.keys()):
            changeable = any(key == name or key.startswith(f"{name}.") for name in free)
            if not changeable and then.get(key) != now.get(key):
                raise CheckpointError(
                    f"{key} is {now.get(key)!r} but the run to resume has {then.get(key)!r}; "
                    "set it back, or start another run under another --name"
                )
        return state

    def load(self, step: int, policies: Mapping[str, PolicyTrainer]) -> None:
        for name, policy in policies.items():
            if policy.config.trainable:
                policy.load(self.folder / f"step_{step}" / f"policy-{name}")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
