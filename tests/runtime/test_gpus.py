"""Which GPUs engines get: tables of placements, what is refused with which sum, and that no two get one of their own."""

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
from drmas.runtime.gpus import Seat, check_fractions, place_engines

HERE, THERE = "tcp://10.0.0.7:8200", "tcp://[fe80::7]:8200"
TORCH = {"backend": "torch"}


def own(tp: int = 1, replicas: int = 1) -> dict:
    return {"gpus": "own", "tensor_parallel": tp, "replicas": replicas}


def shared(tp: int = 1, replicas: int = 1) -> dict:
    return {"gpus": "shared", "tensor_parallel": tp, "replicas": replicas}


@functools.cache
def tiny() -> RunConfig:
    return load("arithmetic-tiny")


def config(hosts=(), **engines) -> RunConfig:
    """A policy for each name, with these settings of its engine; `hosts` are the cluster's."""
    policies = {name: PolicyConfig(model="m", engine=EngineConfig(**settings)) for name, settings in engines.items()}
    return tiny().model_copy(update={"policies": policies, "cluster": ClusterConfig(engine_hosts=list(hosts))})


def gpus(placed) -> dict[str, list]:
    return {name: [list(seat.gpus) for seat in seats] for name, seats in placed.items()}


@pytest.mark.parametrize(
    ("engines", "world", "ranks", "gpus_per_host", "expected"),
    [
        ({"a": own()}, 1, 1, 2, {"a": [[1]]}),
        ({"a": own(2, 2)}, 4, 4, 8, {"a": [[4, 5], [6, 7]]}),
        ({"a": own(2), "b": own(1, 2)}, 4, 4, 8, {"a": [[4, 5]], "b": [[6], [7]]}),
        ({"a": own(), "b": own(), "c": own()}, 16, 4, 8, {"a": [[4]], "b": [[5]], "c": [[6]]}),  # on four hosts
        ({"a": shared()}, 4, 4, 4, {"a": [[0]]}),
        ({"a": shared(2, 2)}, 4, 4, 8, {"a": [[0, 1], [2, 3]]}),
        # the next policy takes the next GPUs, and starts anew where they don't suffice
        ({"a": shared(), "b": shared(2), "c": shared(2)}, 4, 4, 4, {"a": [[0]], "b": [[1, 2]], "c": [[0, 1]]}),
        ({"a": shared(4), "b": shared(4)}, 8, 8, 8, {"a": [[0, 1, 2, 3]], "b": [[4, 5, 6, 7]]}),
        ({"a": shared(4), "b": shared(4)}, 4, 4, 8, {"a": [[0, 1, 2, 3]], "b": [[0, 1, 2, 3]]}),
        ({"a": shared(), "b": own(2)}, 2, 2, 4, {"a": [[0]], "b": [[2, 3]]}),
        ({"a": TORCH, "b": own()}, 1, 1, 2, {"a": [[0]], "b": [[1]]}),
        # an evaluation: no GPU is a trainer's
        ({"a": own(2), "b": own()}, 0, 0, 4, {"a": [[0, 1]], "b": [[2]]}),
        ({"a": shared(2), "b": shared(2)}, 0, 0, 2, {"a": [[0, 1]], "b": [[0, 1]]}),
        ({"a": shared(2), "b": own()}, 0, 0, 4, {"a": [[1, 2]], "b": [[0]]}),
    ],
)  # fmt: skip
def test_gpus_of_rank_0s_host(engines, world, ranks, gpus_per_host, expected):
    placed = place_engines(config(**engines), world=world, ranks_per_host=ranks, gpus_per_host=gpus_per_host)
    assert list(placed) == list(engines)
    assert gpus(placed) == expected
    assert all(seat.host is None for seats in placed.values() for seat in seats)


def test_replicas_take_a_policys_hosts_in_turn_and_those_of_the_cluster_are_taken_in_turn_by_all_policies():
    engines = {
        "a": {"replicas": 3, "hosts": [HERE, HERE, THERE]},
        "b": {"hosts": [], "tensor_parallel": 2},
        "c": {"replicas": 3},
        "d": {"replicas": 2},
        "e": TORCH,
    }
    placed = place_engines(config([THERE, HERE], **engines), world=2, ranks_per_host=2, gpus_per_host=4)
    assert placed == {
        "a": (Seat(HERE, None), Seat(HERE, None), Seat(THERE, None)),
        "b": (Seat(None, (2, 3)),),
        "c": (Seat(THERE, None), Seat(HERE, None), Seat(THERE, None)),
        "d": (Seat(HERE, None), Seat(THERE, None)),
        "e": (Seat(None, (0,)),),
    }


def test_a_host_without_gpus_has_room_for_all_and_gives_none():
    engines = {"a": own(4, 5), "b": shared(), "c": TORCH}
    placed = place_engines(config(**engines), world=4, ranks_per_host=4, gpus_per_host=0)
    assert {name: set(seats) for name, seats in placed.items()} == {name: {Seat(None, None)} for name in "abc"}
    assert len(placed["a"]) == 5


