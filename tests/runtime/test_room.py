"""What trainers and engines need together, against sums done by hand; what is refused, and what is only said."""

from __future__ import annotations

import functools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drmas.config.cluster import ClusterConfig
from drmas.config.load import load
from drmas.config.schema import EngineConfig, PolicyConfig, RunConfig
from drmas.errors import ConfigError
from drmas.policy.architecture import Architecture
from drmas.runtime.machine import Machine
from drmas.runtime.memory import Part
from drmas.runtime.room import CONTEXT_BYTES, GIB, PROCESS_BYTES, SLEEPING_BYTES, EngineNeed, RankNeed, Room, rank_needs

CARD = 80 * GIB


@functools.cache
def tiny() -> RunConfig:
    return load("arithmetic-tiny")


def room(
    machine: Machine,
    engines: dict[str, dict],
    *,
    trainer: float = 20,
    activations: float = 10,
    weights: float = 8,
    hosts=(),
    world: int | None = None,
) -> Room:
    """Every rank holds `trainer` GiB and `activations`, every engine's worker `weights`; 0.5 GiB are a sequence's cache."""
    policies = {name: PolicyConfig(model="m", engine=EngineConfig(**settings)) for name, settings in engines.items()}
    cluster = ClusterConfig(engine_hosts=list(hosts))
    config = tiny().model_copy(update={"policies": policies, "cluster": cluster})
    needs = {name: EngineNeed(weights * GIB, 0.5 * GIB) for name in engines}
    parts = {"weights": trainer * GIB / 4, "optimiser": trainer * GIB * 3 / 4, "optimiser in host memory": 3 * GIB}
    world = machine.ranks if world is None else world
    ranks = {rank: RankNeed(parts, activations * GIB) for rank in range(world)}
    return Room(config, machine.place(config, world=world), machine, needs, ranks)


def shared(fraction: float, *, sleep: bool = False, tp: int = 1) -> dict:
    return {"gpus": "shared", "gpu_memory_fraction": fraction, "sleep": sleep, "tensor_parallel": tp}


@pytest.mark.parametrize(
    ("engines", "when", "needed"),
    [
        ({"a": shared(0.5)}, "while policies are trained", 20 + 1 + 10 + 40),
        ({"a": shared(0.2), "b": shared(0.3)}, "while policies are trained", 20 + 1 + 10 + 16 + 24),
        ({"a": shared(0.7, sleep=True)}, "while episodes run", 20 + 1 + 56),  # 20 + 1 + 10 + 2 asleep
        ({"a": shared(0.1, sleep=True)}, "while policies are trained", 20 + 1 + 10 + 2),  # 20 + 1 + 8 awake
        ({"a": shared(0.2, sleep=True), "b": shared(0.3)}, "while episodes run", 20 + 1 + 16 + 24),  # 20 + 1 + 10 + 2 + 24
        ({"a": shared(0.1, sleep=True), "b": shared(0.3)}, "while policies are trained", 20 + 1 + 10 + 2 + 24),
    ],
)
def test_a_shared_gpu_is_summed_up_at_the_moment_that_counts(engines, when, needed):
    one = room(Machine(1, 1, CARD), engines, weights=4)
    one.check()
    assert one.lines()["GPU memory"].startswith(f"GPU 0 is the fullest and needs {needed:.2f} GiB of 80.00 GiB {when}: the tr")


@pytest.mark.parametrize(
    ("engines", "when", "least"),
    [
        ({"a": shared(0.5)}, "while policies are trained", 31 / 0.5),
        ({"a": shared(0.5, sleep=True)}, "while episodes run", 21 / 0.5),
        ({"a": shared(0.2, sleep=True)}, "while policies are trained", 33.0),
        ({"a": shared(0.2, sleep=True), "b": shared(0.3)}, "while policies are trained", 33 / 0.7),
    ],
)
def test_of_an_unknown_card_it_is_said_how_large_it_must_be(engines, when, least):
    said = f"GPU 0 is the fullest and needs a card of at least {least:.2f} GiB {when}: the trainer's numbers 20.00 GiB "
    assert room(Machine(1, 1), engines).lines()["GPU memory"].startswith(said)
    room(Machine(1, 1, int((least + 0.01) * GIB)), engines, weights=0).check()
    with pytest.raises(ConfigError, match=when):
        room(Machine(1, 1, int((least - 0.01) * GIB)), engines, weights=0).check()


