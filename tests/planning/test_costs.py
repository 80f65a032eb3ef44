"""Seconds of the trainer's phases against arithmetic by hand.

The toy's batch: 3 tasks x 2 episodes x 2 calls = 12 rows of 11 + 5 tokens, which compute 10 + 5 each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from drmas.errors import ConfigError
from drmas.planning import costs
from drmas.planning.types import Lengths

ROWS, TOKENS, PAIRS, RESPONSES = 12, 12 * 15, 12 * 15 * 16 // 2, 12 * 5
WEIGHTS = 32 * 128 + 64 * 32 + 3 * 32 * 64
"""Of a layer, in products."""
ATTENTION = 2 * 4 * 16
HEAD = 32 * 132
FORWARD = 2 * 4 * (WEIGHTS * TOKENS + ATTENTION * PAIRS) + 2 * HEAD * RESPONSES
COUNT = 4 * (WEIGHTS + 2 * 32 + 2 * 16) + 132 * 32 + 32
HIDDEN = TOKENS * 32 * 2
"""Bytes of all tokens' hidden states."""


def test_rows_of_a_step(toy):
    policy = toy(ranks=1).policies["main"]
    work = toy(ranks=1).workload
    assert costs.step_rows(policy, work, share_prefixes=False) == (ROWS, TOKENS, PAIRS, RESPONSES)
    shared = costs.step_rows(policy, work, share_prefixes=True)
    assert shared == (ROWS, 12 * (15 - 6), 12 * (15 * 16 - 6 * 7) / 2, RESPONSES)


def test_uneven_lengths_have_more_pairs(toy, load):
    even, uneven = (load.workload(load.agent(response=Lengths.fitted(50.0, spread, 10**6))) for spread in (0.0, 0.8))
    policy = toy(ranks=1).policies["main"]
    one, other = (costs.step_rows(policy, work, share_prefixes=False) for work in (even, uneven))
    assert other.tokens == pytest.approx(one.tokens)
    assert other.pairs > 1.2 * one.pairs


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", FORWARD - 2 * HEAD * RESPONSES)])
def test_compute_is_flops_over_a_share_of_the_peak(toy, recompute, again):
    training = costs.training(job := toy(ranks=2, recompute=recompute), job.policies["main"])
    assert training.compute == pytest.approx((3 * FORWARD + again) / (2 * 1e12 * 0.5))
    assert training.overhead == pytest.approx(2 * 1e-2)  # 90 tokens per replica in microbatches of 64
    assert (training.bubble, training.tensor_parallel, training.context_parallel, training.pipeline) == (0, 0, 0, 0)


def test_updates_of_float32_use_its_peak(toy):
    slow = costs.training(job := toy(ranks=1, dtype="float32", prefix_sharing=False), job.policies["main"])
    assert slow.compute == pytest.approx(3 * FORWARD / (1e11 * 0.5))


def test_a_pipeline_waits_for_its_first_and_last_microbatch(toy):
    job = toy(ranks=4, pipeline_parallel=4, tokens_per_microbatch=40, engine={"max_model_tokens": 40})
    training = costs.training(job, job.policies["main"])
    assert training.bubble == pytest.approx(training.compute * 3 / 5)  # 180 tokens in 5 microbatches
    assert training.pipeline == pytest.approx(2 * HIDDEN / (1e9 * 0.5))
    across = costs.training(job := toy(ranks=8, pipeline_parallel=4), job.policies["main"])
    assert across.pipeline == pytest.approx(2 * HIDDEN / 2 / (1e8 * 0.5))  # stages on two nodes, two replicas


