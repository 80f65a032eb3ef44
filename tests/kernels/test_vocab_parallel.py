"""The head over two ranks (gloo) against one: I5, and the same bits on both ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drmas_kernels import numerics
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


@pytest.fixture(scope="module")
def ranks(head, tmp_path_factory):
    """Case name -> (case, setting, results of rank 0 and rank 1), and what each rank printed."""
    folder = tmp_path_factory.mktemp("vocab-parallel")
    built = {name: build(head, setting) for name, setting in CASES.items()}
    inputs = [
        vars(built[name])
        | {"vocab_size": setting["vocab_size"], "options": setting.get("options", {}), "chunk": 10}
        | {"temperature": setting.get("temperature", 1.0)}
        for name, setting in CASES.items()
    ]
    torch.save(inputs, folder / "cases.pt")
    script = Path(__file__).with_name("vocab_parallel_rank.py")
    outs = [folder / f"rank{rank}.pt" for rank in range(2)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "kernels"), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "2", folder / "store", folder / "cases.pt", outs[rank]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    results = [torch.load(out, weights_only=False) for out in outs]
    return {name: (built[name], CASES[name], pair) for name, *pair in zip(CASES, *results, strict=True)}, printed


@pytest.mark.parametrize("name", CASES)
def test_I5_two_ranks_equal_one(ranks, check, name):
    case, setting, (first, second) = ranks[0][name]
    options = PolicyLossOptions(**setting.get("options", {}))
    size = setting["vocab_size"]
    whole, dhidden, dweight = case.run(options, vocab_size=size, temperature=setting.get("temperature", 1.0), chunk=10)
    tolerance = numerics.logprob_tolerance(300.0 if case.old_logprob is None else 20.0, 16)
    check(first["loss"], whole.loss, numerics.LOSS)
    check(first["logprob"], whole.logprob, tolerance)
    check(first["dhidden"] + second["dhidden"], dhidden, numerics.GRADIENT)
    check(torch.cat([first["dweight"], second["dweight"]]), dweight, numerics.GRADIENT)


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_in_every_bit(ranks, name):
    _, _, (first, second) = ranks[0][name]
    for value in ("loss", "logprob", "scored", "entropy"):
        assert torch.equal(first[value], second[value]), value
        assert first[value].isfinite().all(), value
    assert torch.equal(first["metrics"].loss, second["metrics"].loss)


def test_metrics_reduce_over_ranks(ranks):
    _, _, (first, _) = ranks[0]["even"]
    own, both = first["metrics"], first["reduced"]
    assert torch.equal(both.tokens, 2 * own.tokens)
    assert torch.equal(both.kl_k3, 2 * own.kl_k3)
    for extreme in ("ratio_min", "ratio_max", "gap_max"):
        assert torch.equal(getattr(both, extreme), getattr(own, extreme))


def test_a_shard_out_of_place_is_refused(ranks):
    assert "vocab_start is 1 on rank 0; expected rank times the shard's 3 rows" in ranks[1][0]
