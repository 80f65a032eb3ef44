"""Dry runs as a user starts them, on a machine without GPU, weights, data or network: the recipes with the paper's settings."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import resources

import pytest

from drmas.agents.team import load_team
from drmas.cli import main as cli
from drmas.config.load import load
from drmas.runtime.preview import made_by, missing_files

GIB_OF_AN_H100 = 79.6
"""Of an 80 GB card, as the driver counts it."""
SHARED = {
    "paper-maths": ["--team.verifier.policy", "solver", "--policies.verifier", "null"],
    "paper-search": [
        *("--team.searcher.policy", "router", "--team.answerer.policy", "router"),
        *("--policies.searcher", "null", "--policies.answerer", "null"),
    ],
    "paper-search-heterogeneous": ["--team.answerer.policy", "searcher", "--policies.answerer", "null"],
}
SIZES = {  # recipe: ranks; policy -> model, parameters in millions, layout
    "paper-maths-4b": (4, dict.fromkeys(("solver", "verifier"), ("Qwen/Qwen3-4B", "4022.5", "TP 4 x DP 1"))),
    "paper-maths-8b": (8, dict.fromkeys(("solver", "verifier"), ("Qwen/Qwen3-8B", "8190.7", "TP 8 x DP 1"))),
    "paper-search-3b": (4, dict.fromkeys(("router", "searcher", "answerer"), ("Qwen/Qwen2.5-3B", "3085.9", "TP 4 x DP 1"))),
    "paper-search-7b": (8, dict.fromkeys(("router", "searcher", "answerer"), ("Qwen/Qwen2.5-7B", "7615.6", "TP 4 x DP 2"))),
    "paper-search-heterogeneous": (
        4,
        {
            "router": ("Qwen/Qwen2.5-7B-Instruct", "7615.6", "TP 4 x DP 1"),
            "searcher": ("meta-llama/Llama-3.2-3B-Instruct", "3212.7", "TP 4 x DP 1"),
            "answerer": ("meta-llama/Llama-3.2-3B-Instruct", "3212.7", "TP 4 x DP 1"),
        },
    ),
}
RECIPES = list(SIZES)


def shared(recipe: str) -> list[str]:
    return SHARED[recipe if recipe in SHARED else recipe.rpartition("-")[0]]


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """dry_run(recipe, ...): (status, label -> line of the summary, stderr), in an empty folder, with an empty hub's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRMAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*words: str):
        status = 0
        monkeypatch.setattr("sys.argv", ["drmas", "train", *words, "--dry-run"])
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr()
        parts = [re.split(r" {2,}", line, maxsplit=1) for line in said.out.splitlines()]
        return status, {part[0]: part[-1] for part in parts}, said.err  # a note is its own label

    return run


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_the_paper_is_described_without_anything_of_it_here(dry_run, recipe):
    status, lines, err = dry_run(recipe)
    assert (status, err) == (0, "")
    ranks, policies = SIZES[recipe]
    assert lines["machine"].startswith(f"{ranks} rank(s) with a GPU each")
    assert [name.removeprefix("policy ") for name in lines if name.startswith("policy ")] == list(policies)
    for name, (model, millions, layout) in policies.items():
        assert lines[f"policy {name}"].startswith(
            f"{model}, {millions} M parameters; trainer {layout} on ranks 0-{ranks - 1}, bf"
        )
        assert lines[f"model {model}"].endswith(f"a start fetches it, as hf download {model} does")
    data = "math" if "maths" in recipe else "search"
    epochs = load(recipe).train.epochs
    made = f"data/{data}/train.jsonl is not here; made by: drmas prepare-data {data}; train.epochs is {epochs}, which"
    assert lines["data"].startswith(made)
    assert lines["eval data"] == f"data/{data}/test.jsonl is not here; made by: drmas prepare-data {data}"
    step = "32 tasks x 8 episodes = 256 episodes, 1" if data == "math" else "128 tasks x 5 episodes = 640 episodes, 5"
    assert lines["step"].startswith(f"{step} update(s) per policy")


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_shared_variant_is_described_too(dry_run, recipe):
    status, lines, err = dry_run(recipe, *shared(recipe))
    assert (status, err) == (0, "")
    first = next(iter(SIZES[recipe][1]))
    policies = [name.removeprefix("policy ") for name in lines if name.startswith("policy ")]
    assert policies == ([first, "searcher"] if recipe.endswith("heterogeneous") else [first])
    speakers = {line.rpartition(" ")[2] for line in lines["team"].split(": ")[1].split(", ")}
    assert speakers == set(policies)
    assert not any("no agent uses" in line for line in lines.values())


