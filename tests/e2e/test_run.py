"""What a whole run leaves, and that it is right."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_a_run_leaves_its_files_and_syncs_after_every_update(uninterrupted: Path, read_run) -> None:
    steps = read_run(uninterrupted)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    updates = 0
    for step in steps:
        updates += 1 - step["train/main/skipped"]
        assert step["sync/main/version"] == updates
        assert step["sync/bytes"] > 1e6
        assert 0 <= step["reward/mean"] <= 1
        assert step["rollout/episodes"] == 16
        for agent in ("solver", "verifier"):
            assert step[f"rollout/{agent}/logprob_gap_mean"] < 1e-4  # I11, both sides in fp32
            assert step[f"rollout/{agent}/logprob_gap_max"] < 1e-3
    files = ("config.json", "report.html", "checkpoints/step_4/run.json", "export/main/config.json", "logs/engine-main.log")
    for name in files:
        assert (uninterrupted / name).is_file(), name
    assert any(step["train/main/grad_norm"] > 0 for step in steps)


def test_I2_every_sampled_token_names_the_version_of_its_step(uninterrupted: Path) -> None:
    for step in range(1, 5):
        for line in (uninterrupted / "episodes" / f"step_{step}.jsonl").read_text().splitlines():
            for turn in json.loads(line)["turns"]:
                assert turn["versions"] == [step - 1] * len(turn["response_ids"])


def test_the_exported_model_gives_the_log_probs_that_the_engine_gave(uninterrupted: Path, trained_model: Path) -> None:
    """The first step's tokens under the start model; and the export is no longer that model."""
    start = AutoModelForCausalLM.from_pretrained(trained_model, dtype=torch.float32).eval()
    for line in (uninterrupted / "episodes" / "step_1.jsonl").read_text().splitlines()[:4]:
        for turn in json.loads(line)["turns"]:
            ids = torch.tensor([turn["prompt_ids"] + turn["response_ids"]])
            with torch.no_grad():
                logits = start(ids).logits[0, len(turn["prompt_ids"]) - 1 : -1]
            ours = torch.log_softmax(logits, -1).gather(1, torch.tensor(turn["response_ids"])[:, None])[:, 0]
            torch.testing.assert_close(ours, torch.tensor(turn["logprobs"]), atol=1e-4, rtol=0)
    end = AutoModelForCausalLM.from_pretrained(uninterrupted / "export" / "main", dtype=torch.float32)
    moved = [(a - b).abs().max().item() for a, b in zip(start.parameters(), end.parameters(), strict=True)]
    assert max(moved) > 1e-4
    assert AutoTokenizer.from_pretrained(uninterrupted / "export" / "main").chat_template


def test_two_policies_train_and_sync_on_their_own(workplace: Path, run, trained_model: Path, read_run) -> None:
    engine = "{max_model_tokens = 64, max_concurrent = 32, kv_cache_bytes = 8388608, threads = 1}"
    done = run(
        *("--name", "two", "--train.steps", "2", "--team.verifier.policy", "second"),
        *("--policies.main.model", str(trained_model)),
        *("--policies.second", f"{{model = '{trained_model}', lr = 5e-4, engine = {engine}}}"),
    )
    assert done.returncode == 0, done.stderr
    for number, step in enumerate(read_run(workplace / "runs" / "two"), start=1):
        assert step["sync/main/version"] == step["sync/second/version"] == number
        assert step["train/main/lr"] == pytest.approx(1e-3)
        assert step["train/second/lr"] == pytest.approx(5e-4)
        assert "train/main/verifier/tokens" not in step
        assert step["train/second/verifier/tokens"] > 0


def test_I11_a_frozen_policy_is_measured_and_never_updated(workplace: Path, run, trained_model: Path, read_run) -> None:
    engine = "{max_model_tokens = 64, max_concurrent = 32, kv_cache_bytes = 8388608, threads = 1}"
    done = run(
        *("--name", "frozen", "--train.steps", "2", "--train.updates-per-step", "2", "--team.verifier.policy", "second"),
        *("--policies.main.model", str(trained_model)),
        *("--policies.second", f"{{model = '{trained_model}', trainable = false, engine = {engine}}}"),
    )
    assert done.returncode == 0, done.stderr
    for number, step in enumerate(read_run(workplace / "runs" / "frozen"), start=1):
        assert step["sync/main/version"] == 2 * number  # two updates a step
        assert step["sync/second/version"] == 0
        assert "train/second/grad_norm" not in step
        for agent in ("solver", "verifier"):
            assert step[f"rollout/{agent}/logprob_gap_max"] < 1e-3
    start, end = (
        load_file(folder / "model.safetensors") for folder in (trained_model, workplace / "runs/frozen/export/second")
    )
    assert all(end[name].equal(tensor) for name, tensor in start.items())