@pytest.mark.parametrize(
    ("engines", "world", "gpus_per_host", "message"),
    [
        (
            {"a": own(4, 2)},
            4,
            8,
            "policies.a.engine needs 2 replicas x tensor_parallel 4 = 8 GPUs of its own; rank 0's host has 8, of which the "
            "trainer ranks take 4: 4 are left. Lower policies.a.engine.replicas or .tensor_parallel, start fewer trainer ranks "
            "per host, set policies.a.engine.gpus to shared, or name hosts that run drmas serve-engines in cluster.engine_host",
        ),
        (
            {"a": own(2), "b": own(), "c": own(1, 2)},
            4,
            8,
            "policies.c.engine needs 2 replicas x tensor_parallel 1 = 2 GPUs of its own; rank 0's host has 8, of which the "
            "trainer ranks take 4 and engines of a 2 and engines of b 1: 1 are left.",
        ),
        ({"a": own()}, 1, 1, "= 1 GPU of its own; rank 0's host has 1, of which the trainer ranks take 1: 0 are left"),
        (
            {"a": shared(2, 3)},
            4,
            8,
            "policies.a.engine needs 3 replicas x tensor_parallel 2 = 6 GPUs of trainer ranks; rank 0's host has 4: 4 are "
            "there to share. Lower policies.a.engine.replicas or .tensor_parallel, or set policies.a.engine.gpus to own",
        ),
        ({"a": own(4)}, 0, 2, "= 4 GPUs of its own; this host has 2: 2 are left"),
        ({"a": own(), "b": shared()}, 0, 1, "1 GPU that no engine has of its own; this host has 1, of which engines of a 1: 0"),
        ({"a": own()}, 3, 2, "rank 0's host has 2 GPU(s) and 3 trainer ranks, which take one each: start at most 2 per host"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_refused_with_the_sum(engines, world, gpus_per_host, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        place_engines(config(**engines), world=world, ranks_per_host=world, gpus_per_host=gpus_per_host)


ENGINE = st.fixed_dictionaries(
    {"gpus": st.sampled_from(["own", "shared"]), "replicas": st.integers(1, 3), "tensor_parallel": st.sampled_from([1, 2, 4])}
)


@given(
    engines=st.dictionaries(st.sampled_from("abc"), ENGINE, min_size=1),
    world=st.integers(0, 12),
    ranks=st.integers(1, 8),
    gpus_per_host=st.integers(1, 16),
)
def test_no_gpu_is_given_twice_unless_it_is_shared_and_every_refusal_is_right(engines, world, ranks, gpus_per_host):
    trainers = min(world, ranks)
    owners = [settings for settings in engines.values() if settings["gpus"] == "own"]
    needs = {name: settings["replicas"] * settings["tensor_parallel"] for name, settings in engines.items()}
    owned = sum(each["replicas"] * each["tensor_parallel"] for each in owners)
    pool = trainers or gpus_per_host - owned
    fits = trainers <= gpus_per_host and owned <= gpus_per_host - trainers
    fits &= all(needs[name] <= pool for name, settings in engines.items() if settings["gpus"] == "shared")
    try:
        placed = place_engines(config(**engines), world=world, ranks_per_host=ranks, gpus_per_host=gpus_per_host)
    except ConfigError as error:
        assert not fits
        _check_sum(str(error), trainers)
        return
    assert fits
    given_away: list[int] = []
    for name, settings in engines.items():
        seats = placed[name]
        mine = [gpu for seat in seats for gpu in seat.gpus]
        assert [len(seat.gpus) for seat in seats] == [settings["tensor_parallel"]] * settings["replicas"]
        assert len(set(mine)) == len(mine)  # replicas of a policy never meet
        assert all(0 <= gpu < gpus_per_host for gpu in mine)
        if settings["gpus"] == "own":
            assert all(gpu >= trainers for gpu in mine)
            given_away += mine
        elif trainers:
            assert all(gpu < trainers for gpu in mine)
    assert len(set(given_away)) == len(given_away)
    met = {gpu for name, each in engines.items() if each["gpus"] == "shared" for seat in placed[name] for gpu in seat.gpus}
    assert not met & set(given_away)


def _check_sum(message: str, trainers: int) -> None:
    """The arithmetic of a refusal says what is missing."""
    product = r"(\d+) replicas? x tensor_parallel (\d+) = (\d+) GPUs? "
    if found := re.search(product + r"of its own; .*? has (\d+)(.*): (\d+) are left", message):
        replicas, size, need, there = (int(found[i]) for i in (1, 2, 3, 4))
        taken = sum(map(int, re.findall(r"(?:take|engines of \w) (\d+)", found[5])))
        assert replicas * size == need > int(found[6]) == there - taken
        assert not trainers or f"the trainer ranks take {trainers}" in found[5]
    elif found := re.search(product + r"(?:of trainer|that no).*: (\d+) are there to share", message):
        assert int(found[1]) * int(found[2]) == int(found[3]) > int(found[4])
    else:
        found = re.search(r"has (\d+) GPU\(s\) and (\d+) trainer ranks", message)
        assert int(found[1]) < int(found[2]) == trainers


def test_engines_of_one_team_want_no_more_than_a_whole_gpu():
    made = config(a=shared(2) | {"gpu_memory_fraction": 0.5}, b=shared() | {"gpu_memory_fraction": 0.6}, c=own())
    engines = {name: policy.engine for name, policy in made.policies.items()}
    seats = {"a": [Seat(None, (0, 1))], "b": [Seat(None, (1,))], "c": [Seat(THERE, None)]}
    message = (
        "GPU 1 has engines that want 1.1 of it: policies.a.engine.gpu_memory_fraction 0.5 + "
        "policies.b.engine.gpu_memory_fraction 0.6; lower them to 1 in sum"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_fractions(engines, seats)
    check_fractions({name: engines[name] for name in "ac"}, seats)
    check_fractions(engines, seats | {"b": [Seat(None, (2,))]})
