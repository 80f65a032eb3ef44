"""Descriptions of clusters: TOML files, packaged or the user's, checked and turned into a `types.Cluster`.

    [device]     one accelerator; a name that `drmas.core.peaks` knows brings its numbers along
    [links]      between devices, nodes, host memory and disk
    [efficiencies]   what is reached of those numbers: assumptions unless a calibration wrote them
    [price]      per device and hour, if the cost is wanted

Errors are `ConfigError`: the key, what was found, the nearest valid key, and the file. Called by `drmas plan`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from drmas.config.section import Name, NonNegativeFloat, Section
from drmas.core.names import expected_names
from drmas.core.peaks import data_sheet
from drmas.errors import ConfigError
from drmas.planning.types import Cluster, Device, Efficiencies

Share = Annotated[float, Field(gt=0, le=1)]
_PRODUCTS = ("float32", "bfloat16", "fp8")
_ASSUMED = Efficiencies()


class DeviceSection(Section):
    """One accelerator, or the cores of a host. What is unset comes from the data sheet of `name`."""

    name: str
    """As NVML gives it: "NVIDIA H100 80GB HBM3"."""
    gpu: bool = True
    """False: the cores of a host, which trainer ranks and engines share, as they do its memory."""
    float32: PositiveFloat | None = None
    """FLOP/s of dense products."""
    bfloat16: PositiveFloat | None = None
    fp8: PositiveFloat | None = None
    memory_bytes: PositiveFloat | None = None
    memory_bytes_per_second: PositiveFloat | None = None
    reserved_bytes: NonNegativeFloat = 4 * 2**30
    """What nobody counts: ECC, driver and NCCL contexts, fragmentation; on a host the processes themselves."""


class LinkSection(Section):
    """Bytes per second of one device in one direction."""

    intra_bytes_per_second: PositiveFloat
    """Between devices of a node."""
    inter_bytes_per_second: PositiveFloat | None = None
    """Between nodes; needed where there are several."""
    latency_seconds: NonNegativeFloat = 1e-5
    """Of a collective of few bytes within a node."""
    host_bytes_per_second: PositiveFloat
    """Between a device and its host's memory."""
    disk_bytes_per_second: PositiveFloat = 2e9
    """Of the folder that all nodes see."""


class EfficiencySection(Section):
    """What is reached of the peaks, and what comes on top. The defaults are assumptions, for GPUs; none was measured here.

    train, score: published utilisations of such trainers lie at 0.31 to 0.40 (verl, a 30B MoE on 8 to 32 GPUs), 0.28 to 0.37
    (prime-rl, 4B and 30B at 64k) and 0.33 (NeMo AutoModel), recompute not counted, which is 1.33 times as much counted.
    decode_bandwidth, prefill, decode_flops: what dense attention and matrix kernels usually reach. link: bus bandwidth of
    NCCL's large collectives. Seconds: of the order that users report.
    """

    train: Share = _ASSUMED.train
    score: Share = _ASSUMED.score
    prefill: Share = _ASSUMED.prefill
    decode_flops: Share = _ASSUMED.decode_flops
    decode_bandwidth: Share = _ASSUMED.decode_bandwidth
    overlap: Annotated[float, Field(ge=0, le=1)] = _ASSUMED.overlap
    link: Share = _ASSUMED.link
    engine_step_seconds: NonNegativeFloat = _ASSUMED.engine_step_seconds
    engine_sequence_seconds: NonNegativeFloat = _ASSUMED.engine_sequence_seconds
    request_seconds: NonNegativeFloat = _ASSUMED.request_seconds
    wake_seconds: NonNegativeFloat = _ASSUMED.wake_seconds
    step_seconds: NonNegativeFloat = _ASSUMED.step_seconds
    microbatch_seconds: NonNegativeFloat = _ASSUMED.microbatch_seconds
    sync_seconds: NonNegativeFloat = _ASSUMED.sync_seconds


class PriceSection(Section):
    per_gpu_hour: NonNegativeFloat
    currency: str = "USD"


class ClusterFile(Section):
    """A description of equal nodes."""

    name: Name
    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt
    host_memory_bytes: PositiveFloat
    """Of one node."""
    device: DeviceSection
    links: LinkSection
    efficiencies: EfficiencySection = EfficiencySection()
    price: PriceSection | None = None


