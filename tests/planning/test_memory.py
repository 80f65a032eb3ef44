"""Bytes per device against arithmetic by hand, and what must hold of them whatever the numbers are."""

from __future__ import annotations

import pytest

from drmas.planning import costs, memory
from drmas.runtime import memory as trainers
from drmas.runtime.room import SLEEPING_BYTES

LAYER = 32 * 128 + 64 * 32 + 3 * 32 * 64
NORMS = 2 * 32 + 2 * 16
COUNT = 4 * (LAYER + NORMS) + 132 * 32 + 32


def of(job, where: str) -> memory.DeviceMemory:
    return next(device for device in memory.devices(job) if device.where == where)


def test_a_trainer_and_an_engine_on_one_gpu(toy):
    job = toy(ranks=1)
    device = of(job, "rank 0")
    assert device.parts == pytest.approx(
        {
            "weights": 2 * COUNT,
            "gradients": 4 * COUNT,
            "optimiser": 12 * COUNT,
            "activations and head": 2 * 64 * 2**20,  # two buckets of weights on their way are more than the toy's activations
            "engine weights": 2 * COUNT,
            "KV cache": 0.6 * 4e9 - 2 * COUNT - 2 * 2**30,
            "engine overhead": 2 * 2**30,
            "reserved": 1e6,
        }
    )
    assert device.total == pytest.approx(sum(device.parts.values()))
    assert device.headroom == pytest.approx(4e9 - device.total)
    assert memory.kv_token_bytes(job.policies["main"]) == 2 * 4 * 2 * 16 * 2


def test_activations_are_those_of_the_runtime(toy):
    job = toy(ranks=4, tensor_parallel=2, pipeline_parallel=2, tokens_per_microbatch=2**17)
    policy = job.policies["main"]
    for rank in (0, 2):
        expected = trainers.activation_bytes(policy.model.architecture, policy.share(rank), gpu=True)
        assert memory.trainer_parts(job, policy, rank)[1] == {"activations and head": expected}


def test_engines_that_sleep_take_turns_with_the_trainer(toy):
    awake, asleep = of(toy(ranks=1), "rank 0"), of(toy(ranks=1, engine={"sleep": True}), "rank 0")
    assert set(asleep.rollout) == {"engine weights", "KV cache", "engine overhead"}
    assert asleep.training["sleeping engines"] == SLEEPING_BYTES
    assert asleep.total == pytest.approx(
        sum(asleep.always.values()) + max(sum(asleep.training.values()), sum(asleep.rollout.values()))
    )
    assert asleep.total < awake.total


def test_engines_of_their_own_lie_behind_the_ranks(toy):
    job = toy(ranks=2, engine={"gpus": "own", "tensor_parallel": 2, "gpu_memory_fraction": 0.9})
    assert job.policies["main"].devices == (2, 3)
    assert job.gpus == 4
    assert "engine weights" not in of(job, "rank 0").parts
    engine = of(job, "engine GPU 2")
    assert engine.parts["engine weights"] == COUNT
    assert set(engine.parts) == {"engine weights", "KV cache", "engine overhead", "reserved"}


def test_no_engine_lies_on_two_nodes(toy):
    job = toy(ranks=3, engine={"gpus": "own", "tensor_parallel": 4, "gpu_memory_fraction": 0.9})
    assert job.policies["main"].devices == (4, 5, 6, 7)
    assert job.gpus == 8


def test_an_offloaded_optimiser_is_the_hosts(toy):
    job = toy(ranks=4, offload_optimizer=True)
    assert "optimiser" not in of(job, "rank 0").parts
    host = of(job, "the first node's host memory")
    assert host.parts == pytest.approx({"optimiser": 4 * 12 * COUNT / 4})
    assert host.capacity == 1e10


def test_sleeping_engines_leave_their_weights_with_the_host(toy):
    host = of(toy(ranks=4, engine={"sleep": True, "replicas": 2, "tensor_parallel": 2}), "the first node's host memory")
    assert host.parts == {"weights of sleeping engines": 4 * COUNT, "weights on their way to engines": 2 * COUNT}


def test_a_host_without_gpus_holds_all_ranks_and_engines(toy):
    cluster = {"nodes": 1, "gpus_per_node": 1, "device": {"gpu": False, "memory_bytes": 4e9}}
    job = toy(ranks=2, dtype="float32", engine={"dtype": "float32", "gpus": "own", "kv_cache_bytes": 1000}, cluster=cluster)
    (device,) = memory.devices(job)
    assert device.where == "the host"
    assert device.parts["weights"] == 2 * 4 * COUNT
    assert device.parts["optimiser"] == 8 * COUNT  # shared out over the two replicas
    assert device.parts["engine weights"] == 4 * COUNT
    assert device.parts["KV cache"] == 1000
    assert device.parts["processes"] == 1e6


def test_an_engine_in_the_trainers_process_has_no_cache_of_its_own(toy):
    cluster = {"nodes": 1, "gpus_per_node": 1, "device": {"gpu": False}}
    engine = {"backend": "torch", "dtype": "float32", "gpus": "own", "max_concurrent": 8}
    job = toy(ranks=1, dtype="float32", engine=engine, cluster=cluster)
    (device,) = memory.devices(job)
    assert device.parts["engine weights"] == 4 * COUNT
    assert device.parts["KV cache"] == 2 * 4 * 2 * 16 * 4 * 8 * 64
    assert costs.sync_seconds(job, job.policies["main"]) == pytest.approx(4 * COUNT / (1e10 * 0.5))


def test_shared_engines_of_two_policies_meet_where_the_ranks_run_out(toy):
    two = {"a": {"engine": {"tensor_parallel": 2}}, "b": {"engine": {"tensor_parallel": 2}}}
    job = toy(ranks=4, policies=two)
    assert [policy.devices for policy in job.policies.values()] == [(0, 1), (2, 3)]
    job = toy(ranks=2, policies=two)
    assert [policy.devices for policy in job.policies.values()] == [(0, 1), (0, 1)]
    assert of(job, "rank 0").parts["engine overhead"] == 2 * 2 * 2**30


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"recompute": "full"}])
def test_more_replicas_never_leave_less(toy, layout):
    room = [memory.fullest(memory.devices(toy(ranks=ranks, **layout))).headroom for ranks in (2, 4, 8)]
    assert room == sorted(room)
    assert room[0] < room[-1]


def test_twice_the_tensor_parallelism_halves_the_weights(toy):
    engines = [memory.engine_weight_bytes(toy(ranks=4, engine={"tensor_parallel": tp}).policies["main"]) for tp in (1, 2, 4)]
    assert engines == [2 * COUNT, COUNT, COUNT / 2]
    held = [of(toy(ranks=4, tensor_parallel=tp), "rank 0").parts["weights"] for tp in (1, 2, 4)]
    whole = 2 * (4 * NORMS + 32)  # norms aren't cut
    assert [size - whole for size in held] == pytest.approx([2 * COUNT - whole, COUNT - whole / 2, COUNT / 2 - whole / 4])
