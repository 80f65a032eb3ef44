"""The vLLM engine against its protocol: a real vLLM process with a small random model."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drmas.errors import EngineDied, EngineError, EngineStartError
from drmas.rollout.engine import Sampling
from drmas.rollout.engine_process import LocalProcess
from drmas.rollout.vllm_engine import PREFILL_TOKENS

EOS = 1
TOLERANCE = 1e-4


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 86), k=length)


def wait_until_gone(pid: int, seconds: float) -> bool:
    """True when process `pid` has ended (it may be somebody else's zombie)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready = select.select([descriptor], [], [], seconds)[0]
    os.close(descriptor)
    return bool(ready)


async def test_I1_ids_are_those_read_and_sampled_and_the_end_token_stays(engine, reference, generate_all):
    requests = [(prompt_of(9, seed), Sampling(200), seed) for seed in range(12)]
    completions = await generate_all(engine, requests)
    for (prompt, _, _), completion in zip(requests, completions, strict=True):
        expected = reference(prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=TOLERANCE, rtol=0)
        stopped = completion.finish_reason == "stop"
        assert (completion.token_ids[-1] == EOS) == stopped
        assert EOS not in completion.token_ids[:-1]
        assert stopped or len(completion.token_ids) == 200
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


async def test_a_stop_string_ends_a_response_and_its_tokens_stay(engine, generate_all):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine._model_path)
    (completion,) = await generate_all(engine, [(prompt_of(9, 5), Sampling(200, stop=("7",)), 11)])
    assert completion.finish_reason == "stop"
    assert tokenizer.decode(completion.token_ids).endswith("7")
    assert tokenizer.decode(completion.token_ids[:-1]).count("7") == 0


async def test_I2_every_token_carries_the_model_folder_version(engine, generate_all):
    (completion,) = await generate_all(engine, [(prompt_of(9, 1), Sampling(20), 1)])
    assert completion.versions == [0] * len(completion.token_ids)


async def test_I9_the_seed_decides_the_tokens_alone_and_in_a_batch(engine, generate_all):
    request = (prompt_of(20, 2), Sampling(40), 1234)
    (alone,) = await generate_all(engine, [request])
    others = [(prompt_of(30, seed), Sampling(40), seed) for seed in range(10)]
    batched, *_, other = await generate_all(engine, [request, *others, (request[0], request[1], 1235)])
    assert batched.token_ids == alone.token_ids
    assert other.token_ids != alone.token_ids


async def test_I11_log_probs_are_of_the_distribution_that_was_sampled(engine, reference, generate_all):
    prompt = prompt_of(15, 3)
    (completion,) = await generate_all(engine, [(prompt, Sampling(60, temperature=0.7), 9)])
    got = torch.tensor(completion.logprobs)
    torch.testing.assert_close(got, reference(prompt, completion.token_ids, 0.7), atol=TOLERANCE, rtol=0)
    assert (got - reference(prompt, completion.token_ids, 1.0)).abs().max() > 1e-2


