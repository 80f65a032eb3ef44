"""The training loop. Every rank runs this same code; rank 0 also drives the rollouts.

            rank 0 only                               every rank, together
    ┌──────────────────────────┐   rows     ┌───────────────────────────────────────┐
    │ driver: tasks -> episodes │ ────────▶ │ advantages -> update of each policy   │
    │ team, engines, grader     │ ◀──────── │ sync: the engines get the new weights │
    └──────────────────────────┘  weights   └───────────────────────────────────────┘

Who waits for whom: the other ranks wait in `share` while rank 0 rolls out; the engines wait, paused, while weights arrive;
nothing else overlaps (rollouts are on-policy). All ranks hold all rows, so groups, advantages and packing can't differ between them.
Setting up and tearing down is `drmas.runtime.run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from drmas.config.schema import RunConfig
from drmas.core.advantages import AdvantageRule, Advantages, advantages
from drmas.core.batching import split_updates, token_weights
from drmas.errors import EngineDied, RolloutError, SyncError
from drmas.policy.trainer import PolicyBatch, PolicyTrainer
from drmas.runtime.driver import Driver
from drmas.runtime.record import StepRecord
from drmas.runtime.resume import Checkpoints
from drmas.types import Row
from drmas.weights.sync import WeightSync

Share = Callable[[Any], Any]


class Controller:
    """Runs the steps of one job. `driver` is None on every rank but 0."""

    def __init__(
        self,
        config: RunConfig,
        *,
        rule: AdvantageRule,
        policies: Mapping[str, PolicyTrainer],
        temperatures: Mapping[str, float],
        syncs: Mapping[str, WeightSync],
        driver: Driver | None,
        share: Share,
        checkpoints: Checkpoints,
    ) -> None:
        self.config, self.rule, self.policies, self.temperatures = config, rule, policies, temperatures
        self.syncs, self.driver, self.share, self.checkpoints = syncs, driver, share, checkpoints
        self.record = StepRecord()

    def run(self, first_step: int) -> None:
        """Steps `first_step` to the configured last one, or until the user asks to stop."""
        for step in range(first_step, self.config.train.steps + 1):
            self.record, started = StepRecord(step), time.perf_counter()
            rows = self.rollout(step)
            values = advantages(rows, self.rule)
            for policy in self.trainable:
                self.update(policy, rows, values)
            for policy in self.trainable:
                if policy.version != self.syncs[policy.name].version:
                    self.sync(policy)
            self.record.add_seconds(("step",), time.perf_counter() - started)
            if self.finish(step, values):
                break

    def rollout(self, step: int) -> list[Row]:
        """The step's rows, on every rank. An engine that died is started again and synced; its episodes run again."""
        with self.timed("rollout"):
            while True:
                message = self.share(self.driver.collect(step) if self.driver else None)
                if message["fatal"]:  # the policies are as the last step left them: keep that before giving up
                    self.save(step - 1)
                    raise RolloutError(message["fatal"])
                if not message["restarted"]:
                    return [Row(**row) for row in message["rows"]]
                for name in message["restarted"]:
                    self.sync(self.policies[name])

    def update(self, policy: PolicyTrainer, rows: list[Row], values: Advantages) -> None:
        """The step's optimiser updates of one policy, each on its share of the tasks."""
        mine = [i for i, row in enumerate(rows) if row.policy == policy.name and values.values[i] is not None]
        with self.timed("train", policy.name):
            tasks = list(dict.fromkeys(rows[i].task for i in mine))
            parts = split_updates(tasks, self.config.train.updates_per_step)
            if len(parts) > 1:  # only the first update sees the weights that sampled, so the gap is measured beforehand
                sampled = [rows[i] for i in mine]
                self.record.logprob_gap(sampled, policy.logprobs(sampled, [self.temperatures[row.agent] for row in sampled]))
            for part in parts:
                chosen = [i for i in mine if rows[i].task in set(part)]
                if chosen:
                    batch = self.batch([rows[i] for i in chosen], [values.values[i] for i in chosen])
                    self.record.update(policy.name, policy.update(batch))

    def batch(self, rows: list[Row], advantage: list[float]) -> PolicyBatch:
        return PolicyBatch(
            rows=rows,
            advantages=advantage,
            token_weights=token_weights(rows, self.config.loss.aggregation),
            temperatures=[self.temperatures[row.agent] for row in rows],
        )

    def sync(self, policy: PolicyTrainer) -> None:
        """The policy's engine gets its weights; the engine's version is the policy's afterwards (I10).

        An engine that dies meanwhile is started again and sent everything; only rank 0 can notice, so it says so to all.
        """
        sync = self.syncs[policy.name]
        with self.timed("sync"):
            while True:
                result, trouble = None, None
                try:
                    result = sync.push(policy.version)
                except (EngineDied, SyncError) as error:
                    trouble = error
                message = self.share(self.driver.after_push(policy.name, trouble) if self.driver else None)
                if message["fatal"]:
                    raise RolloutError(message["fatal"])
                if not message["again"]:
                    break
        self.record.sync(policy.name, policy.version, result)

    def finish(self, step: int, values: Advantages) -> bool:
        """Log, then save where it is due. True when the run should end after this step."""
        stop = self.share(self.driver.finish(step, values, self.record) if self.driver else None)["stop"]
        every = self.config.checkpoint.every_steps
        if stop or step == self.config.train.steps or (every and step % every == 0):
            self.save(step)
        return stop

    def save(self, step: int) -> None:
        """A checkpoint of the run as it was after `step`; there is none of a run that has not done a step."""
        if step > 0:
            self.checkpoints.save(step, self.policies, self.driver.state() if self.driver else None)

    @property
    def trainable(self) -> list[PolicyTrainer]:
        return [policy for policy in self.policies.values() if policy.config.trainable]

    @contextmanager
    def timed(self, *names: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.record.add_seconds(names, time.perf_counter() - start)
