"""One update step beside plain transformers, in one run: `python bench/update_step.py [--recipe NAME] [--where] [--json PATH]`.

Every side makes the same update of the recipe's first policy (forward, backward, clipping, AdamW) on the batch of one step of
the recipe: its own tasks, prompts and team, answered by a script. Rows, weights and token budget per microbatch are the same:

    drmas              PolicyTrainer.update without gradient norms per agent, which the others don't measure either
    drmas, unshared    the same without prefix sharing
    drmas, as run      as the recipe has it, gradient norms per agent included
    transformers       rows packed end to end with their positions, the loss from whole logits, torch's fused AdamW
    transformers, kept the same, with logits of the response tokens only (`logits_to_keep`)

Each side is a process of its own; they take turns, step by step, and the best step of each counts: compare ratios, not
seconds. Peak memory is the process's high-water mark (VmHWM) over the measured steps, weights and optimiser included. tokens/s
counts the tokens that a step reads, prompts too, however they were computed. `--where` prints what a step's time goes to, by
operator.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages

import torch

from bench.suite.record import Ratio, Result, Table, about, add_json
from drmas.agents.team import load_team
from drmas.config.load import load
from drmas.config.schema import PolicyConfig, RolloutConfig, RunConfig
from drmas.config.tasks import RewardConfig
from drmas.core.batching import plan_microbatches, token_weights
from drmas.envs.rewards import make_reward
from drmas.envs.source import TaskSource
from drmas.policy.host_platform import set_threads
from drmas.rollout.collector import Collector
from drmas.rollout.scripted import ScriptedEngine
from drmas.runtime.models import resolve_model
from drmas.types import Row, rows_of

Step = Callable[[], float]


def rows_of_a_step(config: RunConfig, name: str, folder: Path) -> list[Row]:
    """The policy's rows of one step of the recipe. Answers are a sentence of the lengths that the model's own had."""
    from transformers import AutoTokenizer

    team, tokenizer = load_team(config.team), AutoTokenizer.from_pretrained(folder)

    def answer(prompt: str, key: str) -> str:
        number = sum(map(ord, key)) % 90
        verdict = ("yes", "no")[number % 2]
        return verdict if "yes or no" in prompt else f"The sum of the two numbers that you gave is {number}, I think."

    with ExitStack() as stack:
        reward = make_reward(RewardConfig(type="exact"))
        stack.callback(reward.close)
        rollout = RolloutConfig(**config.rollout.model_dump())
        engines = {policy: ScriptedEngine(tokenizer, answer) for policy in config.policies}
        collector = Collector(team, engines, dict.fromkeys(engines, tokenizer), reward, rollout, seed=config.seed)
        tasks = TaskSource(config.data, seed=config.seed).take(config.rollout.tasks_per_step)
        rows = rows_of(collector.collect(tasks, step=1))
    return [row for row in rows if row.policy == name and row.status == "ok"]


def ours(config: RunConfig, name: str, folder: Path, **changes: Any) -> Step:
    from drmas.policy.batch import PolicyBatch
    from drmas.policy.groups import Groups, init_distributed
    from drmas.policy.trainer import PolicyTrainer

    init_distributed()
    policy = config.policies[name].model_copy(update=changes)
    rows = rows_of_a_step(config, name, folder)
    trainer = PolicyTrainer(
        name,
        policy,
        model_path=folder,
        layout=Groups().layout(),
        seed=0,
        total_steps=1000,
        agents=list(dict.fromkeys(row.agent for row in rows)),
        loss=config.loss,
    )
    weights = token_weights(rows, "token")
    batch = PolicyBatch(rows, advantages_of(rows), weights, [1.0] * len(rows), on_policy=True)
    return lambda: trainer.update(batch).metrics["loss"]


def plain(config: RunConfig, name: str, folder: Path, *, keep: bool) -> Step:
    from transformers import AutoModelForCausalLM

    policy = config.policies[name]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, policy.dtype), attn_implementation="sdpa")
    betas = (policy.adam_beta1, policy.adam_beta2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=policy.lr, betas=betas, weight_decay=policy.weight_decay, fused=True)
    rows = rows_of_a_step(config, name, folder)
    weights, advantages = token_weights(rows, "token"), advantages_of(rows)
    microbatches = [packed(rows, share, weights, advantages) for share in plan(rows, policy)]

    def step() -> float:
        total = 0.0
        for ids, positions, source, target, factor in microbatches:
            if keep:
                logits = model(ids, position_ids=positions, logits_to_keep=source, use_cache=False).logits[0]
            else:
                logits = model(ids, position_ids=positions, use_cache=False).logits[0, source]
            logprob = -torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")
            ratio = (logprob - logprob.detach()).exp()
            clipped = ratio.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
            loss = torch.maximum(-factor * ratio, -factor * clipped).sum()
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), policy.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def advantages_of(rows: list[Row]) -> list[float]:
    return [1.0 if i % 2 else -0.5 for i in range(len(rows))]


def plan(rows: list[Row], policy: PolicyConfig) -> list[list[int]]:
    from drmas.core.batching import TokenCost

    budget = policy.tokens_per_microbatch
    return plan_microbatches(rows, budget=budget, num_ranks=1, cost=TokenCost(1, 0, 0), share_prefixes=False)[0]


def packed(rows: list[Row], share: list[int], weights: list[float], advantages: list[float]) -> tuple[torch.Tensor, ...]:
    ids, positions, source, target, factor = [], [], [], [], []
    for i in share:
        row = rows[i]
        own = [*row.prompt_ids, *row.response_ids[:-1]]
        source += range(len(ids) + len(row.prompt_ids) - 1, len(ids) + len(own))
        ids += own
        positions += range(len(own))
        target += row.response_ids
        factor += [weights[i] * advantages[i]] * len(row.response_ids)
    return (
        torch.tensor([ids]),
        torch.tensor([positions]),
        torch.tensor(source),
        torch.tensor(target),
        torch.tensor(factor),
    )


MAKERS = {
    "drmas": (ours, {"agent_grad_norm_every": 0}),
    "drmas, unshared": (ours, {"agent_grad_norm_every": 0, "prefix_sharing": False}),
    "drmas, as run": (ours, {}),
    "transformers": (plain, {"keep": False}),
    "transformers, kept": (plain, {"keep": True}),
}


def child(side: str, config: RunConfig, threads: int, where: bool) -> None:
    """Make a step, then one for every line that comes in; answer with seconds, the loss and the peak so far."""
    set_threads(threads)
    name = next(iter(config.policies))
    folder = resolve_model(config.policies[name].model)
    make, options = MAKERS[side]
    step = make(config, name, folder, **options)
    step()
    Path("/proc/self/clear_refs").write_text("5")
    rows = rows_of_a_step(config, name, folder)
    print(json.dumps({"rows": len(rows), "tokens": sum(row.num_tokens for row in rows)}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": loss, "peak": high_water_mark()}), flush=True)
    if where:
        print(json.dumps(operators(step)), flush=True)


def high_water_mark() -> int:
    """Bytes: the most that this process held since it was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def operators(step: Step) -> list[tuple[str, float, int]]:
    """(operator, its own milliseconds, calls) of one step, the costly ones first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return [(event.key, event.self_cpu_time_total / 1e3, event.count) for event in events]


def spawn(side: str, args: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, __file__, "--recipe", args.recipe, "--threads", str(args.threads), "--side", side]
    command += ["--where"] * args.where + args.overrides
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Per side: tokens, best seconds, loss of the first measured step, peak bytes, operators."""
    found: dict[str, Any] = {}
    sides = {side: spawn(side, args) for side in MAKERS if side in (args.sides or MAKERS)}
    try:
        for side, process in sides.items():
            found[side] = read(process) | {"seconds": float("inf")}
        for repeat in range(args.repeats):
            for side, process in sides.items():
                process.stdin.write("step\n")
                process.stdin.flush()
                message = read(process)
                found[side]["seconds"] = min(found[side]["seconds"], message["seconds"])
                found[side]["peak"] = message["peak"]
                if repeat == 0:
                    found[side]["loss"] = message["loss"]
        for side, process in sides.items():
            process.stdin.close()
            if args.where:
                found[side]["operators"] = read(process)
    finally:
        for process in sides.values():
            process.kill()
    return found


