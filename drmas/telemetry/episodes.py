"""The episodes of a step as a file: every turn with its text, ids, log-probs, versions, advantage and segments; tool calls.

`episodes/step_N.jsonl` of a run folder, one object per episode; written by the controller after advantages, read by the report
and by `drmas inspect`. Failed episodes are in it, with their status and message (I3), and those of probes, with the probe's
name: their turns have no row, so no advantage. A run with `telemetry.episodes = false` has no such files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from drmas.errors import DataError
from drmas.jsonl import read_objects
from drmas.telemetry.sinks import replace_text
from drmas.types import Episode, Turn, rows_of


class Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], /) -> str: ...


class Segment(Protocol):
    """What this file needs of `drmas.core.advantages.Segment`."""

    @property
    def scope(self) -> str: ...
    @property
    def key(self) -> tuple[Any, ...]: ...
    @property
    def rows(self) -> Sequence[int]: ...


class Advantages(Protocol):
    """What this file needs of `drmas.core.advantages.Advantages`: values and segments over `rows_of(episodes)`.

    `anchors` are further segments, of estimators that compare twice.
    """

    @property
    def values(self) -> Sequence[float | None]: ...
    @property
    def segments(self) -> Sequence[Segment]: ...
    @property
    def anchors(self) -> Sequence[Segment]: ...


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / "episodes" / f"step_{step}.jsonl"


def write_episodes(
    run_dir: Path,
    step: int,
    episodes: Sequence[Episode],
    tokenizers: Mapping[str, Tokenizer],
    advantages: Advantages,
) -> Path:
    """Write a step's episodes, whole or not at all.

    `tokenizers`: policy -> tokenizer, for the prompt's text, special tokens included; a turn of a remote model has text only.
    `advantages` is over `rows_of(episodes)`; a turn without a row (empty response, probe) gets null.
    """
    keys: dict[int, dict[str, list[Any]]] = {}
    for segment in (*advantages.segments, *advantages.anchors):
        for row in segment.rows:
            keys.setdefault(row, {})[segment.scope] = list(segment.key)
    lines = []
    row, rows = 0, rows_of(list(episodes))
    for episode in episodes:
        turns = []
        for turn in episode.turns:
            has_row = bool(turn.response_ids) and episode.probe is None
            written = _turn(turn, tokenizers[turn.policy] if turn.prompt_ids else None)
            written["advantage"] = _finite(advantages.values[row]) if has_row else None
            written["segments"] = {"mean": None, "std": None} | (keys.get(row, {}) if has_row else {})
            written["reward"] = _finite(rows[row].reward) if has_row else None
            written["status"] = rows[row].status if has_row else None
            turns.append(written)
            row += has_row
        lines.append(json.dumps(_episode(episode) | {"turns": turns}, allow_nan=False))
    if row != len(advantages.values):
        raise ValueError(f"{len(advantages.values)} advantages for {row} rows of the episodes of step {step}")
    path = path_of(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(f"{line}\n" for line in lines))
    return path


def _episode(episode: Episode) -> dict[str, Any]:
    return {
        "task": episode.task.id,
        "sample": episode.sample,
        "episode": episode.id,
        "probe": episode.probe,
        "question": episode.task.question,
        "truth": episode.task.truth,
        "answer": episode.answer,
        "reward": _finite(episode.reward),
        "agent_rewards": {agent: _finite(reward) for agent, reward in episode.agent_rewards.items()},
        "status": episode.status,
        "message": episode.failure.message if episode.failure else "",
        "seconds": episode.seconds,
        "retried": episode.retried,
        "tools": [asdict(use) for use in episode.tool_uses],
    }


def _turn(turn: Turn, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "agent": turn.agent,
        "policy": turn.policy,
        "turn": turn.index,
        "prompt": turn.prompt_text if tokenizer is None else tokenizer.decode(turn.prompt_ids),
        "text": turn.text,
        "prompt_ids": turn.prompt_ids,
        "response_ids": turn.response_ids,
        "logprobs": [_finite(value) for value in turn.logprobs],
        "versions": turn.versions,
        "finish_reason": turn.finish_reason,
        "valid": turn.valid,
        "penalty": turn.penalty,
        "trained": turn.trained,
        "seconds": turn.seconds,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def steps_with_episodes(run_dir: Path) -> list[int]:
    """The steps whose episodes are there, in order."""
    names = (re.fullmatch(r"step_(\d+)\.jsonl", path.name) for path in (run_dir / "episodes").glob("step_*.jsonl"))
    return sorted(int(name[1]) for name in names if name)


def read_episodes(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """A step's episodes in the order they were written; DataError if the step isn't there or a line is damaged."""
    path = path_of(run_dir, step)
    if not path.is_file():
        steps = ", ".join(map(str, steps_with_episodes(run_dir))) or "none"
        why = "" if steps != "none" else " (with telemetry.episodes = false a run writes none)"
        raise DataError(f"{path}: no such file; the steps with episodes are: {steps}{why}")
    episodes = []
    for number, episode in read_objects(path, 'an episode, an object with "turns"'):
        if not isinstance(episode.get("turns"), list):
            raise DataError(f'{path}:{number}: expected an episode, an object with "turns"')
        episodes.append(episode)
    return episodes
