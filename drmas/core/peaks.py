"""What GPUs can do at most, from NVIDIA's data sheets: the denominator of a model's FLOPs utilisation, and what plans rest on.

Dense products, without the data sheets' 2:4 sparsity, which doubles their figures. float32 is the one without tensor cores,
since TF32 is off. A data sheet's gigabytes of memory are binary ones (the driver of an H100 of 80 reports 79.6 GiB, that of an
H200 of 141 reports 140.4 GiB); its bandwidths are decimal. Sources, per product:

- A100, SXM and PCIe, of 40 and 80 GB: nvidia.com, "NVIDIA A100 Tensor Core GPU" data sheet (1758950)
- L40S: "NVIDIA L40S" data sheet (2735300); of its 48 GB, GDDR6 without bits of its own for ECC, the driver reports 46,068 MiB
- H100 SXM, PCIe, NVL: "NVIDIA H100 Tensor Core GPU" data sheet (resources.nvidia.com/en-us-tensor-core); the PCIe card's column
  stands in its first editions (2287922)
- H200 SXM, NVL: "NVIDIA H200 Tensor Core GPU" data sheet; GH200 with HBM3: "NVIDIA GH200 Grace Hopper Superchip" data sheet
- B200 in HGX B200 at 1,000 W, GB200 at 1,200 W: "NVIDIA Blackwell" data sheet
  (resources.nvidia.com/en-us-blackwell-architecture)
"""

from __future__ import annotations

import re
from typing import NamedTuple


class DevicePeaks(NamedTuple):
    """FLOP/s by the type of the factors, None where the device has no such product; its memory, and how fast it reads that."""

    float32: float
    bfloat16: float
    fp8: float | None
    memory_bytes: int
    memory_bytes_per_second: float


_GB = 2**30

DATA_SHEETS = (
    (("A100", "SXM4", "80GB"), DevicePeaks(19.5e12, 312e12, None, 80 * _GB, 2039e9)),
    (("A100", "80GB"), DevicePeaks(19.5e12, 312e12, None, 80 * _GB, 1935e9)),
    (("A100",), DevicePeaks(19.5e12, 312e12, None, 40 * _GB, 1555e9)),
    (("L40S",), DevicePeaks(91.6e12, 362.05e12, 733e12, 46068 * 2**20, 864e9)),
    (("H100", "PCIE"), DevicePeaks(51e12, 756e12, 1513e12, 80 * _GB, 2000e9)),
    (("H100", "NVL"), DevicePeaks(60e12, 835e12, 1671e12, 94 * _GB, 3900e9)),
    (("H100",), DevicePeaks(67e12, 989e12, 1979e12, 80 * _GB, 3350e9)),
    (("H200", "NVL"), DevicePeaks(60e12, 835e12, 1671e12, 141 * _GB, 4800e9)),
    (("H200",), DevicePeaks(67e12, 989e12, 1979e12, 141 * _GB, 4800e9)),
    (("GH200",), DevicePeaks(67e12, 989e12, 1979e12, 96 * _GB, 4000e9)),
    (("B200",), DevicePeaks(75e12, 2250e12, 4500e12, 180 * _GB, 7700e9)),
    (("GB200",), DevicePeaks(80e12, 2500e12, 5000e12, 186 * _GB, 8000e9)),
)
"""Words of a device's name, as NVML and torch give it ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"); the first that fits
counts."""


def data_sheet(device_name: str) -> DevicePeaks | None:
    """The peaks of a device by its name; None for one that isn't listed, and for a MIG slice, which has a part of them.

    Example: data_sheet("NVIDIA H100 PCIe").bfloat16 == 756e12
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if "MIG" in words:
        return None
    return next((peaks for needed, peaks in DATA_SHEETS if words.issuperset(needed)), None)
