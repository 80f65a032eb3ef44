"""The head over two and four ranks (gloo) against one: I5, and the same bits on all ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drmas_kernels import numerics
from drmas_kernels.backend import BACKENDS
from drmas_kernels.linear_logprob import linear_logprob
from drmas_kernels.policy_loss import PolicyLossOptions

CASES = {
    "even": {"vocabulary": 1280, "vocab_size": 1280},
    "bonus and padding": {"vocabulary": 1024, "vocab_size": 1001, "options": {"entropy_bonus": 0.05}},
    "per-token temperature": {"vocabulary": 1000, "vocab_size": 1000, "temperature": torch.linspace(0.5, 2.0, 24)},
    # The second shard is nothing but padding.
    "empty shard": {"vocabulary": 400, "vocab_size": 200, "options": {"entropy_bonus": 0.05}},
    "empty shard, plain": {"vocabulary": 400, "vocab_size": 170},
    # The second shard's probabilities underflow beside the first's, and a target lies there.
    "far shard": {"vocabulary": 400, "vocab_size": 400, "far": -300.0},
    "far shard and bonus": {"vocabulary": 400, "vocab_size": 400, "far": -300.0, "options": {"entropy_bonus": 0.05}},
    "far first shard": {"vocabulary": 400, "vocab_size": 400, "near": -300.0},
    "ignored tokens": {"vocabulary": 300, "vocab_size": 300, "ignored": [0, 5, 6, 23]},
}


def build(head, setting):
    case = head(24, 16, setting["vocabulary"])
    case.target %= setting["vocab_size"]
    if "far" in setting or "near" in setting:
        case.hidden[:, 0] = 1.0
        case.weight[:200, 0], case.weight[200:, 0] = setting.get("near", 0.0), setting.get("far", 0.0)
        case.old_logprob = None
    if setting["vocab_size"] < setting["vocabulary"]:
        case.weight[setting["vocab_size"] :] = torch.nan
    if "ignored" in setting:
        case.token_weight[setting["ignored"]] = 0.0
    return case


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, head, tmp_path_factory):
    """(backend, case name) -> (case, setting, the results of every rank), and what each rank printed."""
    folder, world = tmp_path_factory.mktemp("vocab-parallel"), request.param
    built = {name: build(head, setting) for name, setting in CASES.items()}
    inputs = [
        vars(built[name])
        | {"vocab_size": setting["vocab_size"], "options": setting.get("options", {}), "chunk": 10}
        | {"temperature": setting.get("temperature", 1.0)}
        for name, setting in CASES.items()
    ]
    torch.save(inputs, folder / "cases.pt")
    script, root = Path(__file__).with_name("vocab_parallel_rank.py"), Path(__file__).parents[2]
    outs = [folder / f"rank{rank}.pt" for rank in range(world)]
    environment = {"PYTHONPATH": f"{root / 'kernels'}:{root}", "GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world), folder / "store", folder / "cases.pt", outs[rank]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    printed = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world, printed
    results = [torch.load(out, weights_only=False) for out in outs]
    return {
        (backend, name): (built[name], CASES[name], [result[backend][index] for result in results])
        for backend in BACKENDS
        for index, name in enumerate(CASES)
    }, printed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_I5_any_number_of_ranks_equals_one(ranks, check, name, backend):
    case, setting, results = ranks[0][backend, name]
    options = PolicyLossOptions(**setting.get("options", {}))
    settings = {"vocab_size": setting["vocab_size"], "temperature": setting.get("temperature", 1.0)}
    whole, dhidden, dweight = case.run(options, chunk=10, **settings)
    tolerance = numerics.logprob_tolerance(300.0 if case.old_logprob is None else 20.0, 16)
    check(results[0]["loss"], whole.loss, numerics.LOSS)
    check(results[0]["logprob"], whole.logprob, tolerance)
    check(sum(result["dhidden"] for result in results), dhidden, numerics.GRADIENT)
    check(torch.cat([result["dweight"] for result in results]), dweight, numerics.GRADIENT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_I5_gradients_by_recomputation_equal_those_of_one_rank(ranks, check, name, backend):
    case, setting, results = ranks[0][backend, name]
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    logprob, _ = linear_logprob(
        *(hidden, weight, case.target), vocab_size=setting["vocab_size"], temperature=setting.get("temperature", 1.0)
    )
    (case.token_weight * logprob).sum().backward()
    check(sum(result["dhidden_recomputed"] for result in results), hidden.grad, numerics.GRADIENT)
    check(torch.cat([result["dweight_recomputed"] for result in results]), weight.grad, numerics.GRADIENT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_in_every_bit(ranks, name, backend):
    first, *others = ranks[0][backend, name][2]
    for value in ("loss", "logprob", "scored", "entropy", "recomputed"):
        assert first[value].isfinite().all(), value
        for other in others:
            assert torch.equal(first[value], other[value]), value
    for other in others:
        assert torch.equal(first["metrics"].loss, other["metrics"].loss)


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_reduce_over_ranks(ranks, backend):
    results = ranks[0][backend, "even"][2]
    own, all_ranks = results[0]["metrics"], results[0]["reduced"]
    torch.testing.assert_close(all_ranks.tokens, len(results) * own.tokens)
    torch.testing.assert_close(all_ranks.kl_k3, len(results) * own.kl_k3)
    for extreme in ("ratio_min", "ratio_max", "gap_max"):
        assert torch.equal(getattr(all_ranks, extreme), getattr(own, extreme))


def test_a_shard_out_of_place_is_refused(ranks):
    assert "vocab_start is 1 on rank 0; expected rank times the shard's 3 rows" in ranks[1][0]
