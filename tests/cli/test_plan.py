"""`drmas plan` as a user calls it: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from drmas.cli.plan import numbers, run_plan
from drmas.errors import ConfigError


def test_a_plan_is_printed_and_written(drmas, tmp_path):
    done = drmas("plan", "quickstart", "--cluster", "laptop-cpu", "--price", "0.5", "--response", "6", "--output", "out")
    assert done.returncode == 0, done.stderr
    for word in ("plan         quickstart on laptop-cpu", "fits         yes", "memory of the host", "bottleneck", "cost "):
        assert word in done.stdout
    assert "--response as given, the rest assumed" in done.stdout
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert written["run_cost"] == pytest.approx(4 * written["step_cost"])
    assert (tmp_path / "out" / "plan.html").read_text().startswith("<!doctype html>")


def test_one_json_object_and_overrides(drmas):
    done = drmas("plan", "paper-maths-4b", "--gpus", "4", "--rollout.tasks-per-step", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["cluster"]["gpus"], found["workload"]["tasks"]) == (4, 2)
    assert found["fits"]
    assert found["step_cost"] is None


def test_the_descriptions_are_listed(drmas):
    done = drmas("plan", "--list")
    assert "h100-8\n    One node of 8 H100 SXM" in done.stdout


def test_work_from_a_file_goes_in_the_place_of_assumptions(drmas, tmp_path):
    agents = "".join(f"[workload.agents.{name}]\nprompt = 300\nresponse = 50\n" for name in ("solver", "verifier"))
    (tmp_path / "work.toml").write_text(f"[workload]\ntasks = 3\n{agents}")
    done = drmas("plan", "paper-maths-4b", "--workload", "work.toml", "--json")
    assert done.returncode == 0, done.stderr
    workload = json.loads(done.stdout)["workload"]
    assert workload["tasks"] == 3
    assert [agent["prompt_tokens"] for agent in workload["agents"]] == [300, 300]
    with pytest.raises(ConfigError, match=r"--workload .*work.toml says it all; leave --prompt out"):
        run_plan("paper-maths-4b", [], work=tmp_path / "work.toml", prompt="5")


def test_growth_is_a_table_of_sizes():
    found = run_plan("paper-maths-4b", ["--rollout.tasks-per-step", "2"], response="40", growth=8)
    assert {line.split()[0] for line in found.splitlines() if line.strip()[:1].isdigit()} <= {"1", "2", "4", "8"}
    assert "on-policy" in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": "h100-9"}, "--cluster h100-9: the nearest is 'h100-8'"),
        ({"gpus": 12}, "--gpus is 12; a node of h100-8 has 8"),
        ({"gpus": -8}, "--gpus is -8; expected 1 to 131072"),
        ({"gpus": 10**9}, "--gpus is 1000000000; expected 1 to 131072"),
        ({"price": float("nan")}, "--price is nan; expected 0 to"),
        ({"price": 1e300}, "--price is 1e+300; expected 0 to"),
        ({"spread": 1000.0}, "--spread is 1000; expected 0 to 5"),
        ({"spread": float("nan")}, "--spread is nan"),
        ({"calls": "0"}, "--calls leaves no agent that is called"),
        ({"calls": "1e12"}, "--calls is 1e+12; expected 0 to 1000"),
        ({"prompt": "100000"}, "--prompt is 100000 for solver; policies.solver.engine.max_model_tokens less"),
        ({"growth": 4, "as_json": True}, "--growth prints its table alone"),
        ({"output": Path("/proc/x")}, "--output /proc/x can't be written"),
        ({"price": -1.0}, "--price is -1"),
        ({"overrides": ["--train.ranks", "16"]}, "train.ranks is 16, no engine has its own GPUs: 16 + 0 GPUs are more"),
        ({"response": "9000"}, "--response is 9000 for solver, whose team.solver.max_tokens is 4096"),
        ({"calls": "sovler=2"}, "--calls names 'sovler'; the nearest is 'solver'"),
        ({"calls": "two"}, "--calls two: 'two' is no number; expected N, or AGENT=N,AGENT=N"),
        ({"spread": -1.0}, "--spread is -1"),
        ({"growth": 0}, "--growth is 0"),
        ({"overrides": ["--train.stepz", "3"]}, "train.stepz: unknown key"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_plan("paper-maths-4b", **({"overrides": []} | options))


@pytest.mark.parametrize(("words", "message"), [([], "expected one RECIPE, found none"), (["nowhere"], "no such recipe")])
def test_mistakes_are_one_line_and_status_2(drmas, words, message):
    done = drmas("plan", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_numbers_for_all_agents_and_for_one():
    assert numbers("--calls", "2,solver=1.5") == {"": 2.0, "solver": 1.5}
    assert numbers("--calls", "") == {}
    with pytest.raises(ConfigError, match="--prompt a=b: 'b' is no number"):
        numbers("--prompt", "a=b")
