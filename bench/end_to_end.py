"""A whole step of GRPO beside TRL's GRPOTrainer: `python bench/end_to_end.py --trl-python build/trl/bin/python [--json PATH]`.

    make bench-peers          makes that environment: TRL on the torch and transformers of this one

Both sides train SmolLM2-135M-Instruct in fp32 on the same word problems, in groups of the same size, and answer with exactly as
many tokens (the model's copy here has an end token that it never says), with the same reward (word F1 with the question, which
differs within a group), learning rate, machine and threads. One agent, since TRL has no teams.

    drmas                      `drmas train`: Megatron and vLLM, the policy's and the engine's settings as in `--recipe` below
    TRL                        GRPOTrainer, generation by transformers
    TRL, continuous batching   the same with transformers' continuous batching

Sides are processes of their own and take turns, step by step. The first warms up and doesn't count; all others do, so that the
sides' seconds are those of the same tasks. A step's tokens are those it generates plus those it trains on, prompts too, however
they were computed. Memory is the whole process tree's: the highest sum of PSS of all samples over the counted steps. Compare
ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages

from bench.peers.memory import PeakMemory, cpu_seconds, high_water_marks
from bench.suite.record import Cell, Ratio, Result, Table, about, add_json, printed
from drmas.runtime.models import PACKAGED, resolve_model

UNLIKE = 0.05
"""By how much the tokens of a step may differ between sides: the prompts' templates do by a few."""
PEERS = Path(__file__).parent / "peers"
OURS, TRL = "drmas", "TRL"
SIDES = (OURS, TRL, "TRL, continuous batching")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""What the command `drmas` sets for itself; TRL has torch's own way of waiting."""
SYSTEM = (
    "You are a careful teacher of mathematics. Read the problem, name the quantities that are given, say which is asked for, "
    "and work it out in small steps, a sentence for each. Check the result before you give it, and end with the number alone. "
    "For example: A baker fills 6 trays with 14 rolls each and sells 59 of the rolls before noon. How many rolls are left? "
    "Given are 6 trays, 14 rolls on each, and 59 sold rolls; asked for are the rolls that are left. 6 times 14 is 84. "
    "84 less 59 is 25. Check: 25 and 59 is 84. 25"
)
NEVER_SAID = "<repo_name>"
"""A token of SmolLM2's vocabulary that it was pretrained with at the starts of repositories."""
SPEED_TARGET, MEMORY_TARGET = 3.0, 0.8


@dataclass
class Step:
    """What a side says of one step; `wall` and `cpu` are seconds as seen from here, those of all its processes on all cores."""

    wall: float
    cpu: float
    generated: float
    trained: float
    computed: float
    seconds: dict[str, float]
    loss: float
    grad_norm: float
    reward: float


@dataclass
class Side:
    name: str
    log: Path
    process: subprocess.Popen
    memory: PeakMemory
    steps: list[Step] = field(default_factory=list)
    high_water: int = 0

    def step(self, *, counted: bool) -> None:
        """SystemExit: the side ended."""
        if counted:
            self.memory.start()
        started, used = time.perf_counter(), cpu_seconds(self.process.pid)
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        wall, cpu = time.perf_counter() - started, cpu_seconds(self.process.pid) - used
        if counted:
            self.memory.stop()
            self.high_water = high_water_marks(self.process.pid)
        if not answer:
            raise SystemExit(f"{self.name} ended early:\n{self.log.read_text()[-4000:]}")
        if counted:
            self.steps.append(Step(wall=wall, cpu=cpu, **json.loads(answer)))

    def mean(self, value: Callable[[Step], float]) -> float:
        """Over the steps that count."""
        return sum(map(value, self.steps)) / len(self.steps)

    @property
    def rate(self) -> float:
        """Tokens per second over all of them."""
        return self.mean(lambda step: step.generated + step.trained) / self.mean(lambda step: step.wall)


