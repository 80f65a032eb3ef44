"""The shipped kernels as files of machine code with a manifest, for a launcher that has neither Python nor Triton.

`build` writes one cubin per kernel and `manifest.json`:

    schema 1, triton: version, arch: "sm_90"
    kernels: one object each
      name                            of the spec: unique, a C identifier
      arch, cubin, sha256             cubin: file beside the manifest
      symbol                          entry in the cubin
      num_warps, num_ctas, threads    threads of a block: 32 num_warps
      shared                          dynamic shared memory in bytes; above 48 KiB the function's limit must be raised
      registers
      global_scratch_size, global_scratch_align, profile_scratch_size, profile_scratch_align    0: pass a null pointer
      launch_pdl, launch_cooperative_grid
      arguments                       of the spec, in order: name, type (Triton's word), aligned (a multiple of 16), and for a
                                      descriptor that TMA reads, tensordesc: swizzle, elem_size, elem_type (Triton's numbers),
                                      block_size (the box of one copy), fp4_padded, is_im2col
      constants                       the tl.constexpr arguments it was built with
      parameters                      of the cubin, in order: ordinal, offset, size, type, argument (null: Triton's own), role,
                                      and dimension where the role is shape or stride
      parameter_bytes                 size of the whole parameter buffer

Roles: value; of a descriptor tensor_map (128 bytes), shape (i32 each), stride (i64 each, in elements), or where the
architecture has no TMA base, shape, stride, padding_nan, round_tf32 and then shape and stride again; global_scratch and
profile_scratch. Ordinals, offsets and sizes are read from the cubin and must agree with the spec's signature. Files carry no
machine paths: they are compiled without line information.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drmas_kernels.offline.compilation import CannotCompile, compile_spec
from drmas_kernels.offline.measure import inspect, resources
from drmas_kernels.spec import KernelSpec

MANIFEST = "manifest.json"
SCHEMA = 1
_LINE_INFO = "TRITON_DISABLE_LINE_INFO"
_SIZES = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
_SIZES |= {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8, "nvTmaDesc": 128}
_PARAMETER = re.compile(
    r"EIATTR_KPARAM_INFO\s.*?Ordinal : (0x[0-9a-f]+)\s+Offset\s*: (0x[0-9a-f]+)\s+Size\s*: (0x[0-9a-f]+)", re.S
)
_BUFFER = re.compile(r"EIATTR_CBANK_PARAM_SIZE\s.*?Value:\s*(0x[0-9a-f]+)", re.S)
_METADATA = ("num_warps", "num_ctas", "shared", "global_scratch_size", "global_scratch_align", "profile_scratch_size")
_METADATA += ("profile_scratch_align", "launch_pdl", "launch_cooperative_grid")


@contextmanager
def without_line_info() -> Iterator[None]:
    """What is compiled inside, and in processes started inside, has no machine paths in it."""
    before = os.environ.get(_LINE_INFO)
    os.environ[_LINE_INFO] = "1"
    try:
        yield
    finally:
        del os.environ[_LINE_INFO]
        if before is not None:
            os.environ[_LINE_INFO] = before


def build(out: Path, arch: str, kernels: Mapping[str, KernelSpec]) -> list[Path]:
    """Write the kernels that list `arch`; what an earlier build wrote there is removed first. The files, the manifest last.

    CannotCompile: the folder holds something else, or a cubin's parameters are not the spec's.
    """
    import triton

    _clear(out)
    written, entries = [], []
    for name, spec in kernels.items():
        if arch in spec.archs:
            with without_line_info():
                kernel = compile_spec(spec, arch)
            written.append(out / f"{name}.cubin")
            written[-1].write_bytes(kernel.asm["cubin"])
            entries.append(_entry(spec, kernel, arch, written[-1].name))
    manifest = {"schema": SCHEMA, "triton": triton.__version__, "arch": arch, "kernels": entries}
    partial = out / f"{MANIFEST}.part"
    partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / MANIFEST)
    return [*written, out / MANIFEST]


def _clear(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    ours = {MANIFEST, f"{MANIFEST}.part"}
    if (out / MANIFEST).exists():
        ours |= {kernel["cubin"] for kernel in json.loads((out / MANIFEST).read_text(encoding="utf-8"))["kernels"]}
    others = sorted(path.name for path in out.iterdir() if path.name not in ours)
    if others:
        raise CannotCompile(f"{out} holds {others[0]}, which no build there lists: please name an empty folder")
    for path in out.iterdir():
        path.unlink()


def _entry(spec: KernelSpec, kernel: Any, arch: str, file: str) -> dict[str, Any]:
    metadata, cubin = kernel.metadata, kernel.asm["cubin"]
    described = iter(metadata.tensordesc_meta or ())
    arguments = []
    for name, kind in spec.signature.items():
        argument = {"name": name, "type": kind, "aligned": name in spec.aligned}
        if kind.startswith("tensordesc") and metadata.tensordesc_meta:
            argument["tensordesc"] = dict(next(described))
        arguments.append(argument)
    parameters, size = layout(spec, cubin, metadata.name, bool(metadata.tensordesc_meta))
    return {
        "name": spec.name,
        "arch": arch,
        "cubin": file,
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "symbol": metadata.name,
        "threads": 32 * metadata.num_warps,
        "registers": resources(cubin, metadata.name)[0],
        **{name: getattr(metadata, name) for name in _METADATA},
        "arguments": arguments,
        "constants": {name: _plain(value) for name, value in spec.constants.items()},
        "parameters": parameters,
        "parameter_bytes": size,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def layout(spec: KernelSpec, cubin: bytes, symbol: str, tma: bool) -> tuple[list[dict[str, Any]], int]:
    """(the cubin's parameters with their places in the parameter buffer, the buffer's size)."""
    lines = inspect(cubin, "cuobjdump", "-elf").splitlines()
    if f".nv.info.{symbol}" not in lines:
        raise CannotCompile(f"{spec.name}: cuobjdump -elf shows no section .nv.info.{symbol}")
    start = lines.index(f".nv.info.{symbol}") + 1
    end = next((number for number in range(start, len(lines)) if lines[number].startswith(".")), len(lines))
    section = "\n".join(lines[start:end])
    places = sorted(tuple(int(number, 16) for number in found.groups()) for found in _PARAMETER.finditer(section))
    buffer = _BUFFER.search(section)
    expected = _expected(spec, tma)
    sizes = [size for _, _, size in places]
    wanted = [_SIZES[parameter["type"]] if parameter["type"][0] != "*" else 8 for parameter in expected]
    if buffer is None or sizes != wanted or [ordinal for ordinal, _, _ in places] != list(range(len(wanted))):
        raise CannotCompile(f"{spec.name}: the cubin's parameters have the sizes {sizes}, its signature means {wanted}")
    placed = [
        {"ordinal": ordinal, "offset": offset, "size": size, **parameter}
        for (ordinal, offset, size), parameter in zip(places, expected, strict=True)
    ]
    return placed, int(buffer[1], 16)


def _expected(spec: KernelSpec, tma: bool) -> list[dict[str, Any]]:
    found = []
    for name, kind in spec.signature.items():
        if kind.startswith("tensordesc"):
            found.extend({"argument": name, **part} for part in _descriptor(kind, tma))
        else:
            found.append({"argument": name, "role": "value", "type": kind})
    for role in ("global_scratch", "profile_scratch"):
        found.append({"argument": None, "role": role, "type": "*i8"})
    return found


def _descriptor(kind: str, tma: bool) -> list[dict[str, Any]]:
    element, shape = re.fullmatch(r"tensordesc<(\w+)\[([\d, ]+)\]>", kind).groups()
    dimensions = range(len(shape.split(",")))

    def each(role: str, kind: str) -> list[dict[str, Any]]:
        return [{"role": role, "type": kind, "dimension": dimension} for dimension in dimensions]

    tail = [*each("shape", "i32"), *each("stride", "i64")]
    if tma:
        return [{"role": "tensor_map", "type": "nvTmaDesc"}, *tail]
    flags = [{"role": role, "type": "i1"} for role in ("padding_nan", "round_tf32")]
    return [{"role": "base", "type": f"*{element}"}, *each("shape", "i64"), *each("stride", "i64"), *flags, *tail]
