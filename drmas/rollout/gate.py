"""The gate between episodes and engines: it holds requests while their engine is dead, and says when engines may step.

A request whose engine dies waits until the engine is back (`revive`) and is put again, so that its episode goes on from its
last finished turn; one that stalls is put once more. Where rollouts are deterministic, engines step only when no episode could
still add a request, so that batches never depend on timing (I9):

    every live episode waits -> advance the engines that have requests -> deliver what finished, in key order -> ...

What is in a batch decides the last bits of its log-probs. Between two advances the gate waits until every live episode has an
open request, and during one it hands nothing out; so what an advance admits is a function of the answers before it, whatever
the clock did. Episodes that are being graded have left the gate. One that awaits something else (a tool) holds everyone until
it asks again, for `patience_seconds` at most: then the others go on without it (I3 before I9), and the log says that timing
decides from there. A parallel team whose branches await other things than engines is the other case that timing can reach.

Called by the player for every request, and by the collector, in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from drmas.errors import EngineDied, EngineError, EngineTimeout, TurnTimeout
from drmas.rollout.deadline import Deadline
from drmas.rollout.engine import Completion, Engine, Sampling

logger = logging.getLogger(__name__)

_SETTLE_PASSES = 10
"""Passes of the event loop without a new event before the gate believes that all wait. A parallel team resumes through future,
task, gather and coroutine, one pass each; an answer must be able to climb that ladder to the next request."""


@dataclass(slots=True)
class _Request:
    policy: str
    episode: str
    task: asyncio.Task[Completion]
    delivery: asyncio.Future[Completion]
    deadlines: tuple[Deadline, Deadline]


class Gate:
    """Knows which engines are dead, who is live and who waits; advances `engines` (by policy) when all wait.

    With `deterministic` False nobody runs `run`, and requests go straight to their engine.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        deterministic: bool,
        patience_seconds: float = 10.0,
        turn_timeout_seconds: float | None = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_death` is called when a request finds its engine dead, in the event loop."""
        self._engines = engines
        self._deterministic = deterministic
        self._patience = patience_seconds
        self._turn_timeout = turn_timeout_seconds
        self._on_death = on_death
        self._live: set[str] = set()
        self._requests: dict[str, _Request] = {}
        self._dead: dict[str, EngineError] = {}
        self._given_up: set[str] = set()
        self._back: dict[str, asyncio.Event] = {}
        self._lives: dict[str, int] = dict.fromkeys(engines, 0)
        self._events = 0
        self._changed = asyncio.Event()

    @property
    def dead(self) -> set[str]:
        """The policies whose requests wait for `revive` or `give_up`. May be read from any thread."""
        return self._dead.keys() - self._given_up

    def cause_of_death(self, policy: str) -> str:
        """What the engine's death was noticed by, in a line; empty where no request noticed."""
        return str(self._dead.get(policy, "")).partition("\n")[0]

    def hold(self, policy: str) -> None:
        """The policy's engine must not be asked until `revive`: it is being started again, or hasn't its weights yet."""
        self._dead.setdefault(policy, EngineDied("it is being started again"))
        self._note()

    def revive(self, policy: str) -> None:
        """The policy's engine serves again: what waits for it is put again."""
        self._lives[policy] += 1
        self._dead.pop(policy, None)
        self._given_up.discard(policy)
        self._wake(policy)

    def give_up(self, policy: str) -> None:
        """Nobody will bring the engine back: what needs it fails, until `revive`."""
        self._given_up.add(policy)
        self._wake(policy)

    def _wake(self, policy: str) -> None:
        if back := self._back.pop(policy, None):
            back.set()
        self._note()

    def enter(self, episode: str) -> None:
        """`episode` is live: engines wait for it until it waits for them."""
        self._live.add(episode)
        self._note()

    def leave(self, episode: str) -> None:
        self._live.discard(episode)
        self._note()

    async def generate(
        self,
        policy: str,
        episode: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        key: str,
        deadline: Deadline,
        on_retry: Callable[[], None] = lambda: None,
    ) -> Completion:
        """`Engine.generate` of `policy`, for a live `episode`; put again when the engine died under it, or stalled once.

        `deadline` is the episode's; it stands still while an engine is being replaced. `on_retry` is called when the request is
        put again. EngineDied: the engine was given up. TurnTimeout: an attempt took longer than a turn may.
        """
        stalled = False
        while True:
            await self._served(policy, deadline)
            life = self._lives[policy]
            answer = self._engines[policy].generate(prompt_ids, sampling, seed=seed, key=key)
            turn = Deadline(self._turn_timeout)
            try:
                async with turn.running:
                    if not self._deterministic:
                        return await answer
                    return await self._delivered(policy, episode, key, answer, (deadline, turn))
            except EngineDied as error:
                if life == self._lives[policy]:  # else it died before, and is back already
                    self._bury(policy, error)
            except EngineTimeout:
                if stalled:
                    raise
                stalled = True
            except TimeoutError as error:
                if not turn.expired:
                    raise
                limit = f"rollout.turn_timeout_seconds = {self._turn_timeout:g}"
                raise TurnTimeout(f"{key}: no response after {limit}") from error
            on_retry()

    async def _served(self, policy: str, deadline: Deadline) -> None:
        """Until the policy's engine isn't known to be dead. EngineDied: it was given up."""
        while policy in self._dead:
            if policy in self._given_up:
                raise self._death(policy)
            with deadline.held():
                await self._back.setdefault(policy, asyncio.Event()).wait()

    async def _delivered(
        self,
        policy: str,
        episode: str,
        key: str,
        answer: Coroutine[Any, Any, Completion],
        deadlines: tuple[Deadline, Deadline],
    ) -> Completion:
        task = asyncio.create_task(answer)
        # nobody may be left to read how a cancelled or buried request ended
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        delivery = asyncio.get_running_loop().create_future()
        self._requests[key] = _Request(policy, episode, task, delivery, deadlines)
        self._live.add(episode)  # again, if the others lost patience with it
        self._note()
        try:
            return await delivery
        finally:
            # reached early by a cancelled call: its request must not stay in the engine
            task.cancel()
            self._requests.pop(key, None)
            self._note()

    async def run(self) -> None:
        """Advance the engines for as long as this is not cancelled. Raises only for faults of ours."""
        while True:
            await self._all_waiting()
            if refused := [key for key, request in self._requests.items() if request.task.done()]:
                self._deliver(refused)
                continue
            waiting = {policy: self._waiting_for(policy) for policy in self._engines}
            policies = sorted(policy for policy, keys in waiting.items() if keys)
            outcomes = await asyncio.gather(*(self._engines[name].advance() for name in policies), return_exceptions=True)
            finished: set[str] = set()
            for policy, outcome in zip(policies, outcomes, strict=True):
                if isinstance(outcome, EngineError):
                    self._bury(policy, outcome)
                elif isinstance(outcome, BaseException):
                    raise outcome
                elif not outcome and waiting[policy] == self._waiting_for(policy) and not self._any_done(policy):
                    count = len(waiting[policy])
                    self._bury(policy, EngineDied(f"the engine advanced without a result while {count} requests waited"))
                else:
                    finished.update(outcome)
            tasks = [self._requests[key].task for key in finished if key in self._requests]
            if tasks:
                await asyncio.wait(tasks)
            self._deliver(finished)

    async def _all_waiting(self) -> None:
        """Until there are live episodes, each of them waits, and nothing more is on its way."""
        loop, until = asyncio.get_running_loop(), None
        while True:
            events = self._events
            if self.dead:
                await self._all_alive()
                continue
            blocked = {request.episode for request in self._requests.values()}
            if not self._live or not self._live <= blocked:
                if blocked and until is None:
                    until = loop.time() + self._patience
                self._changed.clear()
                try:
                    async with asyncio.timeout_at(until if blocked else None):
                        await self._changed.wait()
                except TimeoutError:
                    late = sorted(self._live - blocked)
                    logger.warning(
                        "engines go on without %s, silent for %g s; batches depend on timing now", late, self._patience
                    )
                    self._live -= set(late)
                continue
            for _ in range(_SETTLE_PASSES):
                await asyncio.sleep(0)
            if events == self._events:
                return

    async def _all_alive(self) -> None:
        """Until no engine is dead; meanwhile no deadline of a request that waits here comes closer."""
        with ExitStack() as stack:
            for request in self._requests.values():
                for deadline in request.deadlines:
                    stack.enter_context(deadline.held())
            while self.dead:
                self._changed.clear()
                await self._changed.wait()

    def _any_done(self, policy: str) -> bool:
        """Whether a request of the policy has ended, in an error of its own then: the advance named none."""
        return any(request.task.done() for request in self._requests.values() if request.policy == policy)

    def _deliver(self, keys: Iterable[str]) -> None:
        """Hand out the results of `keys`, in key order, so that the episodes resume in that order."""
        for key in sorted(keys):
            request = self._requests.pop(key, None)
            if request is None or request.delivery.done() or request.task.cancelled():
                continue
            error = request.task.exception()
            if error is None:
                request.delivery.set_result(request.task.result())
            else:
                request.delivery.set_exception(error)

    def _waiting_for(self, policy: str) -> set[str]:
        return {key for key, request in self._requests.items() if request.policy == policy}

    def _bury(self, policy: str, error: EngineError) -> None:
        """The engine is gone: all that waits for it hears so, in key order, and then waits for its return."""
        if policy not in self._dead:
            self._dead[policy] = error
            self._on_death()
        for key in sorted(self._waiting_for(policy)):
            request = self._requests.pop(key)
            request.task.cancel()
            if not request.delivery.done():
                request.delivery.set_exception(self._death(policy))

    def _death(self, policy: str) -> EngineDied:
        return EngineDied(f"the engine of policy {policy} died: {self._dead[policy]}")

    def _note(self) -> None:
        self._events += 1
        self._changed.set()
