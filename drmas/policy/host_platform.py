"""The host as a device of Megatron: one code path for CPU with gloo and for CUDA with NCCL.

Megatron-core 0.16.1 knows one accelerator, "cuda": it asks `torch.cuda` for devices, generators, streams and memory, and passes
"cuda" to tensor factories. Where CUDA is missing, `install` gives the modules named megatron.* (and no others) a copy of the
`torch` namespace in which those questions are answered for the host. Rebinding inside one package, instead of patching torch,
keeps `torch.device("meta")` contexts and dynamo, which recognise factories by identity, whole for everybody else. Where CUDA is
present `install` does nothing. This is not a device abstraction for our own code: that calls `device()`.

Called by `drmas.policy` at import, before any import of megatron.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)
_RNG_WARNING = "CPU RNG state changed within GPU RNG context"
NOISE = (
    r".*Apex (are|is) not installed",
    r"full scope is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    r"`load_state_dict` is deprecated",
    r"Please use DTensor instead",
)
"""Warnings about Megatron's own code, which nobody who reads them here can act on."""


def is_host() -> bool:
    """True where Megatron runs on the CPU."""
    return not torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank."""
    return _CPU if is_host() else torch.device("cuda", torch.cuda.current_device())


def upload(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A host's tensor on `target`; the host doesn't wait for a GPU's queue, since the copy starts from pinned memory."""
    return tensor.pin_memory().to(target, non_blocking=True) if target.type == "cuda" else tensor.to(target)


def trim() -> None:
    """Give freed memory back to the system: what torch caches of a GPU, or what the C library keeps of a host's (glibc), on
    which building a model leaves a copy of its weights free, half of them in pieces too small to be returned by themselves."""
    if not is_host():
        torch.cuda.empty_cache()
    elif (trim_heap := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim_heap(0)


def backend() -> str:
    """The torch.distributed backend of this rank's device. One backend only: a mixed one opens a gloo mesh per group."""
    return "gloo" if is_host() else "nccl"


def set_threads(threads: int) -> None:
    """CPU threads of this process's tensor operations."""
    torch.set_num_threads(threads)


def peak_memory_bytes() -> int:
    """The most memory this process held: resident on the host, allocated on a GPU."""
    if is_host():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated()


@functools.cache
def install() -> None:
    """Make the host answer for CUDA inside megatron.*; where CUDA is present, only silence Megatron's own warnings.

    RuntimeError: megatron was imported before, and with it the real `torch`.
    """
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    if not is_host():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron was imported before drmas.policy; import drmas.policy first, or nothing of megatron at all"
        )
    # Host and accelerator share one generator here, so Megatron sees its own draws as a disturbance.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(lambda record: _RNG_WARNING not in record.getMessage())
    for package in ("transformer_engine", "flash_attn"):  # Megatron imports them where it finds them; here they only can fail
        sys.modules.setdefault(package, None)
    _patch_tensor_methods()
    sys.meta_path.insert(0, _MegatronFinder(_host_torch()))


class _HostEvent:
    """A CUDA event's interface on the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: _HostEvent) -> float:
        return (other.seconds - self.seconds) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None: ...


class _HostStream:
    """A CUDA stream's interface: on the host, program order is the only order."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, event: _HostEvent | None = None) -> _HostEvent:
        event = event or _HostEvent()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> _HostStream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _HostGenerators:
    """`torch.cuda.default_generators`: every index is the generator that host operations draw from."""

    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


class _TypeName(str):
    """A tensor's type name that equals its CUDA spelling too; Megatron compares with that in three places."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) == other.replace("torch.cuda.", "torch.")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class _Namespace(ModuleType):
    """A copy of a module whose names can be changed; what is looked up later and isn't here comes from the module."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        vars(self).update(vars(module))
        vars(self)["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


class _MegatronFinder(MetaPathFinder):
    """Import hook: after a megatron module has run, its global `torch` is the host's."""

    def __init__(self, host_torch: _Namespace) -> None:
        self.host_torch = host_torch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "megatron":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, Loader):
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.rebind(module)

            spec.loader.exec_module = exec_module
        return spec

    def rebind(self, module: ModuleType) -> None:
        names = vars(module)
        if names.get("torch") is torch:
            names["torch"] = self.host_torch
        for name in ("_lazy_call", "_lazy_init"):  # imported by name from torch.cuda
            if name in names:
                names[name] = getattr(self.host_torch.cuda, name)
        if module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()  # dozens of tiny functions, faster eager on the host than through dynamo


def _host_device(device: Any) -> Any:
    """The CPU for every spelling of a CUDA device (name, index, torch.device); other devices as they are."""
    return _CPU if isinstance(device, int) or str(device).startswith("cuda") else device


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _host_device(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _host_torch() -> _Namespace:
    """The `torch` that megatron modules see."""
    host = _Namespace(torch)
    for name in _FACTORIES:
        setattr(host, name, _on_host(getattr(torch, name)))
    host.compile = lambda model=None, **_: (lambda function: function) if model is None else model
    host.cuda = _host_cuda()
    return host


def _host_cuda() -> _Namespace:
    """The `torch.cuda` that megatron modules see."""
    cuda = _Namespace(torch.cuda)
    cuda.random, cuda.nvtx = _Namespace(torch.cuda.random), _Namespace(torch.cuda.nvtx)
    cuda.current_device = _returns(_CPU)  # Megatron uses it as a device and as an index of default_generators
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init"):
        setattr(cuda, name, _returns(None))
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _returns(None))
    cuda.Stream, cuda.Event = _HostStream, _HostEvent
    cuda.current_stream = cuda.default_stream = _returns(_HostStream())
    cuda.stream = cuda.device = lambda target=None: contextlib.nullcontext(target)
    cuda.memory_allocated = cuda.memory_reserved = _resident_bytes
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: peak_memory_bytes()
    generator = torch.default_generator
    for names in (cuda, cuda.random):
        names.get_rng_state = lambda device=None: generator.get_state()
        names.set_rng_state = lambda state, device=None: generator.set_state(state)
        names.manual_seed = names.manual_seed_all = lambda seed: generator.manual_seed(int(seed))
    cuda.default_generators = _HostGenerators()
    # torch's own queues the call until CUDA is initialised, which never happens: restoring RNG states would be lost silently.
    cuda._lazy_call = lambda function, **_: function()
    return cuda


def _resident_bytes(*_: Any) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _patch_tensor_methods() -> None:
    """Methods can't be rebound per package. These raise on a torch without CUDA, except `type`, whose result is equal."""
    to, type_ = torch.Tensor.to, torch.Tensor.type

    def host_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (str, int, torch.device)):
            args = (_host_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _host_device(kwargs["device"])
        return to(self, *args, **kwargs)

    def host_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return type_(self, *args, **kwargs) if args or kwargs else _TypeName(type_(self))

    torch.Tensor.to, torch.Tensor.type = host_to, host_type
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda self, *_, **__: None
    torch.nn.Module.cuda = lambda self, *_, **__: self
