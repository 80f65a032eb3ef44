"""What the loop keeps of its parts' speed, in one run: `python bench/loop.py [--model SPEC] [--dtype DTYPE] [--json PATH]`.

Rollout: one agent on N tasks through the collector (deterministic, as runs are), beside the same prompts and seeds put into an
engine as one flat batch. Training: `PolicyTrainer.update` on 4 rows of 128 tokens, all response but the first, beside plain
transformers with torch's fused AdamW. The two sides of a pair alternate and the best of each counts: compare ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.suite.record import Ratio, Result, Table, about, add_json
from drmas.agents.team import load_team
from drmas.config.schema import EngineConfig, LossConfig, PolicyConfig, RolloutConfig
from drmas.config.tasks import RewardConfig
from drmas.core.seeds import sample_seed
from drmas.envs.rewards import make_reward
from drmas.policy.groups import Groups, init_distributed
from drmas.policy.host_platform import set_threads
from drmas.policy.trainer import PolicyBatch, PolicyTrainer
from drmas.rollout.collector import Collector
from drmas.rollout.engine import Sampling
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import PACKAGED, resolve_model
from drmas.types import Row, Task

RESPONSE_TOKENS, ROWS, ROW_TOKENS = 48, 4, 128


def rollout(folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Generated tokens per second: through the collector, and as one flat batch."""
    config = EngineConfig(dtype=args.dtype, max_model_tokens=256, max_concurrent=args.tasks, kv_cache_bytes=2**28)
    tasks = [Task(id=f"t{i}", question=" ".join(str(i + j) for j in range(12)), truth="") for i in range(args.tasks)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    section = {"name": "single", "solver": {"prompt": "{question}", "parser": "text", "max_tokens": RESPONSE_TOKENS}}
    reward = make_reward(RewardConfig(type="exact"))
    with tempfile.TemporaryDirectory() as logs:
        engines = {
            name: VllmEngine(name, config, model_path=folder, log_dir=Path(logs), seed=0, deterministic=name == "loop")
            for name in ("loop", "flat")
        }
        try:
            for engine in engines.values():
                engine.start()
            options = RolloutConfig(group_size=1)
            collector = Collector(load_team(section), {"main": engines["loop"]}, {"main": tokenizer}, reward, options, seed=0)
            prompts = [turn.prompt_ids for episode in collector.collect(tasks, step=0) for turn in episode.turns]

            async def flat_batch(step: int) -> int:
                sampling = Sampling(max_tokens=RESPONSE_TOKENS)
                seeds = [sample_seed(0, step, task.id, 0, "solver", 0) for task in tasks]
                calls = [
                    engines["flat"].generate(prompt, sampling, seed=seed, key=str(i))
                    for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
                ]
                return sum(len(completion.token_ids) for completion in await asyncio.gather(*calls))

            def through_loop(step: int) -> int:
                return sum(len(turn.response_ids) for episode in collector.collect(tasks, step=step) for turn in episode.turns)

            return best_rates(through_loop, lambda step: asyncio.run(flat_batch(step)), args.repeats)
        finally:
            for engine in engines.values():
                engine.close()


def training(folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Trained tokens per second: ours, and plain transformers."""
    init_distributed()
    trainer = PolicyTrainer(
        "main",
        PolicyConfig(model=str(folder), dtype=args.dtype),
        model_path=folder,
        layout=Groups().layout(),
        seed=0,
        total_steps=100,
        agents=["solver"],
        loss=LossConfig(),
    )
    ids = torch.randint(trainer.architecture.vocab, (ROWS, ROW_TOKENS), generator=torch.Generator().manual_seed(0))
    zeros = [0] * (ROW_TOKENS - 1)
    rows = [
        Row(f"t{i}", f"t{i}#0", "solver", "main", 0, line[:1], line[1:], [0.0] * len(zeros), zeros, 1.0)
        for i, line in enumerate(ids.tolist())
    ]
    share = 1.0 / (ROWS * len(zeros))
    batch = PolicyBatch(rows, [1.0] * ROWS, [share] * ROWS, [1.0] * ROWS, on_policy=True)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6, fused=True)

    def ours(_: int) -> int:
        trainer.update(batch)
        return ids.numel()

    def theirs(_: int) -> int:
        logits = plain(ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return ids.numel()

    return best_rates(ours, theirs, args.repeats)


def best_rates(first: Callable[[int], int], second: Callable[[int], int], repeats: int) -> tuple[float, float]:
    """The best tokens per second of each, alternating, after one unmeasured round."""
    best = [0.0, 0.0]
    for step in range(repeats + 1):
        for side, run in enumerate((first, second)):
            start = time.perf_counter()
            tokens = run(step)
            if step:
                best[side] = max(best[side], tokens / (time.perf_counter() - start))
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PACKAGED)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    add_json(parser)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    set_threads(cores)
    folder = resolve_model(args.model)
    title, rows, ratios = f"{args.model}, {args.dtype}, {cores} cores, {args.tasks} tasks", [], []
    print(title)
    for name, other, measured, why in (
        ("rollout", "flat batch in the same engine", rollout, "two engines decode on the same cores in turn"),
        ("training", "transformers, same rows", training, "steps of seconds, in turn; products of the same library"),
    ):
        ours, theirs = measured(folder, args)
        print(f"{name:9} {ours:8.0f} tok/s   {other}: {theirs:8.0f} tok/s   ratio {ours / theirs:.2f}", flush=True)
        rows.append([name, ours, other, theirs, ours / theirs])
        ratios.append(Ratio(name=f"{name} by {other}", value=ours / theirs, better="higher", tolerance=0.2, why=why))
    if args.json:
        columns = ["part", "tokens/s", "beside it", "its tokens/s", "ratio"]
        tables = [Table(title=title, columns=columns, rows=rows)]
        Result(benchmark="loop", about=about(cores), tables=tables, ratios=ratios).write(args.json)


if __name__ == "__main__":
    main()
