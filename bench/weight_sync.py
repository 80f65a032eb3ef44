"""Seconds and bandwidth of a weight sync, by transport: `python bench/weight_sync.py [broadcast] [shared-memory] [disk]`.

    --model packaged:smollm2-135m-instruct | tiny:qwen3 | ...      --pushes N      --threads N      --json PATH      --small

One vLLM engine; every transport pushes the model N times and once more to warm up, with all weights changed. The best of each
part counts, as of what stands beside it: whatever else runs on the machine only adds. Of a push, start to finish while the
engine is paused: `fill` (copy, finite check, checksum on the trainer), `arrive` (until the worker has all of it, verified; fill
is a part of it), `load` (vLLM's loaders and re-packing), `finish` (the rest). `staged` is the pause where the bytes travelled
beforehand. Beside it, in the same run: the bandwidth of a copy in memory by one thread, and of TCP over loopback. Compare
ratios: they are of one run.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages

import torch
from transformers import AutoModelForCausalLM

from bench.suite.record import Ratio, Result, Table, about, add_json, printed
from drmas.config.cluster import SyncConfig
from drmas.config.schema import EngineConfig
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import PACKAGED, resolve_model
from drmas.weights.buckets import BucketTransport
from drmas.weights.choice import open_transport
from drmas.weights.sync import WeightSync
from drmas.weights.wire import LOOPBACK

TARGETS = {"broadcast": 0.6, "shared-memory": 1.1}
"""GB/s of a whole push, vLLM's loading included, of SmolLM2-135M on two cores."""
TRANSPORTS = ("broadcast", "shared-memory", "disk")
_ARRIVED = re.compile(r"weights: received in ([\d.]+) s, loaded in ([\d.]+) s")


class Weights:
    """A model as a source; `change` makes every element another."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tensors = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
        self.num_bytes = sum(tensor.nbytes for _, tensor in self._tensors)

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors)

    def change(self) -> None:
        for _, tensor in self._tensors:
            tensor.mul_(1.001)


class TimedTransport:
    """Adds up the seconds that a transport spends on filling buckets."""

    def __init__(self, transport: BucketTransport) -> None:
        self.seconds, fill = 0.0, transport._fill

        def timed(*args):
            started = time.perf_counter()
            try:
                return fill(*args)
            finally:
                self.seconds += time.perf_counter() - started

        transport._fill = timed


@dataclass(frozen=True, slots=True)
class Push:
    """Seconds."""

    total: float
    fill: float
    arrive: float
    load: float
    finish: float
    staged: float


def measure(transport: str, engine: VllmEngine, weights: Weights, log: Path, args: argparse.Namespace) -> list[Push]:
    """The pushes after the first."""
    made = open_transport(transport, weights, SyncConfig(), policy="bench", folder=log.parent / "updates")
    sync, timer, pushes = WeightSync(engine, made), TimedTransport(made), []
    try:
        for number in range(args.pushes + 1):
            weights.change()
            timer.seconds = 0.0
            total, fill = sync.push(engine.version + 1).seconds, timer.seconds
            arrive, load = map(float, _ARRIVED.findall(log.read_text())[-1])
            version = engine.version + 1
            sync.stage(version)
            staged = sync.push(version).seconds
            if number:
                pushes.append(Push(total, fill, arrive, load, total - arrive - load, staged))
    finally:
        sync.close()
    return pushes


def memory_copy(size: int = 2**28) -> float:
    """GB/s of a copy of `size` bytes by one thread, the best of five."""
    source, target = (torch.full((size,), value, dtype=torch.uint8) for value in (1, 0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = best(lambda: target.copy_(source))
    torch.set_num_threads(threads)
    return size / seconds / 1e9


def loopback(size: int = 2**28) -> float:
    """GB/s of `size` bytes over TCP, the best of five."""
    payload = bytes(size)
    with socket.create_server((LOOPBACK, 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()
        with receiver:

            def receive() -> None:
                buffer = bytearray(2**20)
                left = size
                while left:
                    left -= receiver.recv_into(buffer)

            def transfer() -> None:
                receiving = threading.Thread(target=receive)
                receiving.start()
                sender.sendall(payload)
                receiving.join()

            return size / best(transfer) / 1e9


def best(action: Callable[[], object], times: int = 5) -> float:
    """Seconds of the quickest of some calls."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return min(found)


