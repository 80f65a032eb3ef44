"""Seconds and bandwidth of a weight sync, by transport: `python bench/weight_sync.py [broadcast] [shared-memory] [disk]`.

    --model packaged:smollm2-135m-instruct | tiny:qwen3 | ...      --pushes N      --threads N (engine)      --json FILE      --small

One vLLM engine; every transport pushes the model N times and once more to warm up, with all weights changed, and the median
counts. Of a push, start to finish while the engine is paused: `fill` (copy, finite check, checksum on the trainer), `arrive`
(until the worker has all of it, verified; fill is a part of it), `load` (vLLM's loaders and re-packing), `finish` (the rest).
`staged` is the pause where the bytes travelled beforehand. Beside it, in the same run and with the same threads: the bandwidth of
a copy in memory and of TCP over loopback. Compare ratios: they are of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of bench/, whose file names would hide packages

import torch
from transformers import AutoModelForCausalLM

from drmas.config.cluster import SyncConfig
from drmas.config.schema import EngineConfig
from drmas.rollout.vllm_engine import VllmEngine
from drmas.runtime.models import PACKAGED, resolve_model
from drmas.weights.buckets import BucketTransport
from drmas.weights.choice import open_transport
from drmas.weights.sync import WeightSync
from drmas.weights.wire import LOOPBACK

TRANSPORTS = ("broadcast", "shared-memory", "disk")
_ARRIVED = re.compile(r"weights: received in ([\d.]+) s, loaded in ([\d.]+) s")


class Weights:
    """A model as a source; `change` makes every element another."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
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
    staged: float

    @property
    def finish(self) -> float:
        return self.total - self.arrive - self.load


@dataclass(frozen=True, slots=True)
class Result:
    """Of one transport: medians over its pushes, in seconds, and bandwidths in GB/s."""

    transport: str
    bytes: int
    total: float
    fill: float
    arrive: float
    load: float
    finish: float
    staged: float
    gb_per_second: float
    arrive_gb_per_second: float
    of_memory_copy: float
    of_loopback: float | None


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
                pushes.append(Push(total, fill, arrive, load, staged))
    finally:
        sync.close()
    return pushes


def memory_copy() -> float:
    """GB/s of a copy of 256 MiB, the best of five."""
    source, target = torch.ones(2**26), torch.zeros(2**26)
    return source.nbytes / best(lambda: target.copy_(source)) / 1e9


def loopback() -> float:
    """GB/s of 256 MiB over TCP, the best of five."""
    payload = bytes(2**26)
    with socket.create_server((LOOPBACK, 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()
        with receiver:

            def receive() -> None:
                buffer = bytearray(2**20)
                left = 4 * len(payload)
                while left:
                    left -= receiver.recv_into(buffer)

            def transfer() -> None:
                receiving = threading.Thread(target=receive)
                receiving.start()
                for _ in range(4):
                    sender.sendall(payload)
                receiving.join()

            return 4 * len(payload) / best(transfer) / 1e9


def best(action: Callable[[], object], times: int = 5) -> float:
    """Seconds of the quickest of some calls."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return min(found)


def summary(transport: str, pushes: list[Push], num_bytes: int, *, copy: float, tcp: float) -> Result:
    total, fill, arrive, load, finish, staged = (
        statistics.median(getattr(push, name) for push in pushes)
        for name in ("total", "fill", "arrive", "load", "finish", "staged")
    )
    arriving = num_bytes / arrive / 1e9
    return Result(
        transport=transport,
        bytes=num_bytes,
        total=total,
        fill=fill,
        arrive=arrive,
        load=load,
        finish=finish,
        staged=staged,
        gb_per_second=num_bytes / total / 1e9,
        arrive_gb_per_second=arriving,
        of_memory_copy=arriving / copy,
        of_loopback=arriving / tcp if transport == "broadcast" else None,
    )


def run(args: argparse.Namespace) -> dict[str, object]:
    folder = resolve_model("tiny:qwen3" if args.small else args.model, seed=0, key="--model")
    config = EngineConfig(max_model_tokens=256, kv_cache_bytes=2**27, threads=args.threads)
    with tempfile.TemporaryDirectory() as logs:
        engine = VllmEngine("bench", config, model_path=folder, log_dir=Path(logs), seed=0, deterministic=True)
        try:
            engine.start()
            weights, copy, tcp = Weights(folder), memory_copy(), loopback()
            log = Path(logs) / "engine-bench.log"
            results = [
                summary(name, measure(name, engine, weights, log, args), weights.num_bytes, copy=copy, tcp=tcp)
                for name in args.transports
            ]
        finally:
            engine.close()
    return {
        "model": str(folder.name),
        "engine_threads": args.threads,
        "memory_copy_gb_per_second": copy,
        "loopback_gb_per_second": tcp,
        "results": [asdict(result) for result in results],
    }


def table(found: dict[str, object]) -> str:
    lines = [
        f"{found['model']}, {found['results'][0]['bytes'] / 1e9:.3f} GB, engine with {found['engine_threads']} thread(s); a copy in "
        f"memory {found['memory_copy_gb_per_second']:.2f} GB/s, TCP over loopback {found['loopback_gb_per_second']:.2f} GB/s",
        f"{'':14}{'total':>8}{'fill':>8}{'arrive':>8}{'load':>8}{'finish':>8}{'staged':>8}   GB/s   arriving  of copy  of TCP",
    ]
    for result in found["results"]:
        seconds = "".join(f"{result[name]:8.3f}" for name in ("total", "fill", "arrive", "load", "finish", "staged"))
        tcp = "" if result["of_loopback"] is None else f"{result['of_loopback']:8.2f}"
        lines.append(
            f"{result['transport']:14}{seconds}{result['gb_per_second']:7.2f}{result['arrive_gb_per_second']:11.2f}"
            f"{result['of_memory_copy']:9.2f}{tcp}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "transports", nargs="*", choices=[*TRANSPORTS, []], default=[], metavar="TRANSPORT", help=", ".join(TRANSPORTS)
    )
    parser.add_argument("--model", default=PACKAGED)
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the engine and of the trainer")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--small", action="store_true", help="a tiny model and two pushes, to see that it runs")
    args = parser.parse_args()
    args.transports = args.transports or TRANSPORTS
    args.pushes = 2 if args.small else args.pushes
    torch.set_num_threads(args.threads)
    found = run(args)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
