"""Launches the toy kernels with `KernelSpec.launch`, on a driver that knows an H200 and runs nothing; says what was compiled.

python -m tests.kernels.offline_rank [WARPS of sum_rows]; TRITON_CACHE_DIR names the cache.
"""

import json
import sys
from dataclasses import replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from drmas_kernels.offline.compilation import Driver
from tests.kernels import toy_kernels

launched, compiled = [], []


class Utilities:
    def load_binary(self, name, kernel, shared, device):
        return None, name, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def unload_module(self, module):
        pass


class Pretended(Driver):
    utils = Utilities()

    def launcher_cls(self, source, metadata):
        return lambda *arguments: launched.append(metadata.name)


def main(warps):
    triton.runtime.driver.set_active(Pretended())
    triton.knobs.compilation.listener = lambda src, cache_hit, **rest: cache_hit or compiled.append(src.name)
    sum_rows = replace(toy_kernels.SUM_ROWS, num_warps=warps)
    fp32, bf16 = torch.empty(4096), torch.empty(256, 64, dtype=torch.bfloat16)
    for count, stride, total in ((1024, 2048, fp32), (3, 16, fp32[1:]), (1, 48, fp32[2:]), (1 << 40, 0, fp32)):
        sum_rows.launch((2,), fp32[64:], total, count, stride)
    for count, shift in ((1024, 0), (1, 1), (17, 3)):
        toy_kernels.SCALE.launch((1,), bf16.flatten()[shift:], fp32[shift:], count, 1.0 / (1 + shift))
    matrix = TensorDescriptor.from_tensor(bf16, [128, 64])
    for width in (64, 1, 4096):
        toy_kernels.PRODUCT.launch((1, 1), matrix, matrix, bf16, width, 128)
    sys.stdout.write(json.dumps({"launched": launched, "compiled": compiled}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else toy_kernels.SUM_ROWS.num_warps)
