"""Several scripted engines as one: where requests go, what is known of the whole. With real engines: weights/test_replicas."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from drmas.errors import EngineDied, EngineError, EngineStartError
from drmas.rollout.deadline import Deadline
from drmas.rollout.engine import Sampling
from drmas.rollout.fan_out import FanOut, run_all
from drmas.rollout.gate import Gate
from drmas.rollout.pool import EnginePool, episode_of, make_engine
from drmas.rollout.scripted import ScriptedEngine


def pool_of(tokenizer, count: int, rule=lambda prompt, key: "x", *, deterministic: bool = False, **options) -> EnginePool:
    engines = [ScriptedEngine(tokenizer, rule, deterministic=deterministic, **options) for _ in range(count)]
    return EnginePool(engines, deterministic=deterministic)


def ask(pool: EnginePool, key: str, prompt: list[int] | None = None) -> asyncio.Task:
    return asyncio.create_task(pool.generate(prompt or [5], Sampling(64), seed=1, key=key))


async def passes(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def served(pool: EnginePool) -> list[list[str]]:
    """Per replica, the keys in the order of their admission."""
    return [[key for keys in engine.keys for key in keys] for engine in pool.engines]


def test_one_engine_stays_itself_and_several_are_told_apart() -> None:
    made = []

    def make(replica: int | None) -> object:
        made.append(replica)
        return object()

    alone = make_engine(make, 1, deterministic=True)
    assert not isinstance(alone, EnginePool)
    assert len(make_engine(make, 3, deterministic=True).engines) == 3
    assert made == [None, 0, 1, 2]


@pytest.mark.parametrize(
    ("key", "episode"), [("t1#0/000/solver", "t1#0"), ("facts/7#3/012/inner.solver", "facts/7#3"), ("bare", "bare")]
)
def test_the_episode_of_a_key_may_hold_slashes(key, episode) -> None:
    assert episode_of(key) == episode


async def test_an_episode_keeps_its_replica_and_new_ones_go_where_fewest_are_in_flight(plain_tokenizer) -> None:
    pool = pool_of(plain_tokenizer, 2, lambda prompt, key: None if "stay" in key else "x")
    staying = [ask(pool, f"stay{i}/000/a") for i in range(3)]  # 0 and 2 on the first replica, 1 on the second
    await passes()
    assert served(pool) == [["stay0/000/a", "stay2/000/a"], ["stay1/000/a"]]
    for turn in range(3):  # the second replica has fewer in flight each time
        await ask(pool, f"new/{turn:03d}/a")
    assert served(pool)[1] == ["stay1/000/a", "new/000/a", "new/001/a", "new/002/a"]
    staying[1].cancel()
    await passes()
    more = [ask(pool, f"stay0/{turn:03d}/b") for turn in (1, 2)]  # two more requests of an episode that is there already
    await passes()
    assert served(pool)[0] == ["stay0/000/a", "stay2/000/a", "stay0/001/b", "stay0/002/b"]
    await ask(pool, "last/000/a")
    assert "last/000/a" in served(pool)[1]
    for task in (*staying, *more):
        task.cancel()


async def test_episodes_that_come_one_by_one_are_spread_too(plain_tokenizer) -> None:
    pool = pool_of(plain_tokenizer, 3)
    for episode in range(9):
        for turn in range(2):
            await ask(pool, f"e{episode}/{turn:03d}/a")
    assert [len(keys) for keys in served(pool)] == [6, 6, 6]
    for keys in served(pool):
        assert len({episode_of(key) for key in keys}) == 3


async def test_routes_are_forgotten_with_the_prefixes(plain_tokenizer) -> None:
    pool = pool_of(plain_tokenizer, 2)
    await ask(pool, "a/000/x")
    await ask(pool, "b/000/x")
    pool.pause()
    pool.resume()
    await ask(pool, "b/001/x")  # as a new run would have it: the first to come goes to the first
    assert served(pool) == [["a/000/x", "b/001/x"], ["b/000/x"]]


async def test_routes_do_not_grow_without_bound(plain_tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("drmas.rollout.pool.MOST_ROUTES", 4)
    pool = pool_of(plain_tokenizer, 2)
    for episode in range(20):
        await ask(pool, f"e{episode}/000/x")
        await ask(pool, f"e0/{episode + 1:03d}/x")
    assert list(pool._routes.of) == ["e17", "e18", "e19", "e0"]
    assert {key for key in served(pool)[1] if key.startswith("e0/")} == set()  # used all the time, so never forgotten


def collected(tokenizer, order: list[int]) -> list[list[list[str]]]:
    """What each advance of each replica admitted, in a rollout of two turns whose first requests arrive in `order`."""

    async def run() -> list[list[list[str]]]:
        pool = pool_of(tokenizer, 3, lambda prompt, key: "x" * (1 + sum(key.encode()) % 7), deterministic=True)
        gate = Gate({"main": pool}, deterministic=True)

        async def episode(number: int) -> None:
            name = f"e{number:02d}"
            await asyncio.sleep(0.001 * order.index(number))
            for turn in range(2 + number % 2):
                key = f"{name}/{turn:03d}/a"
                await gate.generate("main", name, [5], Sampling(64), seed=1, key=key, deadline=Deadline(None))
                await asyncio.sleep(0.001 * (order.index(number) % 3))
            gate.leave(name)

        for number in order:
            gate.enter(f"e{number:02d}")
        stepping = asyncio.create_task(gate.run())
        await asyncio.gather(*map(episode, order))
        stepping.cancel()
        return [engine.keys for engine in pool.engines]

    return asyncio.run(run())


def test_I9_where_requests_go_does_not_depend_on_when_they_come(plain_tokenizer) -> None:
    numbers = list(range(12))
    first = collected(plain_tokenizer, numbers)
    assert [len(keys[0]) for keys in first] == [4, 4, 4]
    for seed in range(3):
        assert collected(plain_tokenizer, random.Random(seed).sample(numbers, len(numbers))) == first


async def test_an_advance_returns_the_union_and_moves_only_replicas_with_requests(plain_tokenizer) -> None:
    pool = pool_of(plain_tokenizer, 3, lambda prompt, key: "xx" if "long" in key else "x", deterministic=True)
    assert await pool.advance() == []
    tasks = [ask(pool, key) for key in ("b/000/x", "a/000/x")]
    await passes()
    assert served(pool) == [[], [], []]
    assert await pool.advance() == ["a/000/x", "b/000/x"]
    assert served(pool) == [["a/000/x"], ["b/000/x"], []]
    assert pool.idle
    await asyncio.gather(*tasks)


async def test_a_request_that_its_replica_refuses_ends_the_advance(plain_tokenizer) -> None:
    pool = pool_of(plain_tokenizer, 2, deterministic=True)
    bad, good = ask(pool, "a/000/x", [1] * 1000), ask(pool, "b/000/x")
    await passes()
    assert await pool.advance() == ["a/000/x"]
    with pytest.raises(EngineError, match="together at most 1024"):
        await bad
    assert await pool.advance() == ["b/000/x"]
    assert (await good).finish_reason == "stop"


async def test_a_request_cancelled_while_it_is_held_leaves_nothing(plain_tokenizer) -> None:
    pool = pool_of(plain_tokenizer, 2, deterministic=True)
    gone = ask(pool, "a/000/x")
    await passes()
    gone.cancel()
    await passes()
    assert await pool.advance() == []
    assert pool._requests == {}
    stays = ask(pool, "b/000/x")
    await passes()
    assert await pool.advance() == ["b/000/x"]
    await stays
    assert served(pool) == [["b/000/x"], []]


async def test_a_dead_replica_fails_its_own_episodes_and_comes_back_alone(plain_tokenizer) -> None:
    def rule(prompt: str, key: str) -> str:
        if key == "b/001/x":
            raise EngineDied("killed")
        return "x"

    pool = pool_of(plain_tokenizer, 2, rule, deterministic=True)
    first = [ask(pool, key) for key in ("a/000/x", "b/000/x")]
    await passes()
    await pool.advance()
    await asyncio.gather(*first)
    pool.sync_client.finish_weight_update("3")
    client = pool.sync_client
    second = [ask(pool, key) for key in ("a/001/x", "b/001/x")]
    await passes()
    assert await pool.advance() == ["a/001/x", "b/001/x"]  # the dead one's request has a result, too: its error
    assert (await second[0]).versions == [3, 3]
    with pytest.raises(EngineDied):
        await second[1]
    assert [engine.alive for engine in pool.engines] == [True, False]
    assert not pool.alive
    with pytest.raises(EngineDied, match="start it again"):
        await ask(pool, "b/002/x")
    new = ask(pool, "c/000/x")  # a new episode goes to a replica that lives
    await passes()
    assert await pool.advance() == ["c/000/x"]
    await new

    started = []
    for index, engine in enumerate(pool.engines):
        engine.start = lambda index=index, start=engine.start: (started.append(index), start())
    pool.start()
    assert started == [1]
    assert pool.alive
    assert [engine.version for engine in pool.engines] == [3, 0]
    assert pool.version == 0
    assert pool.sync_client is client  # a scripted engine keeps its channel
    again = ask(pool, "b/002/x")
    await passes()
    assert await pool.advance() == ["b/002/x"]
    await again


async def test_an_advance_in_which_all_die_is_a_death(plain_tokenizer) -> None:
    def rule(prompt: str, key: str) -> str:
        raise EngineDied("killed")

    pool = pool_of(plain_tokenizer, 2, rule, deterministic=True)
    tasks = [ask(pool, key) for key in ("a/000/x", "b/000/x")]
    await passes()
    with pytest.raises(EngineDied, match="killed"):
        await pool.advance()
    assert [type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == [EngineDied, EngineDied]


async def test_a_pool_pauses_and_counts_as_one_engine(plain_tokenizer) -> None:
    pool = pool_of(plain_tokenizer, 2)
    for key in ("a/000/x", "b/000/x"):
        await ask(pool, key)
    assert pool.stats() == {"peak_memory_bytes": 0.0, "prompt_tokens": 2.0, "generated_tokens": 4.0}
    assert (pool.version, pool.max_model_tokens, pool.idle, await pool.advance()) == (0, 1024, True, [])
    pool.pause()
    waiting = [ask(pool, key) for key in ("a/001/x", "b/001/x")]
    await passes()
    assert not any(task.done() for task in waiting)
    pool.resume()
    await asyncio.gather(*waiting)
    pool.close()
    assert not any(engine.alive for engine in pool.engines)
    pool.close()


async def test_a_pool_sleeps_and_wakes_as_one_and_a_dead_replica_is_told_when_all_others_did(plain_tokenizer) -> None:
    pool = pool_of(plain_tokenizer, 3)
    first, second, third = pool.engines
    await ask(pool, "e/000/a")
    pool.sleep()
    assert [engine.asleep for engine in pool.engines] == [{"weights", "cache"}] * 3
    assert not pool._routes.of  # its prefixes are gone
    with pytest.raises(EngineError, match="asleep"):
        await ask(pool, "e/000/a")
    pool.wake(cache=False)
    assert [engine.asleep for engine in pool.engines] == [{"cache"}] * 3
    second.die()
    for call in (pool.wake, pool.sleep):
        with pytest.raises(EngineDied):
            call()
    assert first.asleep == third.asleep == {"weights", "cache"}
    pool.start()  # the dead one alone, awake
    assert [engine.asleep for engine in pool.engines] == [{"weights", "cache"}, set(), {"weights", "cache"}]
    pool.wake()
    assert (await ask(pool, "e/000/a")).finish_reason == "stop"


def test_replicas_that_do_not_come_up_are_named_and_the_others_stay(plain_tokenizer) -> None:
    pool = pool_of(plain_tokenizer, 3)
    pool.close()

    def refuse() -> None:
        raise EngineStartError("no memory")

    pool.engines[1].start = refuse
    with pytest.raises(EngineStartError, match="no memory"):
        pool.start()
    assert [engine.alive for engine in pool.engines] == [True, False, True]


class Recorder:
    """A control channel of an engine with `num_workers`, which notes what it is told; `error` is raised by all calls."""

    def __init__(self, num_workers: int, *, version: str = "1", whole: bool = True, error: Exception | None = None) -> None:
        self.num_workers, self.version, self.whole, self.error = num_workers, version, whole, error
        self.calls: list[tuple[str, object]] = []

    def __getattr__(self, name: str):
        def call(argument: object = None) -> object:
            self.calls.append((name, argument))
            if self.error is not None:
                raise self.error
            return {"get_weight_version": self.version, "abort_weight_update": self.whole}.get(name)

        return call


def test_every_worker_of_every_engine_has_a_rank_of_its_own() -> None:
    clients = [Recorder(2), Recorder(1), Recorder(4)]
    fan_out = FanOut(clients)
    info = {"rank_offset": 1, "world_size": 8}
    fan_out.init_weight_transfer_engine(info)
    assert fan_out.num_workers == 7
    assert [client.calls[0][1] for client in clients] == [{"rank_offset": offset, "world_size": 8} for offset in (1, 3, 4)]
    assert info["rank_offset"] == 1


def test_calls_reach_all_with_their_argument() -> None:
    clients = [Recorder(1), Recorder(1)]
    fan_out = FanOut(clients)
    fan_out.start_weight_update()
    fan_out.update_weights({"names": []})
    fan_out.finish_weight_update("7")
    expected = [("start_weight_update", None), ("update_weights", {"names": []}), ("finish_weight_update", "7")]
    assert [client.calls for client in clients] == [expected, expected]


def test_versions_that_differ_are_all_named_and_an_abort_is_whole_where_all_are() -> None:
    assert FanOut([Recorder(1, version="4"), Recorder(1, version="4")]).get_weight_version() == "4"
    assert FanOut([Recorder(1, version="4"), Recorder(1, version="3")]).get_weight_version() == "4, 3"
    assert FanOut([Recorder(1), Recorder(1)]).abort_weight_update() is True
    assert FanOut([Recorder(1, whole=False), Recorder(1)]).abort_weight_update() is False


def test_what_several_refuse_is_said_once_with_all_reasons() -> None:
    with pytest.raises(EngineError, match=r"^a: too long; b: no room$") as caught:
        FanOut(
            [Recorder(1, error=EngineError("a: too long")), Recorder(1, error=EngineError("b: no room"))]
        ).start_weight_update()
    assert not isinstance(caught.value, EngineDied)
    with pytest.raises(EngineDied, match="gone"):
        FanOut([Recorder(1, error=EngineError("a")), Recorder(1, error=EngineDied("gone"))]).start_weight_update()
    with pytest.raises(ZeroDivisionError):
        run_all([lambda: 1 / 0, lambda: 1])


def test_a_death_is_told_while_another_engine_still_waits() -> None:
    release = threading.Event()
    waiting = Recorder(1)
    waiting.update_weights = lambda info: release.wait(60)
    with pytest.raises(EngineDied, match="gone"):
        FanOut([waiting, Recorder(1, error=EngineDied("gone"))]).update_weights({})
    assert not release.is_set()
    release.set()


def test_an_abort_waits_for_those_that_live_before_it_tells_of_a_death() -> None:
    ended = []
    living = Recorder(1)
    living.abort_weight_update = lambda: ended.append(True) or True
    with pytest.raises(EngineDied, match="gone"):
        FanOut([Recorder(1, error=EngineDied("gone")), living]).abort_weight_update()
    assert ended == [True]


def test_a_replica_that_died_idle_leaves_the_others_running_once_all_are_told_to_resume(plain_tokenizer) -> None:
    first, second = (ScriptedEngine(plain_tokenizer, ["1"], deterministic=False) for _ in range(2))
    pool = EnginePool([first, second], deterministic=False)
    second.die()
    for call in (pool.pause, pool.resume):
        with pytest.raises(EngineDied):
            call()
    answer = asyncio.run(pool.generate([5], Sampling(4), seed=0, key="e0/000/a"))
    assert answer.finish_reason == "stop"