async def test_I11_greedy_and_nucleus_sampling_for_evaluations(engine, engine_model, generate_all):
    """Temperature 0 takes the likeliest token, whatever the seed; top_p samples what is left of the distribution."""
    model = AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.float32).eval()

    def distributions(prompt: list[int], response: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1], -1)

    prompt = prompt_of(15, 6)
    greedy, again, nucleus = await generate_all(
        engine,
        [
            (prompt, Sampling(30, temperature=0), 1),
            (prompt, Sampling(30, temperature=0), 2),
            (prompt, Sampling(60, top_p=0.3), 3),
        ],
    )
    assert greedy.token_ids == again.token_ids == distributions(prompt, greedy.token_ids).argmax(-1).tolist()
    whole = distributions(prompt, nucleus.token_ids)
    ordered, order = whole.sort(descending=True)
    dropped = torch.zeros_like(whole, dtype=torch.bool)
    dropped.scatter_(1, order, ordered.exp().cumsum(-1) - ordered.exp() >= 0.3)
    left = whole.masked_fill(dropped, -torch.inf).log_softmax(-1)[range(len(nucleus.token_ids)), nucleus.token_ids]
    torch.testing.assert_close(torch.tensor(nucleus.logprobs), left, atol=TOLERANCE, rtol=0)
    assert dropped.float().mean() > 0.5


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(4), "a prompt of 0 tokens"),
        ([5] * 256, Sampling(4), "max_model_tokens is 256"),
        ([5, 100_000], Sampling(4), "token 100000"),
        ([5, -1], Sampling(4), "token -1"),
        ([5], Sampling(0), "max_tokens is 0"),
        ([5], Sampling(4, temperature=-1.0), "temperature"),
        ([5], Sampling(4, top_p=0.0), "top_p"),
    ],
)
async def test_a_bad_request_is_refused_and_the_engine_goes_on(engine, generate_all, prompt, sampling, message):
    good = asyncio.ensure_future(generate_all(engine, [(prompt_of(9, 4), Sampling(30), 4)]))
    with pytest.raises(EngineError, match=message) as refusal:
        await engine.generate(prompt, sampling, seed=0, key="bad")
    assert not isinstance(refusal.value, EngineDied)
    (completion,) = await good
    assert len(completion.token_ids) == 30 or completion.token_ids[-1] == EOS
    assert engine.idle


async def test_more_prompts_than_one_step_takes_are_served(engine, reference, generate_all):
    requests = [(prompt_of(240, seed), Sampling(4), seed) for seed in range(20)]
    assert sum(len(prompt) for prompt, _, _ in requests) > PREFILL_TOKENS
    for (prompt, _, _), completion in zip(requests, await generate_all(engine, requests), strict=True):
        expected = reference(prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=TOLERANCE, rtol=0)


