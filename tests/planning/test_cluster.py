"""Cluster descriptions: the packaged ones, other sizes of them, and what is refused."""

from __future__ import annotations

import copy

import pytest

from drmas.core.peaks import data_sheet
from drmas.errors import ConfigError
from drmas.planning.cluster import clusters, load_cluster, parse_cluster

GOOD = {
    "name": "mine",
    "gpus_per_node": 2,
    "host_memory_bytes": 1e11,
    "device": {"name": "NVIDIA H100 80GB HBM3"},
    "links": {"intra_bytes_per_second": 4e11, "host_bytes_per_second": 6e10},
}


def test_every_packaged_description_is_read_and_says_what_it_is():
    found = clusters()
    assert {"h100-8", "h100-4x8", "h200-8", "a100-8", "l40s-8", "laptop-cpu"} <= found.keys()
    for name, about in found.items():
        cluster = load_cluster(name)
        assert cluster.name == name
        assert len(about) > 20
        assert cluster.reserved_bytes < cluster.device.memory_bytes
        if cluster.gpu:
            sheet = data_sheet(cluster.device.name)
            assert cluster.device.flops["bfloat16"] == sheet.bfloat16
            assert cluster.device.memory_bytes_per_second == sheet.memory_bytes_per_second
    assert load_cluster("h100-4x8").gpus == 32
    assert "fp8" not in load_cluster("a100-8").device.flops
    assert not load_cluster("laptop-cpu").gpu


def test_numbers_of_the_file_go_before_the_data_sheet():
    table = copy.deepcopy(GOOD)
    table["device"] |= {"bfloat16": 5e14, "reserved_bytes": 7.0}
    cluster = parse_cluster(table, "mine.toml")
    assert cluster.device.flops["bfloat16"] == 5e14
    assert cluster.device.flops["float32"] == 67e12
    assert cluster.reserved_bytes == 7.0
    assert cluster.price_per_gpu_hour is None


def test_other_sizes_are_parts_of_a_node_or_whole_nodes():
    assert (load_cluster("h100-8", gpus=3).nodes, load_cluster("h100-8", gpus=3).gpus_per_node) == (1, 3)
    assert (load_cluster("h100-8", gpus=64).nodes, load_cluster("h100-8", gpus=64).gpus) == (8, 64)
    with pytest.raises(ConfigError, match=r"--gpus is 12; a node of h100-8 has 8"):
        load_cluster("h100-8", gpus=12)
    with pytest.raises(ConfigError, match=r"--gpus is 0"):
        load_cluster("h100-8", gpus=0)
    with pytest.raises(ConfigError, match=r"links.inter_bytes_per_second"):
        load_cluster("laptop-cpu", gpus=2)


def test_a_file_is_read_and_a_price_goes_before_its(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\ngpus_per_node = 1\nhost_memory_bytes = 1e11\nprice = { per_gpu_hour = 2.5, currency = "EUR" }\n'
        'device = { name = "NVIDIA H200" }\nlinks = { intra_bytes_per_second = 4e11, host_bytes_per_second = 6e10 }\n'
    )
    cluster = load_cluster(str(path))
    assert (cluster.price_per_gpu_hour, cluster.currency) == (2.5, "EUR")
    assert load_cluster(str(path), price=1.0).price_per_gpu_hour == 1.0
    with pytest.raises(ConfigError, match=r"--price is -1"):
        load_cluster(str(path), price=-1.0)
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"mine.toml: not valid TOML"):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_per_node": 3}, r"gpu_per_node: unknown key \(from mine.toml\); the nearest is 'gpus_per_node'"),
        ({"device": {"name": "NVIDIA H200", "memory": 3}}, r"device.memory: unknown key .* the nearest is 'memory_bytes'"),
        ({"gpus_per_node": -1}, r"gpus_per_node: -1; input should be greater than 0 \(from mine.toml\)"),
        ({"efficiencies": {"train": 1.5}}, r"efficiencies.train: 1.5; input should be less than or equal to 1"),
        ({"efficiencies": {"trian": 0.5}}, r"efficiencies.trian: unknown key .* the nearest is 'train'"),
        ({"price": {"per_gpu_hour": -2}}, r"price.per_gpu_hour: -2; input should be greater than or equal to 0"),
        ({"nodes": 2}, r"links.inter_bytes_per_second: missing \(from mine.toml\); there are 2 nodes"),
        ({"device": {"name": "NVIDIA H20"}}, r"device.memory_bytes: missing .*knows no data sheet of 'NVIDIA H20'"),
        ({"device": {"name": "NVIDIA L40S", "reserved_bytes": 1e12}}, r"device.reserved_bytes: 1e\+12; expected less than"),
        ({"links": {}}, r"links.intra_bytes_per_second: missing"),
    ],
)
def test_a_fault_is_named_with_the_key_and_the_file(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_cluster(GOOD | change, "mine.toml")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"--cluster h100-9: the nearest is 'h100-8'"):
        load_cluster("h100-9")
    with pytest.raises(ConfigError, match=r"--cluster there.toml: no such file"):
        load_cluster("there.toml")
