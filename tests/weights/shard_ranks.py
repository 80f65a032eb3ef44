"""Two trainer ranks and a vLLM engine of two workers: torchrun starts it, each rank leaves what it found in SHARED/rank_N.json.

    torchrun --nproc-per-node 2 shard_ranks.py SHARED

Layouts: two models (a tied head; a head of its own, biases, and fewer key-value heads than workers), each under several layouts
of the ranks, trained and pushed by shards, then once more by broadcast. Faults: what goes wrong in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from drmas.config.schema import EngineConfig, LossConfig, RunConfig
from drmas.errors import EngineDied, SyncError
from drmas.policy import host_platform
from drmas.policy.batch import PolicyBatch
from drmas.policy.groups import Groups, init_distributed
from drmas.policy.trainer import PolicyTrainer
from drmas.rollout.engine import Sampling
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import character_tokenizer
from drmas.runtime.weight_sync import make_sync
from drmas.types import Row
from drmas.weights import shards
from drmas.weights.sync import WeightSync

VOCAB = 131
"""Odd, so that neither two trainer ranks nor two workers share it evenly."""
BUCKET_BYTES = 50_000
GROUP_SECONDS = 200
"""An engine starts within it, while the other rank waits."""
PROMPTS = [[5, 9, 11], list(range(4, 40)), [70, 6]]
LAYOUTS = {
    "tp2": ({"tensor_parallel": 2}, [0, 1]),
    "pp2": ({"pipeline_parallel": 2}, [0, 1]),
    "dp2": ({}, [0, 1]),
    "apart": ({}, [1]),
}
"""Settings of the policy, and its ranks in the job."""

Samples = list[tuple[list[int], list[int], list[float]]]
"""(prompt, response, log-probs)"""


def write_model(folder: Path, *, tied: bool) -> Path:
    """A random model of 2 layers: Qwen3 with a tied head, or Qwen2 with biases and one key-value head."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config = (Qwen3Config if tied else Qwen2Config)(
        vocab_size=VOCAB,
        hidden_size=64 if tied else 128,  # vLLM's CPU attention takes heads of 32 and more
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2 if tied else 1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **({"head_dim": 32} if tied else {}),
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases that aren't zero, norms that aren't one
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


