"""The comparison with TRL: its settings, its clocks and its arithmetic, from steps that never ran; memory of a process tree."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import end_to_end
from bench.end_to_end import OURS, TRL, Side, Step, arguments, check_same_work, ratios_of, recipe, table_of, trl_settings
from bench.peers.memory import PeakMemory, Tree, cpu_seconds, descendants, sampled
from drmas.config.load import load

PEERS = Path(end_to_end.__file__).parent / "peers"
MEBI = 2**20


def step(wall=10.0, generated=2048.0, trained=7000.0, **more):
    values = {"cpu": 2 * wall, "computed": trained, "seconds": {"rollout": 4.0, "train": 5.0, "sync": 0.5}}
    said = {"loss": 0.1, "grad_norm": 1.0, "reward": 0.3}
    return Step(wall=wall, generated=generated, trained=trained, **(values | said | more))


def side(name, *steps, peak=4096):
    made = Side(name, Path("log"), None, PeakMemory(0), list(steps))
    made.memory.peak = Tree({"python 1": peak * MEBI // 2, "python 2": peak * MEBI // 2})
    return made


def test_all_counted_steps_are_compared_with_trls_fastest_side():
    ours, slow = side(OURS, step(10.0), step(6.0), peak=3000), side(TRL, step(40.0), peak=6000)
    fast = side("TRL, continuous batching", step(32.0), peak=4000)
    table = {
        row[0]: dict(zip(table_of([ours, slow, fast]).columns, row, strict=True)) for row in table_of([ours, slow, fast]).rows
    }
    assert table[OURS]["step s"] == 8.0
    assert table[OURS]["tokens/s"] == pytest.approx(9048 / 8)
    assert table[OURS]["tokens/s by TRL's"] == pytest.approx(5.0)
    assert table[OURS]["peak by TRL's"] == pytest.approx(0.5)
    assert table[OURS]["generated/s"] == 2048 / 4.0
    speed, memory = ratios_of([ours, slow, fast])
    assert (speed.value, speed.missed, speed.better) == (pytest.approx(4.0), False, "higher")
    assert (memory.value, memory.missed, memory.better) == (0.75, False, "lower")
    assert ratios_of([ours]) == ratios_of([slow]) == []


def test_work_that_is_not_the_same_is_refused():
    args = arguments([])
    check_same_work([side(OURS, step()), side(TRL, step(trained=7300.0))], args)
    for bad, message in [
        (side(TRL, step(generated=2047.0)), "TRL generated 2047 tokens in a step; expected 2048"),
        (side(TRL, step(grad_norm=float("nan"))), "expected a finite loss"),
        (side(TRL, step(reward=1.5)), "a reward from 0 to 1"),
        (side(TRL, step(trained=7500.0)), "the sides trained on"),
    ]:
        with pytest.raises(SystemExit, match=message):
            check_same_work([side(OURS, step()), bad], args)


def test_both_sides_are_set_to_the_same_work(tmp_path):
    args = arguments(["--tasks", "2", "--group", "4", "--tokens", "16", "--trl-batch", "4", "--trl", "beta=0.1"])
    (tmp_path / "recipe.json").write_text(json.dumps(recipe(args, tmp_path)))
    ours, theirs = load(str(tmp_path / "recipe.json")), trl_settings(args, tmp_path, TRL)
    config, policy = theirs["config"], ours.policies["main"]
    assert ours.rollout.tasks_per_step * ours.rollout.group_size == theirs["episodes"] == 8
    assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == 8
    assert config["num_generations"] == ours.rollout.group_size
    assert config["max_completion_length"] == ours.team["solver"]["max_tokens"] == 16
    assert config["learning_rate"] == policy.lr
    assert policy.dtype == config["model_init_kwargs"]["dtype"] == policy.engine.dtype
    assert theirs["model"] == policy.model
    assert theirs["tasks"] == ours.data.path
    assert config["max_steps"] == ours.train.steps > args.steps + 1  # the last counted step isn't the last: that one saves
    assert config["beta"] == 0.1
    assert trl_settings(args, tmp_path, "TRL, continuous batching")["config"]["use_transformers_continuous_batching"]


def test_a_batch_that_does_not_divide_the_episodes_is_refused():
    with pytest.raises(SystemExit):
        arguments(["--trl-batch", "5"])


def test_an_environment_without_trl_is_none(tmp_path):
    assert end_to_end.trl_version(None) is None
    assert end_to_end.trl_version(tmp_path / "python") is None
    empty = tmp_path / "python"
    empty.write_text("#!/bin/sh\nexit 1\n")
    empty.chmod(0o755)
    assert end_to_end.trl_version(empty) is None


def test_the_models_copy_ends_with_a_token_that_is_never_said(tmp_path, monkeypatch):
    (tmp_path / "packaged").mkdir()
    added = [{"id": 2, "content": "<|im_end|>"}, {"id": 3, "content": "<repo_name>"}]
    for name, content in [
        ("tokenizer.json", {"added_tokens": added}),
        ("config.json", {"eos_token_id": 2, "hidden_size": 576}),
        ("generation_config.json", {"eos_token_id": 2}),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}),
    ]:
        (tmp_path / "packaged" / name).write_text(json.dumps(content))
    monkeypatch.setattr(end_to_end, "resolve_model", lambda spec: tmp_path / "packaged")
    end_to_end.write_endless(tmp_path / "model")
    changed = json.loads((tmp_path / "model" / "config.json").read_text())
    assert changed == {"eos_token_id": 3, "hidden_size": 576}
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text()) == {"eos_token": "<repo_name>"}
    assert json.loads((tmp_path / "packaged" / "config.json").read_text())["eos_token_id"] == 2


def test_a_side_that_ends_early_is_said_with_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("what went wrong")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with pytest.raises(SystemExit, match="TRL ended early:\nwhat went wrong"):
        Side(TRL, log, process, PeakMemory(process.pid)).step(counted=True)
    process.stdin.close()
    process.wait()


TAKES_TURNS = f"""
import sys
sys.path.insert(0, {str(PEERS)!r})
from turns import Turns
turns = Turns()
print("noise")
for number in range(9):
    turns.wait()
    print("more noise")
    turns.say(generated=number, trained=2, computed=2, seconds={{}}, loss=0, grad_norm=1, reward=0)
