"""Triton's interpreter for the tests of the kernels: the modules imported for it, and two faults of version 3.9.0 mended.

The interpreter is chosen when a function is decorated, so `load` sets TRITON_INTERPRET for the imports only: processes that
the tests start don't see it. The root conftest imports Triton itself the same way, before anything else does.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

VARIABLE = "TRITON_INTERPRET"
DEVICE = os.environ.get("DRMAS_TEST_DEVICE", "cpu")
"""Where the kernels' tests put their tensors: on "cuda" nothing is interpreted."""

ORIGINAL: dict[str, Any] = {}
"""What `mend` replaced: for the test that asks whether it is still needed."""


@contextmanager
def interpreting() -> Iterator[None]:
    if DEVICE != "cpu":
        yield
        return
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def load(name: str) -> ModuleType:
    """Import a module whose kernels are to be interpreted."""
    with interpreting():
        return importlib.import_module(name)


def mend() -> None:
    """Products of bf16 tiles multiply bit patterns, and fp32 -> bf16 cuts digits off instead of rounding to nearest even.

    `test_interpreter.py` fails once a release has mended either.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot, convert = builder.create_dot, interpreter._convert_float
    if ORIGINAL:
        return
    ORIGINAL.update(create_dot=dot, convert_float=convert)

    def mended_dot(self, a, b, d, *rest):
        return dot(self, _widened(a), _widened(b), d, *rest)

    def mended_convert(data, source, target, rounding):
        names = (str(source), str(target))
        if names == ("fp32", "bf16"):
            return _to_bf16(data)
        if names == ("bf16", "fp32"):
            return data.astype(np.uint32) << 16
        return convert(data, source, target, rounding)

    builder.create_dot, interpreter._convert_float = mended_dot, mended_convert


def _widened(handle):
    """bf16 data are uint16 bit patterns in the interpreter."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _to_bf16(data: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of fp32 values, rounded to nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(data).view(np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