class Ranks:
    """This rank; `engine` is rank 0's. Every method is called on both ranks."""

    def __init__(self, shared: Path, *, tied: bool) -> None:
        self.rank, self.groups = dist.get_rank(), Groups(timeout_seconds=GROUP_SECONDS)
        self.folder, self.timeout_seconds = shared / ("tied" if tied else "untied"), 30
        self.engine: VllmEngine | None = None
        self.version = 0
        if self.rank == 0:
            config = EngineConfig(
                tensor_parallel=2, max_model_tokens=256, kv_cache_bytes=16 * 2**20, threads=1, request_timeout_seconds=60
            )
            write_model(self.folder, tied=tied)
            path = {"model_path": self.folder, "log_dir": shared}
            self.engine = VllmEngine(self.folder.name, config, seed=0, deterministic=True, **path)
            self.engine.start()
        dist.barrier()

    def set_up(self, layout: str) -> tuple[PolicyTrainer | None, Callable[[str], WeightSync]]:
        """The trainer, where this rank holds it, and what makes its sync of a transport."""
        settings, ranks = LAYOUTS[layout]

        def config(transport: str) -> RunConfig:
            how = {"transport": transport, "bucket_bytes": BUCKET_BYTES, "timeout_seconds": self.timeout_seconds}
            policy = {"model": str(self.folder), "lr": 1e-2, "engine": {"tensor_parallel": 2}, "sync": how, **settings}
            return RunConfig(policies={"main": policy}, team={"name": "solver-verifier"}, data={"type": "sums"})

        def sync(transport: str) -> WeightSync:
            place = {"groups": self.groups, "ranks": ranks, "folder": self.folder}
            return make_sync(config(transport), "main", trainer, self.engine, **place)

        policy = config("auto").policies["main"]
        groups = self.groups.layout(tp=policy.tensor_parallel, pp=policy.pipeline_parallel, ranks=ranks)
        arguments = {"model_path": self.folder, "seed": 3, "total_steps": 10, "agents": ["solver"], "loss": LossConfig()}
        trainer = groups and PolicyTrainer("main", policy, layout=groups, **arguments)
        return trainer, sync

    def samples(self) -> Samples:
        """Responses to PROMPTS, the same as long as the weights are."""

        async def run() -> Samples:
            calls = [
                asyncio.ensure_future(self.engine.generate(prompt, Sampling(16), seed=i, key=f"{i}"))
                for i, prompt in enumerate(PROMPTS)
            ]
            await asyncio.sleep(0)
            while not all(call.done() for call in calls):
                await self.engine.advance()
            done = [await call for call in calls]
            return [(p, list(d.token_ids), list(d.logprobs)) for p, d in zip(PROMPTS, done, strict=True)]

        return self.told(asyncio.run(run()) if self.rank == 0 else None)

    def told(self, word: Any, *, by: int = 0) -> Any:
        words = [word]
        dist.broadcast_object_list(words, src=by)
        return words[0]

    def train(self, trainer: PolicyTrainer | None, samples: Samples) -> None:
        if trainer is not None:
            rows = rows_of(samples, trainer.version)
            ones = [1.0] * len(rows)
            trainer.update(PolicyBatch(rows, advantages=[1.0, -1.0, 0.5], token_weights=[0.02] * 3, temperatures=ones))

    def gap(self, trainer: PolicyTrainer | None, samples: Samples) -> float:
        """The largest difference between the engine's log-probs and the trainer's."""
        found = None
        if trainer is not None:
            rows = rows_of(samples, trainer.version)
            pairs = zip(trainer.logprobs(rows, [1.0] * len(rows)), rows, strict=True)
            found = max(abs(a - b) for own, row in pairs for a, b in zip(own, row.logprobs, strict=True))
        return self.told(found, by=1)

    def push(self, sync: WeightSync) -> int:
        """Bytes that this rank sent."""
        self.version += 1
        return sync.push(self.version).bytes

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def rows_of(samples: Samples, version: int) -> list[Row]:
    about = {"task": "t", "agent": "solver", "policy": "main", "turn": 0, "reward": 1.0}
    return [
        Row(
            **about,
            episode=f"e{i}",
            prompt_ids=prompt,
            response_ids=response,
            logprobs=logprobs,
            versions=[version] * len(response),
        )
        for i, (prompt, response, logprobs) in enumerate(samples)
    ]


def one_layout(ranks: Ranks, layout: str) -> dict[str, Any]:
    """Gaps before and after each push, bytes sent, and whether a broadcast of the same weights changes a bit."""
    trainer, make = ranks.set_up(layout)
    sync = make("shards")
    said: dict[str, Any] = {"gaps": [], "before": [], "bytes": []}
    for staged in (False, False, True):
        ranks.train(trainer, ranks.samples())
        if staged:
            sync.stage(ranks.version + 1)
        said["before"].append(ranks.gap(trainer, ranks.samples()))  # the engine has the older weights
        said["bytes"].append(ranks.push(sync))
        samples = ranks.samples()
        said["gaps"].append(ranks.gap(trainer, samples))
    sync.close()
    broadcast = make("broadcast")
    said["broadcast bytes"] = ranks.push(broadcast)
    said["same bits"] = ranks.samples() == samples
    broadcast.close()
    said["version"] = ranks.engine.version == ranks.version if ranks.engine else None
    return said


Hook = Callable[[int, torch.Tensor], None]


