"""Peaks by device name, as NVML and torch spell it."""

import pytest

from drmas.core.peaks import data_sheet


@pytest.mark.parametrize(
    ("name", "float32", "bfloat16", "fp8", "gigabytes", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 67, 989, 1979, 80, 3350),
        ("NVIDIA H100 PCIe", 51, 756, 1513, 80, 2000),
        ("NVIDIA H100 NVL", 60, 835, 1671, 94, 3900),
        ("NVIDIA H200", 67, 989, 1979, 141, 4800),
        ("NVIDIA H200 NVL", 60, 835, 1671, 141, 4800),
        ("NVIDIA GH200 480GB", 67, 989, 1979, 96, 4000),
        ("NVIDIA A100-SXM4-80GB", 19.5, 312, None, 80, 2039),
        ("NVIDIA A100 80GB PCIe", 19.5, 312, None, 80, 1935),
        ("NVIDIA A100-SXM4-40GB", 19.5, 312, None, 40, 1555),
        ("NVIDIA L40S", 91.6, 362.05, 733, 46068 / 1024, 864),
        ("NVIDIA B200", 75, 2250, 4500, 180, 7700),
        ("NVIDIA GB200", 80, 2500, 5000, 186, 8000),
    ],
)
def test_a_listed_device(name, float32, bfloat16, fp8, gigabytes, bandwidth):
    found = data_sheet(name)
    assert found[:3] == (float32 * 1e12, bfloat16 * 1e12, fp8 and fp8 * 1e12)
    assert found[3:] == (gigabytes * 2**30, bandwidth * 1e9)


@pytest.mark.parametrize("name", ["NVIDIA H20", "NVIDIA L4", "NVIDIA A10", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""])
def test_a_device_that_is_not_listed_or_a_slice_of_one(name):
    assert data_sheet(name) is None
