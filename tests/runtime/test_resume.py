"""Which checkpoints of a run stay, which one it goes on from, and what a failed save costs: nothing that was saved before."""

from __future__ import annotations

import contextlib
import json
import linecache
import math
import shutil
from types import SimpleNamespace

import pytest

from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, load_team
from drmas.errors import CheckpointError
from drmas.policy.broadcast import Broadcast
from drmas.runtime import resume
from drmas.runtime.resume import Checkpoints, fingerprint


class Team(TeamConfig):
    """Stands in for a team's settings."""

    rounds: int = 1
    solver: AgentConfig = AgentConfig()

    async def run(self, task, agents):
        return None


class Policy:
    """Stands in for a trainer: its state is a number, a checkpoint of it is a folder with that number and its manifest."""

    def __init__(self, state: int = 0, *, trainable: bool = True) -> None:
        self.state, self.config, self.trouble = state, SimpleNamespace(trainable=trainable), ""

    @contextlib.contextmanager
    def active(self):
        yield

    def load(self, folder):
        self.state = json.loads((folder / "state").read_text())


class Pending:
    """Stands in for a save by a thread."""

    def __init__(self, policy, folder) -> None:
        self.policy, self.folder, self.state, self.written = policy, folder, policy.state, False

    def done(self) -> bool:
        return self.written

    def finish(self) -> None:
        if self.policy.trouble:
            raise CheckpointError(self.policy.trouble)
        self.folder.mkdir(parents=True)
        (self.folder / "state").write_text(json.dumps(self.state))
        (self.folder / "files.json").write_text(json.dumps({"state": (self.folder / "state").stat().st_size}))

    def abandon(self) -> None:
        pass


@pytest.fixture(autouse=True)
def saving(monkeypatch):
    monkeypatch.setattr(resume.checkpoint, "save", lambda policy, folder: Pending(policy, folder).finish())
    monkeypatch.setattr(resume.checkpoint, "save_async", Pending)


@pytest.fixture
def checkpoints(tmp_path):
    def make(**settings):
        return Checkpoints(tmp_path, Team(), Broadcast(), **({"keep": 2} | settings))

    return make


def save(keeper, step, state=None, **settings):
    policy = Policy(step if state is None else state)
    keeper.save(step, {"main": policy}, lambda: {"source": step}, **settings)
    return policy


def names(keeper):
    return sorted(path.name for path in keeper.folder.iterdir())


def test_the_newest_stay_and_come_back(checkpoints):
    keeper = checkpoints()
    for step in (1, 2, 10):
        save(keeper, step)
    assert names(keeper) == ["step_10", "step_2"]
    state = checkpoints().latest()
    assert (state["step"], state["driver"], state["policies"]) == (10, {"source": 10}, ["policy-main"])
    policy = Policy()
    keeper.load(10, {"main": policy})
    assert policy.state == 10


def test_the_best_of_the_older_ones_stay_too(checkpoints):
    keeper = checkpoints(keep=1, keep_best=2)
    for step, value in enumerate((0.1, 0.9, None, 0.5, math.nan, 0.3, 0.2), start=1):
        save(keeper, step, value=value)
    assert names(keeper) == ["step_2", "step_4", "step_7"]  # 0.9, 0.5, and the newest
    for step in (8, 9):
        save(keeper, step, value=0.9)
    assert names(keeper) == ["step_2", "step_8", "step_9"]  # of equal ones the newest


def test_without_a_metric_none_is_best(checkpoints):
    keeper = checkpoints(keep=1, keep_best=3)
    for step in (1, 2, 3):
        save(keeper, step)
    assert names(keeper) == ["step_3"]


def test_frozen_policies_are_not_saved_and_critics_are(checkpoints):
    keeper = checkpoints()
    main, critic = Policy(1), Policy(2)
    main.critic = critic
    keeper.save(1, {"main": main, "judge": Policy(3, trainable=False)}, dict)
    assert checkpoints().latest()["policies"] == ["critic-main", "policy-main"]
    main.state = critic.state = 0
    keeper.load(1, {"main": main})
    assert (main.state, critic.state) == (1, 2)


def test_saving_a_step_again_keeps_what_is_there(checkpoints):
    keeper = checkpoints()
    save(keeper, 1, state=5)
    save(keeper, 1, state=6)
    policy = Policy()
    keeper.load(1, {"main": policy})
    assert policy.state == 5


