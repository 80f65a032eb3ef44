from __future__ import annotations

import asyncio

import pytest

from drmas.errors import EngineDied, EngineError
from drmas.rollout.engine import Sampling
from drmas.rollout.scripted import LOGPROB, ScriptedEngine


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


async def ask(engine: ScriptedEngine, prompt_ids: list[int], key: str = "k", **sampling):
    return await engine.generate(prompt_ids, Sampling(**{"max_tokens": 64, **sampling}), seed=1, key=key)


@pytest.fixture
def free(plain_tokenizer):
    """A free-running engine that answers with the prompt's text and the key."""
    return ScriptedEngine(plain_tokenizer, lambda prompt, key: f"{prompt}|{key}", deterministic=False)


async def test_answers_by_rule_with_the_end_token(free, plain_tokenizer) -> None:
    done = await ask(free, ids_of(plain_tokenizer, "3+4="), key="t#0/000/solver")
    assert done.token_ids == [*ids_of(plain_tokenizer, "3+4=|t#0/000/solver"), plain_tokenizer.eos_token_id]
    assert done.logprobs == [LOGPROB] * len(done.token_ids)
    assert done.versions == [0] * len(done.token_ids)
    assert done.finish_reason == "stop"


async def test_answers_from_a_list_in_turn(plain_tokenizer) -> None:
    engine = ScriptedEngine(plain_tokenizer, ["a", "b"], deterministic=False)
    texts = [plain_tokenizer.decode((await ask(engine, [5], key=str(i))).token_ids[:1]) for i in range(3)]
    assert texts == ["a", "b", "a"]
    with pytest.raises(ValueError, match="empty list"):
        ScriptedEngine(plain_tokenizer, [])


@pytest.mark.parametrize(("most", "finish_reason"), [(3, "length"), (4, "length"), (5, "stop")])
async def test_max_tokens_counts_the_end_token(plain_tokenizer, most: int, finish_reason: str) -> None:
    engine = ScriptedEngine(plain_tokenizer, ["abcd"], deterministic=False)
    done = await ask(engine, [5], max_tokens=most)
    assert done.token_ids == [*ids_of(plain_tokenizer, "abcd"), plain_tokenizer.eos_token_id][:most]
    assert done.finish_reason == finish_reason


async def test_a_stop_text_ends_the_response_where_it_is_complete(plain_tokenizer) -> None:
    engine = ScriptedEngine(plain_tokenizer, ["one;;two;;"], deterministic=False)
    done = await ask(engine, [5], stop=(";;", "zzz"))
    assert plain_tokenizer.decode(done.token_ids) == "one;;"
    assert done.finish_reason == "stop"


async def test_bad_requests_are_refused_and_the_engine_lives(free, plain_tokenizer) -> None:
    for prompt, message in (([], "no tokens"), ([99_999], "the id 99999"), ([1] * 1000, "together at most 1024")):
        with pytest.raises(EngineError, match=message) as caught:
            await ask(free, prompt)
        assert not isinstance(caught.value, EngineDied)
    assert (await ask(free, [5])).finish_reason == "stop"
    assert free.alive


async def test_I2_tokens_carry_the_version_of_the_last_finished_sync(free) -> None:
    client = free.sync_client
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    assert set((await ask(free, [5])).versions) == {0}
    client.finish_weight_update("4")
    assert free.version == 4
    assert set((await ask(free, [5])).versions) == {4}
    assert client.calls[-1] == "finish_weight_update"


async def test_nothing_is_served_while_paused(free) -> None:
    free.pause()
    waiting = asyncio.create_task(ask(free, [5]))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    free.resume()
    assert (await waiting).finish_reason == "stop"


