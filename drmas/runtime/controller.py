"""The training loop. Every rank runs this same code; rank 0 also drives the rollouts.

            rank 0 only                               every rank, together
    ┌──────────────────────────┐   rows     ┌───────────────────────────────────────┐
    │ driver: tasks -> episodes │ ────────▶ │ advantages -> update of each policy   │
    │ team, engines, grader     │ ◀──────── │ sync: the engines get the new weights │
    └──────────────────────────┘  weights   └───────────────────────────────────────┘

Who waits for whom: the other ranks wait in `share` while rank 0 rolls out; the engines wait, paused, while weights arrive;
nothing else overlaps (rollouts are on-policy). All ranks hold all rows, so groups, advantages and packing can't differ between
them. `share(action)` runs the action on rank 0 and gives its result, or its error, to all. Setting up is `drmas.runtime.run`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from drmas.config.schema import RunConfig
from drmas.core.advantages import AdvantageRule, Advantages, advantages
from drmas.core.batching import split_updates, token_weights
from drmas.errors import EngineDied, RolloutError, SyncError
from drmas.policy.trainer import PolicyBatch, PolicyTrainer
from drmas.runtime.driver import Driver
from drmas.runtime.record import StepRecord
from drmas.runtime.resume import Checkpoints, Share
from drmas.telemetry.console import Console
from drmas.types import Row
from drmas.weights.sync import WeightSync


class Controller:
    """Runs the steps of one job. `driver` is None on every rank but 0, where `share` runs what is asked of it."""

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
        console: Console,
    ) -> None:
        self.config, self.rule, self.policies, self.temperatures = config, rule, policies, temperatures
        self.syncs, self.driver, self.share, self.checkpoints = syncs, driver, share, checkpoints
        self.console = console
        self.trainable = [policy for policy in policies.values() if policy.config.trainable]
        self.record = StepRecord()

    def run(self, first_step: int) -> None:
        """Steps `first_step` to the configured last one, or until the user asks to stop.

        RolloutError: it can't go on; what was finished is saved.
        """
        if trouble := self.sync_changed():  # a resumed policy: its engine still holds the model folder's weights
            raise RolloutError(trouble)
        for step in range(first_step, self.config.train.steps + 1):
            self.record, started = StepRecord(), time.perf_counter()
            rows = self.rollout(step)
            values = advantages(rows, self.rule)
            for policy in self.policies.values():
                self.update(policy, rows, values)
            trouble = self.sync_changed()
            self.record.add_seconds(("step",), time.perf_counter() - started)
            stop = self.finish(step, values, last=trouble is not None)
            if trouble:
                raise RolloutError(trouble)
            if stop:
                break

    def rollout(self, step: int) -> list[Row]:
        """The step's rows, on every rank. An engine that died is started again and synced; what it lost is run again."""
        while True:
            with self.timed("rollout"):
                message = self.share(lambda: self.driver.collect(step))
            trouble = message["fatal"] or next(
                filter(None, (self.sync(self.policies[name]) for name in message["restarted"])), None
            )
            if trouble:  # the policies are as the last step left them: keep that before giving up
                self.save(step - 1)
                raise RolloutError(trouble)
            if not message["restarted"]:
                return [Row(**row) for row in message["rows"]]

    def update(self, policy: PolicyTrainer, rows: list[Row], values: Advantages) -> None:
        """The step's optimiser updates of one policy, each on its share of the tasks; a frozen one is only measured (I11)."""
        mine = [i for i, row in enumerate(rows) if row.policy == policy.name and values.values[i] is not None]
        with self.timed("train", policy.name), self.console.progress(f"train {policy.name}", len(mine)) as on_rows:
            tasks = list(dict.fromkeys(rows[i].task for i in mine))
            parts = split_updates(tasks, self.config.train.updates_per_step) if policy.config.trainable else []
            if len(parts) != 1:  # a frozen policy has no update to measure the gap in, and a second one comes too late
                sampled = [rows[i] for i in mine]
                self.record.logprob_gap(sampled, policy.logprobs(sampled, [self.temperatures[row.agent] for row in sampled]))
            for part in map(set, parts):
                chosen = [i for i in mine if rows[i].task in part]
                if chosen:
                    batch = self.batch([rows[i] for i in chosen], [values.values[i] for i in chosen])
                    self.record.update(policy.name, policy.update(batch, on_rows=on_rows))

    def batch(self, rows: list[Row], advantage: list[float]) -> PolicyBatch:
        return PolicyBatch(
            rows=rows,
            advantages=advantage,
            token_weights=token_weights(rows, self.config.loss.aggregation),
            temperatures=[self.temperatures[row.agent] for row in rows],
        )

    def sync_changed(self) -> str | None:
        """Sync the policies whose engine holds another version. Returns what went wrong if it did for good."""
        changed = [policy for policy in self.trainable if policy.version != self.syncs[policy.name].version]
        return next(filter(None, map(self.sync, changed)), None)

    def sync(self, policy: PolicyTrainer) -> str | None:
        """The policy's engine gets its weights; the engine's version is the policy's afterwards (I10).

        An engine that dies meanwhile is started again and sent everything; only rank 0 can notice, so it says so to all.
        Returns what went wrong if it did for good.
        """
        with self.timed("sync"):
            while True:
                trouble: Exception | None = None
                try:
                    self.record.sync(self.syncs[policy.name].push(policy.version))
                except (EngineDied, SyncError) as error:
                    trouble = error
                message = self.share(lambda found=trouble: self.driver.after_push(policy.name, found))
                if not message["again"]:
                    return message["fatal"]

    def finish(self, step: int, values: Advantages, *, last: bool) -> bool:
        """Log, then save where it is due. True when the user asked to stop after this step."""
        self.record.versions = {name: policy.version for name, policy in self.policies.items()}
        stop = self.share(lambda: self.driver.finish(step, values, self.record))
        every = self.config.checkpoint.every_steps
        if last or stop or step == self.config.train.steps or (every and step % every == 0):
            self.save(step)
        return stop

    def save(self, step: int) -> None:
        """A checkpoint of the run as it was after `step`; there is none of a run that has not done a step."""
        if step > 0:
            self.checkpoints.save(step, self.policies, lambda: self.driver.state())

    @contextmanager
    def timed(self, *names: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.record.add_seconds(names, time.perf_counter() - start)
