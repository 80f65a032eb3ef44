"""Layouts that don't fit are refused before anything starts; the summary's arithmetic against models that are built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from drmas.agents.team import load_team
from drmas.config.load import load
from drmas.config.schema import RunConfig
from drmas.core.estimators import resolve
from drmas.errors import ConfigError, EngineStartError, ModelError
from drmas.runtime.models import TINY, resolve_model, write_tiny_qwen3
from drmas.runtime.placement import check, describe, has_critic, notes, parameters, policy_ranks, run_estimator

MAIN = "policies.main"


@pytest.fixture
def two(tmp_path: Path):
    """two("--flag", "value", ...): the tiny recipe with a policy per agent, changed."""

    def made(*words: str) -> RunConfig:
        second = ["--policies.other.model", TINY, "--policies.other.engine.max-model-tokens", "64"]
        return load("arithmetic-tiny", ["--output", str(tmp_path), *second, "--team.verifier.policy", "other", *words])

    return made


def summary(config: RunConfig, world: int) -> dict[str, str]:
    folders = {name: resolve_model(policy.model, seed=config.seed) for name, policy in config.policies.items()}
    return describe(config, load_team(config.team), resolve("dr-mas"), world=world, folders=folders)


def test_engine_options_are_judged_before_anything_starts(two):
    summary(two("--policies.other.engine.options", "{max_num_batched_tokens = 4096}"), 1)
    for option, message in (("max_num_batched_token", "can't be passed on"), ("block_size", "is set by drmas for this device")):
        with pytest.raises(EngineStartError, match=rf"policies\.other\.engine\.options\.{option} {message}"):
            summary(two("--policies.other.engine.options", f"{{{option} = 16}}"), 1)


def split(main: int | None, other: int | None) -> list[str]:
    words = ["--train.placement", "split"]
    for name, count in (("main", main), ("other", other)):
        words += [f"--policies.{name}.num-ranks", str(count)] if count else []
    return words


def test_shared_ranks_are_everybodys(two):
    assert policy_ranks(two(), 3) == {"main": [0, 1, 2], "other": [0, 1, 2]}


@pytest.mark.parametrize(
    ("main", "other", "world", "expected"),
    [
        (1, 3, 4, {"main": [0], "other": [1, 2, 3]}),
        (None, 1, 4, {"main": [0, 1, 2], "other": [3]}),
        (3, None, 4, {"main": [0, 1, 2], "other": [3]}),
        (None, None, 4, {"main": [0, 1], "other": [2, 3]}),
    ],
)
def test_split_ranks_follow_the_configurations_order(two, main, other, world, expected):
    assert policy_ranks(two(*split(main, other)), world) == expected


@pytest.mark.parametrize(
    ("main", "other", "world", "message"),
    [
        (1, 2, 4, r"split with policies.main.num_ranks 1, policies.other.num_ranks 2: 3 ranks in sum; the job has 4"),
        (3, 2, 4, r"5 ranks in sum; the job has 4, make them equal"),
        (4, None, 4, r"policies.main.num_ranks 4: that leaves 0 of the job's 4 rank\(s\) for 1 other policies"),
        (
            None,
            None,
            3,
            r"split with no num_ranks: that leaves 3 of the job's 3 rank\(s\) for 2 other policies, .*equal shares",
        ),
        (None, None, 1, r"that leaves 1 of the job's 1 rank\(s\)"),
    ],
)
def test_split_ranks_that_do_not_add_up_are_refused(two, main, other, world, message):
    with pytest.raises(ConfigError, match=message):
        check(two(*split(main, other)), load_team(two().team), world=world)


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (
            ["--policies.main.tensor-parallel", "2"],
            1,
            r"policies.main.tensor_parallel x .* is 2 x 1 x 1 = 2; it must divide the policy's 1 trainer rank\(s\)",
        ),
        (
            ["--policies.other.pipeline-parallel", "2", "--policies.other.context-parallel", "3"],
            4,
            r"policies.other.tensor_parallel x pipeline_parallel x context_parallel is 1 x 2 x 3 = 6; it must divide .* 4",
        ),
        (
            [*split(3, 1), "--policies.main.tensor-parallel", "2"],
            4,
            r"policies.main.tensor_parallel .* = 2; it must divide the policy's 3 rank\(s\) of its own",
        ),
        (["--policies.main.attention", "flex"], 1, r"policies.main.attention is 'flex': it trains on CUDA only"),
        (
            ["--policies.other.fp8", "hybrid"],
            1,
            r"policies.other.fp8 is 'hybrid', of TransformerEngine: it trains on CUDA only",
        ),
    ],
)
def test_what_does_not_fit_the_ranks_or_the_machine_is_refused(two, words, world, message):
    config = two(*words)
    with pytest.raises(ConfigError, match=message):
        check(config, load_team(config.team), world=world)


@pytest.mark.parametrize("name", ["failed", "probe_failed"])
@pytest.mark.parametrize("policy", ["main", "other"])
def test_an_agent_that_is_called_as_a_counter_is_refused(two, name, policy):
    config = two()
    team = load_team(config.team)
    agents = {name: team.agents["solver"].model_copy(update={"policy": policy})}
    remote = config.model_copy(update={"remotes": {"other": None}})
    with pytest.raises(ConfigError, match=f"an agent can't be called {name}: rollout/{name}/KIND counts failed episodes"):
        check(remote, SimpleNamespace(agents=agents), world=1)


def test_what_does_not_fit_the_model_is_refused(two):
    with pytest.raises(ModelError, match=r"policies.other.pipeline_parallel is 5; it must divide the model's 4 layers"):
        summary(two("--policies.other.pipeline-parallel", "5"), 5)


def test_a_reference_with_another_vocabulary_is_refused(two, tmp_path):
    folder = tmp_path / "reference"
    write_tiny_qwen3(folder, seed=0)
    kl = ["--loss.kl", "k3", "--policies.main.reference", str(folder)]
    assert "reference 0.00" in summary(two(*kl), 1)["policy main"]
    text = (folder / "config.json").read_text()
    size = next(line for line in text.splitlines() if '"vocab_size"' in line)
    (folder / "config.json").write_text(text.replace(size, size.replace('": ', '": 1')))
    with pytest.raises(ModelError, match=r"policies.main.reference is .*reads the policy's tokens and must have"):
        summary(two(*kl), 1)


def test_the_summary_names_layout_stack_and_memory(two):
    lines = summary(two(*split(4, 2), "--policies.main.tensor-parallel", "2"), 6)
    assert "trainer TP 2 x DP 2 on ranks 0-3, float32" in lines["policy main"]
    assert "trainer TP 1 x DP 2 on ranks 4-5, float32" in lines["policy other"]
    assert "weights " in lines["policy main"]
    assert lines["stack"].startswith("layers torch (Megatron's own); attention sdpa (not transformer-engine or flex: it trains")
    assert lines["memory"].startswith("rank 4 holds the most: ")  # whole there, half on the others
    assert parameters(resolve_model(TINY)) > 1e6
    apart = summary(two("--policies.main.prefix-sharing", "false"), 1)
    assert "prefix sharing off (as configured)" in apart["stack main"]
    assert "prefix sharing on" in apart["stack other"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        (["--policies.main.num-ranks", "1"], ["policies.main.num_ranks has no effect: train.placement is shared"]),
        (["--policies.main.sequence-parallel"], ["policies.main.sequence_parallel has no effect: tensor_parallel is 1"]),
        (
            ["--policies.main.trainable", "false", "--policies.main.freeze", '["model.norm.*"]'],
            ["policies.main.freeze has no effect: trainable is false"],
        ),
        (
            ["--policies.main.overlap"],
            ["policies.main.overlap has no effect: one replica has nothing to exchange"],
        ),
        (["--policies.main.offload-optimizer"], ["policies.main.offload_optimizer has no effect: the trainer runs on a CPU"]),
        (
            ["--policies.main.engine.gpus", "shared", "--policies.main.engine.hosts", '["tcp://far:8200"]'],
            ["policies.main.engine.gpus has no effect: its engines run on engine hosts, which have no trainer ranks"],
        ),
        (["--policies.main.engine.gpus", "shared", "--policies.main.engine.hosts", "[]"], []),
        (
            ["--policies.main.reference", TINY],
            ["policies.main.reference has no effect: no loss.kl is set for a policy that is trained"],
        ),
        (["--policies.main.reference", TINY, "--policies.main.loss.kl", "k3"], []),
        (
            ["--policies.main.critic.lr", "1e-4"],
            ["policies.main.critic has no effect: only policies with an agent under advantage.preset ppo have one"],
        ),
        (
            ["--team.solver.length-penalty", "0.5"],
            ["team.solver.length_penalty has no effect: length_buffer is 0"],
        ),
        (["--team.solver.length-penalty", "0.5", "--team.solver.length-buffer", "4"], []),
        (
            ["--policies.main.trainable", "false", "--policies.other.trainable", "false"],
            ["no policy is trainable; the run samples and trains nothing"],
        ),
    ],
)
def test_settings_without_effect_are_noted(two, words, expected):
    config = two(*words)
    assert notes(config, load_team(config.team), world=1) == expected


@pytest.mark.parametrize(
    ("words", "critics"),
    [
        ([], []),
        (["--advantage.preset", "ppo"], ["main", "other"]),
        (["--advantage.preset", "ppo", "--policies.other.trainable", "false"], ["main"]),
        (["--advantage.agents.verifier.preset", "ppo"], ["other"]),
        (["--advantage.preset", "ppo", "--advantage.agents.verifier.preset", "rloo"], ["main"]),
    ],
)
def test_a_policy_has_a_critic_where_one_of_its_agents_needs_it(two, words, critics):
    config = two(*words)
    team = load_team(config.team)
    assert [name for name in config.policies if has_critic(config, team, name)] == critics


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--advantage.preset", "remax"], "advantage.preset is 'remax'"),
        (["--advantage.agents.verifier.preset", "ema"], "advantage.agents.verifier.preset is 'ema'"),
    ],
)
def test_dynamic_sampling_is_refused_with_presets_that_learn_from_equal_groups(two, words, key):
    config = two("--rollout.dynamic.enabled", "true", *words)
    with pytest.raises(ConfigError, match=f"rollout.dynamic.enabled is true and {key}"):
        run_estimator(config, load_team(config.team))
    for fine in (("--rollout.dynamic.enabled", "true", "--advantage.preset", "dapo"), words):
        config = two(*fine)
        run_estimator(config, load_team(config.team))


@pytest.mark.parametrize(
    "words", [["--team.solver.trainable", "false"], ["--policies.main.trainable", "false"], ["--team.solver.policy", "far"]]
)
def test_only_agents_that_are_trained_have_counterfactuals(two, words):
    far = ["--remotes.far.url", "http://127.0.0.1:1/v1", "--remotes.far.model", "x"]
    config = two("--advantage.preset", "difference", *far, *words)
    probes = run_estimator(config, load_team(config.team)).probes
    assert [probe.without for probe in probes] == ["verifier"]


def test_what_dapo_brings_along_is_said_with_what_the_run_has_otherwise(two):
    brings = "loss.clip_high 0.28, loss.aggregation token, loss.kl unset, rollout.dynamic.enabled true"

    def said(*words: str) -> list[str]:
        config = two(*words)
        return notes(config, load_team(config.team), world=1)

    run, one = ("--advantage.preset", "dapo"), ("--advantage.agents.verifier.preset", "dapo")
    assert said() == []
    assert said(*run) == said(*run, *one) == [f"advantage.preset is dapo, which comes with {brings}; so it is here"]
    otherwise = ("--loss.clip-high", "0.2", "--rollout.dynamic.enabled", "false", "--policies.other.loss.kl", "k3")
    (note,) = said(*run, *otherwise)
    assert note.endswith("; here loss.clip_high 0.2, policies.other.loss.kl k3, rollout.dynamic.enabled false")
    (note,) = said(*one)
    assert note == (
        "advantage.agents.verifier.preset is dapo, which sets nothing else for a single agent; as the run's it comes with "
        f"{brings}; here loss.clip_high 0.2, rollout.dynamic.enabled false"
    )


def test_the_summary_counts_the_episodes_of_probes(two):
    config = two("--rollout.tasks-per-step", "4", "--rollout.group-size", "3")
    folders = {name: resolve_model(policy.model, seed=config.seed) for name, policy in config.policies.items()}
    team = load_team(config.team)
    for preset, expected in (
        ("rloo", "4 tasks x 3 episodes = 12 "),
        ("difference", "4 tasks x (3 + 2 for baselines) episodes = 20 "),
    ):
        lines = describe(config, team, resolve(preset, team=list(team.agents)), world=1, folders=folders)
        assert lines["step"].startswith(expected)