async def test_a_cancelled_request_leaves_the_engine(engine, generate_all):
    call = asyncio.ensure_future(engine.generate(prompt_of(9, 4), Sampling(240), seed=4, key="long"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert engine.idle
    await generate_all(engine, [(prompt_of(9, 4), Sampling(2), 4)])


async def play(engine, order: list[int], *, gaps: bool) -> dict[str, tuple[list[int], list[float]]]:
    """Two turns of eight episodes; the first turns are submitted in `order`, with pauses in between if `gaps`."""
    tasks: dict[str, asyncio.Task] = {}

    def submit(episode: int, turn: int, prompt: list[int]) -> None:
        key = f"{episode:02d}/{turn}"
        sampling = Sampling(8 + 5 * episode)
        tasks[key] = asyncio.ensure_future(engine.generate(prompt, sampling, seed=100 * episode + turn, key=key))

    for episode in order:
        submit(episode, 0, prompt_of(10 + episode, episode))
        await asyncio.sleep(0.02 if gaps else 0)
    results = {}
    while len(results) < 2 * len(order):
        done = await engine.advance()
        assert done
        assert engine.idle
        for key in sorted(done, reverse=gaps):
            completion = await tasks[key]
            results[key] = (completion.token_ids, completion.logprobs)
            episode, turn = map(int, key.split("/"))
            if turn == 0:
                submit(episode, 1, [*prompt_of(10 + episode, episode), *completion.token_ids, 5])
                await asyncio.sleep(0.02 if gaps else 0)
    return results


async def test_I9_deterministic_mode_is_bit_equal_whatever_the_order_and_timing(deterministic_engine):
    first = await play(deterministic_engine, list(range(8)), gaps=False)
    deterministic_engine.pause()  # forget the prefixes of the first play
    deterministic_engine.resume()
    second = await play(deterministic_engine, [5, 2, 7, 0, 1, 6, 3, 4], gaps=True)
    assert second == first


async def test_advance_without_requests_or_after_their_cancellation_returns_nothing(deterministic_engine):
    assert await deterministic_engine.advance() == []
    call = asyncio.ensure_future(deterministic_engine.generate(prompt_of(9, 4), Sampling(240), seed=4, key="long"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert await deterministic_engine.advance() == []


async def test_a_cancelled_advance_stops_the_engine_and_the_next_one_goes_on(deterministic_engine):
    call = asyncio.ensure_future(deterministic_engine.generate(prompt_of(9, 4), Sampling(240), seed=6, key="long"))
    await asyncio.sleep(0)
    advance = asyncio.ensure_future(deterministic_engine.advance())
    await asyncio.sleep(0)
    advance.cancel()
    await asyncio.gather(advance, return_exceptions=True)
    assert deterministic_engine.idle
    deterministic_engine.sync_client.get_weight_version()  # answered after the cancellation was read
    if deterministic_engine._connection.waiting:  # else the call was complete when the cancellation was read
        assert await deterministic_engine.advance() == ["long"]
    assert (await call).token_ids


async def test_nothing_runs_while_paused_and_held_requests_survive(deterministic_engine):
    call = asyncio.ensure_future(deterministic_engine.generate(prompt_of(9, 4), Sampling(10), seed=4, key="held"))
    await asyncio.sleep(0)
    deterministic_engine.pause()
    advance = asyncio.ensure_future(deterministic_engine.advance())
    await asyncio.sleep(0)
    deterministic_engine.pause()  # an answer to this comes after the advance was read
    assert not advance.done()
    deterministic_engine.resume()
    assert await advance == ["held"]
    assert (await call).token_ids


async def test_a_response_that_takes_too_long_is_given_up(deterministic_engine, monkeypatch):
    short = deterministic_engine._config.model_copy(update={"request_timeout_seconds": 0.2})
    monkeypatch.setattr(deterministic_engine, "_config", short)
    with pytest.raises(EngineError, match=r"no response to late within 0\.2 s \(policies\.deterministic\.engine") as error:
        await deterministic_engine.generate([5], Sampling(4), seed=0, key="late")
    assert not isinstance(error.value, EngineDied)
    assert deterministic_engine.alive
    monkeypatch.undo()
    assert await deterministic_engine.advance() == []  # the request was given up over there too


async def test_an_engine_that_is_only_slow_loses_its_requests_and_not_its_life(deterministic_engine, monkeypatch):
    short = deterministic_engine._config.model_copy(update={"request_timeout_seconds": 0.2})
    deterministic_engine.pause()
    monkeypatch.setattr(deterministic_engine, "_config", short)
    call = asyncio.ensure_future(deterministic_engine.generate([5], Sampling(4), seed=0, key="late"))
    await asyncio.sleep(0)
    assert await deterministic_engine.advance() == []
    with pytest.raises(EngineError, match="no response to late") as error:
        await call
    assert not isinstance(error.value, EngineDied)
    assert deterministic_engine.alive
    monkeypatch.undo()
    deterministic_engine.resume()


def test_trap_5_threads_and_environment_took_effect(engine):
    environment = dict(
        item.split("=", 1) for item in Path(f"/proc/{engine.pid}/environ").read_text().split("\0") if "=" in item
    )
    expected = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "drmas_weights",
    }
    assert expected.items() <= environment.items()
    assert not {"VLLM_CPU_KVCACHE_SPACE", "RANK"} & environment.keys()
    assert engine.sync_client.torch_threads == 1
    maps = Path(f"/proc/{engine.pid}/maps").read_text().split()
    assert {path for path in maps if "libgomp" in path} == {environment["LD_PRELOAD"].split(":")[0]}


def test_stats_count_tokens_and_measure_memory(engine, generate_all):
    before = engine.stats()
    (completion,) = asyncio.run(generate_all(engine, [(prompt_of(13, 8), Sampling(17), 8)]))
    after = engine.stats()
    assert after["prompt_tokens"] - before["prompt_tokens"] == 13
    assert after["generated_tokens"] - before["generated_tokens"] == len(completion.token_ids)
    assert 300e6 < after["peak_memory_bytes"] < 3e9


def test_a_missing_model_folder_is_found_before_anything_starts(make_engine, tmp_path):
    engine = make_engine("lost", model_path=tmp_path / "nowhere")
    with pytest.raises(EngineStartError, match=r"nowhere is no model folder.*policies\.lost\.model"):
        engine.start()
    assert engine.pid is None


def test_I11_a_setting_that_the_trainer_can_not_mirror_is_refused_before_anything_starts(make_engine):
    engine = make_engine("odd", options={"quantization": "fp8"})
    with pytest.raises(EngineStartError, match=r"policies\.odd\.engine\.options\.quantization can't be passed on"):
        engine.start()
    assert not engine.alive
    assert engine.pid is None


def test_a_value_that_vllm_refuses_is_one_clear_error(make_engine):
    engine = make_engine("odd", options={"max_num_batched_tokens": 100})
    with pytest.raises(
        EngineStartError, match=r"max_num_batched_tokens \(100\) is smaller than max_model_len \(256\)"
    ) as error:
        engine.start()
    message, log = str(error.value), engine._log.read_text()
    assert message.endswith(f"the whole log is {engine._log}")
    assert "\n" not in message
    assert "Traceback" not in log
    assert not engine.alive
    assert wait_until_gone(engine.pid, 0)


SILENT = """
import json, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
for line in connection.makefile("rb"):
    message = json.loads(line)
    if message["do"] == "start":
        result = {"vocab_size": 90, "num_workers": 1, "torch_threads": 1}
        connection.sendall(json.dumps({"id": message["id"], "result": result}).encode() + b"\\n")
"""


@pytest.fixture
def silent_engine(make_engine, monkeypatch):
    """An engine whose process comes up and then never answers."""

    def launch(environment, log):
        ours, theirs = socket.socketpair()
        log.touch()
        with theirs:
            command = [sys.executable, "-c", SILENT, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
            return LocalProcess(process, log, 0), ours

    monkeypatch.setattr("drmas.rollout.vllm_engine.launch", launch)
    monkeypatch.setattr("drmas.rollout.vllm_engine.PROBE_SECONDS", 0.1)
    engine = make_engine("silent", deterministic=True, request_timeout_seconds=0.1)
    engine.start()
    yield engine
    engine.close()


async def advance_over_a_request(engine):
    engine._connection.request("generate")  # without a timeout of its own, so that the advance's is the first
    await engine.advance()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda engine: engine.generate([5], Sampling(4), seed=0, key="late"), "no response to late .*, nor to anything else"),
        (advance_over_a_request, "was silent for 0.1 s after an advance"),
        (lambda engine: asyncio.to_thread(engine.pause), "no answer to pause"),
        (lambda engine: asyncio.to_thread(engine.sync_client.get_weight_version), "no answer to get_weight_version"),
    ],
    ids=["generate", "advance", "pause", "sync"],
)
async def test_a_silent_engine_is_dead_and_can_be_started_again(silent_engine, ask, message):
    assert silent_engine.alive
    with pytest.raises(EngineDied, match=message):
        await ask(silent_engine)
    assert not silent_engine.alive
    assert wait_until_gone(silent_engine.pid, 0)
    silent_engine.start()
    assert silent_engine.alive


def test_a_start_that_takes_too_long_is_given_up(make_engine):
    engine = make_engine("slow", start_timeout_seconds=0.3)
    with pytest.raises(EngineStartError, match=r"not ready after 0\.3 s \(policies\.slow\.engine\.start_timeout_seconds\)"):
        engine.start()
    assert wait_until_gone(engine.pid, 0)


async def test_requests_before_the_start_say_so(make_engine):
    with pytest.raises(EngineDied, match="not running; start it first"):
        await make_engine("cold").generate([5], Sampling(1), seed=0, key="k")


def test_the_engine_ends_with_a_parent_that_is_killed(engine_model, tmp_path):
    program = f"""
from pathlib import Path
from drmas.config.schema import EngineConfig
from drmas.rollout.vllm_engine import VllmEngine
import threading, time
config = EngineConfig(max_model_tokens=64, kv_cache_bytes=2**24, threads=1)
model, logs = Path({str(engine_model)!r}), Path({str(tmp_path)!r})
engine = VllmEngine("orphan", config, model_path=model, log_dir=logs, seed=0, deterministic=False)
starter = threading.Thread(target=engine.start)
starter.start()
starter.join()
print(engine.pid, engine.alive, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid, alive = parent.stdout.readline().split()
        assert alive == "True"  # it outlives the thread that started it
        parent.send_signal(signal.SIGKILL)
    assert wait_until_gone(int(pid), 20)