async def test_asleep_it_refuses_requests_and_keeps_those_in_flight_until_it_has_its_cache_again(plain_tokenizer) -> None:
    engine = ScriptedEngine(plain_tokenizer, ["a"], deterministic=False, seconds=lambda prompt, key: 0.001)
    waiting = asyncio.create_task(ask(engine, [5], key="early"))
    await asyncio.sleep(0)
    engine.sleep()
    engine.sleep()  # harmless
    with pytest.raises(EngineError, match="late: the scripted engine is asleep; wake it first"):
        await ask(engine, [5], key="late")
    with pytest.raises(EngineError, match="wake its weights before an update"):
        engine.sync_client.finish_weight_update("1")
    engine.wake(cache=False)
    engine.pause()
    engine.sync_client.finish_weight_update("1")
    engine.resume()
    await asyncio.sleep(0.01)  # its time is over, and it must not end
    assert not waiting.done()
    with pytest.raises(EngineError, match="asleep"):
        await ask(engine, [5], key="late")
    engine.wake()
    engine.wake()
    assert (await waiting).finish_reason == "stop"
    assert (await ask(engine, [5], key="late")).versions[0] == 1


async def test_a_pause_outlasts_a_sleep_and_a_death_ends_it(plain_tokenizer) -> None:
    engine = ScriptedEngine(plain_tokenizer, ["a"])
    engine.pause()
    engine.sleep()
    engine.wake()
    waiting = asyncio.create_task(ask(engine, [5]))
    await asyncio.sleep(0)
    assert await engine.advance() == []
    engine.resume()
    assert await engine.advance() == ["k"]
    await waiting
    engine.sleep()
    engine.die()
    for call in (engine.sleep, engine.wake):
        with pytest.raises(EngineDied):
            call()
    engine.start()
    asyncio.get_running_loop().call_soon(asyncio.create_task, engine.advance())
    assert (await ask(engine, [5])).finish_reason == "stop"


async def test_an_advance_decodes_to_the_end_of_the_shortest(plain_tokenizer) -> None:
    engine = ScriptedEngine(plain_tokenizer, lambda prompt, key: key)
    tasks = {key: asyncio.create_task(ask(engine, [5], key=key)) for key in ("ccc", "a", "bb", "z")}
    await asyncio.sleep(0)
    assert await engine.advance() == ["a", "z"]
    late = asyncio.create_task(ask(engine, [5], key="d"))
    await asyncio.sleep(0)
    assert tasks["a"].done() or not tasks["bb"].done()
    assert await engine.advance() == ["bb"]
    # "ccc" had two of its four tokens left when "d" was admitted, one of them decoded together with the end of "bb"
    assert await engine.advance() == ["ccc", "d"]
    await asyncio.gather(*tasks.values(), late)
    assert engine.keys == [["a", "bb", "ccc", "z"], ["d"]]
    assert await engine.advance() == []
    assert engine.stats()["generated_tokens"] == 2 + 3 + 4 + 2 + 2


async def test_an_answer_that_never_comes_holds_the_advance_until_it_is_cancelled(plain_tokenizer) -> None:
    engine = ScriptedEngine(plain_tokenizer, lambda prompt, key: None)
    waiting = asyncio.create_task(ask(engine, [5]))
    await asyncio.sleep(0)
    advance = asyncio.create_task(engine.advance())
    await asyncio.sleep(0.01)
    assert not advance.done()
    assert not engine.idle
    waiting.cancel()
    assert await advance == []
    assert engine.idle


async def test_death_fails_what_waits_and_what_comes_until_the_start(plain_tokenizer) -> None:
    def rule(prompt: str, key: str) -> str:
        if key == "b":
            raise EngineDied("killed")
        return "x"

    engine = ScriptedEngine(plain_tokenizer, rule)
    engine.sync_client.finish_weight_update(3)
    waiting = [asyncio.create_task(ask(engine, [5], key=key)) for key in ("a", "b", "c")]
    await asyncio.sleep(0)
    with pytest.raises(EngineDied):
        await engine.advance()
    assert all(isinstance(error, EngineDied) for error in await asyncio.gather(*waiting, return_exceptions=True))
    assert not engine.alive
    with pytest.raises(EngineDied, match="start it again"):
        await ask(engine, [5])
    engine.start()
    assert (engine.alive, engine.version) == (True, 0)
    again = asyncio.create_task(ask(engine, [5], key="a"))
    await asyncio.sleep(0)
    assert await engine.advance() == ["a"]
    await again
    engine.close()
    engine.close()