def write_tasks(path: Path, count: int) -> None:
    """Word problems in the manner of GSM8K, with the question itself as what the reward compares with."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=0)
    lines = ({"id": f"problem-{i}", "prompt": each["question"], "answer": each["question"]} for i, each in enumerate(problems))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_endless(folder: Path) -> None:
    """The model with another end token, so that every response has all the tokens that it may have."""
    shutil.copytree(resolve_model(PACKAGED), folder)
    number = json.loads((folder / "tokenizer.json").read_text())
    token = next(each["id"] for each in number["added_tokens"] if each["content"] == NEVER_SAID)
    for name, change in (
        ("config.json", {"eos_token_id": token}),
        ("generation_config.json", {"eos_token_id": token}),
        ("tokenizer_config.json", {"eos_token": NEVER_SAID}),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change, indent=2))


def recipe(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What drmas trains."""
    return {
        "name": "end-to-end",
        "output": str(folder / "runs"),
        "policies": {
            "main": {
                "model": str(folder / "model"),
                "lr": 1e-5,
                "tokens_per_microbatch": args.microbatch,
                "engine": {
                    "max_model_tokens": 512,
                    "max_concurrent": args.tasks * args.group,
                    "kv_cache_bytes": 256 * 2**20,
                    "threads": args.threads,
                },
            }
        },
        "team": {
            "name": "single",
            "solver": {"system": SYSTEM, "prompt": "{question}", "parser": "text", "max_tokens": args.tokens},
        },
        "data": {"type": "jsonl", "path": str(folder / "tasks.jsonl")},
        "reward": {"type": "f1"},
        "rollout": {"tasks_per_step": args.tasks, "group_size": args.group},
        "advantage": {"preset": "grpo"},
        "train": {"steps": args.steps + 2, "threads": args.threads},
    }


