"""A rollout, event by event: replicas that batch continuously, episodes whose calls wait for one another, in virtual time.

    submit episodes -> calls arrive -> routed to a replica -> prefilled, decoded with others -> done -> what waited for them

Fluid between events: what runs on a replica advances at one token per engine step, and a step takes what `EngineSpeed` says of
the sequences and the context of the moment; only arrivals and ends change that, so there is no loop over tokens. A prefill
holds its replica up for as long as it takes. Sequences are admitted in the order in which they came, while slots and KV cache
have room for all of them to their end (real engines admit more and preempt). Episodes go to replicas as `drmas.rollout.pool`
sends them; with `deterministic` the engines advance as `drmas.rollout.gate` lets them, from barrier to barrier. Not modelled:
blocks evicted from a prefix cache, retries, deaths, a gate's patience. A call to a policy without engines, a remote model,
takes no time but its `tool_seconds`. `simulate` is one on-policy rollout; `pipeline` runs steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count

import numpy

from drmas.planning.types import Engines, EngineSpeed, Rollout, Workload
from drmas.planning.workload import Chains, Script, Source

_EPSILON = 1e-9
"""Of a step: sequences that end so close to one another end together."""


class _Worker:
    """What takes turns on devices: a replica, or a trainer. `rate`: seconds of work per second."""

    __slots__ = ("active", "busy_seconds", "cells", "held", "now", "rate", "stamp")

    def __init__(self) -> None:
        self.cells: list[_Cell] = []
        self.active = self.held = False
        self.now = self.rate = self.busy_seconds = 0.0
        self.stamp = 0


class _Cell:
    """A device, or a part of a replica's, that several workers use."""

    __slots__ = ("busy", "workers")

    def __init__(self) -> None:
        self.busy = 0
        self.workers: list[_Worker] = []