def quickest(pushes: list[Push]) -> Push:
    """The best of each part by itself."""
    return Push(**{part.name: min(getattr(push, part.name) for push in pushes) for part in fields(Push)})


def summary(found: dict[str, Push], num_bytes: int, *, model: str, threads: int, copy: float, tcp: float) -> Result:
    """`copy` and `tcp`: GB/s of what moves bytes without looking at them."""
    rows = [
        [name, push.total, push.fill, push.arrive, push.load, push.finish, push.staged, num_bytes / push.total / 1e9]
        for name, push in found.items()
    ]
    arriving = {name: num_bytes / push.arrive / 1e9 for name, push in found.items()}
    why = "two processes share two cores with whatever else runs there"
    ratios = []
    if "shared-memory" in found:
        value = arriving["shared-memory"] / copy
        ratios.append(Ratio(name="shared-memory by a copy", value=value, better="higher", tolerance=0.5, why=why, target=0.5))
    if "broadcast" in found:
        value = arriving["broadcast"] / tcp
        ratios.append(Ratio(name="broadcast by TCP over loopback", value=value, better="higher", tolerance=0.5, why=why))
    for name, push in found.items():
        share = push.staged / push.total
        ratios.append(Ratio(name=f"{name}: pause when staged", value=share, better="lower", tolerance=0.5, why=why))
    title = (
        f"{model}, {num_bytes / 1e9:.3f} GB, {threads} thread(s) for the engine and for the trainer; a copy in memory "
        f"{copy:.2f} GB/s, TCP over loopback {tcp:.2f} GB/s"
    )
    columns = ["transport", "total s", "fill s", "arrive s", "load s", "finish s", "staged s", "GB/s"]
    tables, notes = [Table(title=title, columns=columns, rows=rows)], []
    for name, target in TARGETS.items():
        if name in found:
            rate = num_bytes / found[name].total / 1e9
            verdict = "reached" if rate >= target else "missed"
            notes.append(f"{name} made {rate:.2f} GB/s in a whole push; at least {target:g} is asked for: {verdict}")
    return Result(benchmark="weight_sync", about=about(threads), tables=tables, ratios=ratios, notes=notes)


def run(args: argparse.Namespace) -> Result:
    folder = resolve_model("tiny:qwen3" if args.small else args.model, seed=0, key="--model")
    config = EngineConfig(max_model_tokens=256, kv_cache_bytes=2**27, threads=args.threads)
    with tempfile.TemporaryDirectory() as logs:
        engine = VllmEngine("bench", config, model_path=folder, log_dir=Path(logs), seed=0, deterministic=True)
        try:
            engine.start()
            weights, copy, tcp = Weights(folder), memory_copy(), loopback()
            log = Path(logs) / "engine-bench.log"
            found = {name: quickest(measure(name, engine, weights, log, args)) for name in args.transports}
        finally:
            engine.close()
    return summary(found, weights.num_bytes, model=folder.name, threads=args.threads, copy=copy, tcp=tcp)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = ", ".join(TRANSPORTS)
    parser.add_argument("transports", nargs="*", choices=[*TRANSPORTS, []], default=[], metavar="TRANSPORT", help=choices)
    parser.add_argument("--model", default=PACKAGED)
    parser.add_argument("--pushes", type=int, default=6)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine and of the trainer")
    parser.add_argument("--small", action="store_true", help="a tiny model and two pushes, to see that it runs")
    add_json(parser)
    args = parser.parse_args()
    args.transports = args.transports or TRANSPORTS
    args.pushes = 2 if args.small else args.pushes
    torch.set_num_threads(args.threads)
    found = run(args)
    print(printed(found))
    if args.json:
        found.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
