"""Supervised steps before reinforcement, for models that start from nothing.

The team runs with a teacher in the place of its engines; each turn it would have taken is a demonstration. Training on them is
the update of `PolicyTrainer` with advantage 1 for every row, on-policy: the gradient of the policy loss is then that of the
negative log-likelihood. The result is a Hugging Face folder per policy, from which trainer and engine start at version 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drmas.agents.team import TeamConfig
from drmas.config.schema import RolloutConfig, RunConfig, WarmStartConfig
from drmas.core.batching import token_weights
from drmas.envs import lookups, sums
from drmas.envs.rewards import make_reward
from drmas.envs.source import TaskSource
from drmas.policy.batch import PolicyBatch
from drmas.policy.broadcast import Broadcast
from drmas.policy.trainer import PolicyTrainer
from drmas.rollout.collector import Collector
from drmas.rollout.scripted import ScriptedEngine
from drmas.runtime.tools import make_tools
from drmas.types import Row, rows_of


class Teacher:
    """Demonstrations on rank 0: `batch(step)` runs the team on fresh tasks with a teacher answering."""

    def __init__(self, config: RunConfig, team: TeamConfig, tokenizers: Mapping[str, Any], stack: ExitStack) -> None:
        self.warm = config.warm_start
        self.source = TaskSource(config.data, seed=config.seed + 1)
        reward = make_reward(config.reward)
        stack.callback(reward.close)

        demonstrate = {"sums": sums.demonstrate, "lookups": lookups.demonstrate}[config.data.type]

        def answer(prompt: str, key: str) -> str:
            return demonstrate(prompt, key, seed=config.seed, error_rate=self.warm.error_rate)

        engines = {name: ScriptedEngine(tokenizer, answer) for name, tokenizer in tokenizers.items()}
        rollout = RolloutConfig(group_size=1, max_concurrent_episodes=self.warm.batch_size)
        tools = make_tools(config.tools)
        collector = Collector(team, engines, tokenizers, reward, rollout, seed=config.seed, tools=tools)
        self.collector = stack.enter_context(collector)

    def batch(self, step: int) -> list[dict[str, Any]]:
        episodes = self.collector.collect(self.source.take(self.warm.batch_size), step=-step)
        return [row.to_dict() for row in rows_of(episodes) if row.status == "ok"]


def warm_start(
    config: WarmStartConfig,
    policies: Mapping[str, PolicyTrainer],
    teacher: Teacher | None,
    share: Broadcast,
    folders: Mapping[str, Path],
    *,
    on_step: Callable[[], None],
) -> None:
    """Train every policy on the teacher's demonstrations and export it to its folder. Collective over the ranks; `policies` are
    those that this rank holds."""

    def update(rows: list[Row]) -> None:
        for name, policy in policies.items():
            if mine := [row for row in rows if row.policy == name]:
                policy.update(demonstrations(mine))

    def export() -> None:
        for name, policy in policies.items():
            policy.export(folders[name])

    for step in range(1, config.steps + 1):
        rows = [Row(**row) for row in share(lambda at=step: teacher.batch(at))]
        share.gather(lambda rows=rows: update(rows))
        on_step()
    share.gather(export)


def demonstrations(rows: list[Row]) -> PolicyBatch:
    """Rows to imitate: advantage 1, every response token of the same weight."""
    return PolicyBatch(
        rows=rows,
        advantages=[1.0] * len(rows),
        token_weights=token_weights(rows, "token"),
        temperatures=[1.0] * len(rows),
        on_policy=True,
    )