class _Trainer(_Worker):
    """An update on devices that it shares with engines."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        super().__init__()
        self.left = 0.0

    def advance(self, now: float) -> None:
        self.left -= (now - self.now) * self.rate
        self.now = now

    def plan(self) -> float | None:
        return max(0.0, self.left) if self.active else None


class _Episode:
    __slots__ = ("children", "done", "group", "left", "number", "script", "started", "waits")

    def __init__(self, number: int, script: Script, group: Hashable, done: Callable[[], None]) -> None:
        self.number, self.script, self.group, self.done = number, script, group, done
        self.left = len(script)
        self.started = 0.0
        waits, self.children = _links(tuple([call.after for call in script]))
        self.waits = list(waits)


@lru_cache(maxsize=4096)
def _links(after: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """(for how many calls each call waits, which calls wait for each)."""
    children: list[list[int]] = [[] for _ in after]
    for index, parents in enumerate(after):
        for parent in parents:
            children[parent].append(index)
    return tuple(map(len, after)), tuple(map(tuple, children))


class _Replica(_Worker):
    """One engine: `running` is a heap of (engine steps made at the end, episode's number, call, episode, KV tokens)."""

    __slots__ = (*("context", "debt", "growth", "index", "kv", "open", "running", "seen", "speed", "step", "steps", "waiting"),)

    def __init__(self, speed: EngineSpeed, index: int) -> None:
        super().__init__()
        self.speed, self.index = speed, index
        self.running: list[tuple[float, int, int, _Episode, int]] = []
        self.waiting: deque[tuple[_Episode, int]] = deque()
        self.open: dict[int, int] = {}  # an episode's number -> its requests here
        self.seen: dict[tuple[Hashable, str], int] = {}  # (group, agent) -> tokens of the prompt's start that are cached
        self.steps = 0.0
        self.context = 0.0
        self.debt = 0.0  # seconds of prefill before the next step
        self.kv = 0
        self.step = self.growth = 0.0  # seconds of the next engine step; by how much each further one takes longer

    def advance(self, now: float) -> None:
        elapsed, self.now = now - self.now, now
        if not self.running or not self.rate or elapsed <= 0:
            return
        self.busy_seconds += elapsed
        work = elapsed * self.rate
        if self.debt >= work:
            self.debt -= work
            return
        work -= self.debt
        self.debt = 0.0
        first = self.step - self.growth / 2
        made = 2 * work / (first + math.sqrt(first * first + 2 * self.growth * work))
        self._made(made)

    def _made(self, steps: float) -> None:
        self.steps += steps
        self.context += len(self.running) * steps
        self.step += self.growth * steps

    def plan(self) -> float | None:
        """Seconds of work until the next sequence ends."""
        if not self.running:
            return None
        speed, sequences = self.speed, len(self.running)
        steps = max(0.0, self.running[0][0] - self.steps)
        middle = self.context + sequences * steps / 2
        kv, pair, beside = speed.kv_token_seconds, speed.pair_seconds, 1 - speed.overlap
        reads, products = speed.weight_seconds, speed.token_seconds * sequences
        if reads + kv * middle >= products + pair * middle:
            work, slope = reads + beside * products, kv + beside * pair
        else:
            work, slope = products + beside * reads, pair + beside * kv
        self.step = work + slope * self.context + speed.overhead_seconds + speed.sequence_seconds * sequences
        self.growth = slope * sequences
        return self.debt + steps * self.step + self.growth * steps * (steps - 1) / 2

    def ended(self) -> list[tuple[_Episode, int]]:
        """Take out the sequences that end now."""
        self._made(self.running[0][0] - self.steps)
        self.debt = 0.0
        found = []
        while self.running and self.running[0][0] <= self.steps + _EPSILON:
            _, _, index, episode, tokens = heappop(self.running)
            call = episode.script[index]
            self.context -= call.prompt + call.response
            self.kv -= tokens
            found.append((episode, index))
        if not self.running:
            self.context = 0.0
        return found

    def recompute(self) -> None:
        """Everything that is cached is forgotten; running sequences are prefilled anew."""
        self.seen.clear()
        for end, _, index, episode, _ in self.running:
            call = episode.script[index]
            tokens = call.prompt + call.response - (end - self.steps)
            self.debt += self.speed.prefill_seconds(tokens, tokens * tokens / 2)


class _Pool:
    """The replicas of a policy, and which of them an episode keeps to."""

    def __init__(self, replicas: list[_Replica]) -> None:
        self.replicas = replicas
        self.request_seconds = replicas[0].speed.request_seconds
        self.generated = self.computed = 0
        self.forget()

    def forget(self) -> None:
        self.routes: dict[int, int] = {}
        self.given = [0] * len(self.replicas)
        self._order = [(len(one.open), 0, index) for index, one in enumerate(self.replicas)]
        heapify(self._order)

    def route(self, episode: _Episode) -> tuple[_Replica, bool]:
        """The episode's replica, and whether it is a new one: that with the fewest episodes in flight, then the fewest given,
        then the first."""
        chosen = self.routes.get(episode.number)
        fresh = chosen is None
        if chosen is None:
            chosen = self._quietest()
            self.given[chosen] += 1
            self.routes[episode.number] = chosen
        replica = self.replicas[chosen]
        replica.open[episode.number] = replica.open.get(episode.number, 0) + 1
        self._note(chosen)
        return replica, fresh

    def _quietest(self) -> int:
        if len(self.replicas) == 1:
            return 0
        while True:  # the order has old entries, too
            flying, given, index = self._order[0]
            if (flying, given) == (len(self.replicas[index].open), self.given[index]):
                return index
            heappop(self._order)

    def closed(self, replica: _Replica, episode: _Episode) -> None:
        left = replica.open.pop(episode.number) - 1
        if left:
            replica.open[episode.number] = left
        else:
            self._note(replica.index)

    def _note(self, index: int) -> None:
        if len(self.replicas) > 1:
            heappush(self._order, (len(self.replicas[index].open), self.given[index], index))


class Simulation:
    """The engines of a job, in virtual time; `now` is its clock. Times are seconds.

    `call_seconds`: of the one thread that drives all episodes, per call; calls queue for it. `trainer_shares`: updates run on
    the engines' devices, and take turns with what is in flight.
    """

    def __init__(
        self,
        engines: Mapping[str, Engines],
        *,
        max_concurrent_episodes: int,
        deterministic: bool = False,
        call_seconds: float = 0.0,
        trainer_shares: bool = False,
    ) -> None:
        self.now = 0.0
        self.pools = {
            name: _Pool([_Replica(own.speed, index) for index in range(own.replicas)]) for name, own in engines.items()
        }
        self._trainer = _Trainer()
        _share_devices(engines, self.pools, self._trainer if trainer_shares else None)
        self._most, self._deterministic, self._call_seconds = max_concurrent_episodes, deterministic, call_seconds
        # (time, number, whose end it is, as of which stamp, what happens)
        self._events: list[tuple[float, int, _Worker | None, int, Callable[..., None], tuple]] = []
        self._numbers = count()
        self._dirty: dict[_Worker, None] = {}
        self._queue: deque[_Episode] = deque()
        self._live = 0
        self._driver_free = 0.0
        self._coming = 0  # calls that an episode will make without hearing from an engine
        self._stepping = 0  # replicas of an advance that haven't finished anything yet
        self._collected: list[tuple[_Replica, _Episode, int]] = []
        self._changed = True
        self.longest_episode_seconds = 0.0

    def submit(self, script: Script, group: Hashable, done: Callable[[], None]) -> None:
        """An episode; `done` is called at its end. It starts when one of `max_concurrent_episodes` places is free."""
        self._queue.append(_Episode(next(self._numbers), script, group, done))
        self._fill()

    def run(self, until: Callable[[], bool]) -> bool:
        """Until `until()` holds, which is looked at whenever an episode has ended; False: nothing is left that could happen."""
        self._changed = True
        while True:
            if self._changed:
                self._changed = False
                if until():
                    return True
            if not self._next(math.inf):
                return until()

    def wait(self, seconds: float) -> None:
        """So much time passes; what is in flight goes on."""
        end = self.now + seconds
        while self._next(end):
            pass
        self.now = end

    def train(self, seconds: float) -> None:
        """An update of so many seconds of work runs to its end; on shared devices it takes longer."""
        trainer = self._trainer
        if not trainer.cells:
            self.wait(seconds)
            return
        trainer.left, trainer.now = seconds, self.now
        self._activate(trainer, True)
        while trainer.active:
            self._next(math.inf)

    def hold(self, policy: str) -> None:
        """The policy's engines stop, and forget what they cached and where episodes went: weights arrive."""
        pool = self.pools[policy]
        pool.forget()
        for replica in pool.replicas:
            replica.advance(self.now)
            replica.recompute()
            replica.held = True
            self._retime(replica)

    def release(self, policy: str) -> None:
        for replica in self.pools[policy].replicas:
            replica.advance(self.now)
            replica.held = False
            self._retime(replica)

    def busy_seconds(self, policy: str) -> float:
        """In which its replicas had work, on the mean over them."""
        replicas = self.pools[policy].replicas
        return math.fsum(replica.busy_seconds for replica in replicas) / len(replicas)

    # episodes

    def _fill(self) -> None:
        while self._queue and self._live < self._most:
            episode = self._queue.popleft()
            episode.started = self.now
            if not episode.script:
                self._changed = True
                episode.done()
                continue
            self._live += 1
            for index, waits in enumerate(episode.waits):
                if not waits:
                    self._ask(episode, index)

    def _ask(self, episode: _Episode, index: int) -> None:
        """The driver renders the call, one after the other, and it reaches the engines."""
        self._driver_free = max(self.now, self._driver_free) + self._call_seconds
        pool = self.pools.get(episode.script[index].policy)
        self._coming += 1
        self._at(self._driver_free + (pool.request_seconds if pool else 0.0), self._arrive, episode, index)

    def _arrive(self, episode: _Episode, index: int) -> None:
        self._coming -= 1
        policy = episode.script[index].policy
        if policy not in self.pools:
            self._answered(episode, index)
            return
        replica, fresh = self.pools[policy].route(episode)
        if fresh and any(call.policy == policy for call in episode.script[:index]):  # what it cached is forgotten
            episode.script = _without_own(episode.script, index)
        replica.waiting.append((episode, index))
        self._dirty[replica] = None

    def _delivered(self, replica: _Replica, episode: _Episode, index: int) -> None:
        call = episode.script[index]
        pool = self.pools[call.policy]
        pool.generated += call.response
        pool.closed(replica, episode)
        self._answered(episode, index)

    def _answered(self, episode: _Episode, index: int) -> None:
        call = episode.script[index]
        episode.left -= 1
        if not episode.left:
            self._end(episode)
        elif not episode.children[index]:
            return
        elif call.tool_seconds:
            self._coming += 1
            self._at(self.now + call.tool_seconds, self._heard, episode, index, 1)
        else:
            self._heard(episode, index, 0)

    def _heard(self, episode: _Episode, index: int, coming: int) -> None:
        self._coming -= coming
        for child in episode.children[index]:
            episode.waits[child] -= 1
            if not episode.waits[child]:
                self._ask(episode, child)

    def _end(self, episode: _Episode) -> None:
        self.longest_episode_seconds = max(self.longest_episode_seconds, self.now - episode.started)
        self._live -= 1
        self._changed = True
        episode.done()
        self._fill()

    # time

    def _at(self, time: float, happen: Callable[..., None], *arguments: object) -> None:
        heappush(self._events, (time, next(self._numbers), None, 0, happen, arguments))

    def _next(self, end: float) -> bool:
        """The next event, if there is one up to `end`."""
        events = self._events
        while True:
            if (self._dirty or self._deterministic) and (not events or events[0][0] > self.now):
                self._settle()
            if not events or events[0][0] > end:
                return False
            time, _, worker, stamp, happen, arguments = heappop(events)
            if worker is None or worker.stamp == stamp:  # else it was said before something changed
                break
        self.now = time
        happen(*arguments)
        return True

    def _settle(self) -> None:
        """Nothing more happens at this time: replicas take in what has arrived, and the times of their next ends are known."""
        if self._deterministic:
            self._advance_engines()
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for worker in dirty:
                self._renew(worker)

    def _renew(self, worker: _Worker) -> None:
        worker.advance(self.now)
        if isinstance(worker, _Replica) and not self._deterministic:
            if worker.waiting and not worker.held:
                self._fill_slots(worker)
            if worker.active != bool(worker.running):
                self._activate(worker, not worker.active)
                del self._dirty[worker]
        worker.stamp += 1
        left = worker.plan()
        if left is not None and worker.rate:
            time = self.now + left / worker.rate
            heappush(self._events, (time, next(self._numbers), worker, worker.stamp, self._due, (worker,)))

    def _due(self, worker: _Worker) -> None:
        """What `worker` works on ends."""
        worker.advance(self.now)
        if isinstance(worker, _Trainer):
            self._activate(worker, False)
            return
        ended = worker.ended()
        self._dirty[worker] = None
        if self._deterministic:
            self._stepping -= 1
            self._collected += [(worker, *each) for each in ended]
            self._activate(worker, False)
        else:
            for episode, index in ended:
                self._delivered(worker, episode, index)

    def _advance_engines(self) -> None:
        """Deterministic: once all replicas of an advance have finished something, the answers go out; once every episode has
        asked again, all replicas with requests step."""
        if self._stepping:
            return
        collected, self._collected = self._collected, []
        for replica, episode, index in collected:
            self._delivered(replica, episode, index)
        replicas = [replica for pool in self.pools.values() for replica in pool.replicas]
        if self._coming or any(replica.held for replica in replicas):
            return
        for replica in replicas:
            if replica.running or replica.waiting:
                self._stepping += 1
                self._fill_slots(replica)
                self._activate(replica, True)

    def _fill_slots(self, replica: _Replica) -> None:
        """First come, first served, while there is room."""
        speed, waiting = replica.speed, replica.waiting
        while waiting and len(replica.running) < speed.slots:
            episode, index = waiting[0]
            call = episode.script[index]
            key = (episode.group, call.agent)
            shared = min(call.shared, replica.seen.get(key, 0))
            need = call.prompt + call.response - shared
            if replica.running and replica.kv + need > speed.kv_tokens:
                return
            waiting.popleft()
            cached = max(call.own, shared)
            replica.seen[key] = max(call.shared, replica.seen.get(key, 0))
            replica.kv += need
            replica.context += call.prompt
            replica.debt += speed.prefill_seconds(call.prompt - cached, (call.prompt**2 - cached**2) / 2)
            self.pools[call.policy].computed += call.prompt - cached
            heappush(replica.running, (replica.steps + call.response, episode.number, index, episode, need))

    def _activate(self, worker: _Worker, active: bool) -> None:
        """`worker` begins to need its devices, or ends: those that share them get more or less of them."""
        worker.active = active
        for cell in worker.cells:
            cell.busy += 1 if active else -1
        self._retime(worker)
        if worker.cells:
            for other in {other for cell in worker.cells for other in cell.workers if other is not worker}:
                self._retime(other)

    def _retime(self, worker: _Worker) -> None:
        worker.advance(self.now)
        idle = worker.held or not worker.active
        worker.rate = 0.0 if idle else 1 / max((cell.busy for cell in worker.cells), default=1)
        self._dirty[worker] = None


def _without_own(script: Script, index: int) -> Script:
    """The call at `index` with nothing of its own in the cache."""
    return (*script[:index], script[index]._replace(own=0), *script[index + 1 :])


def _share_devices(engines: Mapping[str, Engines], pools: Mapping[str, _Pool], trainer: _Trainer | None) -> None:
    """Cells for replicas whose devices others use, too. Replicas of several policies on the same devices divide these evenly,
    so that a large one lies over several small ones."""
    places: dict[str, list[str]] = {}
    for name, own in engines.items():
        places.setdefault(own.devices or f"only {name}", []).append(name)
    for names in places.values():
        if len(names) == 1 and trainer is None:
            continue
        parts = math.lcm(*(engines[name].replicas for name in names))
        cells = [_Cell() for _ in range(parts)]
        for name in names:
            width = parts // engines[name].replicas
            for replica in pools[name].replicas:
                replica.cells = cells[replica.index * width : (replica.index + 1) * width]
        if trainer is not None:
            trainer.cells += cells
        for worker in (*(replica for name in names for replica in pools[name].replicas), *([trainer] if trainer else [])):
            for cell in worker.cells:
                cell.workers.append(worker)


def simulate(
    workload: Workload,
    engines: Mapping[str, Engines],
    *,
    source: Source | None = None,
    seed: int = 0,
    deterministic: bool = False,
    call_seconds: float = 0.0,
) -> Rollout:
    """One step's rollout, from empty engines to the end of the last episode.

    `source` says where episodes come from; chains of the workload's calls if None. A policy whose KV cache has no room for one
    of its sequences takes infinitely long. `deterministic` and `call_seconds` as in `Simulation`.
    """
    groups = (source or Chains()).groups(workload, workload.tasks, numpy.random.default_rng(seed))
    calls = [call for group in groups for script in group for call in script]
    calls = [call for call in calls if call.policy in engines]
    room = {name: own.speed.kv_tokens for name, own in engines.items()}
    if any(call.prompt + call.response > room[call.policy] for call in calls):
        return Rollout(math.inf, sum(call.response for call in calls), 0.0, math.inf, dict.fromkeys(engines, 1.0), "simulated")
    simulation = Simulation(
        engines,
        max_concurrent_episodes=workload.max_concurrent_episodes,
        deterministic=deterministic,
        call_seconds=call_seconds,
    )
    for number, group in enumerate(groups):
        for script in group:
            simulation.submit(script, number, lambda: None)
    simulation.run(lambda: False)
    seconds = simulation.now
    return Rollout(
        seconds=seconds,
        generated_tokens=sum(pool.generated for pool in simulation.pools.values()),
        prompt_tokens=sum(pool.computed for pool in simulation.pools.values()),
        longest_episode_seconds=simulation.longest_episode_seconds,
        busy_share={name: simulation.busy_seconds(name) / seconds if seconds else 0.0 for name in engines},
        method="simulated",
    )
