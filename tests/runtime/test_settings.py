"""Whole runs with scripted engines for settings that change what a policy is: critic, reference, adapters, frozen parts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "main" / "model.safetensors")


PPO = ("--advantage.preset", "ppo", "--advantage.gae-lambda", "0.95", "--policies.main.critic.lr", "3e-3")


def test_ppo_trains_a_critic_and_resumes_with_it(run, metrics_of):
    done, whole = run(*PPO)
    assert done.returncode == 0, done.stderr
    steps = metrics_of(whole)
    assert steps[0]["train/main/critic_error"] > steps[1]["train/main/critic_error"] > 0
    assert steps[0]["train/main/critic_grad_norm"] > 0
    assert all(step["advantage/solver/row_sum"] is not None for step in steps)
    assert (whole / "checkpoints" / "step_2" / "critic-main").is_dir()
    half, folder = run(*PPO, "--train.steps", "1", name="half")
    assert half.returncode == 0, half.stderr
    resumed, folder = run(*PPO, "--resume", name="half")
    assert resumed.returncode == 0, resumed.stderr
    again = metrics_of(folder)[1]
    for key in ("train/main/loss", "train/main/grad_norm", "train/main/critic_loss", "train/main/critic_error"):
        assert again[key] == steps[1][key], key
    assert all(torch.equal(one, other) for one, other in zip(exported(whole).values(), exported(folder).values(), strict=True))


def test_a_kl_term_is_measured_from_the_model_that_the_run_starts_with(run, metrics_of):
    warm = ("--warm-start.steps", "2", "--warm-start.batch-size", "4")  # which has no use for a reference
    done, folder = run("--loss.kl", "k3", "--loss.kl-coefficient", "0.1", *warm)
    assert done.returncode == 0, done.stderr
    first, second = metrics_of(folder)
    assert first["train/main/solver/kl_ref"] == pytest.approx(0.0, abs=1e-6)
    assert second["train/main/solver/kl_ref"] > 1e-5


def test_adapters_train_and_the_exported_model_is_merged(run, metrics_of):
    done, folder = run("--policies.main.lora.rank", "4")
    assert done.returncode == 0, done.stderr
    assert metrics_of(folder)[0]["train/main/grad_norm"] > 0
    start, end = run("--policies.main.trainable", "false", name="start")[1], exported(folder)
    before = exported(start)
    changed = {name for name in end if not torch.equal(before[name], end[name])}
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    size = sum(file.stat().st_size for file in (folder / "checkpoints" / "step_2" / "policy-main").iterdir())
    assert size < sum(tensor.numel() * 4 for tensor in before.values()) / 2  # adapters and their moments, not the base


def test_frozen_tensors_leave_a_run_as_they_came(run):
    done, folder = run("--policies.main.freeze", '["model.embed_tokens.*", "model.layers.[01].*"]')
    assert done.returncode == 0, done.stderr
    start = exported(run("--policies.main.trainable", "false", name="start")[1])
    same = {name for name, tensor in exported(folder).items() if torch.equal(start[name], tensor)}
    assert same == {name for name in start if name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1."))}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--advantage.preset", "ppo", "--advantage.std", "task"), "advantage.std is 'task'; with preset 'ppo'"),
        (("--policies.main.pipeline-parallel", "3"), "x pipeline_parallel x context_parallel is 1 x 3 x 1 = 3"),
        (("--policies.main.attention", "flex"), "policies.main.attention is 'flex'"),
        (("--policies.main.fp8", "hybrid"), "policies.main.fp8 is 'hybrid'"),
        (("--policies.main.freeze", '["model.layers.9.*"]'), "matches no tensor"),
        (("--telemetry.profile", "steps=3-1"), "profile"),
        (("--loss.kl", "k3", "--policies.main.reference", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(run, words, message):
    done, _ = run(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