def read(process: subprocess.Popen) -> Any:
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a side ended early: {' '.join(process.args)}")
    return json.loads(line)


def check_agreement(found: dict[str, Any]) -> None:
    """All sides do the same work, so they lose the same, within what two updates' rounding makes of it."""
    losses = {side: values["loss"] for side, values in found.items()}
    first = next(iter(losses.values()))
    if any(abs(loss - first) > 0.01 * abs(first) + 1e-4 for loss in losses.values()):
        raise SystemExit(f"the sides don't agree about the loss: {losses}")


def lines(found: dict[str, Any]) -> list[list[str | float | None]]:
    """[side, seconds, tokens/s, ratio of the rates to transformers', peak GiB, ratio of the peaks]"""
    base = found.get("transformers")
    made = []
    for side, values in found.items():
        speed = base and base["seconds"] / values["seconds"]
        memory = base and values["peak"] / base["peak"]
        made.append([side, values["seconds"], values["tokens"] / values["seconds"], speed, values["peak"] / 2**30, memory])
    return made


def ratios(table: list[list[str | float | None]]) -> list[Ratio]:
    """Of the side "drmas" to plain transformers, where both were measured."""
    speed, memory = next(((row[3], row[5]) for row in table if row[0] == "drmas"), (None, None))
    if speed is None:
        return []
    products = "most of both sides' time is products of the same library; other work on the machine slows attention more"
    pages = "the same tensors on both sides; the allocator's rest differs by some tens of MB"
    return [
        Ratio(name="tokens/s by transformers'", value=speed, better="higher", tolerance=0.25, why=products),
        Ratio(name="peak memory by transformers'", value=memory, better="lower", tolerance=0.08, why=pages),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart", help="a packaged recipe or a file; its first policy is trained")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--where", action="store_true", help="print the costliest operators of each side's step")
    parser.add_argument("--sides", action="append", choices=MAKERS, help="measure these only; several times")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    add_json(parser)
    args, args.overrides = parser.parse_known_args()
    config = load(args.recipe, args.overrides)
    if args.side:
        child(args.side, config, args.threads, args.where)
        return
    found = measure(args)
    check_agreement(found)
    policy, batch, table = next(iter(config.policies.values())), next(iter(found.values())), lines(found)
    title = f"{args.recipe}: {policy.model}, {policy.dtype}, {batch['rows']} rows, {batch['tokens']} tokens, "
    title += f"at most {policy.tokens_per_microbatch} per microbatch"
    result = Result(
        benchmark="update_step",
        about=about(args.threads),
        tables=[Table(title=title, columns=["side", "s", "tokens/s", "x", "peak GiB", "x"], rows=table)],
        ratios=ratios(table),
    )
    print(f"{title}; {args.threads} threads, {result.about.machine}, {result.about.date}")
    for side, seconds, rate, speed, peak, memory in table:
        beside = "" if speed is None else f"   tokens/s x {speed:.2f}   peak x {memory:.2f}"
        print(f"{side:20} {seconds:7.2f} s   {rate:6.0f} tokens/s   {peak:5.2f} GiB{beside}")
    if args.json:
        result.write(args.json)
    if args.where:
        for side, values in found.items():
            total = sum(own for _, own, _ in values["operators"])
            print(f"\n{side}: where a step's time goes ({total:.0f} ms under the profiler)")
            for key, own, calls in values["operators"][:16]:
                print(f"  {own:9.1f} ms {100 * own / total:5.1f} %  {calls:6}  {key}")


if __name__ == "__main__":
    main()