def trl_settings(args: argparse.Namespace, folder: Path, side: str) -> dict[str, Any]:
    """What TRL trains: fp32 and no recomputation, as drmas does; a step's episodes in batches of `--trl-batch`."""
    episodes = args.tasks * args.group
    config = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
        "per_device_train_batch_size": args.trl_batch,
        "gradient_accumulation_steps": episodes // args.trl_batch,
        "num_generations": args.group,
        "max_completion_length": args.tokens,
        "max_steps": args.steps + 2,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "beta": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "shuffle_dataset": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    if side == "TRL, continuous batching":
        blocks = {"num_blocks": 2 * episodes, "max_batch_tokens": 2048}  # of 256 tokens; by itself it takes most of the memory
        config |= {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": blocks}
    config |= dict(args.trl)
    common = {"model": str(folder / "model"), "tasks": str(folder / "tasks.jsonl"), "system": SYSTEM}
    return common | {"threads": args.threads, "episodes": episodes, "config": config}


def start(name: str, args: argparse.Namespace, folder: Path) -> Side:
    """The side's process, on its way to its first step."""
    slug = name.replace(", ", "-").replace(" ", "-")
    settings = folder / f"{slug}.json"
    settings.write_text(json.dumps(recipe(args, folder) if name == OURS else trl_settings(args, folder, name)))
    python = sys.executable if name == OURS else str(args.trl_python)
    script = PEERS / ("drmas_side.py" if name == OURS else "trl_side.py")
    log = folder / f"{slug}.log"
    process = subprocess.Popen(
        [python, str(script), str(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env=os.environ | ENVIRONMENT | (PASSIVE if name == OURS else {}) | {"OMP_NUM_THREADS": str(args.threads)},
    )
    return Side(name, log, process, PeakMemory(process.pid))


def measure(names: Sequence[str], args: argparse.Namespace, folder: Path) -> list[Side]:
    """Every side's steps, in turn, after one that doesn't count."""
    write_tasks(folder / "tasks.jsonl", args.tasks * (args.steps + 2))
    write_endless(folder / "model")
    with ExitStack() as stack:
        sides = []
        for name in names:
            sides.append(start(name, args, folder))
            stack.callback(end, sides[-1])
        for number in range(args.steps + 1):
            for side in sides:
                side.step(counted=number > 0)
        return sides


def end(side: Side) -> None:
    """By closing what it listens to; by force where that isn't enough."""
    side.process.stdin.close()
    try:
        side.process.wait(60)
    except subprocess.TimeoutExpired:
        side.process.kill()
        side.process.wait()


def check_same_work(sides: Sequence[Side], args: argparse.Namespace) -> None:
    """SystemExit where the sides' numbers can't be of the same work."""
    tokens = args.tasks * args.group * args.tokens
    for side in sides:
        for step in side.steps:
            if step.generated != tokens:
                raise SystemExit(f"{side.name} generated {step.generated:g} tokens in a step; expected {tokens}")
            if not (0 < step.grad_norm < float("inf") and abs(step.loss) < 10 and 0 <= step.reward <= 1):
                raise SystemExit(f"{side.name}: {step}; expected a finite loss and gradient and a reward from 0 to 1")
    for steps in zip(*(side.steps for side in sides), strict=True):
        trained = [step.trained for step in steps]
        if max(trained) > (1 + UNLIKE) * min(trained):
            raise SystemExit(f"the sides trained on {trained} tokens in one step; they should have the same tasks")


def table_of(sides: Sequence[Side]) -> Table:
    base = next((side for side in sides if side.name == TRL), None)
    rows: list[list[Cell]] = []
    for side in sides:
        peak = side.memory.peak.total
        phases = {phase: side.mean(lambda step, phase=phase: step.seconds[phase]) for phase in ("rollout", "train", "sync")}
        rows.append(
            [
                side.name,
                side.mean(lambda step: step.wall),
                side.mean(lambda step: step.cpu),
                *phases.values(),
                side.mean(lambda step: step.generated) / phases["rollout"],
                side.mean(lambda step: step.trained) / phases["train"],
                side.rate,
                base and side.rate / base.rate,
                peak / 2**30,
                base and peak / base.memory.peak.total,
            ]
        )
    columns = ["side", "step s", "CPU s", "rollout s", "train s", "sync s", "generated/s", "trained/s", "tokens/s"]
    columns += ["tokens/s by TRL's", "peak GiB", "peak by TRL's"]
    return Table(title="A step, the mean of each side", columns=columns, rows=rows)


def memory_table(sides: Sequence[Side]) -> Table:
    """By process, of the sample with the highest sum."""
    rows: list[list[Cell]] = []
    for side in sides:
        rows += [[side.name, name.rpartition(" ")[0], size / 2**30] for name, size in side.memory.peak.processes.items()]
        rows.append(
            [side.name, "all processes' own high-water marks, what they share counted for each", side.high_water / 2**30]
        )
    return Table(title="Where the memory is", columns=["side", "process", "GiB"], rows=rows)


def ratios_of(sides: Sequence[Side]) -> list[Ratio]:
    """Of drmas to TRL's best, where both were measured."""
    found = {side.name: side for side in sides}
    others = [side for name, side in found.items() if name != OURS]
    if OURS not in found or not others:
        return []
    ours, fastest = found[OURS], max(others, key=lambda side: side.rate)
    return [
        Ratio(
            name="tokens/s of a step by TRL's fastest side",
            value=ours.rate / fastest.rate,
            better="higher",
            tolerance=0.25,
            why="generation waits for memory and training for arithmetic, which other work on the machine slows unequally",
            target=SPEED_TARGET,
        ),
        Ratio(
            name="peak memory by that side's",
            value=ours.memory.peak.total / fastest.memory.peak.total,
            better="lower",
            tolerance=0.1,
            why="what allocators keep, and peaks between two samples",
            target=MEMORY_TARGET,
        ),
    ]


def trl_version(python: Path | None) -> str | None:
    """None where that environment isn't there or lacks TRL."""
    if python is None or not python.is_file():
        return None
    code = "import importlib.metadata as m; print(m.version('trl'))"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, metavar="PATH", help="the interpreter of TRL's environment")
    parser.add_argument("--sides", action="append", choices=SIDES, help=f"several times; default: {OURS} and {TRL}")
    parser.add_argument("--steps", type=int, default=2, help="that count, of each side")
    parser.add_argument("--tasks", type=int, default=4, help="per step")
    parser.add_argument("--group", type=int, default=8, help="episodes per task")
    parser.add_argument("--tokens", type=int, default=64, help="of every response")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--microbatch", type=int, default=1024, help="tokens per microbatch of drmas")
    parser.add_argument("--trl-batch", type=int, default=8, help="episodes per batch of TRL")
    parser.add_argument(
        "--trl", type=setting, action="append", default=[], metavar="KEY=JSON", help="of GRPOConfig; several times"
    )
    add_json(parser)
    args = parser.parse_args(argv)
    if args.tasks * args.group % args.trl_batch:
        parser.error(f"--trl-batch is {args.trl_batch}; it must divide the {args.tasks * args.group} episodes of a step")
    return args


def setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, json.loads(value)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    names, notes, installed = list(args.sides or (OURS, TRL)), [], trl_version(args.trl_python)
    if installed is None and any(name != OURS for name in names):
        notes.append(
            "TRL is not installed: run `make bench-peers`, and give its interpreter as --trl-python build/trl/bin/python"
        )
        names = [OURS]
    with tempfile.TemporaryDirectory(prefix="drmas-bench-") as folder:
        sides = measure(names, args, Path(folder))
    check_same_work(sides, args)
    here = about(args.threads)
    if installed is not None:
        here = here.model_copy(update={"versions": here.versions | {"trl": installed}})
    result = Result(
        benchmark="end_to_end",
        about=here,
        tables=[table_of(sides), memory_table(sides)],
        ratios=ratios_of(sides),
        notes=notes,
    )
    title = f"{PACKAGED}, float32, {args.tasks} tasks x {args.group} episodes x {args.tokens} response tokens"
    print(f"{title}; {args.threads} threads, {here.machine}, {here.date}")
    print(printed(result))
    if args.json:
        result.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
