"""What a machine does, measured with the real parts: a vLLM engine, a `PolicyTrainer`, and a push of weights between them.

No run is started and nothing is fitted here: the result is a list of timed pieces of work, which `calibration` turns into a
cluster description. The engine steps only when it is told to, as in deterministic runs, so that every piece is known: how many
steps, with how many sequences and how much context. Each piece is done several times, and the best time counts. Called by
`calibration`.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from drmas.agents.team import load_team
from drmas.config.schema import LossConfig, RunConfig
from drmas.core.batching import token_weights
from drmas.core.flops import causal_pairs, flops, forward_cost
from drmas.core.peaks import data_sheet
from drmas.planning.job import element_bytes, parameter_count
from drmas.policy import host_platform
from drmas.policy.architecture import read_architecture
from drmas.policy.batch import PolicyBatch
from drmas.policy.groups import Groups, destroy, init_distributed
from drmas.policy.peak import measured_gemm
from drmas.policy.trainer import PolicyTrainer
from drmas.rollout.engine import Completion, Sampling
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import TINY, resolve_model
from drmas.runtime.weight_sync import make_sync
from drmas.types import Row

Note = Callable[[str], None]

BATCHES = ((1, 48, 12), (2, 48, 14), (5, 48, 14), (13, 48, 14), (32, 48, 12), (4, 320, 8))
"""(sequences, prompt tokens, response tokens) of a piece of engine work. The first of several sequences writes only two tokens,
so that there are steps without a prompt."""
UPDATES = ((8, 64, 24), (8, 128, 32), (24, 64, 16))
"""(rows, tokens of a row, of them response) of an update."""
MICROBATCH_TOKENS = 1024
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class EngineWork:
    """A stretch of engine steps with the same sequences, as timed."""

    seconds: float
    steps: int
    sequences: int
    context: float
    """Tokens in all sequences together, on the mean over the steps."""
    prompt_tokens: int = 0
    """Prefilled at its start."""
    prompt_pairs: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What an engine of one model did."""

    weight_bytes: float
    """That a step reads."""
    kv_token_bytes: float
    token_flops: float
    """Of one token, the head included."""
    prompt_token_flops: float
    """Of one token without the head."""
    pair_flops: float
    work: tuple[EngineWork, ...]


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """One update, or one pass that scores, as timed."""

    seconds: float
    flops: float
    microbatches: int
    optimiser_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured."""

    model: str
    dtype: str
    gpu: bool
    gpus: int
    """1 where there are none: the host."""
    device: str
    cores: int
    product: float
    """FLOP/s of a large product."""
    memory_bytes: float
    memory_bytes_per_second: float
    host_memory_bytes: float
    engines: tuple[EngineRun, ...]
    updates: tuple[UpdateWork, ...]
    scores: tuple[UpdateWork, ...]
    sync_seconds: float
    sync_bytes: float
    seconds: float
    """That measuring took."""


def measure(model: str, *, dtype: str = "float32", rounds: int = ROUNDS, note: Note = lambda line: None) -> Machine:
    """Measure this machine with `model`, and its engine's overheads with a tiny one. Takes minutes; nothing else should run.

    `note` hears what is being done. ModelError, EngineStartError: the model can't be had, or served.
    """
    started = time.perf_counter()
    host_platform.set_threads(len(os.sched_getaffinity(0)))
    init_distributed()
    try:
        with tempfile.TemporaryDirectory(prefix="drmas-calibration-") as scratch:
            return _measure(model, dtype, rounds, note, Path(scratch), started)
    finally:
        destroy()


def _measure(model: str, dtype: str, rounds: int, note: Note, scratch: Path, started: float) -> Machine:
    note("memory and products")
    gpu = not host_platform.is_host()
    device = torch.cuda.get_device_name() if gpu else _processor()
    before = _peaks(dtype, device, gpu)
    engines = []
    if model != TINY:
        note(f"engine steps of {TINY}")
        tiny = _config(TINY, dtype)
        with _engine(tiny, resolve_model(TINY), scratch) as engine:
            engines.append(_engine_run(tiny, resolve_model(TINY), engine, rounds))
    config, folder = _config(model, dtype), resolve_model(model)
    with _engine(config, folder, scratch) as engine:
        note(f"engine steps of {model}")
        engines.append(_engine_run(config, folder, engine, rounds))
        note(f"updates of {model}")
        trainer = _trainer(config, folder)
        updates, scores = _updates(config, trainer, rounds)
        note("weight sync")
        seconds, size = _sync(config, trainer, engine, scratch, rounds)
    product, bandwidth = map(max, before, _peaks(dtype, device, gpu))
    return Machine(
        model=model,
        dtype=dtype,
        gpu=gpu,
        gpus=torch.cuda.device_count() if gpu else 1,
        device=device,
        cores=len(os.sched_getaffinity(0)),
        product=product,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if gpu else _host_memory(),
        memory_bytes_per_second=bandwidth,
        host_memory_bytes=_host_memory(),
        engines=tuple(engines),
        updates=updates,
        scores=scores,
        sync_seconds=seconds,
        sync_bytes=size,
        seconds=time.perf_counter() - started,
    )


def _config(model: str, dtype: str) -> RunConfig:
    """A run of one agent with room for every batch."""
    most = max(count for count, _, _ in BATCHES)
    longest = max(prompt + response for _, prompt, response in BATCHES)
    engine = {"dtype": dtype, "gpus": "shared", "max_concurrent": most, "max_model_tokens": longest, "kv_cache_bytes": 2**29}
    policy = {"model": model, "dtype": dtype, "engine": engine, "tokens_per_microbatch": MICROBATCH_TOKENS}
    return RunConfig.model_validate(
        {"policies": {"main": policy}, "team": {"name": "single"}, "data": {"type": "sums"}, "loss": {"kl": None}}
    )


@contextmanager
def _engine(config: RunConfig, folder: Path, scratch: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine("main", config.policies["main"].engine, model_path=folder, log_dir=scratch, seed=0, deterministic=True)
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


def _engine_run(config: RunConfig, folder: Path, engine: VllmEngine, rounds: int) -> EngineRun:
    """The pieces of every batch; prompts are random and all different, so that nothing is cached."""
    shape, size = read_architecture(folder).shape, element_bytes(config.policies["main"].engine.dtype)
    cost, parameters = forward_cost(shape), parameter_count(shape)
    work: list[EngineWork] = []
    asyncio.run(_batch(engine, shape.vocab, 4, 32, 4, seed=-1))  # the first steps make buffers
    for seed, (count, prompt, response) in enumerate(BATCHES):
        repeats = []
        for _ in range(rounds):
            engine.pause()
            engine.resume()
            repeats.append(asyncio.run(_batch(engine, shape.vocab, count, prompt, response, seed=seed)))
        work += [min(same, key=lambda one: one.seconds) for same in zip(*repeats, strict=True)]
    return EngineRun(
        weight_bytes=size * (parameters - (0 if shape.tied else shape.vocab * shape.hidden)),
        kv_token_bytes=2.0 * shape.layers * shape.kv_heads * shape.head_dim * size,
        token_flops=cost.token + cost.response,
        prompt_token_flops=cost.token,
        pair_flops=cost.pair,
        work=tuple(work),
    )


async def _batch(engine: VllmEngine, vocab: int, count: int, prompt: int, response: int, *, seed: int) -> list[EngineWork]:
    """Sequences that begin together, from one end of a sequence to the next. The same seed gives the same pieces."""
    draw = random.Random(seed)
    calls = [
        asyncio.ensure_future(
            engine.generate(
                [draw.randrange(vocab // 2, vocab) for _ in range(prompt)],
                Sampling(max_tokens=response if index or count == 1 else 2),
                seed=draw.randrange(2**31),
                key=f"{index:05d}",
            )
        )
        for index in range(count)
    ]
    await asyncio.sleep(0)
    found: list[EngineWork] = []
    made, running = 0, count
    while running:
        started = time.perf_counter()
        done = await engine.advance()
        seconds = time.perf_counter() - started
        answers: Sequence[Completion] = await asyncio.gather(*(calls[int(key)] for key in done))
        steps = len(answers[0].token_ids) - made
        first = not found
        found.append(
            EngineWork(
                seconds=seconds,
                steps=steps,
                sequences=running,
                context=running * (prompt + made + (steps - 1) / 2),
                prompt_tokens=count * prompt if first else 0,
                prompt_pairs=count * prompt**2 / 2 if first else 0.0,
            )
        )
        made, running = made + steps, running - len(done)
    return found


def _trainer(config: RunConfig, folder: Path) -> PolicyTrainer:
    return PolicyTrainer(
        "main",
        config.policies["main"],
        model_path=folder,
        layout=Groups().layout(),
        seed=0,
        total_steps=100,
        agents=list(load_team(config.team).agents),
        loss=LossConfig(kl=None),
    )


def _updates(config: RunConfig, trainer: PolicyTrainer, rounds: int) -> tuple[tuple[UpdateWork, ...], tuple[UpdateWork, ...]]:
    shape = trainer.architecture.shape
    optimiser = 34.0 * parameter_count(shape)
    updates, scores = [], []
    agent = trainer.agents[0]
    for seed, (count, tokens, response) in enumerate(UPDATES):
        rows = _rows(agent, shape.vocab, count, tokens, response, seed)
        batch = PolicyBatch(rows, [(-1.0) ** i for i in range(count)], token_weights(rows, "token"), [1.0] * count)
        microbatches = -(-count * (tokens - 1) // MICROBATCH_TOKENS)
        best, work = float("inf"), 0.0
        for _ in range(rounds):
            result = trainer.update(batch)
            best, work = min(best, result.seconds), result.metrics["flops"]
        updates.append(UpdateWork(best, work, microbatches, optimiser))
        best = min(_timed(lambda rows=rows: trainer.logprobs(rows, [1.0] * len(rows))) for _ in range(rounds))
        lengths = [tokens - 1] * count
        work = flops(forward_cost(shape), tokens=sum(lengths), pairs=causal_pairs(lengths), responses=count * response)
        scores.append(UpdateWork(best, float(work), microbatches))
    return tuple(updates), tuple(scores)


def _rows(agent: str, vocab: int, count: int, tokens: int, response: int, seed: int) -> list[Row]:
    draw = random.Random(seed)
    found = []
    for index in range(count):
        ids = [draw.randrange(vocab // 2, vocab) for _ in range(tokens)]
        told, said = ids[:-response], ids[-response:]
        found.append(
            Row(f"t{index}", f"t{index}#0", agent, "main", 0, told, said, [-1.0] * response, [0] * response, float(index % 2))
        )
    return found


def _sync(config: RunConfig, trainer: PolicyTrainer, engine: VllmEngine, scratch: Path, rounds: int) -> tuple[float, float]:
    """(seconds, bytes) of a push after the first one, which connects."""
    sync = make_sync(config, "main", trainer, engine, groups=Groups(), ranks=[0], folder=scratch)
    try:
        sync.push(1)
        pushes = [sync.push(version) for version in range(2, 2 + rounds)]
    finally:
        sync.close()
    return min(push.seconds for push in pushes), float(pushes[0].bytes)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _peaks(dtype: str, device: str, gpu: bool) -> tuple[float, float]:
    """FLOP/s of a large product, bytes per second of memory; of a GPU that is known, its data sheet's."""
    sheet = data_sheet(device) if gpu else None
    if sheet is not None:
        return getattr(sheet, dtype), sheet.memory_bytes_per_second
    measured_gemm.cache_clear()
    return measured_gemm(dtype).flops_per_second, _bandwidth(host_platform.device())


def _bandwidth(device: torch.device) -> float:
    """Bytes per second that summing 256 MiB reads, the best of a few."""
    values = torch.ones(2**26, dtype=torch.float32, device=device)
    return values.numel() * 4 / min(_timed(lambda: values.sum().item()) for _ in range(5))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'a CPU'}"


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
