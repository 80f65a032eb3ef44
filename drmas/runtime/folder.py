"""The folder of one run: who may write there, and what happens to what is there already.

A folder *holds a run* once a step was logged or a checkpoint saved; that is never deleted unless asked for, and then only after
the new run stands. Used by rank 0.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import IO, Any

from drmas.config.load import dump
from drmas.config.schema import RunConfig
from drmas.errors import CheckpointError, ConfigError
from drmas.telemetry.environment import write_environment
from drmas.telemetry.sinks import replace_text

FREE_TO_CHANGE = (
    *("name", "output", "train.steps", "train.epochs", "train.ranks", "train.threads", "train.placement"),
    *("checkpoint", "telemetry", "eval", "cluster"),
    *("reward.timeout_seconds", "reward.workers", "rollout.max_concurrent_episodes"),
    *("rollout.episode_timeout_seconds", "rollout.turn_timeout_seconds"),
)
"""Sections and keys that a resumed run may set anew; any other difference would make it another run. (Another number of
threads, concurrent episodes or ranks, or another layout, may change the last bits of its sums.)"""
FREE_OF_POLICIES = (
    *("num_ranks", "tensor_parallel", "sequence_parallel", "pipeline_parallel", "context_parallel"),
    *("tokens_per_microbatch", "prefix_sharing", "recompute", "overlap", "offload_optimizer", "agent_grad_norm_every"),
    *("price_per_million_tokens", "transport", "bucket_bytes", "timeout_seconds", "folder"),
)
FREE_OF_ENGINES = (
    *("max_restarts", "start_timeout_seconds", "request_timeout_seconds", "gpu_memory_fraction", "threads", "replicas"),
    *("hosts", "gpus", "sleep"),
)
FREE_OF_SERVERS = (
    *("url", "api_key_env", "timeout_seconds", "start_timeout_seconds", "max_retries", "max_concurrent", "cache_size"),
    "price_per_million_tokens",
)
"""Of tools and remote models: where a server is and how patiently it is asked, which isn't what it answers."""


class RunFolder:
    """`output/name`, locked from `open` to `close`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = Path(config.output) / config.name
        self._aside = self.path.with_name(f".{config.name}.replaced")
        self._lock: IO[str] | None = None

    def open(self, *, resume: bool, overwrite: bool, auto_resume: bool = False) -> bool:
        """Take the folder, or refuse; whether the run in it goes on. What `overwrite` replaces is set aside until `settle`.

        `auto_resume` is `resume` where the folder holds a run. ConfigError: it holds a run and no flag was given, or it is no
        run's folder, or another process writes there. CheckpointError: `resume` of no run, or of one with other settings.
        """
        refuse_contradictions(resume=resume, overwrite=overwrite, auto_resume=auto_resume)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.path, "--name")
        self._put_back()  # what a killed process left between `open` and `settle`
        resume = resume or (auto_resume and self._holds_run())
        before = self._settings_there()
        if before is None and self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not the folder of a run; use another --name or --output")
        if resume:
            if before is None:
                raise CheckpointError(f"{self.path} holds no run to resume; start it without --resume")
            check_same_run(before, self.config)
        elif self._holds_run() and not overwrite:
            raise ConfigError(
                f"{self.path} holds a run already; --resume continues it, --overwrite deletes it, --name NAME writes elsewhere"
            )
        elif before is not None and (overwrite or not _same_run(before, self.config)):
            shutil.rmtree(self._aside, ignore_errors=True)
            self.path.rename(self._aside)
        self.path.mkdir(exist_ok=True)
        return resume

    def settle(self) -> None:
        """The run's settings are sound: write them, and delete what this run replaces."""
        replace_text(self.path / "config.json", dump(self.config))
        write_environment(self.path)
        shutil.rmtree(self._aside, ignore_errors=True)

    def close(self) -> None:
        """Give the folder back; if the run never settled, put back what it would have replaced. Nothing without the lock."""
        if self._lock is None:
            return
        self._put_back()
        if self.path.exists() and not any(self.path.iterdir()):
            self.path.rmdir()
        self._lock.close()
        self._lock = None

    def _put_back(self) -> None:
        """The replaced run returns, unless the run that replaces it has settled."""
        if not self._aside.exists():
            return
        if self._settings_there() is not None:
            shutil.rmtree(self._aside)
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._aside.rename(self.path)

    def _settings_there(self) -> dict[str, Any] | None:
        file = self.path / "config.json"
        try:
            return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        except ValueError as error:
            raise CheckpointError(
                f"{file} is damaged ({error}); put the run's settings back, or move {self.path} away"
            ) from error

    def _holds_run(self) -> bool:
        metrics = self.path / "metrics.jsonl"
        return (metrics.is_file() and metrics.stat().st_size > 0) or any((self.path / "checkpoints").glob("step_*"))


def refuse_contradictions(*, resume: bool, overwrite: bool, auto_resume: bool) -> None:
    """ConfigError: more than one word on what becomes of a run that is in the folder."""
    flags = {"--resume": resume, "--overwrite": overwrite, "--auto-resume": auto_resume}
    given = [name for name, flag in flags.items() if flag]
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(given)} are given; --resume continues the run in the folder, --overwrite deletes it, --auto-resume "
            "continues it if there is one: give one of them"
        )


def lock_folder(path: Path, option: str) -> IO[str]:
    """Lock the folder `path` by a file beside it, until that is closed in every process that has it open.

    Hosts on a shared file system see each other's locks where it keeps them for all: NFS does, version 3 with lockd, unless it
    is mounted with nolock or local_lock; Lustre does if mounted with flock (with localflock only hosts themselves do). The file
    says who holds it. ConfigError: another process does; `option` names another folder. Or there are no locks.
    """
    file = path.with_name(f".{path.name}.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        who = f" ({holder})" if holder else ""
        raise ConfigError(f"another process writes to {path}{who}; wait for it, or use another {option}") from None
    except OSError as error:
        file.close()
        raise ConfigError(
            f"{path} can't be locked against other jobs: {error}. Its file system has no locks (NFS 3 needs lockd, Lustre "
            "the mount option flock); have them turned on, or use another --output"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def check_same_run(then: dict[str, Any], config: RunConfig) -> None:
    """CheckpointError naming the first key that a run with `config` can't have changed since `then`."""
    before, now = flat(then), flat(config.model_dump(mode="json"))
    changeable = set(FREE_TO_CHANGE)
    if any(policy.lr_schedule != "constant" for policy in config.policies.values()):
        changeable.remove("train.steps")  # the schedule is laid over the steps
    for key in sorted(before.keys() | now.keys()):
        free = any(key == name or key.startswith(f"{name}.") for name in changeable)
        if key.startswith("policies."):
            free |= key.rpartition(".")[2] in (FREE_OF_ENGINES if ".engine." in key else FREE_OF_POLICIES)
        if key.startswith(("tools.", "remotes.")):
            # a search tool without a url has its index in the run, which is another tool than a server
            moved = key.endswith(".url") and None in (before.get(key), now.get(key))
            free |= key.rpartition(".")[2] in FREE_OF_SERVERS and not moved
        if not free and before.get(key) != now.get(key):
            raise CheckpointError(
                f"{key} is {now.get(key)!r} but the run to resume has {before.get(key)!r}; set it back (the run's config.json "
                "is a recipe of all that it had), or start another run under another --name"
            )


def _same_run(then: dict[str, Any], config: RunConfig) -> bool:
    try:
        check_same_run(then, config)
    except CheckpointError:
        return False
    return True


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested tables by their dotted keys. Example: flat({"a": {"b": 1}}) == {"a.b": 1}"""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