async def test_a_mistake_in_the_rule_is_loud(plain_tokenizer) -> None:
    def rule(prompt: str, key: str) -> str:
        raise ValueError("no sum in the prompt")

    engine = ScriptedEngine(plain_tokenizer, rule)
    waiting = asyncio.create_task(ask(engine, [5]))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="no sum"):
        await engine.advance()
    with pytest.raises(ValueError, match="no sum"):
        await waiting


async def test_answers_that_take_time_come_in_the_order_of_their_ends(plain_tokenizer) -> None:
    seconds = {"slow": 0.08, "quick": 0.01, "none": 0.0}
    engine = ScriptedEngine(plain_tokenizer, ["x"], deterministic=False, seconds=lambda prompt, key: seconds[key])
    order = []

    async def request(key: str) -> None:
        await ask(engine, [5], key=key)
        order.append(key)

    await asyncio.gather(*map(request, ["slow", "quick", "none"]))
    assert order == ["none", "quick", "slow"]


async def test_at_most_so_many_are_served_at_a_time_first_come_first_served(plain_tokenizer) -> None:
    engine = ScriptedEngine(plain_tokenizer, ["x"], deterministic=False, seconds=lambda prompt, key: 0.001, max_concurrent=3)
    most = 0

    async def request(key: str) -> None:
        nonlocal most
        await ask(engine, [5], key=key)
        most = max(most, len(engine._running))

    await asyncio.gather(*(request(f"{i:02d}") for i in range(10)))
    assert engine.keys[0] == ["00", "01", "02"]
    assert [key for keys in engine.keys for key in keys] == [f"{i:02d}" for i in range(10)]
    assert max(map(len, engine.keys)) == 3
    assert most <= 3
    assert engine.stats()["generated_tokens"] == 20


async def test_a_cancelled_request_gives_its_room_to_the_next(plain_tokenizer) -> None:
    rule = lambda prompt, key: None if key == "stuck" else "x"  # noqa: E731
    engine = ScriptedEngine(plain_tokenizer, rule, deterministic=False, seconds=lambda prompt, key: 0.0, max_concurrent=1)
    stuck = asyncio.create_task(ask(engine, [5], key="stuck"))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(ask(engine, [5], key="next"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    stuck.cancel()
    assert (await waiting).finish_reason == "stop"


async def test_an_answer_whose_time_comes_in_a_pause_comes_after_it(plain_tokenizer) -> None:
    engine = ScriptedEngine(plain_tokenizer, ["x"], deterministic=False, seconds=lambda prompt, key: 0.005)
    waiting = asyncio.create_task(ask(engine, [5]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine.pause()
    await asyncio.sleep(0.05)
    assert not waiting.done()
    engine.resume()
    assert (await waiting).finish_reason == "stop"


async def test_a_death_ends_a_request_that_takes_time_and_its_timer_spares_the_next_one(plain_tokenizer) -> None:
    seconds = iter([0.05, 1000.0])
    engine = ScriptedEngine(plain_tokenizer, ["x"], deterministic=False, seconds=lambda prompt, key: next(seconds))
    first = asyncio.create_task(ask(engine, [5]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine.die()
    with pytest.raises(EngineDied):
        await first
    engine.start()
    second = asyncio.create_task(ask(engine, [5]))
    await asyncio.sleep(0.1)  # past the end of the first
    assert not second.done()
    second.cancel()


async def test_ten_thousand_requests_wait_at_the_same_time(plain_tokenizer) -> None:
    engine = ScriptedEngine(plain_tokenizer, ["x"], deterministic=False, seconds=lambda prompt, key: 0.2)
    calls = [asyncio.create_task(ask(engine, [5], key=str(i))) for i in range(10_000)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(engine._running) == 10_000
    answers = await asyncio.gather(*calls)
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert not engine._running


@pytest.mark.parametrize("option", [{"seconds": lambda prompt, key: 1.0}, {"max_concurrent": 2}])
def test_a_deterministic_engine_takes_no_time(plain_tokenizer, option) -> None:
    with pytest.raises(ValueError, match="deterministic to False"):
        ScriptedEngine(plain_tokenizer, ["x"], **option)
