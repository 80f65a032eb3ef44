"""What a device can do at most: by its data sheet, or timed here and called so."""

import pytest
import torch

from drmas.config.schema import PolicyConfig
from drmas.policy import host_platform, peak


@pytest.fixture
def card(monkeypatch):
    """A machine with one GPU of a name, as far as asking goes."""

    def named(name: str) -> None:
        monkeypatch.setattr(host_platform, "is_host", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(peak, "measured_gemm", lambda dtype: peak.Peak(1.0, f"measured: {dtype}"))

    return named


@pytest.mark.parametrize(("settings", "expected"), [({}, 67e12), ({"dtype": "bfloat16"}, 989e12), ({"fp8": "e4m3"}, 1979e12)])
def test_a_listed_gpu_has_the_peak_of_its_data_sheet(card, settings, expected):
    card("NVIDIA H200")
    assert peak.device_peak(PolicyConfig(model="x", **settings)) == (expected, "data sheet of NVIDIA H200")


def test_another_gpu_is_measured_and_so_is_a_product_that_a_listed_one_lacks(card):
    card("NVIDIA GeForce RTX 5090")
    assert peak.device_peak(PolicyConfig(model="x")).origin == "measured: float32"
    card("NVIDIA A100-SXM4-80GB")
    assert peak.device_peak(PolicyConfig(model="x", fp8="hybrid", dtype="bfloat16")).origin == "measured: bfloat16"


def test_a_cpu_is_measured_once():
    found = peak.device_peak(PolicyConfig(model="x"))
    assert found is peak.device_peak(PolicyConfig(model="x"))
    assert found.origin == "measured: a float32 product of 1024 x 1024 matrices"
    assert 1e8 < found.flops_per_second < 1e14
