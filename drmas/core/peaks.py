"""What GPUs can do at most, from NVIDIA's data sheets: the denominator of a model's FLOPs utilisation.

Dense products, without the data sheets' 2:4 sparsity, which doubles their figures. float32 is the one without tensor cores,
since TF32 is off. Sources, per product:

- A100: nvidia.com, "NVIDIA A100 Tensor Core GPU" data sheet (1758950)
- H100 SXM, PCIe, NVL: "NVIDIA H100 Tensor Core GPU" data sheet (resources.nvidia.com/en-us-tensor-core); the PCIe card's column
  stands in its first editions (2287922)
- H200 SXM, NVL: "NVIDIA H200 Tensor Core GPU" data sheet; GH200: "NVIDIA GH200 Grace Hopper Superchip" data sheet
- B200 in HGX B200 at 1,000 W, GB200 at 1,200 W: "NVIDIA Blackwell" data sheet
  (resources.nvidia.com/en-us-blackwell-architecture)
"""

from __future__ import annotations

import re
from typing import NamedTuple


class DeviceFlops(NamedTuple):
    """FLOP/s by the type of the factors; None where the device has no such product."""

    float32: float
    bfloat16: float
    fp8: float | None


DATA_SHEETS = (
    (("A100",), DeviceFlops(19.5e12, 312e12, None)),
    (("H100", "PCIE"), DeviceFlops(51e12, 756e12, 1513e12)),
    (("H100", "NVL"), DeviceFlops(60e12, 835e12, 1671e12)),
    (("H100",), DeviceFlops(67e12, 989e12, 1979e12)),
    (("H200", "NVL"), DeviceFlops(60e12, 835e12, 1671e12)),
    (("H200",), DeviceFlops(67e12, 989e12, 1979e12)),
    (("GH200",), DeviceFlops(67e12, 989e12, 1979e12)),
    (("B200",), DeviceFlops(75e12, 2250e12, 4500e12)),
    (("GB200",), DeviceFlops(80e12, 2500e12, 5000e12)),
)
"""Words of a device's name, as NVML and torch give it ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"); the first that fits
counts."""


def data_sheet(device_name: str) -> DeviceFlops | None:
    """The peaks of a device by its name; None for one that isn't listed, and for a MIG slice, which has a part of them.

    Example: data_sheet("NVIDIA H100 PCIe").bfloat16 == 756e12
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if "MIG" in words:
        return None
    return next((peaks for needed, peaks in DATA_SHEETS if words.issuperset(needed)), None)