def test_an_asynchronous_save_is_a_checkpoint_only_once_it_is_written(checkpoints):
    keeper = checkpoints(asynchronous=True)
    policy = save(keeper, 1)
    policy.state = 99  # training goes on
    keeper.poll()
    assert (keeper.steps(), keeper.latest()) == ([], None)
    keeper._pending.parts[0].written = True
    keeper.poll()
    assert keeper.latest()["driver"] == {"source": 1}
    keeper.load(1, {"main": policy})
    assert policy.state == 1
    save(keeper, 2)
    save(keeper, 3)  # finishes 2 first
    assert keeper.steps() == [1, 2]
    keeper.finish()
    assert keeper.steps() == [2, 3]
    keeper.finish()  # nothing is left to do


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_is_told_and_costs_nothing(checkpoints, asynchronous):
    told = []
    keeper = checkpoints(asynchronous=asynchronous, on_failure=told.append)
    save(keeper, 1)
    policy = Policy(2)
    policy.trouble = "no room"
    keeper.save(2, {"main": policy}, dict)
    keeper.poll()
    with pytest.raises(CheckpointError, match=r"the run's end is not kept: .*no room"):
        keeper.finish()
    assert (keeper.failed, names(keeper)) == (1, ["step_1"])
    assert told == ["a checkpoint was not saved, training goes on: no room"]
    save(keeper, 3)
    keeper.finish()
    assert (keeper.failed, names(keeper)) == (1, ["step_1", "step_3"])


def test_a_failed_save_is_raised_where_nobody_listens(checkpoints):
    policy = Policy()
    policy.trouble = "no room"
    with pytest.raises(CheckpointError, match="no room"):
        checkpoints().save(1, {"main": policy}, dict)


def test_a_full_disk_for_the_run_s_own_file_is_a_failed_save(checkpoints, monkeypatch):
    keeper = checkpoints()
    save(keeper, 1)
    monkeypatch.setattr(resume.folders, "flush", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"step_2 can't be written: .*No space left"):
        save(keeper, 2)
    assert names(keeper) == ["step_1"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "policy-main" / "state").write_text("1000"), "has 4 bytes; 1 were saved"),
        (lambda folder: (folder / "policy-main" / "state").unlink(), "has no state"),
        (lambda folder: shutil.rmtree(folder / "policy-main"), "policy-main' doesn't exist"),
        (lambda folder: (folder / "run.json").write_text('{"step"'), "has no whole run.json"),
        (lambda folder: (folder / "run.json").unlink(), "has no whole run.json"),
    ],
    ids=["changed size", "missing file", "missing policy", "truncated run.json", "missing run.json"],
)
def test_a_damaged_newest_checkpoint_is_refused_by_name(checkpoints, damage, words):
    keeper = checkpoints(keep=3)
    for step in (1, 2, 3):
        save(keeper, step)
    damage(keeper.folder / "step_2")
    damage(keeper.folder / "step_3")
    with pytest.raises(CheckpointError, match=rf"{words}.*; step 1 is whole: delete .*step_3 to go on from there"):
        keeper.latest()
    shutil.rmtree(keeper.folder / "step_1")
    with pytest.raises(CheckpointError, match="no older one is whole"):
        keeper.latest()


def test_a_damaged_checkpoint_is_written_again(checkpoints):
    keeper = checkpoints()
    save(keeper, 1, state=5)
    (keeper.folder / "step_1" / "policy-main" / "state").unlink()
    save(keeper, 1, state=6)
    policy = Policy()
    keeper.load(1, {"main": policy})
    assert (policy.state, names(keeper)) == (6, ["step_1"])


def test_what_a_killed_process_left_goes_with_the_next_save(checkpoints):
    keeper = checkpoints()
    save(keeper, 1)
    (keeper.folder / ".step_2" / "policy-main").mkdir(parents=True)
    (keeper.folder / ".step_0.removed").mkdir()
    assert keeper.latest()["step"] == 1
    save(keeper, 3)
    assert names(keeper) == ["step_1", "step_3"]


def test_another_team_is_refused(checkpoints, tmp_path):
    save(checkpoints(), 1)
    with pytest.raises(CheckpointError, match="the team has changed since"):
        Checkpoints(tmp_path, Team(rounds=2), Broadcast(), keep=2).latest()


@pytest.mark.parametrize("changed", ["parser.py", "tool.py", "inner.py"])
def test_the_code_that_a_team_depends_on_is_part_of_it(tmp_path, changed):
    (tmp_path / "parser.py").write_text("def read(text):\n    return text, True\n")
    (tmp_path / "tool.py").write_text("def tool():\n    return 'a'\n")
    inner = "from drmas.agents.agent import AgentConfig\nfrom drmas.agents.team import TeamConfig, register_team\n\n"
    inner += f"@register_team('{tmp_path.name}')\nclass Inner(TeamConfig):\n    solver: AgentConfig = AgentConfig()\n"
    (tmp_path / "inner.py").write_text(inner + "    async def run(self, task, agents):\n        return ''\n")
    sub = type(load_team({"name": f"{tmp_path / 'inner.py'}:{tmp_path.name}"}))

    class Outer(TeamConfig):
        inner: sub = sub()
        writer: AgentConfig = AgentConfig(parser=f"{tmp_path / 'parser.py'}:read")

        async def run(self, task, agents):
            return None

    before = fingerprint(Outer(), [tmp_path / "tool.py"])
    assert fingerprint(Outer(), [tmp_path / "tool.py"]) == before
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "\n\nMORE = 1\n")
    linecache.checkcache()
    assert fingerprint(Outer(), [tmp_path / "tool.py"]) != before
