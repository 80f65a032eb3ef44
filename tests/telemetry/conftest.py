from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drmas.telemetry.episodes import write_episodes
from drmas.telemetry.sinks import MetricsLog
from drmas.types import Episode, Failure, Task, Turn, rows_of


@dataclass
class FakeSegment:
    scope: str
    key: tuple
    rows: list[int]


@dataclass
class FakeAdvantages:
    values: list[float | None]
    segments: list[FakeSegment] = field(default_factory=list)
    anchors: list[FakeSegment] = field(default_factory=list)


class Letters:
    """A tokenizer whose token 0 is special and whose others are letters."""

    def decode(self, token_ids):
        return "".join("<bos>" if token == 0 else chr(96 + token) for token in token_ids)


def turn(agent: str, index: int, text: str, response: list[int], **more) -> Turn:
    size = len(response)
    return Turn(agent, "main", index, [0, 1, 2], response, [-0.25] * size, [3] * size, "stop", text, **more)


@pytest.fixture
def episodes() -> list[Episode]:
    """One that succeeded, one with an empty response and an invalid turn, one that failed."""
    task = Task("sums/1", "What is 1 + 1?", "2")
    return [
        Episode(task, 0, [turn("solver", 0, "2", [5]), turn("verifier", 1, "yes", [6, 7])], "2", 1.0, seconds=1.5),
        Episode(task, 1, [turn("solver", 0, "", []), turn("verifier", 1, "??", [8], valid=False, penalty=0.1)], None, 0.0),
        Episode(task, 2, [turn("solver", 0, "3", [9])], failure=Failure("engine", "exit code 9")),
    ]


@pytest.fixture
def advantages(episodes) -> FakeAdvantages:
    rows = rows_of(episodes)
    keys = [(row.task, row.agent) for row in rows]
    segments = [FakeSegment(scope, key, [i]) for i, key in enumerate(keys) for scope in ("mean", "std") if i < 3]
    return FakeAdvantages([0.5, 0.5, -0.6, None], segments)


@pytest.fixture
def tokenizers() -> dict[str, Letters]:
    return {"main": Letters()}


def metrics_of(step: int, steps: int) -> dict[str, float | None]:
    share = step / steps
    metrics: dict[str, float | None] = {"reward/mean": share}
    for agent, offset in (("solver", 0.0), ("verifier", 0.05)):
        metrics[f"rollout/{agent}/reward_mean"] = share - offset
        metrics[f"rollout/{agent}/advantage_rms"] = 0.9
        metrics[f"advantage/{agent}/inflation_factor"] = 1.5 + offset if step != 2 else None
    return metrics | {
        "rollout/logprob_gap_mean": 3e-6,
        "rollout/logprob_gap_max": 8e-5 * step,
        "rollout/tokens_per_second": 210.0 + step,
        "rollout/episodes": 3,
        "rollout/failed/engine": 1,
        "train/main/grad_norm": 0.01 * step,
        "train/main/tokens_per_second": 150.0,
        "time/rollout_seconds": 9.0,
        "time/train_seconds": 4.0,
        "time/sync_seconds": 0.5,
    }


@pytest.fixture
def make_run(tmp_path, episodes, advantages, tokenizers):
    """A run folder of `steps` steps with episodes, as a run leaves it."""

    def make(steps: int, *, config: str | None = '{"name": "pair", "train": {"steps": 4}}') -> Path:
        run_dir = tmp_path / f"run{steps}"
        log = MetricsLog(run_dir, tensorboard=False)
        for step in range(1, steps + 1):
            log.write(step, metrics_of(step, steps))
            write_episodes(run_dir, step, episodes, tokenizers, advantages)
        log.close()
        if config is not None:
            (run_dir / "config.json").write_text(config)
        return run_dir

    return make
