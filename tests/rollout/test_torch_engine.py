from __future__ import annotations

import asyncio
import math

import pytest
import torch
from safetensors.torch import load_file

from drmas.config.schema import EngineConfig
from drmas.errors import EngineDied, EngineError, EngineStartError, SyncError
from drmas.rollout.engine import Sampling
from drmas.rollout.torch_engine import TorchEngine, nucleus
from drmas.weights.sync import WeightSync
from drmas.weights.transport import InProcess

CONFIG = EngineConfig(backend="torch", max_model_tokens=64, max_concurrent=16)
PROMPTS = [[7, 8, 9], [20, 21], [30, 31, 32, 33, 34, 35]]


@pytest.fixture(scope="module")
def weights(engine_model):
    return load_file(engine_model / "model.safetensors")


@pytest.fixture
def engine(engine_model):
    engine = TorchEngine("main", CONFIG, model_path=engine_model, deterministic=False)
    engine.start()
    return engine


@pytest.fixture
def stepped(engine_model):
    engine = TorchEngine("main", CONFIG, model_path=engine_model, deterministic=True)
    engine.start()
    return engine


async def test_I11_the_log_probs_are_those_of_the_distribution_that_was_sampled(engine, reference, generate_all) -> None:
    requests = [(prompt, Sampling(max_tokens=8, temperature=t), 5) for prompt in PROMPTS for t in (0.7, 1.0, 1.6)]
    for (prompt, sampling, _), done in zip(requests, await generate_all(engine, requests), strict=True):
        expected = reference(prompt, done.token_ids, sampling.temperature)
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=2e-5, rtol=0)
        assert done.versions == [0] * len(done.token_ids)


async def test_tokens_are_drawn_as_often_as_their_probability_says(engine, reference, generate_all) -> None:
    """Seeds are all that differs: the counts of the first token over 1,500 of them, against the model's own probabilities."""
    draws = 1500
    drawn = await generate_all(engine, [([7, 8], Sampling(max_tokens=1), seed) for seed in range(draws)])
    first = [done.token_ids[0] for done in drawn]
    every = range(len(engine._tokenizer))
    probabilities = torch.cat([reference([7, 8], [token]).exp() for token in every]).double()
    counts = torch.bincount(torch.tensor(first), minlength=len(every))
    chi2 = float(((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum())
    degrees = len(every) - 1
    assert abs(chi2 - degrees) < 4 * math.sqrt(2 * degrees)


async def test_I9_a_response_is_a_function_of_its_seed(engine, generate_all) -> None:
    requests = [(prompt, Sampling(max_tokens=6), seed) for prompt in PROMPTS for seed in (1, 2)]
    alone = [(await generate_all(engine, [request]))[0].token_ids for request in requests]
    assert [done.token_ids for done in await generate_all(engine, requests)] == alone
    assert all(one != other for one, other in zip(alone[::2], alone[1::2], strict=True))


async def test_greedy_and_nucleus_for_evaluations(engine, reference, generate_all) -> None:
    greedy, narrow = await generate_all(
        engine, [([7, 8], Sampling(max_tokens=4, temperature=0), 1), ([7, 8], Sampling(max_tokens=4, top_p=1e-6), 2)]
    )
    assert greedy.token_ids == narrow.token_ids  # the smallest nucleus is the best token
    assert greedy.logprobs == pytest.approx([0.0] * 4, abs=1e-6) == narrow.logprobs
    vocabulary = range(80)
    first = torch.stack([reference([7, 8], [token])[0] for token in vocabulary])
    assert greedy.token_ids[0] == int(first.argmax())


def test_a_nucleus_by_hand() -> None:
    found = nucleus(torch.tensor([0.2, 0.5, 0.05, 0.25]).log(), 0.7).exp()
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5 / 0.75, 0.0, 0.25 / 0.75]))


async def test_a_response_ends_at_the_end_token_a_stop_text_or_the_limit(engine, weights) -> None:
    """With weights that always choose one token: the head's row for it made large."""
    tokenizer = engine._tokenizer
    for text, sampling, expected in (
        ("a", Sampling(max_tokens=3, temperature=0), ("aaa", "length")),
        ("a", Sampling(max_tokens=9, temperature=0, stop=("aa",)), ("aa", "stop")),
        ("<eos>", Sampling(max_tokens=3, temperature=0), ("<eos>", "stop")),
    ):
        token = tokenizer.convert_tokens_to_ids(text)
        same = torch.zeros_like(engine._model.model.norm.weight)
        head = torch.zeros_like(weights["model.embed_tokens.weight"])
        head[token] = 1.0  # with a tied head: every prompt of this token keeps to it
        engine.take_weights((weights | {"model.embed_tokens.weight": head, "model.norm.weight": same + 1}).items())
        done = await engine.generate([token], sampling, seed=0, key="k")
        assert (tokenizer.decode(done.token_ids), done.finish_reason) == expected


async def test_an_advance_serves_all_that_was_submitted_in_key_order(stepped) -> None:
    waiting = {key: asyncio.create_task(stepped.generate([7], Sampling(max_tokens=2), seed=1, key=key)) for key in "bca"}
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting.values())
    stepped.pause()
    assert await stepped.advance() == []
    stepped.resume()
    assert await stepped.advance() == ["a", "b", "c"]
    assert all([len((await task).token_ids) in (1, 2) for task in waiting.values()])
    assert await stepped.advance() == []
    assert stepped.idle