@given(
    fractions=st.lists(st.tuples(st.floats(0.05, 0.6), st.booleans()), min_size=1, max_size=3),
    trainer=st.floats(1, 70),
    activations=st.floats(0, 40),
)
def test_it_is_refused_exactly_where_a_sum_exceeds_the_card_and_what_is_proposed_helps(fractions, trainer, activations):
    engines = {f"p{i}": shared(fraction, sleep=sleep) for i, (fraction, sleep) in enumerate(fractions)}
    asleep = any(sleep for _, sleep in fractions)
    awake = trainer + 1 + sum(fraction for fraction, _ in fractions) * 80
    updates = trainer + 1 + activations + sum(2 if sleep else fraction * 80 for fraction, sleep in fractions)
    found = room(Machine(1, 1, CARD), engines, trainer=trainer, activations=activations, weights=0.1)
    try:
        found.check()
    except ConfigError as error:
        message = str(error)
        assert max(updates, awake if asleep else 0) > 80 - 1e-6
        said = re.match(r"GPU 0 of rank 0's host has 80.00 GiB and would need ([\d.]+) GiB (while [a-z ]+): ", message)
        wanted = awake if said[2] == "while episodes run" else updates
        assert float(said[1]) == pytest.approx(wanted, abs=0.01)
        terms = re.findall(r"(?:numbers|NCCL|about|asleep|= ?) ?([\d.]+) GiB", message.partition(": ")[2])
        assert sum(map(float, terms)) == pytest.approx(wanted, abs=0.05)
        if most := re.search(r"lower [^;]* to ([\d.]+)", message):
            counted = [fraction for fraction, sleep in fractions if said[2] == "while episodes run" or not sleep]
            assert float(most[1]) < sum(counted) + 0.01
    else:
        assert max(updates, awake if asleep else 0) < 80 + 1e-6


def test_a_refusal_names_the_gpu_the_terms_and_the_keys():
    with pytest.raises(ConfigError) as caught:
        room(Machine(2, 8, CARD), {"a": shared(0.5, tp=2), "b": shared(0.4, tp=2)}).check()
    assert str(caught.value) == (
        "GPU 0 of rank 0's host has 80.00 GiB and would need 103.00 GiB while policies are trained: the trainer's numbers "
        "20.00 GiB (weights 5.00, optimiser 15.00, optimiser in host memory 3.00), CUDA and NCCL 1.00 GiB, activations about "
        "10.00 GiB, engine a 0.5 x 80.00 GiB = 40.00 GiB, engine b 0.4 x 80.00 GiB = 32.00 GiB; lower "
        "policies.a.engine.gpu_memory_fraction and policies.b.engine.gpu_memory_fraction to 0.61 in sum, or lay the policies "
        "out over more ranks, or set policies.a.engine.sleep to true, or set policies.b.engine.gpus to own"
    )
    with pytest.raises(ConfigError) as caught:
        room(Machine(1, 8, CARD), {"a": shared(0.9, sleep=True)}).check()
    message = str(caught.value)
    assert "would need 93.00 GiB while episodes run" in message
    assert "lower policies.a.engine.gpu_memory_fraction to 0.74, or" in message
    assert "activations" not in message
    assert "sleep" not in message  # it does


def test_fractions_that_leave_nothing_for_the_trainer_are_refused_whatever_the_card():
    with pytest.raises(
        ConfigError, match=r"GPU 0 of rank 0's host would need 31.00 GiB and 1 of itself while policies are trained"
    ):
        room(Machine(1, 1), {"a": shared(0.3), "b": shared(0.7)}).check()
    room(Machine(1, 1), {"a": shared(0.3), "b": shared(0.6)}).check()
    room(Machine(1, 1, 10 * CARD), {"a": shared(0.3), "b": shared(0.6)}).check()


