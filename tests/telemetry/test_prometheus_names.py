"""Every metric that a run writes, and that the README documents, is served with its agents, policies and phases as labels."""

import re
from pathlib import Path

import pytest

from drmas.telemetry.prometheus_names import Sample, named

PLACEHOLDERS = {"AGENT": "agent", "POLICY": "policy", "KIND": "kind", "PROBE": "probe", "SOURCE": "source", "N": "gpu"}


def documented(readme: str) -> list[str]:
    """The names in the README's table of metrics; `/name` stands where the last full name does."""
    table = readme[readme.index("| metric | meaning |") :].partition("\n\n")[0]
    found, folder = [], ""
    for line in table.splitlines()[2:]:
        for name in re.findall(r"`([^`]*)`", line.split("|")[1]):
            if name.startswith("/"):
                name = folder + name
            elif name.startswith("_"):
                name = found[-1] + name
            else:
                folder = name.rpartition("/")[0]
            found.append(name)
    return found


def test_every_documented_metric_is_served_with_labels() -> None:
    names = documented((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"))
    assert {"reward/mean", "rollout/AGENT/tool_errors_share", "train/POLICY/AGENT/kl_k3"} <= set(names)
    for name in names:
        sample = named(name)
        assert sample is not None, name
        assert re.fullmatch(r"drmas_[a-z][a-z0-9_]*", sample.name), name
        wanted = {PLACEHOLDERS[part]: part for part in name.split("/") if part in PLACEHOLDERS}
        if name.startswith("time/"):
            wanted["phase"] = sample.labels["phase"]
        assert sample.labels == wanted, name


@pytest.mark.parametrize(
    ("key", "sample"),
    [
        ("reward/mean", Sample("drmas_reward_mean", {})),
        ("time/step_seconds", Sample("drmas_time_seconds", {"phase": "step"})),
        ("rollout/failed/engine", Sample("drmas_rollout_failed", {"kind": "engine"})),
        ("rollout/tokens", Sample("drmas_rollout_tokens", {})),
        ("rollout/web-searcher/rows", Sample("drmas_rollout_agent_rows", {"agent": "web-searcher"})),
        ("train/main/solver/kl_k1", Sample("drmas_train_agent_kl_k1", {"policy": "main", "agent": "solver"})),
        ("train/tokens_saved", Sample("drmas_train_tokens_saved", {})),
        ("train/main/tokens_saved", Sample("drmas_train_policy_tokens_saved", {"policy": "main"})),
        ("gpu/7/power_watts_max", Sample("drmas_gpu_power_watts_max", {"gpu": "7"})),
        ("data/success_rate", Sample("drmas_data_success_rate", {"source": ""})),
        ("data/maths-train.jsonl/share", Sample("drmas_data_share", {"source": "maths-train.jsonl"})),
        ("alarms/count", Sample("drmas_alarms_active", {})),
        ("nonfinite", Sample("drmas_nonfinite", {})),
        ("one/two/three", None),
        ("unheard-of", None),
    ],
)
def test_names_and_labels(key: str, sample: Sample | None) -> None:
    assert named(key) == sample


def test_totals_and_parts_have_different_names() -> None:
    """A sum over one name must not count the team beside its agents."""
    for total, part in (("rollout/logprob_gap_mean", "rollout/a/logprob_gap_mean"), ("sync/seconds", "sync/a/seconds")):
        assert named(total).name != named(part).name