async def test_bad_requests_are_refused_and_the_engine_lives(engine) -> None:
    for prompt, most, message in (([], 4, "no tokens"), ([99_999], 4, "the id 99999"), ([1] * 61, 4, "together at most 64")):
        with pytest.raises(EngineError, match=message):
            await engine.generate(prompt, Sampling(max_tokens=most), seed=1, key="k")
    assert len((await engine.generate([1] * 60, Sampling(max_tokens=4), seed=1, key="k")).token_ids) <= 4


async def test_nothing_is_served_while_paused(engine) -> None:
    engine.pause()
    waiting = asyncio.create_task(engine.generate([5], Sampling(max_tokens=1), seed=1, key="k"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    engine.resume()
    assert len((await waiting).token_ids) == 1


async def test_a_closed_engine_says_so(engine) -> None:
    engine.pause()
    waiting = asyncio.create_task(engine.generate([5], Sampling(max_tokens=1), seed=1, key="k"))
    await asyncio.sleep(0)
    engine.close()
    with pytest.raises(EngineDied, match="closed"):
        await waiting
    assert not engine.alive
    with pytest.raises(EngineDied, match="isn't running"):
        await engine.generate([5], Sampling(max_tokens=1), seed=1, key="k")


def test_a_folder_without_a_model(tmp_path) -> None:
    with pytest.raises(EngineStartError, match="can't be loaded"):
        TorchEngine("main", CONFIG, model_path=tmp_path, deterministic=True).start()


class Weights:
    """A source of tensors, as a trainer gives them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def metadata(self):
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self):
        return iter(self.tensors.items())


async def test_I10_a_push_gives_the_engine_the_trainers_weights_and_version(engine, weights, generate_all) -> None:
    before = (await generate_all(engine, [([7, 8], Sampling(max_tokens=4), 1)]))[0]
    noise = torch.manual_seed(0)
    changed = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise) for name, tensor in weights.items()}
    sync = WeightSync(engine, InProcess(Weights(changed)))
    result = sync.push(3)
    assert result.bytes == sum(tensor.numel() * 4 for tensor in changed.values())
    after = (await generate_all(engine, [([7, 8], Sampling(max_tokens=4), 1)]))[0]
    assert set(after.versions) == {3}
    assert after.logprobs != before.logprobs
    held = engine._model.state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in changed.items())


@pytest.mark.parametrize("fault", ["nan", "unknown", "missing", "shape"])
async def test_a_push_that_fails_changes_nothing_and_the_engine_goes_on(engine, weights, fault, generate_all) -> None:
    before = (await generate_all(engine, [([7, 8], Sampling(max_tokens=4), 1)]))[0]
    tensors = {name: tensor + 1 for name, tensor in weights.items()}
    last = list(tensors)[-1]
    if fault == "nan":
        tensors[last] = tensors[last] * math.nan
    elif fault == "unknown":
        tensors["model.other.weight"] = torch.zeros(2)
    elif fault == "missing":
        del tensors[last]
    else:
        tensors[last] = tensors[last][:1]
    with pytest.raises(SyncError):
        WeightSync(engine, InProcess(Weights(tensors))).push(1)
    assert (await generate_all(engine, [([7, 8], Sampling(max_tokens=4), 1)]))[0] == before
    assert engine.version == 0


@pytest.mark.parametrize("setting", [{"replicas": 2}, {"tensor_parallel": 2}, {"options": {"block_size": 16}}])
def test_what_only_vllm_has_is_refused(setting) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        EngineConfig(backend="torch", **setting)


async def test_I2_no_token_of_a_batch_is_sampled_after_its_weights_have_changed(engine, weights) -> None:
    """A push that comes while a batch is computed waits for it, and nothing of the batch is mixed."""
    zero = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    waiting = [
        asyncio.create_task(engine.generate([7, 8], Sampling(max_tokens=60), seed=seed, key=str(seed))) for seed in range(8)
    ]
    while not engine._computing.locked():
        await asyncio.sleep(0)
    sync = WeightSync(engine, InProcess(Weights(zero)))
    await asyncio.get_running_loop().run_in_executor(None, sync.push, 1)
    done = [await task for task in waiting]
    assert {version for each in done for version in each.versions} == {0}
    even = -math.log(len(engine._tokenizer))  # what weights of zero give every token
    assert all(abs(value - even) > 1e-4 for each in done for value in each.logprobs)
    after = await engine.generate([7, 8], Sampling(max_tokens=4), seed=1, key="k")
    assert set(after.versions) == {1}
    assert after.logprobs == pytest.approx([even] * len(after.logprobs))


async def test_a_request_of_a_key_whose_batch_still_runs_is_not_lost(engine) -> None:
    first = asyncio.create_task(engine.generate([7, 8], Sampling(max_tokens=60), seed=1, key="k"))
    while not engine._computing.locked():
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    again = await asyncio.wait_for(engine.generate([9], Sampling(max_tokens=2), seed=2, key="k"), timeout=60)
    assert len(again.token_ids) <= 2