@contextlib.contextmanager
def packing(hook: Hook | None) -> Iterator[None]:
    """`hook` gets the number and the buffer of each message that this rank has packed."""
    pack, count = shards.pack, iter(range(1, 1000))

    def hooked(*arguments: Any) -> torch.Tensor:
        buffer = pack(*arguments)
        hook(next(count), buffer)
        return buffer

    shards.pack = hooked if hook else pack
    try:
        yield
    finally:
        shards.pack = pack


class Faults:
    """Pushes that fail, and what they leave behind."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.found = ranks, {}
        self.trainer, make = ranks.set_up("tp2")
        self.sync = make("shards")

    def tried(self, what: str, hook: Hook | None = None, *, by: int = 1) -> None:
        """A push of new weights, with `hook` on one rank. Then: the error, its time, whether the engine goes on as before."""
        before = self.ranks.samples()
        self.ranks.train(self.trainer, before)
        started, error = time.monotonic(), ""
        try:
            with packing(hook if self.ranks.rank == by else None):
                self.ranks.push(self.sync)
        except (SyncError, EngineDied) as raised:
            error = f"{type(raised).__name__}: {raised}"
        self.found[what] = {"error": error, "seconds": time.monotonic() - started}
        if self.ranks.told(self.ranks.engine and self.ranks.engine.alive):
            after = self.ranks.samples()
            self.found[what] |= {"as before": after == before, "gap": self.ranks.gap(self.trainer, after)}

    def spoil(self, number: int, buffer: torch.Tensor) -> None:
        if number == 3:
            buffer[-1] ^= 1

    def fall_silent(self, number: int, _: torch.Tensor) -> None:
        if number == 3:
            time.sleep(self.ranks.timeout_seconds + 8)

    def kill_the_engine(self, number: int, _: torch.Tensor) -> None:
        if number == 3:
            os.kill(self.ranks.engine.pid, signal.SIGKILL)


def faults(ranks: Ranks) -> Faults:
    test = Faults(ranks)
    test.tried("first")
    weight = test.trainer.model.decoder.layers[1].mlp.linear_fc2.weight.data
    kept = weight[3, 5].clone()
    weight[3, 5] = torch.nan if ranks.rank == 1 else kept
    before, error = ranks.samples(), ""
    try:
        ranks.push(test.sync)
    except SyncError as raised:
        error = str(raised)
    weight[3, 5] = kept
    test.found["NaN"] = {"error": error, "as before": ranks.samples() == before}
    test.tried("corrupt", test.spoil)
    test.tried("after corrupt")
    test.tried("silent", test.fall_silent)
    test.tried("killed engine", test.kill_the_engine, by=0)
    if ranks.engine is not None:
        ranks.engine.start()
    dist.barrier()
    test.tried("after killed engine")
    return test


def last_words(ranks: Ranks, test: Faults) -> None:
    """Rank 1 dies while it packs; rank 0 says what it sees."""
    before, started, error = ranks.samples(), time.monotonic(), ""
    try:
        with packing((lambda *_: os._exit(0)) if ranks.rank == 1 else None):
            ranks.push(test.sync)
    except SyncError as raised:
        error = str(raised)
    seconds = time.monotonic() - started
    ranks.told = lambda word, by=0: word  # nobody is left to hear
    test.found["dead rank"] = {"error": error, "seconds": seconds, "as before": ranks.samples() == before}
    ranks.close()


def main(shared: Path) -> None:
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=GROUP_SECONDS)
    found: dict[str, Any] = {}
    for tied in (False, True):
        ranks = Ranks(shared, tied=tied)
        for layout in LAYOUTS:
            found[f"{ranks.folder.name} {layout}"] = one_layout(ranks, layout)
        if not tied:
            ranks.close()
    ranks.timeout_seconds = 4
    test = faults(ranks)
    found |= test.found
    place = shared / f"rank_{ranks.rank}.json"
    place.write_text(json.dumps(found))
    last_words(ranks, test)
    place.write_text(json.dumps(found | test.found))
    os._exit(0)  # the other rank is gone, so that nothing is left together


if __name__ == "__main__":
    main(Path(sys.argv[1]))
