"""What a compiled kernel costs, as one flat record: the row of `offline report`, and what `budgets` compares.

Reads the cubin with cuobjdump and nvdisasm, which the package triton brings along.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from drmas_kernels.offline import machine_code
from drmas_kernels.offline.compilation import CannotCompile, capability
from drmas_kernels.spec import KernelSpec

NO_SPILLS = "sm_90"
"""The architecture that the tile tables are made for: there a kernel's stack is a fault whatever its budget."""

_USAGE = re.compile(r"Function ([\w$.]+):\s*REG:(\d+) STACK:(\d+)")
_SHARED = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100}
"""KiB of shared memory of a multiprocessor, by compute capability."""
_WARPS = {86: 48, 87: 48, 89: 48, 120: 48}
"""Warps that a multiprocessor holds, where it isn't 64."""


def tool(name: str) -> str:
    """The path of one of Triton's CUDA tools. CannotCompile: it is missing."""
    from triton import knobs

    try:
        return getattr(knobs.nvidia, name.replace("-", "_")).path
    except RuntimeError:
        path = Path(knobs.__file__).parent / "backends" / "nvidia" / "bin" / name
        variable = f"TRITON_{name.upper().replace('-', '_')}_PATH"
        raise CannotCompile(
            f"{path} is missing or does not run. It is part of the package triton: please install that again from PyPI, "
            f"or name another {name} of CUDA 13 in {variable}"
        ) from None


def compiler() -> dict[str, str]:
    """The versions that machine code depends on."""
    import triton
    from triton import knobs

    for name in ("ptxas", "ptxas-blackwell"):
        tool(name)
    return {
        "triton": triton.__version__,
        "ptxas": knobs.nvidia.ptxas.version,
        "ptxas-blackwell": knobs.nvidia.ptxas_blackwell.version,
    }


def inspect(cubin: bytes, name: str, *options: str) -> str:
    """What a tool prints about a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool(name), *options, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotCompile(f"{name} could not read a cubin: {done.stderr.strip()}")
    return done.stdout


def resources(cubin: bytes, symbol: str) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack)."""
    for found in _USAGE.finditer(inspect(cubin, "cuobjdump", "-res-usage")):
        if found[1] == symbol:
            return int(found[2]), int(found[3])
    raise CannotCompile(f"cuobjdump -res-usage does not list {symbol}")


def ctas_per_sm(arch: str, threads: int, registers: int, shared: int) -> int:
    """Programs that a multiprocessor holds at a time.

    A warp takes its registers in units of 256 from the 16384 of one of four partitions; a program takes 1 KiB of shared memory
    for the system (from sm_80 on).
    """
    number = capability(arch)
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = 16384 // per_warp * 4 // warps
    by_warps = _WARPS.get(number, 64) // warps
    by_shared = _SHARED.get(number, 100) * 1024 // (shared + 1024)
    return min(by_registers, by_warps, by_shared, 32)


def measure(spec: KernelSpec, compiled: Any, arch: str) -> dict[str, Any]:
    """Counts are of instructions; widths are bits of a thread's access to global memory.

    instructions_per_element and ex2_per_element are of the work loop (`machine_code`), per thread and element, and stand where
    the spec says how many elements a pass handles. stack: bytes per thread; spills: instructions that use it.
    """
    cubin, symbol = compiled.asm["cubin"], compiled.metadata.name
    registers, stack = resources(cubin, symbol)
    blocks = machine_code.read_sass(inspect(cubin, "nvdisasm", "--print-code", "--no-dataflow"), symbol)
    profile = machine_code.profile(blocks, machine_code.read_ptx(compiled.asm["ptx"]))
    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    total, work = profile.total, profile.work
    record = {
        "registers": registers,
        "stack": stack,
        "spills": total.spills,
        "shared": shared,
        "ctas_per_sm": ctas_per_sm(arch, threads, registers, shared),
        "loads": _widths(total.loads),
        "stores": _widths(total.stores),
        "work_loads": _widths(work.loads),
        "work_stores": _widths(work.stores),
        "tma_loads": total.tma_loads,
        "tma_stores": total.tma_stores,
        "tensor_core": dict(sorted(total.tensor_core.items())),
        "fp64": total.fp64,
        "atomics": total.atomics,
        "instructions": total.instructions,
    }
    if spec.elements:
        scale = threads / (spec.elements * profile.passes)
        record["instructions_per_element"] = round(work.instructions * scale, 3)
        record["ex2_per_element"] = round(work.ex2 * scale, 3)
    record["missing"] = missing(spec, profile, arch)
    if arch == NO_SPILLS and (stack or total.spills):
        record["missing"].append(f"{stack} bytes of stack and {total.spills} spills, on {arch} there may be none")
    return record


def _widths(counter: Any) -> dict[str, int]:
    return {str(width): counter[width] for width in sorted(counter, reverse=True)}


def missing(spec: KernelSpec, profile: machine_code.Profile, arch: str) -> list[str]:
    """What `spec.expects` asks for and the machine code lacks, in words.

    "wide" holds the loads and stores of the work loop to 128 bits or more; a masked tail outside it may be narrower. Without a
    work loop the stretch without branches that moves most bytes is held to it, but for an eighth of its bytes: what a program
    reads about its own place.
    """
    number, total = capability(arch), profile.total
    found = []
    for name in sorted(spec.expects):
        if name == "hgmma":
            wanted = "UTC" if number >= 100 else "HGMMA" if number >= 90 else "HMMA"
            if not any(opcode.startswith(wanted) for opcode in total.tensor_core):
                found.append(f"expects hgmma: no {wanted} instruction")
        elif name == "tma":
            if number >= 90 and not total.tma_loads + total.tma_stores:
                found.append("expects tma: no UTMALDG or UTMASTG instruction")
        elif name == "wide":
            found.extend(_narrow(profile))
        elif name not in ("fp64", "atomics"):
            found.append(f"expects {name!r}, which is none of hgmma, tma, wide, fp64, atomics")
    for name, number_of, what in (("fp64", total.fp64, "instructions of 64-bit floats"), ("atomics", total.atomics, "atomics")):
        if number_of and name not in spec.expects:
            found.append(f'{number_of} {what} without "{name}" in expects')
    return found


def _narrow(profile: machine_code.Profile) -> list[str]:
    code = profile.work if profile.looped else profile.busiest
    if not code.bytes:
        return [] if code.tma_loads or code.tma_stores else ["expects wide: there is no access to global memory"]
    narrow = {
        kind: {width: number for width, number in accesses.items() if width < 128}
        for kind, accesses in (("load", code.loads), ("store", code.stores))
    }
    size = sum(width * number for widths in narrow.values() for width, number in widths.items()) // 8
    if size <= (0 if profile.looped else code.bytes // 8):
        return []
    listed = [f"{number} {kind}s of {width}" for kind, widths in narrow.items() for width, number in sorted(widths.items())]
    return [f"expects wide: {', '.join(listed)} bits"]
