import errno
import os
import re
import socket
from pathlib import Path

import pytest

from drmas.config.schema import RemoteConfig, RunConfig
from drmas.config.tasks import SearchTool
from drmas.errors import CheckpointError, ConfigError
from drmas.runtime.folder import RunFolder, check_same_run


def with_results(folder: RunFolder) -> None:
    folder.open(resume=False, overwrite=False)
    folder.settle()
    (folder.path / "metrics.jsonl").write_text('{"step": 1}\n')
    folder.close()


def test_a_run_with_results_is_refused_resumed_or_replaced(config) -> None:
    with_results(RunFolder(config))
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder(config).open(resume=False, overwrite=False)
    resumed = RunFolder(config)
    resumed.open(resume=True, overwrite=False)
    resumed.close()
    assert (config_path := resumed.path / "metrics.jsonl").exists()
    new = RunFolder(config)
    new.open(resume=False, overwrite=True)
    new.settle()
    new.close()
    assert not config_path.exists()
    assert (new.path / "config.json").exists()


def test_what_is_replaced_comes_back_if_the_new_run_never_settles(config) -> None:
    with_results(RunFolder(config))
    new = RunFolder(config)
    new.open(resume=False, overwrite=True)
    (new.path / "half").write_text("x")
    new.close()
    assert sorted(path.name for path in new.path.iterdir()) == ["config.json", "environment.json", "metrics.jsonl"]


def test_a_run_without_results_makes_room_for_other_settings_and_keeps_its_warm_start_for_its_own(config) -> None:
    first = RunFolder(config)
    first.open(resume=False, overwrite=False)
    first.settle()
    (first.path / "warm_start").mkdir()
    first.close()
    again = RunFolder(config)
    again.open(resume=False, overwrite=False)
    assert (again.path / "warm_start").exists()
    again.close()
    other = RunFolder(config.model_copy(update={"seed": 9}))
    other.open(resume=False, overwrite=False)
    assert not (other.path / "warm_start").exists()
    other.close()


def test_two_processes_cant_write_one_folder(config) -> None:
    first = RunFolder(config)
    first.open(resume=False, overwrite=False)
    with pytest.raises(ConfigError, match="another process writes"):
        RunFolder(config).open(resume=False, overwrite=False)
    first.close()


def test_who_holds_a_folder_is_said(config) -> None:
    first = RunFolder(config)
    first.open(resume=False, overwrite=False)
    for _ in range(2):  # being refused changes nothing
        with pytest.raises(ConfigError, match=rf"\(process {os.getpid()} on {socket.gethostname()}, since 2\d{{3}}-\d\d-\d\d "):
            RunFolder(config).open(resume=False, overwrite=False)
    first.close()
    second = RunFolder(config)
    second.open(resume=False, overwrite=False)
    lock = second.path.with_name(f".{config.name}.lock")
    assert lock.read_text().count("process") == 1
    second.close()


def test_a_file_system_without_locks_is_said(config, monkeypatch) -> None:
    def none(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("drmas.runtime.folder.fcntl.flock", none)
    with pytest.raises(ConfigError, match=r"can't be locked against other jobs: .*not supported.*use another --output"):
        RunFolder(config).open(resume=False, overwrite=False)


def test_a_process_that_was_refused_touches_nothing(config) -> None:
    with_results(RunFolder(config))
    first = RunFolder(config)
    first.open(resume=False, overwrite=True)
    refused = RunFolder(config)
    with pytest.raises(ConfigError, match="another process writes"):
        refused.open(resume=False, overwrite=False)
    refused.close()
    assert first.path.is_dir()
    assert not (first.path / "metrics.jsonl").exists()
    first.settle()
    first.close()
    assert sorted(path.name for path in first.path.iterdir()) == ["config.json", "environment.json"]


def test_a_run_that_was_set_aside_by_a_killed_process_is_back_for_the_next(config) -> None:
    with_results(RunFolder(config))
    killed = RunFolder(config)
    killed.open(resume=False, overwrite=True)
    (killed.path / "half").write_text("x")
    killed._lock.close()  # as the system closes it when the process dies
    resumed = RunFolder(config)
    resumed.open(resume=True, overwrite=False)
    resumed.close()
    assert (resumed.path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_folder_that_is_no_run_is_never_touched(config) -> None:
    folder = Path(config.output) / config.name
    folder.mkdir()
    (folder / "chapter.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is not the folder of a run"):
            RunFolder(config).open(resume=False, overwrite=overwrite)
    assert (folder / "chapter.txt").read_text() == "years of work"


def test_settings_that_are_damaged_are_named_and_never_half_written(config, monkeypatch) -> None:
    folder = RunFolder(config)
    folder.open(resume=False, overwrite=False)
    folder.settle()
    folder.close()
    file = folder.path / "config.json"
    whole = file.read_text()
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("no space left")))
    again = RunFolder(config)
    again.open(resume=False, overwrite=False, auto_resume=True)
    with pytest.raises(OSError, match="no space left"):
        again.settle()
    again.close()
    assert file.read_text() == whole
    file.write_text(whole[:10])
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))} is damaged"):
        RunFolder(config).open(resume=False, overwrite=False, auto_resume=True)


