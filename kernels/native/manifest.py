"""From the manifests of `drmas_kernels.offline build` to the launcher library's table, and whether they fit their cubins.

    python manifest.py table OUT MANIFEST...     write the table of all kernels, a C++ source
    python manifest.py check MANIFEST...         exit status 1 and what is wrong, where a cubin isn't what its manifest says

Run by CMakeLists.txt. It needs neither CUDA nor Triton: a cubin is an ELF file, with a section for the kernel's parameters.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SIZES = {"i1": 1, "u1": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
SIZES |= {f"{sign}{bits}": bits // 8 for sign in "iu" for bits in (8, 16, 32, 64)}
"""Bytes of a scalar argument."""

TENSOR_MAP_TYPES = {"i8": 0, "u8": 0, "i32": 3, "i64": 5, "fp16": 6, "fp32": 7, "fp64": 8, "bf16": 9}
"""CUtensorMapDataType of a matrix element."""

MATRIX_BYTES = 32
"""sizeof(drmas_matrix)"""

MATRIX_PARAMETERS = (128, 4, 4, 8, 8)
"""What a matrix becomes: the tensor map, its shape and its strides."""

SCRATCH_PARAMETERS = (8, 8)
"""Triton's last two parameters of every kernel: pointers to scratch memory."""

MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block can have on any architecture so far."""


class Argument(NamedTuple):
    name: str
    type: str
    multiple_of: int
    descriptor: dict[str, Any] | None

    @property
    def size(self) -> int:
        """Bytes of the value that the caller passes."""
        return MATRIX_BYTES if self.descriptor else 8 if self.type.startswith("*") else SIZES[self.type]


class Kernel(NamedTuple):
    name: str
    arch: str
    symbol: str
    threads: int
    shared: int
    sha256: str
    cubin: Path
    arguments: tuple[Argument, ...]
    parameters: list[int]
    """Bytes of each parameter of the machine code, as the manifest has them."""

    @property
    def passed(self) -> list[int]:
        """Bytes of each parameter that the launcher passes."""
        sizes = [size for one in self.arguments for size in (MATRIX_PARAMETERS if one.descriptor else (one.size,))]
        return [*sizes, *SCRATCH_PARAMETERS]


def read(manifest: Path) -> list[Kernel]:
    """ValueError: a kernel needs what the launcher doesn't do."""
    entries = json.loads(manifest.read_text())["kernels"]
    return [_kernel(manifest.parent, entry) for entry in entries]


def _kernel(folder: Path, entry: dict[str, Any]) -> Kernel:
    name = entry["name"]
    for key, only in (("num_ctas", 1), ("global_scratch_size", 0), ("profile_scratch_size", 0)):
        if entry[key] != only:
            raise ValueError(f"{name}: {key} is {entry[key]}; the launcher does {only} only")
    for key in ("launch_pdl", "launch_cooperative_grid"):
        if entry[key]:
            raise ValueError(f"{name}: the launcher doesn't do {key}")
    return Kernel(
        name=name,
        arch=entry["arch"],
        symbol=entry["symbol"],
        threads=entry["threads"],
        shared=entry["shared"],
        sha256=entry["sha256"],
        cubin=folder / entry["cubin"],
        arguments=tuple(_argument(name, one) for one in entry["arguments"]),
        parameters=[one["size"] for one in entry["parameters"]],
    )


def _argument(kernel: str, entry: dict[str, Any]) -> Argument:
    name, kind, descriptor = entry["name"], entry["type"], entry.get("tensordesc")
    if kind.startswith("tensordesc"):
        element = re.match(r"tensordesc<(\w+)\[", kind)
        if descriptor is None:
            raise ValueError(f"{kernel}: {name} is {kind} without a tensor map; the launcher takes those of sm_90 on")
        if element is None or element[1] not in TENSOR_MAP_TYPES or len(descriptor["block_size"]) != 2:
            raise ValueError(f"{kernel}: {name} is {kind}; the launcher takes matrices of {', '.join(TENSOR_MAP_TYPES)}")
        if descriptor["fp4_padded"] or descriptor["is_im2col"]:
            raise ValueError(f"{kernel}: {name} is {kind}, padded or im2col; the launcher takes plain matrices")
        descriptor = {**descriptor, "type": TENSOR_MAP_TYPES[element[1]]}
    elif not kind.startswith("*") and kind not in SIZES:
        raise ValueError(f"{kernel}: {name} is {kind}; the launcher takes pointers, matrices and {', '.join(SIZES)}")
    return Argument(name, kind, 16 if entry["aligned"] and not descriptor else 1, descriptor)