@pytest.mark.parametrize(("recompute", "reductions"), [("none", 4), ("full", 6)])
def test_tensor_parallel_ranks_reduce_every_layer(toy, recompute, reductions):
    job = toy(ranks=4, tensor_parallel=2, recompute=recompute, tokens_per_microbatch=64)
    training = costs.training(job, job.policies["main"])
    bytes_ = reductions * 4 * 2 * (1 / 2) * HIDDEN / 2  # half of the tokens per replica
    calls = reductions * 4 * 2  # layers x microbatches
    assert training.tensor_parallel == pytest.approx(bytes_ / (1e9 * 0.5) + calls * 1e-5)


def test_context_parallel_ranks_pass_keys_and_values_on(toy):
    job = toy(ranks=2, context_parallel=2)
    keys = 2 * 2 * 16 * 2
    assert costs.training(job, job.policies["main"]).context_parallel == pytest.approx(
        3 * 4 * (1 / 2) * TOKENS * keys / (1e9 * 0.5)
    )


def test_replicas_exchange_what_a_microbatch_does_not_hide(toy):
    job = toy(ranks=2, overlap=False, run={"train": {"updates_per_step": 3}})
    seconds = COUNT * (4 + 2) * (1 / 2) / (1e9 * 0.5)
    assert costs.training(job, job.policies["main"]).replicas == pytest.approx(3 * seconds)
    hidden = costs.training(job := toy(ranks=2, overlap=True), job.policies["main"])
    assert hidden.replicas == pytest.approx(max(0.0, seconds - hidden.compute / 2))
    across = costs.training(job := toy(ranks=8, overlap=False), job.policies["main"])
    assert across.replicas == pytest.approx(COUNT * 6 * (7 / 8) / (1e8 * 0.5))


def test_the_optimiser_reads_its_shard_from_the_memory_that_has_it(toy):
    near = costs.training(job := toy(ranks=4), job.policies["main"]).optimiser
    assert near == pytest.approx(34 * COUNT / 4 / (1e10 * 0.5))
    far = costs.training(job := toy(ranks=4, offload_optimizer=True), job.policies["main"]).optimiser
    assert far == pytest.approx(34 * COUNT / 4 / 1e8)


def test_scoring_is_a_forward_pass_where_several_updates_need_it(toy):
    job = toy(ranks=1)
    assert costs.scoring(job, job.policies["main"]) == 0
    job = toy(ranks=1, run={"train": {"updates_per_step": 2}})
    seconds = FORWARD / (1e12 * 0.25) + 3 * 1e-2
    assert costs.scoring(job, job.policies["main"]) == pytest.approx(seconds)
    frozen = toy(ranks=1, trainable=False)
    assert costs.scoring(frozen, frozen.policies["main"]) == pytest.approx(seconds)


def test_a_reference_is_one_more_forward_pass_of_an_update(toy):
    job = toy(ranks=1, run={"loss": {"kl": "k3"}})
    assert costs.training(job, job.policies["main"]).reference == pytest.approx(FORWARD / (1e12 * 0.25) + 3 * 1e-2)
    adapters = toy(ranks=1, lora={"rank": 2}, run={"loss": {"kl": "k3"}})
    assert costs.training(adapters, adapters.policies["main"]).reference > 0


CHECKSUM = 0.25
"""And the bytes of both sides over half of 1e10 per second."""


@pytest.mark.parametrize(
    ("transport", "seconds"),
    [
        ("broadcast", 2 * COUNT / (1e9 * 0.5) + COUNT / (1e9 * 0.5)),  # all of it, and half from the other rank
        ("shards", COUNT / (1e9 * 0.5)),
        ("disk", 2 * COUNT * 2 / 1e7),
    ],
)
def test_a_push_of_weights_by_transport(toy, transport, seconds):
    job = toy(ranks=2, tensor_parallel=2, sync={"transport": transport}, engine={"gpus": "own", "tensor_parallel": 2})
    checksum = (COUNT + COUNT) / (1e10 * 0.5)
    assert costs.sync_seconds(job, job.policies["main"]) == pytest.approx(seconds + checksum + CHECKSUM)


