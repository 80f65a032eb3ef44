"""Compiles the shipped Triton kernels without a GPU: exactly what a launch of their specs would compile, by the JIT itself.

`kernel.warmup` takes the arguments of a launch and does everything but the launch. It asks a driver which GPU there is;
`Driver` answers. The arguments are made up from the spec: addresses and integers listed in `aligned` are multiples of 16, the
others are not, so the JIT specialises as it will in a job, and its cache entry is the job's. `faults` names what in a spec
would make that entry depend on the values of a launch.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any

import torch

from drmas_kernels.spec import ALIGNMENT, KernelSpec

_TYPES = {
    "i1": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]>")


class CannotCompile(Exception):
    """This process can't compile kernels, or a spec isn't one. The message says why, and what to do."""


class DoesNotCompile(CannotCompile):
    """Triton refuses a kernel, or compiles another than its spec says. The message names the kernel."""


class Driver:
    """Stands for a machine with one GPU of each architecture: device 90 is an sm_90."""

    def __init__(self) -> None:
        self.device = 90

    def get_current_device(self) -> int:
        return self.device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.device, 32)

    def get_current_stream(self, device: int) -> int:
        return 0


_driver = Driver()


def refuse_interpreter() -> None:
    """CannotCompile: TRITON_INTERPRET is set, or was when Triton's functions were decorated."""
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y"):
        raise CannotCompile("TRITON_INTERPRET is set, so Triton interprets kernels and compiles nothing: please unset it")


def capability(arch: str) -> int:
    """90 for "sm_90". CannotCompile: it isn't an architecture."""
    found = re.fullmatch(r"sm_(\d+)", arch)
    if not found:
        raise CannotCompile(f"arch is {arch!r}; expected something like sm_90")
    return int(found[1])


def compile_spec(spec: KernelSpec, arch: str) -> Any:
    """Triton's CompiledKernel, from the cache where it is there.

    DoesNotCompile: Triton refuses the kernel, or the spec's types are not what it compiled.
    """
    import triton

    refuse_interpreter()
    if not isinstance(spec.kernel, triton.JITFunction):
        raise CannotCompile(f"{spec.name}: its kernel is a {type(spec.kernel).__name__}, not a function of triton.jit")
    _driver.device = capability(arch)
    triton.runtime.driver.set_active(_driver)
    try:
        compiled = spec.kernel.warmup(*arguments(spec), grid=(1,), **spec.constants, **spec.compile_options())
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        text = " ... ".join(dict.fromkeys((lines[0], lines[-1])))
        raise DoesNotCompile(f"{spec.name} for {arch}: {type(error).__name__}: {text}") from error
    for name, kind in spec.signature.items():
        actual = compiled.src.signature.get(name)
        if str(actual).replace(" ", "") != kind.replace(" ", ""):
            raise DoesNotCompile(f"{spec.name}: argument {name} was compiled as {actual}, its signature says {kind}")
    return compiled


def arguments(spec: KernelSpec) -> list[Any]:
    """Stand-ins for the run-time arguments of a launch. Nothing is read from them but their types and alignments."""
    return [_argument(spec, name, kind) for name, kind in spec.signature.items()]


def _argument(spec: KernelSpec, name: str, kind: str) -> Any:
    if descriptor := _DESCRIPTOR.fullmatch(kind):
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape = [int(size) for size in descriptor[2].split(",")]
        return TensorDescriptor.from_tensor(torch.empty(shape, dtype=_type(spec, name, descriptor[1])), shape)
    if kind[0] == "*":
        values = torch.empty(2 * ALIGNMENT, dtype=_type(spec, name, kind.removeprefix("*").removeprefix("k")))
        return values if name in spec.aligned else values[1:]
    if kind.startswith(("fp", "bf")):
        return 0.5
    if kind in ("i1", "u1"):
        return True
    size = 1 << 40 if kind == "i64" else ALIGNMENT
    return size if name in spec.aligned else size + 1


def _type(spec: KernelSpec, name: str, kind: str) -> torch.dtype:
    if kind not in _TYPES:
        raise CannotCompile(f"{spec.name}: argument {name} has the element type {kind!r}; known are {', '.join(_TYPES)}")
    return _TYPES[kind]


def faults(spec: KernelSpec) -> list[str]:
    """What would let a launch compile something that was not compiled ahead, or swap arguments unseen."""
    parameters = {parameter.name: parameter for parameter in spec.kernel.params}
    found = []
    leading = list(parameters)[: len(spec.signature)]
    if list(spec.signature) != leading:
        found.append(f"the signature has {', '.join(spec.signature)}, the kernel begins with {', '.join(leading)}")
    for name in spec.aligned - set(spec.signature):
        found.append(f"aligned has {name}, which the signature has not")
    for name, kind in spec.signature.items():
        with suppress(KeyError):
            found.extend(_faults(name, kind, parameters[name], name in spec.aligned))
    return found


def _faults(name: str, kind: str, parameter: Any, aligned: bool) -> list[str]:
    free = parameter.do_not_specialize
    if kind[0] == "*":
        free = free or parameter.do_not_specialize_on_alignment
        where = "do_not_specialize_on_alignment"
    elif kind[0] in "iu" and kind not in ("i1", "u1"):
        where = "do_not_specialize"
    else:
        return []
    found = []
    if aligned and free:
        found.append(f"{name} is aligned, but the kernel's {where} drops that")
    if not aligned and not free:
        found.append(
            f"{name} is neither in the spec's aligned nor in the kernel's {where}: its values would compile more kernels"
        )
    if kind == "i64" and not parameter.annotation_type:
        found.append(f"{name} is i64 without the annotation tl.int64: a small value would compile it as i32")
    return found
