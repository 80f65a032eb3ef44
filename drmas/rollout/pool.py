"""Several engines of one policy as one engine.

    pool = make_engine(lambda replica: VllmEngine("main", ..., replica=replica), 2, deterministic=True)

An episode keeps to one replica, where its prefixes are cached; a new one goes to the replica with the fewest episodes in flight
(ties: the fewest that it got so far, then the first). Routes are forgotten where caches are, in `pause`, so that nothing of an
earlier step decides where an episode goes.

In deterministic mode this choice doesn't depend on timing (I9). An episode's first request is held until `advance`, where all
that are held are placed in key order. The gate calls `advance` only when every live episode waits for an engine, and once the
coroutines of what finished before have ended: so which requests are held and how many are open is a function of the answers so
far, and the batches of each replica are, too. (Where the gate has lost patience with an episode, timing decides in any case.)

Made by the run and by evaluation; used as any other engine is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from drmas.errors import EngineDied
from drmas.rollout.engine import Completion, Engine, Sampling
from drmas.rollout.fan_out import FanOut, run_all

MOST_ROUTES = 65_536
"""Episodes remembered between two pauses; the one that was silent for longest is forgotten first, and is routed anew."""


def make_engine(make_one: Callable[[int | None], Engine], replicas: int, *, deterministic: bool) -> Engine:
    """One engine (`make_one(None)`), or a pool of several (`make_one(0)`, `make_one(1)`, ...)."""
    if replicas == 1:
        return make_one(None)
    return EnginePool([make_one(index) for index in range(replicas)], deterministic=deterministic)


@dataclass(slots=True)
class _Request:
    """`replica` is None until the request is placed; `placed` is there while it is held for that."""

    episode: str
    replica: int | None = None
    placed: asyncio.Future[None] | None = None


class _Routes:
    """Which replica each episode goes to, since the last pause."""

    def __init__(self, replicas: int) -> None:
        self.of: dict[str, int] = {}
        """Least recently used first."""
        self.given = [0] * replicas


class EnginePool:
    """`engines` have the same weights and settings. `deterministic` is what they were made with."""

    def __init__(self, engines: Sequence[Engine], *, deterministic: bool) -> None:
        self.engines = tuple(engines)
        self._deterministic = deterministic
        self._routes = _Routes(len(self.engines))
        self._requests: dict[str, _Request] = {}
        self._in_flight: list[Counter[str]] = [Counter() for _ in self.engines]  # per replica: episode -> open requests
        self._sync_client: FanOut | None = None

    @property
    def version(self) -> int:
        """The oldest of the replicas': they differ only after one was started anew, until the next sync."""
        return min(engine.version for engine in self.engines)

    @property
    def max_model_tokens(self) -> int:
        return min(engine.max_model_tokens for engine in self.engines)

    def start(self) -> None:
        """Start the replicas that aren't alive, at the same time. EngineStartError: one didn't come up; the others stay."""
        run_all([engine.start for engine in self.engines if not engine.alive])

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int, key: str) -> Completion:
        """See `Engine.generate`. EngineDied: the replica of this episode is gone, which `start` brings back."""
        request = self._requests[key] = _Request(episode_of(key))
        try:
            if self._deterministic and request.episode not in self._routes.of:
                request.placed = asyncio.get_running_loop().create_future()
                await request.placed
            else:
                self._place(request)
            return await self.engines[request.replica].generate(prompt_ids, sampling, seed=seed, key=key)
        finally:
            self._forget(key, request)

    async def advance(self) -> list[str]:
        """See `Engine.advance`: the replicas that have requests run at the same time, and the keys of all come together.

        Where a replica dies, its requests have EngineDied as their result and their keys are among those returned. EngineDied:
        every replica that had requests is gone.
        """
        if not self._deterministic:
            return []
        if refused := await self._place_held():
            return refused
        open_keys = self._open_keys()
        busy = [index for index, keys in enumerate(open_keys) if keys]
        outcomes = await asyncio.gather(*(self.engines[index].advance() for index in busy), return_exceptions=True)
        if busy and all(isinstance(outcome, EngineDied) for outcome in outcomes):
            raise outcomes[0]
        finished: list[str] = []
        for index, outcome in zip(busy, outcomes, strict=True):
            if isinstance(outcome, EngineDied):
                finished += open_keys[index]
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                finished += outcome
        return sorted(finished)

    @property
    def idle(self) -> bool:
        return all(engine.idle for engine in self.engines)

    def pause(self) -> None:
        """See `Engine.pause`; routes are forgotten with the prefixes. EngineDied: a replica is gone, the others are paused."""
        self._routes = _Routes(len(self.engines))
        run_all([engine.pause for engine in self.engines])

    def resume(self) -> None:
        run_all([engine.resume for engine in self.engines])

    def sleep(self) -> None:
        """See `Engine.sleep`; routes are forgotten with the prefixes. EngineDied: a replica is gone, the others sleep."""
        self._routes = _Routes(len(self.engines))
        run_all([engine.sleep for engine in self.engines])

    def wake(self, *, cache: bool = True) -> None:
        """See `Engine.wake`. EngineDied: a replica is gone, the others are awake."""
        run_all([partial(engine.wake, cache=cache) for engine in self.engines])

    @property
    def sync_client(self) -> FanOut:
        """All replicas' control channels as one; a new object after a start of any. EngineDied where one has no process."""
        clients = [engine.sync_client for engine in self.engines]
        if self._sync_client is None or any(a is not b for a, b in zip(clients, self._sync_client.clients, strict=True)):
            self._sync_client = FanOut(clients)
        return self._sync_client

    @property
    def alive(self) -> bool:
        return all(engine.alive for engine in self.engines)

    def stats(self) -> dict[str, float]:
        """The sum over the replicas of each."""
        total: dict[str, float] = {}
        for engine in self.engines:
            for name, value in engine.stats().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def close(self) -> None:
        run_all([engine.close for engine in self.engines])

    def _place(self, request: _Request) -> None:
        """Choose the replica of a request, and count it there."""
        routes = self._routes  # `pause` may put others in their place meanwhile, from another thread
        chosen = routes.of.pop(request.episode, None)
        if chosen is None:
            living = [index for index, engine in enumerate(self.engines) if engine.alive] or range(len(self.engines))
            chosen = min(living, key=lambda index: (len(self._in_flight[index]), routes.given[index], index))
            routes.given[chosen] += 1
            if len(routes.of) >= MOST_ROUTES:
                del routes.of[next(iter(routes.of))]
        routes.of[request.episode] = request.replica = chosen
        self._in_flight[chosen][request.episode] += 1

    async def _place_held(self) -> list[str]:
        """Place what is held, in key order, and let it reach its replica. Returns the keys of those refused there."""
        held = sorted(key for key, request in self._requests.items() if request.placed and not request.placed.done())
        for key in held:
            request = self._requests[key]
            self._place(request)
            request.placed.set_result(None)
        if held:
            await asyncio.sleep(0)  # each `generate` goes on, up to where its replica has the request
        return [key for key in held if key not in self._requests]

    def _open_keys(self) -> list[list[str]]:
        """Per replica, the keys of the requests that it has."""
        keys: list[list[str]] = [[] for _ in self.engines]
        for key, request in self._requests.items():
            if request.replica is not None:
                keys[request.replica].append(key)
        return keys

    def _forget(self, key: str, request: _Request) -> None:
        del self._requests[key]
        if request.replica is not None:
            counts = self._in_flight[request.replica]
            counts[request.episode] -= 1
            if not counts[request.episode]:
                del counts[request.episode]


def episode_of(key: str) -> str:
    """The episode of a request's key, `EPISODE/INDEX/AGENT`; an episode's own name may hold slashes."""
    return key.rsplit("/", 2)[0]
