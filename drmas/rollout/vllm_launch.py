"""Start the vLLM process: its environment, its log file, and the socket that connects it.

Called by `vllm_engine` for engines on this host, and by `host_server` for those of a trainer elsewhere. The environment is set
in full here because most of it must stand before Python starts, and because vLLM's defaults assume that it has the machine to
itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from drmas.errors import EngineStartError
from drmas.rollout.engine_process import LocalProcess

WORKER_EXTENSION = "drmas.weights.worker.WorkerExtension"
WEIGHT_BACKEND = "drmas"
"""What vLLM calls the workers' side of the weight sync, by `drmas.weights.plugin`."""
PLUGIN = "drmas_weights"

TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The trainer's place in its own job, which an engine must not take for its own."""


def engine_device() -> str:
    """`cuda` where torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def engine_environment(device: str, threads: int | None, gpus: Sequence[int] | None = None) -> dict[str, str]:
    """The environment of an engine process on `device` with `threads` CPU threads. None: all that this process may use, and
    beside a GPU as many as its own environment says.

    `gpus` are those that it sees, as indices into what this process sees; all of them if None.
    """
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN and not name.startswith("TORCHELASTIC_")}
    kept.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, and it would override kv_cache_bytes
    kept |= {
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if device == "cpu":
        kept |= {
            "TORCHDYNAMO_DISABLE": "1",  # else the first log-probs compile a helper, with a C++ compiler that may not be there
            # huge pages for tensors, large ones by torch, others by glibc: an update takes a model's worth of fresh memory
            "THP_MEM_ALLOC_ENABLE": "1",
            "GLIBC_TUNABLES": ":".join(filter(None, [kept.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb=1"])),
            "OMP_NUM_THREADS": str(threads or len(os.sched_getaffinity(0))),
            "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait take the cores from the trainer
            "GOMP_SPINCOUNT": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "LD_PRELOAD": ":".join(filter(None, [openmp_library(), kept.get("LD_PRELOAD", "")])),
        }
    elif threads is not None:
        kept["OMP_NUM_THREADS"] = str(threads)
    if gpus is not None:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(gpus))
    return kept


def visible_gpus(indices: Sequence[int]) -> list[str]:
    """What CUDA calls the GPUs of these `indices` into what this process sees: numbers, or UUIDs where it is told so.

    EngineStartError: there are not so many.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in indices]
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if indices and max(indices) >= len(names):
        raise EngineStartError(
            f"an engine needs GPU {max(indices)}; CUDA_VISIBLE_DEVICES is {listed!r}, which has {len(names)}"
        )
    return [names[index] for index in indices]


def check_model_folder(folder: Path, who: str, *, where: str = "") -> None:
    """EngineStartError where vLLM would take `folder` for the name of a model on the hub."""
    if not (folder / "config.json").is_file():
        raise EngineStartError(f"engine {who}: {folder} is no model folder{where} (no config.json)")


def openmp_library() -> str:
    """torch's own libgomp. vLLM's kernels bind to the OpenMP library loaded first; with another one they use one core."""
    spec = find_spec("torch")
    folder = Path(spec.origin).parent
    found = sorted([*(folder / "lib").glob("libgomp*.so*"), *(folder.parent / "torch.libs").glob("libgomp*.so*")])
    return str(found[0]) if found else ""


def launch(environment: dict[str, str], log: Path) -> tuple[LocalProcess, socket.socket]:
    """The process and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        return spawn(environment, log, theirs), ours


def spawn(environment: dict[str, str], log: Path, theirs: socket.socket) -> LocalProcess:
    """The process that serves the other end of `theirs`, in a session of its own: it can be killed with all its children."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "drmas.rollout.vllm_process", str(theirs.fileno()), str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        return LocalProcess(process, log, start)
