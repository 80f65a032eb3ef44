"""metrics.jsonl and TensorBoard: exact values, gaps, kills, resume."""

import json
import warnings

import pytest

from drmas.errors import DataError
from drmas.telemetry.sinks import MetricsLog, read_metrics


@pytest.fixture
def log(tmp_path):
    log = MetricsLog(tmp_path, tensorboard=False)
    yield log
    log.close()


def test_floats_read_back_equal_and_step_comes_first(log, tmp_path):
    values = {"a": 0.1 + 0.2, "b": 1e-300, "c": 3, "step_like": 1 / 3, "none": None}
    log.write(7, values)
    assert read_metrics(tmp_path) == [{"step": 7, **values}]
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 7, "a": 0.30000000000000004')


def test_a_value_that_is_not_finite_is_null_and_counted(log, tmp_path):
    log.write(1, {"a": float("nan"), "b": float("-inf"), "c": 1.0})
    log.write(2, {"a": 1.0})
    assert read_metrics(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1.0, "nonfinite": 2}, {"step": 2, "a": 1.0}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_each_line_is_on_disk_when_write_returns(log, tmp_path):
    log.write(1, {"a": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0}\n'


def test_I9_truncation_drops_later_steps_and_writing_goes_on(log, tmp_path):
    for step in (1, 2, 3, 4):
        log.write(step, {"a": step / 2})
    log.truncate_after(2)
    log.write(3, {"a": 9.0})
    assert [(m["step"], m["a"]) for m in read_metrics(tmp_path)] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_half_written_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1.0}]
    log = MetricsLog(tmp_path, tensorboard=False)
    log.write(2, {"a": 2.0})
    log.close()
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not JSON"):
        read_metrics(tmp_path)
    path.write_text('{"stop": 1}\n')
    with pytest.raises(DataError, match=r'metrics\.jsonl:1: expected an object with an integer "step"'):
        read_metrics(tmp_path)


def test_a_folder_without_metrics_is_no_run(tmp_path):
    with pytest.raises(DataError, match="expected a run folder"):
        read_metrics(tmp_path)


def test_tensorboard_gets_the_scalars_and_a_resumed_run_hides_what_it_writes_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        log.write(step, {"reward/mean": step / 4, "gap": None})
    log.close()
    log = MetricsLog(tmp_path, tensorboard=True)
    log.truncate_after(2)
    log.write(3, {"reward/mean": 9.0})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 9.0)]


def test_a_failing_tensorboard_warns_once_and_the_metrics_go_on(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    log = MetricsLog(tmp_path, tensorboard=True)
    with pytest.warns(UserWarning, match="TensorBoard is off") as caught:
        log.write(1, {"a": 1.0})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.write(2, {"a": 2.0})
        log.close()
    assert [m["a"] for m in read_metrics(tmp_path)] == [1.0, 2.0]


def test_a_failing_metrics_file_is_raised(tmp_path):
    log = MetricsLog(tmp_path, tensorboard=False)
    log.close()
    with pytest.raises(ValueError, match="closed file"):
        log.write(1, {"a": 1.0})


def test_lines_are_plain_json(log, tmp_path):
    log.write(1, {"a": 1e22})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["a"] == 1e22