def clusters() -> dict[str, str]:
    """The packaged descriptions: name -> the comment on top of the file."""
    found = {}
    for entry in sorted(_folder().iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            lines = takewhile(lambda line: line.startswith("#"), entry.read_text(encoding="utf-8").splitlines())
            found[entry.name.removesuffix(".toml")] = " ".join(line.removeprefix("#").strip() for line in lines)
    return found


def load_cluster(spec: str, *, gpus: int | None = None, price: float | None = None) -> Cluster:
    """The cluster that `spec` names: a packaged one, or a path to a .toml file.

    `gpus`: as many of its devices instead, whole nodes of them where they are more than one node has; `price` per device and
    hour goes before the file's. ConfigError: no such description, or a fault in it.

    Example: load_cluster("h100-8", gpus=32).nodes == 4
    """
    cluster = parse_cluster(*_read(spec))
    if price is not None:
        if price < 0:
            raise ConfigError(f"--price is {price:g}; expected a price per device and hour of at least 0")
        cluster = replace(cluster, price_per_gpu_hour=price)
    return cluster if gpus is None else resized(cluster, gpus)


MOST_GPUS = 2**17


def resized(cluster: Cluster, gpus: int) -> Cluster:
    """The same nodes, with `gpus` devices in all. ConfigError: no whole nodes, or an unknown link between them."""
    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(f"--gpus is {gpus}; expected 1 to {MOST_GPUS}")
    if gpus <= cluster.gpus_per_node:
        return replace(cluster, nodes=1, gpus_per_node=gpus)
    if gpus % cluster.gpus_per_node:
        raise ConfigError(
            f"--gpus is {gpus}; a node of {cluster.name} has {cluster.gpus_per_node}: expected a multiple of them"
        )
    if cluster.inter_bytes_per_second <= 0:
        raise ConfigError(
            f"--gpus is {gpus}, which is several nodes of {cluster.name}; its description has no links.inter_bytes_per_second"
        )
    return replace(cluster, nodes=gpus // cluster.gpus_per_node)


def parse_cluster(table: Mapping[str, Any], source: str) -> Cluster:
    """The cluster of a TOML table. `source` names it in errors."""
    try:
        file = ClusterFile.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(fault, source) for fault in error.errors())) from error
    if file.nodes > 1 and file.links.inter_bytes_per_second is None:
        raise ConfigError(f"links.inter_bytes_per_second: missing (from {source}); there are {file.nodes} nodes")
    return Cluster(
        name=file.name,
        nodes=file.nodes,
        gpus_per_node=file.gpus_per_node,
        device=_device(file.device, source),
        intra_bytes_per_second=file.links.intra_bytes_per_second,
        inter_bytes_per_second=file.links.inter_bytes_per_second or 0.0,
        latency_seconds=file.links.latency_seconds,
        host_bytes_per_second=file.links.host_bytes_per_second,
        host_memory_bytes=file.host_memory_bytes,
        disk_bytes_per_second=file.links.disk_bytes_per_second,
        efficiencies=Efficiencies(**file.efficiencies.model_dump()),
        price_per_gpu_hour=file.price.per_gpu_hour if file.price else None,
        currency=file.price.currency if file.price else "USD",
        gpu=file.device.gpu,
        reserved_bytes=file.device.reserved_bytes,
    )


def _device(section: DeviceSection, source: str) -> Device:
    sheet = data_sheet(section.name)
    given = {name: getattr(section, name) for name in (*_PRODUCTS, "memory_bytes", "memory_bytes_per_second")}
    values = {name: getattr(sheet, name, None) if value is None else value for name, value in given.items()}
    for name in ("memory_bytes", "memory_bytes_per_second", "float32"):
        if values[name] is None:
            raise ConfigError(
                f"device.{name}: missing (from {source}); drmas knows no data sheet of {section.name!r}: set what it can do, "
                "or name a device as NVML does"
            )
    if section.reserved_bytes >= values["memory_bytes"]:
        raise ConfigError(
            f"device.reserved_bytes: {section.reserved_bytes:g}; expected less than the {values['memory_bytes']:g} of "
            f"device.memory_bytes (from {source})"
        )
    flops = {name: values[name] for name in _PRODUCTS if values[name] is not None}
    return Device(section.name, flops, values["memory_bytes"], values["memory_bytes_per_second"])


def _folder() -> Any:
    return resources.files("drmas.planning") / "clusters"


def _read(spec: str) -> tuple[dict[str, Any], str]:
    path = Path(spec)
    if path.suffix == ".toml" or path.name != spec:
        if not path.is_file():
            raise ConfigError(f"--cluster {spec}: no such file; expected a .toml file, or one of {', '.join(clusters())}")
        text = path.read_text(encoding="utf-8")
    else:
        packaged = _folder() / f"{spec}.toml"
        if not packaged.is_file():
            raise ConfigError(f"--cluster {spec}: {expected_names(spec, clusters())}, or a path that ends in .toml")
        text = packaged.read_text(encoding="utf-8")
    try:
        return tomllib.loads(text), spec
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{spec}: not valid TOML: {error}") from error


def _line(fault: Any, source: str) -> str:
    """One pydantic error as `key: what was found; what is expected (from where)`."""
    path = [str(part) for part in fault["loc"]]
    key, message = ".".join(path), fault["msg"]
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key (from {source}); {expected_names(path[-1], _keys(path[:-1]))}"
    if fault["type"] == "missing":
        return f"{key}: missing (from {source})"
    return f"{key}: {fault['input']!r}; {message[0].lower()}{message[1:]} (from {source})"


def _keys(path: list[str]) -> list[str]:
    """The keys of the section at `path`."""
    sections = {
        (): ClusterFile,
        ("device",): DeviceSection,
        ("links",): LinkSection,
        ("efficiencies",): EfficiencySection,
        ("price",): PriceSection,
    }
    return list(sections[tuple(path)].model_fields)
