"""The gate against an engine whose results arrive from another thread, at random times and in random order."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from functools import partial

import pytest

from drmas.errors import EngineDied, EngineError, EngineTimeout, TurnTimeout
from drmas.rollout.deadline import Deadline
from drmas.rollout.engine import Completion, Sampling
from drmas.rollout.gate import Gate

SAMPLING = Sampling(max_tokens=8)


class JitteryEngine:
    """Finishes one or two of the admitted requests per advance; which, depends on the keys alone, when, on the clock."""

    def __init__(self, clock: random.Random) -> None:
        self.clock = clock
        self.waiting: dict[str, asyncio.Future[Completion]] = {}
        self.admitted: list[list[str]] = []
        self.advancing = False

    async def generate(self, prompt_ids, sampling, *, seed: int, key: str) -> Completion:
        assert not self.advancing, "a request came in while the engine was stepping"
        future = self.waiting[key] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            self.waiting.pop(key, None)

    async def advance(self) -> list[str]:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        self.advancing = True
        self.admitted.append(sorted(self.waiting))
        chosen = sorted(self.waiting, key=lambda key: (hash_of(key), key))[: 1 + hash_of(str(self.admitted[-1])) % 2]
        self.clock.shuffle(chosen)

        def work() -> None:
            for key in chosen:
                threading.Event().wait(self.clock.random() * 0.002)
                loop.call_soon_threadsafe(self.waiting[key].set_result, Completion([1], [-1.0], [0], "stop"))
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=work).start()
        await done.wait()
        self.advancing = False
        return chosen


def hash_of(text: str) -> int:
    return random.Random(text).getrandbits(30)


async def gated(engines: dict, episodes: dict[str, Callable], **options) -> list:
    """Run each episode `(gate) -> coroutine` as a live one; returns their results or exceptions."""
    gate = Gate(engines, deterministic=True, **options)

    async def live(name: str, play: Callable):
        gate.enter(name)
        try:
            return await play(gate)
        finally:
            gate.leave(name)

    driver = asyncio.create_task(gate.run())
    results = await asyncio.gather(*(live(*item) for item in episodes.items()), return_exceptions=True)
    driver.cancel()
    return results


def chain(name: str, clock: random.Random, calls: int, policies: list[str]) -> Callable:
    """An episode of `calls` sequential calls, with thinking time of its own in between."""

    async def play(gate: Gate) -> None:
        for turn in range(calls):
            if clock.random() < 0.5:
                await asyncio.sleep(clock.random() * 0.002)
            key = f"{name}/{turn:03d}"
            await gate.generate(policies[turn % len(policies)], name, [1], SAMPLING, seed=0, deadline=Deadline(None), key=key)

    return play


def fan_out(name: str) -> Callable:
    """An episode with two parallel branches of two calls each."""

    async def play(gate: Gate) -> None:
        async def branch(side: str) -> None:
            for turn in range(2):
                await gate.generate("a", name, [1], SAMPLING, seed=0, deadline=Deadline(None), key=f"{name}/{side}{turn}")

        await asyncio.gather(branch("left"), branch("right"))

    return play


@pytest.mark.parametrize("policies", [["a"], ["a", "b"]])
def test_I9_what_an_advance_admits_never_depends_on_timing(policies: list[str]) -> None:
    seen = []
    for clock in (random.Random(1), random.Random(2), random.Random(3), random.Random(4)):
        engines = {name: JitteryEngine(clock) for name in ("a", "b")}
        episodes = {f"e{i}": chain(f"e{i}", clock, calls=1 + i % 4, policies=policies) for i in range(9)}
        episodes |= {f"f{i}": fan_out(f"f{i}") for i in range(3)}
        results = asyncio.run(gated(engines, episodes))
        assert results == [None] * 12
        seen.append({name: engine.admitted for name, engine in engines.items()})
    assert seen[0]["a"][0][0] == "e0/000"
    assert sum(len(batch) > 1 for batch in seen[0]["a"]) > 5
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_I9_episodes_resume_in_key_order_however_the_results_arrive() -> None:
    class AllAtOnce(JitteryEngine):
        async def advance(self) -> list[str]:
            chosen = list(self.waiting)
            self.clock.shuffle(chosen)
            for key in chosen:
                self.waiting[key].set_result(Completion([1], [-1.0], [0], "stop"))
                await asyncio.sleep(0)
            return chosen

    for seed in range(3):
        resumed: list[str] = []

        def episode(name: str, log: list[str]) -> Callable:
            async def play(gate: Gate) -> None:
                await gate.generate("a", name, [1], SAMPLING, seed=0, deadline=Deadline(None), key=name)
                log.append(name)

            return play

        names = [f"e{i}" for i in range(8)]
        asyncio.run(gated({"a": AllAtOnce(random.Random(seed))}, {name: episode(name, resumed) for name in reversed(names)}))
        assert resumed == names


def test_an_episode_that_thinks_holds_the_engines_for_a_while() -> None:
    engine = JitteryEngine(random.Random(0))
    log: list[str] = []

    async def quick(gate: Gate) -> None:
        await gate.generate("a", "quick", [1], SAMPLING, seed=0, deadline=Deadline(None), key="quick/000")
        log.append("quick done")

    async def slow(gate: Gate) -> None:
        await asyncio.sleep(0.05)
        log.append("slow asks")
        await gate.generate("a", "slow", [1], SAMPLING, seed=0, deadline=Deadline(None), key="slow/000")

    asyncio.run(gated({"a": engine}, {"quick": quick, "slow": slow}))
    assert log == ["slow asks", "quick done"]
    assert engine.admitted[0] == ["quick/000", "slow/000"]


def test_a_cancelled_call_leaves_the_engine_and_the_gate() -> None:
    engine = JitteryEngine(random.Random(0))

    async def impatient(gate: Gate) -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gate.generate("a", "x", [1], SAMPLING, seed=0, deadline=Deadline(None), key="x/000"), 0.02)
        return "gave up"

    async def slow(gate: Gate) -> str:
        await asyncio.sleep(0.06)
        assert "x/000" not in engine.waiting
        await gate.generate("a", "y", [1], SAMPLING, seed=0, deadline=Deadline(None), key="y/000")
        return "served"

    assert asyncio.run(gated({"a": engine}, {"x": impatient, "y": slow})) == ["gave up", "served"]
    assert engine.admitted == [["y/000"]]


class BrokenEngine(JitteryEngine):
    def __init__(self, outcome: BaseException | list[str]) -> None:
        super().__init__(random.Random(0))
        self.outcome = outcome

    async def advance(self) -> list[str]:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize("outcome", [EngineDied("killed by signal 9"), []], ids=["dies", "makes no progress"])
def test_I3_an_engine_that_is_given_up_fails_its_callers_at_once_and_no_others(outcome) -> None:
    engines = {"a": BrokenEngine(outcome), "b": JitteryEngine(random.Random(0))}
    gates: list[Gate] = []

    async def twice(gate: Gate) -> int:
        gates.append(gate)
        for turn in range(2):
            with pytest.raises(EngineDied, match=r"the engine of policy a died: (killed|the engine advanced)"):
                await gate.generate("a", "x", [1], SAMPLING, seed=0, deadline=Deadline(None), key=f"x/{turn}")
        return 2

    def give_up() -> None:
        assert gates[0].dead == {"a"}
        gates[0].give_up("a")
        assert gates[0].dead == set()

    results = asyncio.run(gated(engines, {"x": twice, "y": chain("y", random.Random(0), 3, ["b"])}, on_death=give_up))
    assert results == [2, None]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_waits_for_its_engine_to_come_back_and_is_put_again(deterministic: bool) -> None:
    """The gate must not step meanwhile: "b" waits for the revival of "a" where rollouts are deterministic."""

    class Mortal(JitteryEngine):
        deaths = 1

        async def generate(self, prompt_ids, sampling, *, seed: int, key: str) -> Completion:
            if self.deaths:
                self.deaths -= 1
                raise EngineDied("killed by signal 9")
            if not deterministic:
                return Completion([seed], [-1.0], [0], "stop")
            return await super().generate(prompt_ids, sampling, seed=seed, key=key)

    again, died, mortal = [], asyncio.Event(), Mortal(random.Random(0))

    async def run() -> tuple[Completion, list[bool]]:
        gate = Gate({"a": mortal}, deterministic=deterministic, on_death=died.set)
        stepping = asyncio.create_task(gate.run()) if deterministic else None
        gate.enter("x")
        deadline = Deadline(0.05)

        async def ask() -> Completion:
            async with deadline.running:
                return await gate.generate(
                    "a", "x", [1], SAMPLING, seed=7, key="x/000", deadline=deadline, on_retry=lambda: again.append(1)
                )

        request = asyncio.create_task(ask())
        await died.wait()
        await asyncio.sleep(0.1)  # longer than the episode may take: its time stands still
        states = [request.done(), gate.dead == {"a"}]
        gate.revive("a")
        completion = await request
        if stepping:
            stepping.cancel()
        return completion, [*states, gate.dead == set()]

    completion, states = asyncio.run(run())
    assert completion.finish_reason == "stop"
    assert states == [False, True, True]
    assert again == [1]


def test_a_stalled_request_is_put_once_more_and_then_fails() -> None:
    class Stalling(JitteryEngine):
        asked = 0

        async def generate(self, prompt_ids, sampling, *, seed: int, key: str) -> Completion:
            self.asked += 1
            if self.asked % 3:
                raise EngineTimeout("no response in time")
            return Completion([seed], [-1.0], [0], "stop")

    engine, again = Stalling(random.Random(0)), []

    async def run() -> None:
        gate = Gate({"a": engine}, deterministic=False)
        ask = partial(gate.generate, "a", "x", [1], SAMPLING, key="x/000", on_retry=lambda: again.append(1))
        with pytest.raises(EngineTimeout):
            await ask(seed=0, deadline=Deadline(None))
        engine.asked = 1
        assert (await ask(seed=5, deadline=Deadline(None))).token_ids == [5]

    asyncio.run(run())
    assert again == [1, 1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_turn_that_takes_too_long_is_the_turns_trouble_and_leaves_the_engine(deterministic: bool) -> None:
    class Silent(JitteryEngine):
        async def advance(self) -> list[str]:
            await asyncio.sleep(60)
            return []

    engine = Silent(random.Random(0))

    async def run() -> None:
        gate = Gate({"a": engine}, deterministic=deterministic, turn_timeout_seconds=0.05)
        stepping = asyncio.create_task(gate.run()) if deterministic else None
        gate.enter("x")
        with pytest.raises(TurnTimeout, match=r"x/000: no response after rollout.turn_timeout_seconds = 0.05"):
            await gate.generate("a", "x", [1], SAMPLING, seed=0, key="x/000", deadline=Deadline(None))
        if stepping:
            stepping.cancel()
        await asyncio.sleep(0)
        assert engine.waiting == {}

    asyncio.run(run())


def test_I3_a_refused_request_fails_alone() -> None:
    class Picky(JitteryEngine):
        async def generate(self, prompt_ids, sampling, *, seed: int, key: str) -> Completion:
            if key == "x/000":
                raise EngineError("bad ids")
            return await super().generate(prompt_ids, sampling, seed=seed, key=key)

    engine = Picky(random.Random(0))
    episodes = {name: chain(name, random.Random(0), 2, ["a"]) for name in ("x", "y")}
    refused, served = asyncio.run(gated({"a": engine}, episodes))
    assert isinstance(refused, EngineError)
    assert not isinstance(refused, EngineDied)
    assert served is None


def test_free_running_passes_through() -> None:
    class Instant(JitteryEngine):
        async def generate(self, prompt_ids, sampling, *, seed: int, key: str) -> Completion:
            return Completion([seed], [-1.0], [0], "stop")

    async def run() -> Completion:
        gate = Gate({"a": Instant(random.Random(0))}, deterministic=False)
        return await gate.generate("a", "x", [1], SAMPLING, seed=7, deadline=Deadline(None), key="x/000")

    assert asyncio.run(run()).token_ids == [7]


def test_a_slow_engine_whose_requests_all_time_out_is_not_dead() -> None:
    """The advance has no result to name then, and the requests have ended in errors of their own: they are put once more."""

    class Slow(JitteryEngine):
        asked = 0

        async def generate(self, prompt_ids, sampling, *, seed: int, key: str) -> Completion:
            self.asked += 1
            if self.asked <= 2:
                await asyncio.sleep(0.02)
                raise EngineTimeout("no response in time")
            return await super().generate(prompt_ids, sampling, seed=seed, key=key)

        async def advance(self) -> list[str]:
            if not self.waiting:
                await asyncio.sleep(0.05)
                return []
            return await super().advance()

    deaths: list[int] = []
    episodes = {name: chain(name, random.Random(0), 1, ["a"]) for name in ("x", "y")}
    assert asyncio.run(gated({"a": Slow(random.Random(0))}, episodes, on_death=lambda: deaths.append(1))) == [None, None]
    assert deaths == []


@pytest.mark.parametrize("limit", ["episode", "turn"])
def test_while_one_engine_is_replaced_nobodys_time_runs(limit: str) -> None:
    """Deterministic engines all stand still then; those who wait for another one must not time out over it."""

    class Mortal(JitteryEngine):
        async def generate(self, prompt_ids, sampling, *, seed: int, key: str) -> Completion:
            raise EngineDied("killed by signal 9")

    async def run() -> Completion:
        turn = {"turn_timeout_seconds": 0.1} if limit == "turn" else {}
        engines = {"a": Mortal(random.Random(0)), "b": JitteryEngine(random.Random(0))}
        died = asyncio.Event()
        gate = Gate(engines, deterministic=True, on_death=died.set, **turn)
        stepping = asyncio.create_task(gate.run())
        deadline = Deadline(0.1 if limit == "episode" else None)

        async def other() -> Completion:
            async with deadline.running:
                return await gate.generate("b", "y", [1], SAMPLING, seed=0, key="y/000", deadline=deadline)

        gate.enter("x")
        gate.enter("y")
        served = asyncio.create_task(other())
        lost = asyncio.create_task(gate.generate("a", "x", [1], SAMPLING, seed=0, key="x/000", deadline=Deadline(None)))
        await died.wait()
        await asyncio.sleep(0.3)
        gate.leave("x")
        lost.cancel()
        gate.revive("a")
        try:
            return await served
        finally:
            stepping.cancel()

    assert asyncio.run(run()).token_ids == [1]


def test_patience_is_counted_from_the_first_request_on() -> None:
    """Others who come and go meanwhile don't make it longer."""
    engine, began = JitteryEngine(random.Random(0)), []

    async def silent(gate: Gate) -> None:
        await asyncio.sleep(1.5)

    async def asks(gate: Gate) -> None:
        began.append(asyncio.get_running_loop().time())
        await gate.generate("a", "asks", [1], SAMPLING, seed=0, deadline=Deadline(None), key="asks/000")
        began.append(asyncio.get_running_loop().time())

    async def restless(gate: Gate) -> None:
        for _ in range(100):
            gate.enter("restless")
            await asyncio.sleep(0.01)

    asyncio.run(gated({"a": engine}, {"silent": silent, "asks": asks, "restless": restless}, patience_seconds=0.2))
    assert engine.admitted == [["asks/000"]]
    assert began[1] - began[0] < 1.0
