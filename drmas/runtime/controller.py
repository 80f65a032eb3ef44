"""The training loop. Every rank runs this same code; rank 0 also drives the rollouts.

            rank 0 only                               every rank, together
    ┌───────────────────────────┐   rows    ┌────────────────────────────────────────────────┐
    │ driver: tasks -> episodes │ ────────▶ │ advantages -> update of the policies it holds  │
    │ team, engines, grader     │ ◀──────── │ all hear of all updates; engines get weights   │
    └───────────────────────────┘  weights  └────────────────────────────────────────────────┘

Who waits for whom: the other ranks wait in `share` while rank 0 waits for a step's episodes; policies on ranks of their own are
updated at the same time, and the quick wait for the slow in `share.gather`; the engines wait, paused, while weights arrive, and
asleep, where they are told to, from the last episode of a step to that (weights) and to the next step (caches).
With `rollout.max_staleness` the next steps' episodes run in a thread of rank 0 while a step is trained; else nothing overlaps.
All ranks hold all rows, so groups, advantages and packing can't differ between them.
`share(action)` runs the action on rank 0, `share.gather(action)` on every rank; what comes of it, or the error, reaches all.
Setting up is `drmas.runtime.run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from drmas.config.schema import RunConfig
from drmas.core.advantages import Advantages
from drmas.core.batching import split_updates, token_weights
from drmas.core.estimators.base import Estimator, Evidence
from drmas.core.moments import second_moments, spread
from drmas.errors import CheckpointError, EngineDied, RolloutError, SyncError
from drmas.policy.batch import PolicyBatch
from drmas.policy.broadcast import Broadcast
from drmas.policy.host_platform import peak_memory_bytes, trim
from drmas.policy.trainer import PolicyTrainer
from drmas.runtime.driver import Driver
from drmas.runtime.probes import Baselines
from drmas.runtime.record import PolicyReport, StepRecord
from drmas.runtime.resume import Checkpoints
from drmas.telemetry.console import Console
from drmas.telemetry.trace import Profile, span
from drmas.types import Row
from drmas.weights.sync import WeightSync


class Controller:
    """Runs the steps of one job. `policies` are those that this rank holds a part of; all else is of all policies.

    `driver` is None on every rank but 0, where `share` runs what is asked of it.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        estimator: Estimator,
        policies: Mapping[str, PolicyTrainer],
        temperatures: Mapping[str, float],
        syncs: Mapping[str, WeightSync],
        driver: Driver | None,
        share: Broadcast,
        checkpoints: Checkpoints,
        console: Console,
        profile: Profile,
    ) -> None:
        self.config, self.estimator, self.policies, self.temperatures = config, estimator, policies, temperatures
        self.syncs, self.driver, self.share, self.checkpoints = syncs, driver, share, checkpoints
        self.console, self.profile = console, profile
        self.record = StepRecord()
        self.versions: dict[str, int] = {}
        self.value: float | None = None

    def run(self, first_step: int) -> None:
        """Steps `first_step` to the configured last one, or until the user asks to stop.

        RolloutError: it can't go on; what was finished is saved.
        """
        self.versions = self.told(lambda: {name: policy.version for name, policy in self.policies.items()})
        if trouble := self.sync_changed():  # a resumed policy: its engine still holds the model folder's weights
            self.give_up(trouble)
        for step in range(first_step, self.config.train.steps + 1):
            self.record, started = StepRecord(), time.perf_counter()
            with self.profile.step(step):
                rows, baselines = self.rollout(step)
                values = self.estimate(rows, baselines)
                self.measure(step, rows, values)
                self.update(rows, values)
                trouble = self.wake_engines() or self.sync_changed()
            self.record.add_seconds("step", time.perf_counter() - started)
            stop = self.finish(step, rows, values, last=trouble is not None)
            if trouble:
                self.give_up(trouble)
            if stop:
                break

    def rollout(self, step: int) -> tuple[list[Row], Baselines]:
        """The step's rows and what probes earned, on every rank. An engine that died is started again and synced, and its
        episodes go on."""
        self.make_room()
        message = self.driven(lambda: self.driver.collect(step, self.versions))
        if message["fatal"]:  # the policies are as the last step left them: keep that before giving up
            self.save(step - 1)
            self.give_up(message["fatal"])
        return [Row(**row) for row in message["rows"]], message["baselines"]

    def driven(self, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the driver says once no engine had to be started again for it; `fatal` says why the run can't go on."""
        while True:
            with self.timed("rollout"), span("rollout"):
                message = self.share(action)
            for name in message["restarted"]:
                self.syncs[name].unstage()
            message["fatal"] = message["fatal"] or next(filter(None, map(self.sync, message["restarted"])), None)
            if message["fatal"] or not message["restarted"]:
                return message

    def estimate(self, rows: list[Row], baselines: Baselines) -> Advantages:
        """Every row's advantage. Each rank computes the same from the same rows, what critics say of them, and baselines."""
        values: dict[str, list[list[float]] | None] = {}
        with self.timed("train"), span("advantage"):
            if self.estimator.needs_critic:
                values = self.told(lambda: {name: self.values(policy, rows) for name, policy in self.policies.items()})
            said = {name: own for name, own in values.items() if own is not None}
            return self.estimator(rows, Evidence(said, baselines))

    def values(self, policy: PolicyTrainer, rows: list[Row]) -> list[list[float]] | None:
        """What the policy's critic says of its rows, None without one; the policy's first rank tells the others."""
        if policy.critic is None:
            return None
        found = policy.values([row for row in rows if row.policy == policy.name])
        return found if policy.groups.whole.rank() == 0 else []

    def measure(self, step: int, rows: list[Row], values: Advantages) -> None:
        """Where it is due, the second moment of every agent's gradient under the weights that the step's updates start from."""
        telemetry = self.config.telemetry
        if not telemetry.moments_every_steps or step % telemetry.moments_every_steps:
            return
        chosen = {
            name: spread(rows, self.trained(name, rows, values) if policy.trainable else [], telemetry.moments_rows)
            for name, policy in self.config.policies.items()
        }

        def norms(policy: PolicyTrainer) -> list[float]:
            mine = [rows[i] for i in chosen[policy.name]]
            return policy.score_norms(mine, [self.temperatures[row.agent] for row in mine])

        with self.timed("moments"):
            found = self.told(lambda: {name: norms(policy) for name, policy in self.policies.items()})
        squares = {i: square for name, own in chosen.items() for i, square in zip(own, found[name], strict=True)}
        self.record.moments = second_moments(rows, squares, values)

    def update(self, rows: list[Row], values: Advantages) -> None:
        """Every rank updates the policies that it holds, then all hear what became of each policy."""
        with self.timed("train"):
            reports = self.told(
                lambda: {name: self.update_policy(policy, rows, values).to_dict() for name, policy in self.policies.items()}
            )
        self.record.policies = {name: PolicyReport.from_dict(report) for name, report in reports.items()}
        self.versions = {name: report.version for name, report in self.record.policies.items()}

    def update_policy(self, policy: PolicyTrainer, rows: list[Row], values: Advantages) -> PolicyReport:
        """The step's optimiser updates of one policy; a frozen one is only measured (I11), one without rows idles (I4)."""
        report = PolicyReport(policy.version, trainable=policy.config.trainable)
        batches, frozen = [], []
        if policy.config.trainable:
            batches = self.batches(policy.name, rows, values)
        else:  # there is no update to measure the gap in, and rows may have no advantage
            frozen = [row for row in rows if row.policy == policy.name and row.trained and row.status == "ok"]
        report.rows = sum(len(batch.rows) for batch in batches) + len(frozen)
        with span("train", policy.name), self.console.progress(f"train {policy.name}", report.rows) as on_rows:
            if frozen:
                self.logprobs(policy, frozen, report)
            if batches and self.config.train.updates_per_step > 1:  # a second update comes too late to measure the gap in
                batches = self.scored(policy, batches, report)
            for batch in batches:
                report.update(policy.update(batch, on_rows=on_rows))
        report.version, report.peak_memory_bytes = policy.version, peak_memory_bytes()
        return report

    def scored(self, policy: PolicyTrainer, batches: list[PolicyBatch], report: PolicyReport) -> list[PolicyBatch]:
        """The batches with the log-probs that the weights give their rows before the first of them changes these."""
        rest = iter(self.logprobs(policy, [row for batch in batches for row in batch.rows], report))
        first, *later = [replace(batch, old_logprobs=[next(rest) for _ in batch.rows]) for batch in batches]
        return [replace(first, old_logprobs=None), *later]  # the first has the very weights: its ratio is exactly 1

    def logprobs(self, policy: PolicyTrainer, rows: list[Row], report: PolicyReport) -> list[list[float]]:
        """What the weights give the rows' tokens; their gap to the engine's goes into the report."""
        found = policy.logprobs(rows, [self.temperatures[row.agent] for row in rows])
        report.logprob_gap(rows, found)
        return found

    def batches(self, policy: str, rows: list[Row], values: Advantages) -> list[PolicyBatch]:
        """What a policy is updated with in this step: one batch per update, each with its share of the tasks."""
        mine = self.trained(policy, rows, values)
        parts = split_updates(list(dict.fromkeys(rows[i].task for i in mine)), self.config.train.updates_per_step)
        chosen = [[i for i in mine if rows[i].task in tasks] for tasks in map(set, parts) if tasks]
        return [self.batch(rows, part, values) for part in chosen]

    def trained(self, policy: str, rows: list[Row], values: Advantages) -> list[int]:
        """The rows that have a say in the policy's updates."""
        return [i for i, row in enumerate(rows) if row.policy == policy and row.trained and values.values[i] is not None]

    def batch(self, rows: list[Row], chosen: list[int], values: Advantages) -> PolicyBatch:
        mine, tokens = [rows[i] for i in chosen], values.tokens
        asked = tokens is not None and tokens.returns is not None  # a critic, which not every policy has
        learnt = tokens if asked and all(tokens.returns[i] is not None for i in chosen) else None
        return PolicyBatch(
            rows=mine,
            advantages=[values.of(i) for i in chosen],
            token_weights=token_weights(mine, self.config.loss.aggregation),
            temperatures=[self.temperatures[row.agent] for row in mine],
            returns=learnt and [learnt.returns[i] for i in chosen],
            values=learnt and [learnt.before[i] for i in chosen],
        )

    def told(self, mine: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """By policy: what the first of its ranks says. Every rank says it of the policies that it holds, and hears of all."""
        said = {name: value for each in reversed(self.share.gather(mine)) for name, value in each.items()}
        return {name: said[name] for name in self.config.policies}

    def wake_engines(self) -> str | None:
        """Engines that slept during the update take back what a sync needs, of the memory that all ranks let go of."""
        with self.timed("sync"):
            return self.share(lambda: self.driver.wake(cache=False)) if self.make_room() else None

    def make_room(self) -> bool:
        """Whether engines sleep on the ranks' GPUs: every rank gives back what torch only caches then, before they wake."""
        sleepers = any(policy.engine.sleep for policy in self.config.policies.values())
        if sleepers:
            self.share.gather(trim)
        return sleepers

    def sync_changed(self) -> str | None:
        """Sync the policies whose engine holds another version. Returns what went wrong if it did for good.

        Where rollouts run ahead, the weights travel beside them. If they aren't carried over, they end before the weights
        change: a step ends with nothing in flight, whatever changed.
        """
        ahead = self.config.rollout.max_staleness > 0
        with self.timed("sync"):
            for name in self.outdated() if ahead else ():
                self.syncs[name].stage(self.versions[name])
        settles = ahead and not self.config.rollout.carry_over
        if settles and (fatal := self.driven(lambda: self.driver.settle())["fatal"]):
            return fatal
        return next(filter(None, map(self.sync, self.outdated())), None)

    def outdated(self) -> list[str]:
        """The policies whose engine holds another version."""
        return [name for name, version in self.versions.items() if version != self.syncs[name].version]

    def sync(self, policy: str) -> str | None:
        """The policy's engine gets its weights; the engine's version is the policy's afterwards (I10).

        An engine that dies meanwhile is started again and sent everything; only rank 0 can notice, so it says so to all.
        Returns what went wrong if it did for good.
        """
        with self.timed("sync"), span("sync", policy):
            while True:
                trouble: Exception | None = None
                try:
                    self.record.sync(self.syncs[policy].push(self.versions[policy]))
                except (EngineDied, SyncError) as error:
                    trouble = error
                message = self.share(lambda found=trouble: self.driver.after_push(policy, found))
                if not message["again"]:
                    return message["fatal"]

    def finish(self, step: int, rows: list[Row], values: Advantages, *, last: bool) -> bool:
        """Log, then save where it is due. True when the user asked to stop after this step."""
        self.checkpoints.poll()
        self.record.failed_saves = self.checkpoints.failed
        skipped = {name: self.batches(name, rows, values) for name, report in self.record.policies.items() if report.skipped()}
        said = self.share(lambda: self.driver.finish(step, values, self.record, skipped))
        self.value, every = said["value"], self.config.checkpoint.every_steps
        if last or said["stop"] or step == self.config.train.steps or (every and step % every == 0):
            self.save(step)
        return said["stop"]

    def save(self, step: int) -> None:
        """A checkpoint of the run as it was after `step`; there is none of a run that has not done a step."""
        if step > 0:
            state = {"estimator": self.estimator.state()}  # equal on every rank
            self.checkpoints.save(step, self.policies, lambda: self.driver.state() | state, value=self.value)

    def give_up(self, trouble: str) -> NoReturn:
        """End the run for `trouble`, once what was saved is written."""
        try:
            self.checkpoints.finish()
        except CheckpointError as error:
            trouble = f"{trouble}; and {error}"
        raise RolloutError(trouble)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.record.add_seconds(phase, time.perf_counter() - start)