"""


def test_a_side_takes_its_turns_and_its_noise_stays_out_of_the_way(tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", TAKES_TURNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    taking = Side("x", tmp_path / "log", process, PeakMemory(process.pid))
    taking.step(counted=False)
    taking.step(counted=True)
    taking.step(counted=True)
    end_to_end.end(taking)
    assert [each.generated for each in taking.steps] == [1, 2]
    assert all(each.wall > 0 for each in taking.steps)
    assert taking.memory.samples >= 2
    assert taking.memory.peak.total > MEBI
    assert process.returncode == 0
    assert (tmp_path / "log").read_text().split() == ["noise", *["more", "noise"] * 3]


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "held = bytearray(b'1' * 2**26); print(len(held), flush=True); input()"],
                         stdin=subprocess.PIPE)
input()
child.communicate(b"\\n")
"""


def test_memory_and_cpu_time_are_those_of_a_process_and_all_below_it():
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == str(2**26)
        tree = descendants(process.pid)
        assert len(tree) == 2
        assert tree[0] == process.pid
        found = sampled(process.pid)
        assert len(found.processes) == 2
        assert 64 * MEBI < found.total < 200 * MEBI
        assert cpu_seconds(process.pid) > 0
    finally:
        process.communicate("\n")
    assert sampled(process.pid).total == 0


def test_the_peak_is_the_largest_sample(monkeypatch):
    sizes = iter([1, 5, 3])
    monkeypatch.setattr("bench.peers.memory.sampled", lambda root: Tree({"a 1": next(sizes, 2)}))
    monkeypatch.setattr("bench.peers.memory.PERIOD_SECONDS", 0.001)
    memory = PeakMemory(1)
    memory.start()
    while memory.samples < 4:
        time.sleep(0.001)
    memory.stop()
    assert memory.peak.total == 5