def test_engines_on_gpus_of_their_own_must_hold_their_weights_and_one_sequence():
    engines = {"a": {"gpu_memory_fraction": 0.1, "tensor_parallel": 2, "max_model_tokens": 4096}}
    room(Machine(1, 8, 85 * GIB), engines).check()
    room(Machine(1, 8), engines).check()  # of unknown size
    message = (
        "policies.a.engine.gpu_memory_fraction is 0.1, of 80.00 GiB a GPU 8.00 GiB; weights take 8.00 GiB, the cache of one "
        "sequence of max_model_tokens 4096 0.50 GiB: raise the fraction, or policies.a.engine.tensor_parallel"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        room(Machine(1, 8, CARD), engines).check()
    room(Machine(1, 8, CARD), engines, hosts=["tcp://10.0.0.7:8200"]).check()  # of a host that isn't known
    assert "GPU memory" not in room(Machine(1, 8, CARD), engines).lines()


def test_ranks_of_other_hosts_are_on_no_gpu_of_rank_0s():
    """Two hosts of four ranks and eight GPUs: ranks 4 to 7 aren't where the engines are."""
    one = room(Machine(4, 8, CARD), {"a": {"gpu_memory_fraction": 0.9, "replicas": 4}}, trainer=60, world=8)
    one.check()
    assert [seat.gpus for seat in one.seats["a"]] == [(4,), (5,), (6,), (7,)]
    assert "GPU memory" not in one.lines()


def test_a_cpu_is_summed_up_over_all_processes():
    engines = {"a": {"replicas": 2, "kv_cache_bytes": 2 * GIB}, "b": {"tensor_parallel": 2}, "c": {"backend": "torch"}}
    found = room(Machine(2, 0, None, 200 * GIB), engines, weights=8)
    found.check()
    trainer = 2 * (20 + 3)  # "in host memory" is here, too
    process = PROCESS_BYTES / GIB
    needed = trainer + 2 * (8 + 2 + process) + (2 * 8 + 2 * 0.5 + 3 * process) + 8
    assert (
        found.lines()["host memory"] == f"about {needed:.2f} GiB and 20.00 GiB of activations of the 200.00 GiB that are left"
    )
    assert room(Machine(2, 0), engines).lines()["host memory"].endswith("GiB of activations")
    room(Machine(2, 0), engines).check()
    room(Machine(2, 0, None, int((needed + 0.01) * GIB)), engines).check()
    with pytest.raises(ConfigError) as caught:
        room(Machine(2, 0, None, int((needed - 0.01) * GIB)), engines).check()
    message = str(caught.value)
    assert message.startswith(f"trainer and engines need about {needed:.2f} GiB, activations not counted, and this host has")
    terms = re.findall(r"(?:trainer's|of engine) [^,;]*? ([\d.]+) GiB", message.partition("left: ")[2])
    assert sum(map(float, terms)) == pytest.approx(needed, abs=0.03)
    assert "lower policies.a.engine.kv_cache_bytes and policies.b.engine.kv_cache_bytes" in message


def test_every_engine_has_a_line():
    engines = {
        "a": shared(0.25, sleep=True),
        "b": {"replicas": 2, "tensor_parallel": 2},
        "c": {"hosts": ["tcp://10.0.0.7:8200"], "tensor_parallel": 4},
        "d": {"backend": "torch"},
    }
    lines = room(Machine(2, 8, CARD), engines).lines()
    assert {label: line for label, line in lines.items() if label != "GPU memory"} == {
        "engine a": "GPU 0 of rank 0's host, shared with trainer ranks, 0.25 of it (20.00 GiB), 8.00 GiB of it for weights; "
        "asleep during updates, 8.00 GiB a GPU in host memory",
        "engine b-0": "GPUs 2-3 of rank 0's host, 0.5 of each (40.00 GiB), 8.00 GiB of it for weights",
        "engine b-1": "GPUs 4-5 of rank 0's host, 0.5 of each (40.00 GiB), 8.00 GiB of it for weights",
        "engine c": "4 GPU(s) of tcp://10.0.0.7:8200, 0.5 of each, 8.00 GiB of it for weights",
        "engine d": "in the process of rank 0 on GPU 0, 8.00 GiB of weights",
    }
    assert "an engine in the trainer's process 8.00 GiB" in lines["GPU memory"]
    lines = room(Machine(1, 0), {"a": {"tensor_parallel": 2}, "b": {"backend": "torch"}}).lines()
    assert lines["engine a"] == "the CPU of rank 0's host, 16.00 GiB of weights, 1.00 GiB of cache, and its process"
    assert lines["engine b"] == "in the process of rank 0 on the CPU, 8.00 GiB of weights"


def test_needs_of_an_engine():
    architecture = Architecture("qwen3", 3, 64, 8, 2, 16, 96, 131, 1e-6, 1e4, True, 256)
    token = 2 * 3 * 16 * 2  # keys and values of three layers in bfloat16, of one head
    found = EngineNeed.of(EngineConfig(dtype="bfloat16", max_model_tokens=100), architecture, 1000)
    assert found == EngineNeed(2000.0, 2 * token * 100.0)
    parallel = EngineConfig(dtype="bfloat16", max_model_tokens=100, tensor_parallel=4)
    assert EngineNeed.of(parallel, architecture, 1000) == EngineNeed(500.0, token * 100.0)  # a head is on two ranks then


def test_a_rank_holds_equal_parts_once_and_the_activations_of_one_policy_at_a_time():
    base, mine, other = Part("base", 5.0, "base"), Part("weights", 2.0, "a"), Part("weights", 4.0, "b")
    held = {"a": {0: [base, mine], 1: [mine]}, "b": {0: [base, other]}}
    found = dict(rank_needs(held, {"a": {0: 7.0, 1: 7.0}, "b": {0: 9.0}}))
    assert found == {0: RankNeed({"base": 5.0, "weights": 6.0}, 9.0), 1: RankNeed({"weights": 2.0}, 7.0)}
    assert (found[0].on_device, CONTEXT_BYTES, SLEEPING_BYTES) == (11.0, GIB, 2 * GIB)