def table(kernels: list[Kernel]) -> str:
    """The C++ source. It names each cubin's digest, so that it changes with the code that the assembler reads from the file."""
    lines = ["// Written by manifest.py: don't edit.", '#include "table.h"']
    rows = []
    for i, kernel in enumerate(kernels):
        path, size = str(kernel.cubin.resolve()), kernel.cubin.stat().st_size
        if set(path) & set('"\\\n'):
            raise ValueError(f"the path {path!r} has a quote or a backslash")
        lines += [
            f"\n// {kernel.name} {kernel.arch}: sha256 {kernel.sha256}",
            f'__asm__(".pushsection .rodata\\n.balign 64\\n.hidden drmas_image_{i}\\n.globl drmas_image_{i}\\n"',
            f'        "drmas_image_{i}:\\n.incbin \\"{path}\\"\\n.popsection");',
            f'extern "C" __attribute__((visibility("hidden"))) const unsigned char drmas_image_{i}[];',
            f"static const drmas_argument arguments_{i}[] = {{",
            *(f"    {_argument_row(one)}," for one in kernel.arguments),
            "};",
        ]
        rows.append(
            f'    {{"{kernel.name}", "{kernel.arch}", "{kernel.symbol}", {kernel.threads}, {kernel.shared}, arguments_{i}, '
            f"{len(kernel.arguments)}, drmas_image_{i}, {size}}},"
        )
    count = f"const size_t drmas_table_count = {len(kernels)};"
    return "\n".join([*lines, "\nconst drmas_kernel drmas_table[] = {", *rows, "};", count, ""])


def _argument_row(one: Argument) -> str:
    matrix = one.descriptor or {"type": 0, "elem_size": 0, "swizzle": 0, "block_size": (0, 0)}
    rows, columns = matrix["block_size"]
    numbers = f"{matrix['type']}, {matrix['elem_size']}, {matrix['swizzle']}, {{{rows}, {columns}}}"
    return f'{{"{one.name}", "{one.type}", {one.size}, {one.multiple_of}, {numbers}}}'


class Cubin(NamedTuple):
    """What a cubin says of its kernels."""

    arch: str
    functions: frozenset[str]
    parameters: dict[str, list[int]]
    """Bytes of each, by function."""
    threads: dict[str, int]
    """Of a block, by function."""

    @classmethod
    def read(cls, data: bytes) -> Cubin:
        """ValueError: no cubin."""
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("is no ELF file of 64 bits")
        sections = dict(_sections(data))
        functions = frozenset(
            name for name in _functions(sections[".symtab"], sections[".strtab"]) if f".nv.info.{name}" in sections
        )
        parameters: dict[str, list[int]] = {}
        threads: dict[str, int] = {}
        for function in functions:
            found = {}
            for attribute, value in _attributes(sections[f".nv.info.{function}"]):
                if attribute == 0x17:  # EIATTR_KPARAM_INFO
                    _, ordinal, _, packed = struct.unpack("<IHHI", value)
                    found[ordinal] = packed >> 18
                elif attribute == 0x10:  # EIATTR_REQNTID
                    x, y, z = struct.unpack("<III", value)
                    threads[function] = x * y * z
            parameters[function] = [found[ordinal] for ordinal in sorted(found)]
        (flags,) = struct.unpack_from("<I", data, 0x30)
        newer = data[8] >= 8  # the version of the binary interface, which moved the architecture
        return cls(f"sm_{flags >> 8 & 0xFF if newer else flags & 0xFF}", functions, parameters, threads)


def _sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
    for name, kind, _, _, offset, length in headers:
        where = headers[names][4] + name
        yield data[where : data.index(b"\0", where)].decode(), b"" if kind == 8 else data[offset : offset + length]


def _functions(symbols: bytes, names: bytes) -> Iterator[str]:
    for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", symbols):
        if info & 0xF == 2 and section:
            yield names[name : names.index(b"\0", name)].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes of an .nv.info section; values of the short formats are empty here."""
    at = 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        length = size if form == 4 else 0
        yield attribute, data[at : at + length]
        at += length


def check(kernel: Kernel) -> list[str]:
    """What is wrong with a kernel's cubin."""
    data = kernel.cubin.read_bytes() if kernel.cubin.is_file() else b""
    digest = hashlib.sha256(data).hexdigest()
    if digest != kernel.sha256:
        return [f"{kernel.cubin} has sha256 {digest}; the manifest says {kernel.sha256}"]
    cubin = Cubin.read(data)
    if kernel.symbol not in cubin.functions:
        return [f"{kernel.cubin} has no function {kernel.symbol}, but {', '.join(sorted(cubin.functions))}"]
    facts = (
        ("architecture", cubin.arch, kernel.arch),
        ("bytes of parameters", cubin.parameters[kernel.symbol], kernel.parameters),
        ("bytes of parameters", cubin.parameters[kernel.symbol], kernel.passed),
        ("threads of a block", cubin.threads.get(kernel.symbol), kernel.threads),
    )
    wrong = [
        f"{kernel.cubin}: {what}: {found}; expected by manifest and launcher: {said}"
        for what, found, said in facts
        if found != said
    ]
    if kernel.shared > MOST_SHARED:
        wrong.append(f"{kernel.name}: {kernel.shared} bytes of shared memory; a block can have {MOST_SHARED}")
    return wrong


def main(words: list[str]) -> int:
    command, *rest = words
    out = Path(rest.pop(0)) if command == "table" else None
    kernels = [kernel for manifest in rest for kernel in read(Path(manifest))]
    if not kernels:
        raise ValueError(f"no kernels in {', '.join(rest)}")
    if out:
        out.write_text(table(kernels))
        return 0
    wrong = [line for kernel in kernels for line in check(kernel)]
    sys.stdout.write("\n".join([*wrong, f"{len(kernels)} kernels, {len(wrong)} faults", ""]))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