@pytest.mark.parametrize("words", [[], "shared"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_trainer_and_engines_fit_on_a_card_together(dry_run, recipe, words):
    """With 8 GiB left for activations, at the rank that holds the most; engines start once the trainer's numbers are there."""
    words = shared(recipe) if words else []
    _, lines, _ = dry_run(recipe, *words)
    policies = [name for name in lines if name.startswith("policy ")]
    fullest = lines["memory"] if "memory" in lines else lines[policies[0]].partition("about ")[2]
    trainer = float(re.search(r"([\d.]+) GiB \(", fullest)[1])
    engines = [lines[name.replace("policy ", "engine ")] for name in policies]
    fractions = [float(re.search(r"shared with trainer ranks, ([\d.]+) of each", line)[1]) for line in engines]
    weights = [float(re.search(r"([\d.]+) GiB of it for weights", line)[1]) for line in engines]
    assert trainer + sum(fractions) * GIB_OF_AN_H100 < GIB_OF_AN_H100 - 8
    for fraction, held in zip(fractions, weights, strict=True):
        assert fraction * GIB_OF_AN_H100 - held > 5  # room for the cache


@pytest.mark.parametrize("words", [[], "shared"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_fits_on_the_papers_cards_by_the_arithmetic_of_a_start(dry_run, recipe, words):
    words = shared(recipe) if words else []
    status, lines, err = dry_run(recipe, *words)
    assert (status, err) == (0, "")
    said = r"GPU 0 is the fullest and needs a card of at least ([\d.]+) GiB while policies are trained: the trainer's numbers "
    least = float(re.match(said, lines["GPU memory"])[1])
    assert 20 < least < GIB_OF_AN_H100
    status, lines, err = dry_run(recipe, *words, "--gpu-memory-gib", str(least + 0.1))
    assert (status, err) == (0, "")
    assert f" of {least + 0.1:.2f} GiB while policies are trained" in lines["GPU memory"]
    status, _, err = dry_run(recipe, *words, "--gpu-memory-gib", str(least - 0.1))
    assert (status, err.count("\n")) == (2, 1)
    assert f"GPU 0 of rank 0's host has {least - 0.1:.2f} GiB and would need" in err


def test_what_a_dry_run_is_not_told_of_the_hosts_is_assumed_and_said(dry_run):
    own = ["--policies.solver.engine.gpus", "own"]  # of the verifier, too, which is like it
    status, lines, err = dry_run("paper-maths-4b", *own)
    assert (status, err) == (0, "")
    assert "on hosts of 8 (assumed); stack" in lines["machine"]
    assert "of which the trainer ranks take 4 and engines of solver 4: 0 are left" in lines["engines"]
    assert lines["engines"].endswith("(8 GPUs per host are assumed; --gpus-per-host says otherwise)")
    status, _, err = dry_run("paper-maths-4b", *own, "--gpus-per-host", "8")
    assert (status, err.count("\n")) == (2, 1)
    assert "policies.verifier.engine needs 1 replica x tensor_parallel 4 = 4 GPUs of its own" in err
    _, lines, _ = dry_run("paper-maths-4b", *own, "--gpus-per-host", "12")
    assert "on hosts of 12; stack" in lines["machine"]
    assert lines["engine solver"].startswith("GPUs 4-7 of rank 0's host, 0.2 of each, 1.87 GiB of it for weights")
    assert lines["engine verifier"].startswith("GPUs 8-11 of rank 0's host, 0.2 of each")
    assert "GPU memory" not in lines


def test_sizes_of_a_host_are_for_dry_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["drmas", "train", "paper-maths-4b", "--gpus-per-host", "8"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--gpus-per-host and --gpu-memory-gib are of --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_numbers_are_the_papers(recipe):
    config = load(recipe)
    team, maths = load_team(config.team), "maths" in recipe
    response, prompt = (4096, 8192) if maths else (800, 4096)
    for agent in team.agents.values():
        assert (agent.max_tokens, agent.temperature, agent.overlong) == (response, 1.0, "truncate")
        assert agent.invalid_penalty == (0.1 if maths else 0.01)
        assert agent.chat_template_options == ({"enable_thinking": False} if maths else {})
        policy = config.policies[agent.policy]
        assert policy.engine.max_model_tokens == prompt + response
        assert (policy.lr, policy.lr_schedule, policy.dtype, policy.engine.dtype) == (1e-6, "constant", "bfloat16", "bfloat16")
        assert policy.engine.max_concurrent * len(config.policies) >= config.rollout.tasks_per_step * config.rollout.group_size
    assert {agent.policy for agent in team.agents.values()} == set(config.policies)
    assert team.rounds == (2 if maths else 4)
    assert (config.advantage.preset, config.loss.clip_low, config.loss.clip_high, config.loss.kl) == ("dr-mas", 0.2, 0.2, None)
    assert config.loss.entropy_bonus == (0.0 if maths else 0.001)
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p) == (16, 0.6, 0.95)
    assert config.checkpoint.every_steps == 100
    if not maths:
        assert (config.tools["search"].topk, config.reward.type) == (3, "em")


def test_another_number_of_ranks_is_laid_out_or_refused(dry_run):
    _, lines, _ = dry_run("paper-maths-4b", "--ranks", "8")
    assert "trainer TP 4 x DP 2 on ranks 0-7" in lines["policy solver"]
    assert "optimiser 5.62" in lines["policy solver"]  # half of what it is with one replica
    status, _, err = dry_run("paper-maths-4b", "--ranks", "6")
    assert (status, err.count("\n")) == (2, 1)
    assert "policies.solver.tensor_parallel x pipeline_parallel x context_parallel is 4 x 1 x 1 = 4; it must divide" in err
    assert "6 trainer rank(s)" in err


def test_ranks_are_for_dry_runs_and_a_job_of_others_is_refused(dry_run, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["drmas", "train", "paper-maths-4b", "--ranks", "4"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--ranks 4 is of --dry-run" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["drmas", "train", "paper-maths-4b"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "train.ranks is 4 and the job has 1 trainer rank(s); start it with launchers/torchrun" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "8")  # a dry run under torchrun is of the job that it is in
    assert "train.ranks is 4 and the job has 8 trainer rank(s)" in dry_run("paper-maths-4b")[2]


def test_a_hub_name_that_nobody_knows_is_refused_with_the_way_out(dry_run):
    status, _, err = dry_run("paper-maths-4b", "--policies.solver.model", "Qwen/Qwen9-1B")
    assert (status, err.count("\n")) == (2, 1)
    assert "'Qwen/Qwen9-1B' is no folder here" in err
    assert "hf download Qwen/Qwen9-1B config.json is enough for a dry run" in err


def test_a_start_without_weights_is_refused(dry_run, tmp_path):
    (tmp_path / "data" / "math").mkdir(parents=True)
    (tmp_path / "data" / "math" / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    words = ["--train.ranks", "1", "--policies.solver.tensor-parallel", "1", "--policies.solver.sequence-parallel", "false"]
    _, lines, _ = dry_run("paper-maths-4b", *words)
    assert lines["data"] == "1 task(s), over which 1 step(s) pass 32 times"
    command = [sys.executable, "-m", "drmas.cli", "train", "paper-maths-4b", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    message = "model 'Qwen/Qwen3-4B' is no folder here, the hub's cache has no whole copy of it, and HF_HUB_OFFLINE is set"
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "paper-maths-4b").exists()


def test_a_dry_run_checks_the_reward_of_data_that_is_here(dry_run, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"question": "1+1", "answer": "2", "source": "sums"}\n')
    words = ["--data.type", "jsonl", "--data.path", "t.jsonl", "--warm-start", "null"]
    assert dry_run("arithmetic-tiny", *words)[1]["data"] == "1 task(s), over which 60 step(s) pass 1.92e+03 times"
    status, _, err = dry_run("arithmetic-tiny", *words, "--reward.type", "gym")
    assert status == 2
    assert "reward.type is gym" in err


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("data/math/train.jsonl", "drmas prepare-data math"),
        ("data/aime24/test.jsonl", "drmas prepare-data aime24"),
        ("elsewhere/search/test.jsonl", "drmas prepare-data search --output elsewhere/search"),
        ("mine/train.jsonl", None),
        ("data/math/train.parquet", None),
    ],
)
def test_the_command_that_makes_a_file(path, command):
    assert made_by(path) == command


def test_missing_files_of_every_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.jsonl").touch()
    parts = '{"x": {"data": {"type": "jsonl", "path": "a.jsonl b.jsonl"}}, "y": {"data": {"type": "facts"}}}'
    words = ["--warm-start", "null", "--data.type", "mix", "--data.parts", parts]
    assert missing_files(load("arithmetic-tiny", words).data) == ["a.jsonl"]


def test_a_dataset_of_the_hub_is_not_fetched(dry_run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked = []
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.repo_info", lambda *args, **kwargs: asked.append(kwargs))
    words = ["--data.type", "huggingface", "--data.path", "openai/gsm8k", "--train.epochs", "3"]
    status, lines, err = dry_run(
        "paper-maths-4b", *words, "--eval.data", '{"type": "huggingface", "path": "a/b", "split": "x"}'
    )
    assert (status, err, asked) == (0, "", [])
    assert lines["data"] == (
        "openai/gsm8k, split train, is not in the hub's cache; a start fetches it; train.epochs is 3, which becomes steps then"
    )
    assert lines["eval data"] == "a/b, split x, is not in the hub's cache; a start fetches it"
    status, _, err = dry_run("paper-maths-4b", *words, "--data.path", "runs/old--export")
    assert (status, err.count("\n")) == (2, 1)
    assert "data.path runs/old--export: not a dataset's name" in err


def test_the_note_on_a_profile_knows_the_steps_of_epochs_or_stays_away(dry_run, tmp_path):
    """Of 64 tasks, 32 a step: 10 epochs are 20 steps, and one is 2. The schema's own 10 steps say nothing."""
    data = ["--data.type", "jsonl", "--data.path", "t.jsonl", "--warm-start", "null", "--telemetry.profile", "steps=19-20"]

    def run(epochs: str) -> str:
        return "\n".join(map(" ".join, dry_run("arithmetic-tiny", *data, "--train.epochs", epochs)[1].items()))

    assert "to trace" not in run("1")
    (tmp_path / "t.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 64)
    assert "to trace" not in run("10")
    assert "telemetry.profile is steps=19-20; the run has 2 steps to trace" in run("1")


def test_references_and_critics_that_are_not_here_are_listed(dry_run):
    here = "hf download {} does"
    words = ["--policies.solver.reference", "Qwen/Qwen3-8B", "--policies.solver.critic.model", "Qwen/Qwen3-0.6B"]
    _, lines, _ = dry_run("paper-maths-4b", *words)
    assert "model Qwen/Qwen3-8B" not in lines  # without effect, and a note says so
    used = ["--advantage.preset", "ppo", "--loss.kl", "k3"]
    status, lines, err = dry_run("paper-maths-4b", *words, *used)
    assert (status, err) == (0, "")
    for name in ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"):
        assert lines[f"model {name}"].endswith(here.format(name))
    for key in ("reference", "critic.model"):
        status, _, err = dry_run("paper-maths-4b", *used, f"--policies.solver.{key}", "Qwen/Qwen9-1B")
        assert (status, err.count("\n")) == (2, 1)
        assert f"policies.solver.{key}: model 'Qwen/Qwen9-1B' is no folder here" in err


def test_the_single_agent_of_the_page_has_the_solvers_settings():
    page = (resources.files("drmas") / "recipes" / "README.md").read_text().replace("\\\n", " ")
    (command,) = (line for line in page.splitlines() if line.startswith("drmas train") and "--team.name single" in line)
    recipe, *words = shlex.split(command)[2:]
    words.remove("--dry-run")
    single, team = load_team(load(recipe, words).team), load_team(load(recipe).team)
    assert single.agents == {"solver": single.agents["solver"]}
    for key in ("policy", "max_tokens", "overlong", "invalid_penalty", "chat_template_options", "temperature"):
        assert getattr(single.agents["solver"], key) == getattr(team.agents["solver"], key), key


def test_the_transport_of_the_weights_is_said_with_its_reason_and_refused_before_the_start(dry_run):
    status, lines, _ = dry_run("paper-maths-4b", "--policies.verifier.sync.transport", "broadcast")
    assert status == 0
    assert lines["weights verifier"] == "by broadcast: policies.verifier.sync.transport says so"
    assert re.fullmatch("by (shards|shared-memory): the engines are on .*", lines["weights solver"])
    where = ("--cluster.engine-hosts", '["tcp://10.0.0.7:8200"]', "--policies.solver.engine.gpus", "own")
    status, _, err = dry_run("paper-maths-4b", *where, "--policies.solver.sync.transport", "shared-memory")
    assert status == 2
    assert "policies.solver.sync.transport is shared-memory, and engines run on other hosts" in err
