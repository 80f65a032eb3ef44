"""A toy model on a toy cluster, whose numbers are round enough for arithmetic by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drmas.agents.team import load_team
from drmas.config.schema import RunConfig
from drmas.planning.cluster import parse_cluster
from drmas.planning.job import Job, make_job
from drmas.planning.types import AgentLoad, Lengths, Workload

CLUSTER = {
    "name": "toy",
    "nodes": 2,
    "gpus_per_node": 4,
    "host_memory_bytes": 1e10,
    "device": {
        "name": "toy",
        "float32": 1e11,
        "bfloat16": 1e12,
        "memory_bytes": 4e9,
        "memory_bytes_per_second": 1e10,
        "reserved_bytes": 1e6,
    },
    "links": {
        "intra_bytes_per_second": 1e9,
        "inter_bytes_per_second": 1e8,
        "latency_seconds": 1e-5,
        "host_bytes_per_second": 1e8,
        "disk_bytes_per_second": 1e7,
    },
    "efficiencies": {
        **{"train": 0.5, "score": 0.25, "prefill": 0.5, "decode_flops": 0.2, "decode_bandwidth": 0.5, "link": 0.5},
        **{"engine_step_seconds": 1e-3, "engine_sequence_seconds": 1e-6, "request_seconds": 1e-2, "wake_seconds": 0.5},
        **{"step_seconds": 2.0, "microbatch_seconds": 1e-2, "sync_seconds": 0.25},
    },
}
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 132,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory) -> Path:
    """A folder with nothing but the toy's config.json."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def workload(*agents: AgentLoad, tasks: int = 3, group: int = 2, flying: int = 64) -> Workload:
    return Workload(agents, tasks, group, flying)


def agent(name: str = "solver", policy: str = "main", **changes: Any) -> AgentLoad:
    """Two calls of 11 prompt tokens, of which 6 are cached, and 5 response tokens."""
    given = {"calls": 2.0, "prompt_tokens": 11.0, "cached_tokens": 6.0, "response": Lengths(5.0, 0.0, 32)}
    return AgentLoad(name, policy, **(given | changes))


@pytest.fixture(scope="session")
def load() -> SimpleNamespace:
    """load.agent(calls=1.0) and load.workload(agent, ..., tasks=3)."""
    return SimpleNamespace(agent=agent, workload=workload)


@pytest.fixture
def toy(toy_model) -> Callable[..., Job]:
    """toy(ranks=4, tensor_parallel=2, engine={...}) -> a job of one policy; keys of `run` go to the sections that they name.

    `work` is the workload, `cluster` changes of the cluster's table; `policies` gives several policies' tables by name.
    """

    def build(
        *,
        ranks: int | None = None,
        work: Workload | None = None,
        cluster: dict[str, Any] | None = None,
        run: dict[str, Any] | None = None,
        policies: dict[str, dict[str, Any]] | None = None,
        **policy: Any,
    ) -> Job:
        base = {"model": str(toy_model), "dtype": "bfloat16", "tokens_per_microbatch": 64}
        engine = {"dtype": "bfloat16", "max_model_tokens": 64, "gpus": "shared", "gpu_memory_fraction": 0.6}
        names = policies or {"main": {}}
        tables = {}
        for name, own in names.items():
            mine = base | policy | own
            tables[name] = mine | {"engine": engine | policy.get("engine", {}) | own.get("engine", {})}
        team = {"name": "single", "solver": {"max_tokens": 32, "policy": next(iter(names))}}
        if len(names) > 1:
            first, second = list(names)[:2]
            team = {"name": "solver-verifier", "solver": {"policy": first}, "verifier": {"policy": second}}
            team = {key: value | {"max_tokens": 32} if isinstance(value, dict) else value for key, value in team.items()}
        sections = {"train": {"ranks": ranks}} | (run or {})
        sections["train"] = {"ranks": ranks, **sections.get("train", {})}
        config = RunConfig.model_validate({"policies": tables, "team": team, "data": {"type": "sums"}, **sections})
        table = copy.deepcopy(CLUSTER)
        for key, value in (cluster or {}).items():
            table[key] = table.get(key, {}) | value if isinstance(value, dict) else value
        default = workload(*(agent(name=f"agent-{name}", policy=name) for name in names))
        job = make_job(config, load_team(config.team), parse_cluster(table, "toy"), work or default, anywhere=True)
        return replace(job, elsewhere=False)

    return build