def test_auto_resume_goes_on_where_there_is_a_run_and_starts_where_there_is_none(config) -> None:
    first = RunFolder(config)
    assert first.open(resume=False, overwrite=False, auto_resume=True) is False
    first.settle()
    first.close()
    (first.path / "warm_start").mkdir()
    killed_early = RunFolder(config)  # before its first step: nothing to go on from
    assert killed_early.open(resume=False, overwrite=False, auto_resume=True) is False
    assert (first.path / "warm_start").exists()
    killed_early.settle()
    killed_early.close()
    (first.path / "metrics.jsonl").write_text('{"step": 1}\n')
    again = RunFolder(config)
    assert again.open(resume=False, overwrite=False, auto_resume=True) is True
    again.close()
    assert (first.path / "metrics.jsonl").exists()


def test_auto_resume_of_another_run_is_refused(config) -> None:
    with_results(RunFolder(config))
    other = RunFolder(config.model_copy(update={"seed": 9}))
    with pytest.raises(CheckpointError, match="seed is 9 but the run to resume has 0"):
        other.open(resume=False, overwrite=False, auto_resume=True)
    other.close()


@pytest.mark.parametrize("flags", [(True, True, False), (True, False, True), (False, True, True), (True, True, True)])
def test_contradicting_flags_are_refused(config, flags) -> None:
    resume, overwrite, auto_resume = flags
    with pytest.raises(ConfigError, match=r"--\S+ and .*are given; .*give one of them"):
        RunFolder(config).open(resume=resume, overwrite=overwrite, auto_resume=auto_resume)


def test_resume_of_nothing_or_with_overwrite_is_refused(config) -> None:
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        RunFolder(config).open(resume=True, overwrite=False)
    with pytest.raises(ConfigError, match="give one of them"):
        RunFolder(config).open(resume=True, overwrite=True)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"train": {"steps": 99}}, None),
        ({"telemetry": {"tensorboard": False}}, None),
        ({"seed": 5}, "seed is 5 but the run to resume has 0"),
        ({"rollout": {"group_size": 3}}, "rollout.group_size is 3"),
        ({"policies": {"main": {"lr": 1.0}}}, "policies.main.lr is 1.0"),
        ({"policies": {"main": {"engine": {"max_restarts": 9}}}}, None),
        ({"policies": {"main": {"tensor_parallel": 2, "tokens_per_microbatch": 99}}}, None),
        ({"policies": {"main": {"pipeline_parallel": 2, "num_ranks": 2}}, "train": {"placement": "split"}}, None),
        ({"policies": {"main": {"engine": {"tensor_parallel": 2}}}}, "policies.main.engine.tensor_parallel is 2"),
        ({"policies": {"main": {"engine": {"max_model_tokens": 99}}}}, "policies.main.engine.max_model_tokens is 99"),
        ({"policies": {"main": {"lr_schedule": "cosine"}}, "train": {"steps": 99}}, "policies.main.lr_schedule is 'cosine'"),
    ],
)
def test_what_a_resumed_run_may_change(config, changes, refused) -> None:
    with_results(RunFolder(config))

    def merged(old, new):
        return {**old, **{key: merged(old[key], value) if isinstance(value, dict) else value for key, value in new.items()}}

    changed = type(config).model_validate(merged(config.model_dump(), changes))
    folder = RunFolder(changed)
    if refused is None:
        folder.open(resume=True, overwrite=False)
    else:
        with pytest.raises(CheckpointError, match=refused):
            folder.open(resume=True, overwrite=False)
    folder.close()


def test_where_a_server_is_and_how_patiently_it_is_asked_may_change_and_what_it_is_may_not(config) -> None:
    def run(tool: SearchTool, remote: RemoteConfig) -> RunConfig:
        return config.model_copy(update={"tools": {"search": tool}, "remotes": {"judge": remote}})

    here, judge = SearchTool(url="http://127.0.0.1:1"), RemoteConfig(url="http://127.0.0.1:2/v1", model="large")
    before = run(here, judge).model_dump(mode="json")
    moved = here.model_copy(update={"url": "http://127.0.0.1:3", "max_retries": 9, "timeout_seconds": 60.0})
    check_same_run(before, run(moved, judge.model_copy(update={"url": "http://127.0.0.1:4/v1"})))
    for tool, remote, key in (
        (here.model_copy(update={"topk": 9}), judge, "tools.search.topk"),
        (here.model_copy(update={"url": None}), judge, "tools.search.url"),
        (here, judge.model_copy(update={"model": "larger"}), "remotes.judge.model"),
    ):
        with pytest.raises(CheckpointError, match=key):
            check_same_run(before, run(tool, remote))
