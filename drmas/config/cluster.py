"""Where a run's engines are, how weights get there, and what the hosts of a job watch each other for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from drmas.config.section import Section

URL_FORM = "tcp://HOST:PORT"


def check_engine_hosts(urls: list[str]) -> list[str]:
    """ValueError for a URL that `drmas serve-engines` can't have; each may be named several times."""
    for url in urls:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        if not url.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{url!r} is no address of an engine host; expected {URL_FORM}, as drmas serve-engines prints it")
    return urls


class SyncConfig(Section):
    """How a policy's weights travel to its engines after an update."""

    transport: Literal["auto", "broadcast", "shards", "shared-memory", "disk"] = "auto"
    """broadcast: whole tensors in packed buckets from one trainer rank to all engine workers, by NCCL or gloo. shards: every
    trainer rank sends each worker what this one needs of its shard. shared-memory: for engines on the host of rank 0, by
    memory that both map (CUDA IPC on GPUs). disk: through a folder that both see. auto takes what fits the placement;
    `--dry-run` says which, and why."""
    bucket_bytes: Annotated[PositiveInt, Field(ge=1024)] = 64 * 2**20
    """Tensors are packed into pieces of this size; a larger one travels alone."""
    timeout_seconds: PositiveFloat = 60.0
    """How long a piece may take until its peer counts as lost."""
    folder: str | None = None
    """Of disk: where the files go, on every host the same; runs may share it. The run's folder if unset."""


class ClusterConfig(Section):
    """The hosts of a job beside those that torchrun starts trainer ranks on, and what all of them are held to."""

    engine_hosts: list[str] = []
    """Where engines run: addresses of `drmas serve-engines`, such as tcp://10.0.0.7:8200. Replicas take them in turn. Rank 0's
    own host if empty; `policies.NAME.engine.hosts` says otherwise for one policy."""
    token_env: str = "DRMAS_ENGINE_TOKEN"
    """The environment variable with the secret that engine hosts ask for; the secret never stands in a configuration."""
    connect_timeout_seconds: PositiveFloat = 20.0
    """How long an engine host may take to answer at the start."""
    host_timeout_seconds: PositiveFloat = 30.0
    """A host of the job that is silent for so long is given up: the run ends and names it, or, if it had an engine, the engine
    counts as dead."""
    preflight: bool = True
    """Refuse to start where ranks have unequal software, unequal settings of communication or kernels (NCCL_*, TORCH_NCCL_*,
    GLOO_*, NVTE_* and a few, but for interfaces and what is logged), or one GPU for two; or where an engine host has other
    versions or NCCL_* than rank 0."""

    @field_validator("engine_hosts")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        return check_engine_hosts(urls)