def test_shared_memory_of_several_workers_goes_through_the_host_and_of_one_from_gpu_to_gpu(toy):
    engine = {"tensor_parallel": 2, "replicas": 2}
    job = toy(ranks=4, tensor_parallel=2, sync={"transport": "shared-memory"}, engine=engine)
    gather, host = COUNT / (1e9 * 0.5), job.cluster.host_bytes_per_second
    seconds = gather + 2 * COUNT / host + COUNT / host + 2 * COUNT / costs.HOST_FILL_BYTES_PER_SECOND
    assert costs.sync_seconds(job, job.policies["main"]) == pytest.approx(seconds + CHECKSUM)
    alone = toy(ranks=1, sync={"transport": "shared-memory"})
    checksum = (2 * COUNT + 2 * COUNT) / (1e10 * 0.5)
    assert costs.sync_seconds(alone, alone.policies["main"]) == pytest.approx(2 * COUNT / (1e9 * 0.5) + checksum + CHECKSUM)


def test_a_critic_is_costed_by_its_own_shape(toy):
    job = toy(ranks=1)
    policy = job.policies["main"]
    rows = costs.step_rows(policy, job.workload, share_prefixes=False)
    same = costs.forward(job, policy, rows, policy.model, head=False)
    shape = replace(policy.shape, layers=3 * policy.shape.layers)
    deeper = replace(policy.model, architecture=replace(policy.model.architecture, layers=shape.layers))
    microbatches = costs.microbatches_of(policy, rows, 1) * job.cluster.efficiencies.microbatch_seconds
    assert costs.forward(job, policy, rows, deeper, head=False) - microbatches == pytest.approx(3 * (same - microbatches))
    assert same < costs.forward(job, policy, rows)


@pytest.mark.parametrize(
    ("ranks", "engine", "transport"),
    [(2, {}, "shared-memory"), (2, {"gpus": "own"}, "broadcast"), (4, {"gpus": "own"}, "broadcast")],
)
def test_the_transport_is_the_runs_own_rule(toy, ranks, engine, transport):
    job = toy(ranks=ranks, engine=engine)
    assert costs.transport_of(job, job.policies["main"]) == transport


def test_weights_to_another_node_take_its_link(toy):
    job = toy(ranks=4, engine={"gpus": "own"}, sync={"transport": "broadcast"})
    assert costs.sync_bandwidth(job, job.policies["main"]) == pytest.approx(1e8 * 0.5)


def test_adapters_alone_are_few_bytes(toy):
    job = toy(ranks=4, tensor_parallel=2, lora={"rank": 2, "sync": "adapter"})
    width = sum(sum(pair) for pair in job.policies["main"].shape.linears().values())
    assert costs.sync_bytes(job.policies["main"]) == 2 * 4 * 2 * width


def test_waking_moves_the_weights_both_ways(toy):
    assert costs.wake_seconds(toy(ranks=1)) == 0
    assert costs.wake_seconds(toy(ranks=1, engine={"sleep": True})) == pytest.approx(2 * 2 * COUNT / 1e8 + 0.5)


def test_fp8_on_a_device_without_it_is_refused(toy):
    job = toy(ranks=1, fp8="hybrid")
    with pytest.raises(ConfigError, match=r"policies.main.fp8 needs products of fp8, which toy hasn't"):
        costs.training(job, job.policies["main"])
    fast = toy(ranks=1, fp8="hybrid", cluster={"device": {"fp8": 2e12}})
    assert costs.training(fast, fast.policies["main"]).compute == pytest.approx(3 * FORWARD / (2e12 * 0.5))


def test_ranks_on_a_host_share_its_cores(toy):
    cluster = {"nodes": 1, "gpus_per_node": 1, "device": {"gpu": False}}
    one, two = (
        costs.training(job := toy(ranks=ranks, dtype="float32", engine={"gpus": "own"}, cluster=cluster), job.policies["main"])
        for ranks in (1, 2)
    )
    assert one.compute == pytest.approx(two.compute)
