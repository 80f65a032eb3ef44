"""Peaks by device name, as NVML and torch spell it."""

import pytest

from drmas.core.peaks import data_sheet


@pytest.mark.parametrize(
    ("name", "float32", "bfloat16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 67, 989, 1979),
        ("NVIDIA H100 PCIe", 51, 756, 1513),
        ("NVIDIA H100 NVL", 60, 835, 1671),
        ("NVIDIA H200", 67, 989, 1979),
        ("NVIDIA H200 NVL", 60, 835, 1671),
        ("NVIDIA GH200 480GB", 67, 989, 1979),
        ("NVIDIA A100-SXM4-80GB", 19.5, 312, None),
        ("NVIDIA A100 80GB PCIe", 19.5, 312, None),
        ("NVIDIA B200", 75, 2250, 4500),
        ("NVIDIA GB200", 80, 2500, 5000),
    ],
)
def test_a_listed_device(name, float32, bfloat16, fp8):
    found = data_sheet(name)
    assert found == (float32 * 1e12, bfloat16 * 1e12, fp8 and fp8 * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA H20", "NVIDIA L40S", "NVIDIA A10", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""])
def test_a_device_that_is_not_listed_or_a_slice_of_one(name):
    assert data_sheet(name) is None
