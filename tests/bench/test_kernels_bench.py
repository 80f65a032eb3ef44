"""The kernels' benchmark: sides do the same work, table, CSV and plot hold what was measured, the check finds what is worse."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.kernel_bench import bars, gate, measure, peers, report, runner
from bench.kernel_bench.cases import cases
from bench.kernel_bench.measure import Peaks
from bench.kernel_bench.sides import EAGER, OURS, PRESETS, Measured, Side, clear
from drmas_kernels.backend import OPS
from drmas_kernels.numerics import Cost, logprob_cost, policy_loss_cost, segment_advantage_cost

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
QUICK = ["--shapes", "small", "--skip-gate", "--repeats", "1", "--implementation", EAGER]
SMALL = cases("small", "cpu", "float32")
COMPARED = (OURS, f"{OURS} in place", EAGER, "Megatron CE", "Megatron", "torch linear CE", "torch foreach", "Python loops")


@pytest.fixture(scope="module", autouse=True)
def no_world_left():
    yield
    peers.leave_megatron()


@pytest.fixture(autouse=True)
def no_tests_inside(monkeypatch):
    """A gate would run the suite within itself."""
    monkeypatch.setattr(runner, "run_gate", lambda ops, device: pytest.fail("the gate ran"))


def row(case="linear_policy_loss", implementation=OURS, time="0.9", peak="100.0", memory="0.5", shape="T=64"):
    values = dict.fromkeys(report.COLUMNS, "")
    values |= {"case": case, "implementation": implementation, "shape": shape, "dtype": "float32"}
    return values | {"ratio_to_eager": time, "peak_mb": peak, "memory_ratio_to_eager": memory}


def measured(implementation, seconds, peak, **more):
    return Measured(SMALL[0], implementation, seconds=seconds, peak_bytes=peak, floor_seconds=0.5, **more)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_sides_of_a_case_give_the_same_number(case):
    inputs, answers = case.inputs(), {}
    for side in case.sides:
        if side.implementation in COMPARED:
            answers[side.implementation] = side.make(inputs)()
    compared = {name: float(answer) for name, answer in answers.items() if answer is not None}
    if case.op == "adamw_step":
        assert not compared
        return
    assert {OURS, EAGER} <= set(compared)
    assert list(compared.values()) == pytest.approx([compared[EAGER]] * len(compared), rel=1e-4)


def test_a_head_side_leaves_the_gradients_of_the_loss():
    case = next(case for case in SMALL if case.name == "linear_policy_loss")
    inputs, found = case.inputs(), {}
    for side in case.sides:
        if side.implementation in (OURS, EAGER, "Megatron CE"):
            clear(inputs)
            side.make(inputs)()
            found[side.implementation] = [leaf.grad.clone() for leaf in inputs.leaves]
    for gradients in found.values():
        for mine, expected in zip(gradients, found[EAGER], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-7)


def test_steps_of_the_optimiser_move_the_parameters_alike():
    made = [case for case in SMALL if case.op == "adamw_step"]
    for case in made:
        moved = {}
        for side in case.sides:
            if side.implementation == "torch compile":
                continue
            inputs = case.inputs()
            before = inputs.param.clone()
            side.make(inputs)()
            moved[side.implementation] = inputs.param - before
        for name, change in moved.items():
            assert change.abs().max() > 0, name
            torch.testing.assert_close(change, moved[EAGER], rtol=0.05, atol=2e-7)


def test_the_compiled_formula_of_adamw_is_torchs():
    from bench.kernel_bench import plain

    tensors = [torch.randn(100, dtype=torch.float64) for _ in range(2)]
    param, grad = tensors
    first, second, step = torch.zeros_like(param), torch.zeros_like(param), torch.zeros((), dtype=torch.int64)
    expected = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([expected], lr=0.1)
    for _ in range(3):
        expected.grad = 0.5 * grad
        optimizer.step()
        plain.adamw(param, grad, first, second, step, torch.tensor(0.5, dtype=torch.float64), 0.1)
    torch.testing.assert_close(param, expected.detach())


def test_every_operation_has_a_case_and_every_preset_its_shapes():
    assert {case.op for case in SMALL} == set(OPS)
    assert len({case.title for case in SMALL}) == len(SMALL)
    for preset, sizes in PRESETS.items():
        made = cases(preset, "cuda", "bfloat16")
        assert len({case.title for case in made}) == len(made)
        if sizes.memory_only:
            assert {case.op for case in made} == {"linear_logprob", "linear_policy_loss"}
    tokens = [case.shape for case in cases("small", "cpu", "float32", 4) if case.op == "linear_policy_loss"]
    assert set(tokens) == {"T=256 H=32 V=211"}


def test_costs_count_what_the_maths_moves():
    assert logprob_cost(10, 100, 2) == Cost(5000, 2080)
    assert logprob_cost(10, 100, 2, backward=True) == Cost(9000, 6080)
    assert policy_loss_cost(10) == Cost(200, 240)
    assert segment_advantage_cost(10) == Cost(80, 370)
    norm, step, whole = (case.cost for case in SMALL if case.op in ("squared_norms", "adamw_step"))
    assert whole.bytes == norm.bytes + step.bytes + 2 * 4096 == 34 * 4096


def test_rows_and_lines_of_what_was_measured():
    made = [measured(OURS, 1.0, 30_000_000, ratio=0.5), measured(EAGER, 2.0, 60_000_000, ratio=1.0)]
    made.append(measured("CCE", None, None, reason="not installed"))
    table = report.rows(made)
    assert [entry["implementation"] for entry in table] == [OURS, EAGER]
    ours = table[0]
    assert (ours["ms"], ours["ratio_to_eager"], ours["peak_mb"]) == ("1000.0000", "0.5000", "30.0")
    assert (ours["memory_ratio_to_eager"], ours["time_over_floor"]) == ("0.5000", "2.000")
    text = report.lines(SMALL[1], made, None)
    assert any("CCE" in line and "not installed" in line for line in text)
    assert not any("target" in line for line in text)
    assert report.lines(SMALL[1], made, "NVIDIA H200")[-1] == "  target: 1.65 times the floor; measured 2: missed"


def test_columns_stay_apart_however_wide_a_number_is():
    wide = measured(OURS, 123_456.789, 98_765_432_100_000, ratio=12_345_678.9, note="a note")
    text = report.lines(SMALL[1], [wide], None)[-1]
    assert re.split(r"\s{2,}", text.strip()) == [OURS, "123456789", "12345678.90", "98765432.1", "246914", "a note"]
    text = report.lines(SMALL[1], [measured(OURS, 0.0123456, 4_440_000, ratio=0.5), wide], None)
    assert re.split(r"\s{2,}", text[-2].strip()) == [OURS, "12.35", "0.50", "4.4", "0.0247"]
    assert text[-2].index("12.35") + len("12.35") == text[-3].index("ms") + len("ms")


def test_memory_ratio_needs_a_peak_worth_the_name():
    table = report.rows([measured(OURS, 1.0, 5000), measured(EAGER, 2.0, 4000)])
    assert table[0]["memory_ratio_to_eager"] == ""


def test_csv_round_trip(tmp_path):
    path = tmp_path / "new" / "kernels.csv"
    table = report.rows([measured(OURS, 1.0, 1, note="less, and other")])
    report.write_csv(path, {"machine": "one: with a colon", "threads": "2"}, table)
    assert report.read_csv(path) == ({"machine": "one: with a colon", "threads": "2"}, table)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"kernels.csv lacks the column case"):
        report.read_csv(path)


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        ({"time": "1.16"}, []),
        ({"time": "1.18"}, ["time ratio"]),
        ({"memory": "0.54"}, []),
        ({"memory": "0.56"}, ["memory ratio"]),
        ({"memory": "0.56", "peak": "20.0"}, []),  # 2 MB
        ({"memory": "", "peak": "117.0"}, []),
        ({"memory": "", "peak": "119.0"}, ["peak MB"]),
        ({"memory": "", "peak": ""}, ["peak MB 100.0 -> not measured now"]),
        ({"time": ""}, ["time ratio 0.9 -> not measured now"]),
        ({"time": "9.0", "memory": "9.0", "shape": "T=128"}, []),
        ({"time": "9.0", "memory": "9.0", "implementation": EAGER}, []),
    ],
)
def test_check_compares_ratios(now, worse):
    verdicts = report.compare([row(), row("common")], [row(**now), row("common")])
    found = [verdict.text for verdict in verdicts if verdict.worse]
    assert len(found) == len(worse)
    assert all(part in text and "WORSE" in text for part, text in zip(worse, found, strict=True))


def test_check_names_cases_that_one_side_lacks():
    now = [row("logprob"), row("common", memory="", peak="")]
    verdicts = report.compare([row("policy_loss"), row("common")], now, memory=False)
    assert [verdict.text for verdict in verdicts if "common" not in verdict.text] == [
        "logprob  T=64  float32: not in the baseline",
        "policy_loss  T=64  float32: not measured now",
    ]
    assert not any(verdict.worse for verdict in verdicts)


def test_check_fails_where_no_case_is_in_both():
    worse = [verdict.text for verdict in report.compare([row("policy_loss")], [row("logprob")]) if verdict.worse]
    assert worse == ["no case of this run is in the baseline: WORSE"]


def test_a_run_prints_a_table_and_fails_beside_a_better_baseline(tmp_path, capsys):
    csv = tmp_path / "now.csv"
    arguments = [*QUICK, "--op", "squared_norms", "--csv", str(csv)]
    assert runner.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("Measured is the torch backend on the CPU, not the Triton kernels")
    assert "squared_norms  n=4096  float32" in out
    head, table = report.read_csv(csv)
    assert head["threads"] == str(torch.get_num_threads())
    assert [entry["implementation"] for entry in table] == [OURS, EAGER]
    assert all(float(entry["ms"]) > 0 and float(entry["peak_mb"]) >= 0 for entry in table)

    table[0] |= {"ratio_to_eager": "1e9", "peak_mb": "9.0"}
    report.write_csv(csv, head, table)
    assert runner.main([*QUICK, "--op", "squared_norms", "--skip-memory", "--check", str(csv)]) == 0
    assert "(at most 1.3e+09): fine" in capsys.readouterr().out
    table[0]["ratio_to_eager"] = "1e-9"
    report.write_csv(csv, head, table)
    assert runner.main([*QUICK, "--op", "squared_norms", "--skip-memory", "--check", str(csv)]) == 1
    assert "WORSE" in capsys.readouterr().out
    report.write_csv(csv, head | {"backend": "triton (compiled for sm_90)"}, table)
    with pytest.raises(SystemExit, match=r"is of the backend triton .*nothing to compare"):
        runner.main([*QUICK, "--op", "squared_norms", "--skip-memory", "--check", str(csv)])


def test_a_plot_names_every_case_and_side(tmp_path):
    pytest.importorskip("matplotlib")
    table = report.rows([measured(OURS, 1.0, 30_000_000, ratio=0.5), measured(EAGER, 2.0, 60_000_000, ratio=1.0)])
    bars.draw(tmp_path / "bars.svg", "a machine", table)
    text = (tmp_path / "bars.svg").read_text()
    assert all(part in text for part in ("a machine", SMALL[0].name, OURS, EAGER, "0.5  (1e+03 ms)", "60 MB"))
    bars.draw(tmp_path / "bars.png", "a machine", table)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_sides_that_disagree_stop_the_run():
    ours, eager = measured(OURS, 1.0, 1, answer=1.01), measured(EAGER, 1.0, 1, answer=1.0)
    assert runner.agreement([ours, measured("CCE", 1.0, 1), eager]) is None
    with pytest.raises(SystemExit, match=r"CCE gives 1\.1, torch eager 1\.0"):
        runner.agreement([ours, measured("CCE", 1.0, 1, answer=1.1), eager])
    with pytest.raises(SystemExit, match="CCE gives nan"):
        runner.agreement([ours, measured("CCE", 1.0, 1, answer=float("nan")), eager])


def test_without_an_answer_of_eager_another_side_is_compared_with():
    ours, eager = measured(OURS, 1.0, 1, answer=1.0), measured(EAGER, None, None, reason="out of memory")
    peer = measured("CCE", 1.0, 1, answer=1.01)
    assert runner.agreement([ours, eager, peer]) == "compared with drmas: torch eager gives no number here"
    assert runner.agreement([ours, eager]) == "not compared: only drmas gives a number to compare"
    assert runner.agreement([eager]) == "not compared: no side gives a number to compare"
    peer.answer = 1.1
    with pytest.raises(SystemExit, match=r"CCE gives 1\.1, drmas 1\.0"):
        runner.agreement([ours, eager, peer])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--implementation", "apex"], r"'apex'; expected one of CCE"),
        (["--op", "policy_loss", "--shapes", "memory"], "--shapes memory has no case of --op policy_loss"),
    ],
)
def test_wrong_choices_are_named(wrong, message):
    with pytest.raises(SystemExit, match=message):
        runner.main([*QUICK, *wrong])


def test_wrong_arguments_are_named(capsys, tmp_path):
    missing, there = tmp_path / "none.csv", tmp_path / "there.csv"
    there.write_text("")
    for wrong, message in (
        (["--repeats", "0"], "--repeats is 0"),
        (["--check", str(missing)], "there is no such file"),
        (["--check", str(there), "--implementation", "CCE"], "--check compares ratios to torch eager, which isn't among"),
        (["--sweep", "--check", str(there)], "please leave out --check"),
    ):
        with pytest.raises(SystemExit, match="2"):
            runner.arguments(wrong)
        assert message in capsys.readouterr().err


def test_the_header_holds_the_whole_command():
    words = ["--op", "logprob", "--op", "policy_loss", "--implementation", EAGER, "--repeats", "3", "--skip-memory"]
    head = runner.header(runner.arguments(["--shapes", "small", *words, "--skip-gate"]), Peaks(1e9, 1e9, "made up"))
    assert head["command"] == (
        "bench/kernels.py --shapes small --device cpu --dtype float32 --repeats 3 --op logprob --op policy_loss "
        "--implementation 'torch eager' --skip-memory"
    )


def test_peak_memory_is_what_a_step_adds_to_a_process_and_is_limited():
    code = (
        "import torch; from bench.kernel_bench.measure import limit_memory, peak_bytes\n"
        "kept = torch.ones(10_000_000)\n"
        "larger = torch.ones(100_000_000); del larger\n"
        "def step(): return (kept * 2).add_(torch.ones(5_000_000).repeat(2)).sum()\n"
        "step(); print(peak_bytes(step, lambda: None, 'cpu')[0])\n"
        "limit_memory(2**30); torch.ones(500_000_000)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    # 40 MB, 20 MB (which the allocator may have kept) and 40 MB at once; neither `kept` nor `larger`
    assert 75e6 < int(done.stdout) < 135e6
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr


def test_a_lost_process_costs_a_memory_not_a_time(monkeypatch):
    done = subprocess.CompletedProcess([], -9, stdout="", stderr="")
    monkeypatch.setattr(runner.subprocess, "run", lambda *_, **__: done)
    arguments = runner.arguments(QUICK)
    entry = measured(OURS, 1.0, None, note="less")
    runner._measure_apart(entry, arguments)
    assert (entry.note, entry.reason) == ("less; its memory: out of memory", "")
    done.returncode, done.stderr = 1, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"
    runner._measure_apart(entry, arguments, keep_time=True)
    assert entry.reason == "out of memory"
    done.returncode, done.stderr = 1, "Traceback\nValueError: no\n"
    runner._measure_apart(entry, arguments, keep_time=True)
    assert entry.reason == "failed: ValueError: no"


def test_out_of_memory_is_a_reason(monkeypatch):
    def make(inputs):
        def step():
            raise torch.OutOfMemoryError("too large")

        return step

    case = SMALL[0]
    sides = [Side(OURS, make), *(side for side in case.sides if side.implementation == EAGER)]
    arguments = runner.arguments([*QUICK, "--skip-memory"])
    ours, eager = runner.run_case(case, sides, arguments, Peaks(1e9, 1e9, "made up"))
    assert (ours.reason, ours.seconds) == ("out of memory", None)
    assert eager.ratio == 1.0


def test_a_run_fails_where_drmas_has_no_numbers(monkeypatch, capsys, tmp_path):
    norm = next(case for case in SMALL if case.op == "squared_norms")
    eager = Measured(norm, EAGER, seconds=2.0, ratio=1.0, peak_bytes=1, answer=1.0, floor_seconds=0.5)
    monkeypatch.setattr(runner, "run_case", lambda *_: [Measured(norm, OURS, reason="out of memory"), eager])
    monkeypatch.setattr(runner, "peaks", lambda *_, **__: Peaks(1e9, 1e9, "made up"))
    assert runner.main([*QUICK, "--op", "squared_norms"]) == 1
    out = capsys.readouterr().out
    assert "squared_norms  n=4096  float32: drmas has no numbers: out of memory" in out
    assert "  not compared: only torch eager gives a number to compare" in out
    baseline = tmp_path / "old.csv"
    report.write_csv(baseline, runner.header(runner.arguments(QUICK), Peaks(1e9, 1e9, "made up")), [row("squared_norms")])
    assert runner.main([*QUICK, "--op", "squared_norms", "--check", str(baseline)]) == 1


def test_a_gpu_is_measured_by_events_and_by_torchs_allocator(monkeypatch):
    """With stand-ins: what is called, and which numbers are taken."""
    testing = pytest.importorskip("triton.testing")
    times = iter([3.0, 7.0, 4.0, 5.0])
    monkeypatch.setattr(testing, "do_bench", lambda step, **settings: next(times) if settings["return_mode"] == "min" else None)
    assert measure.best_seconds({"a": lambda: None, "b": lambda: None}, 2, "cuda") == {"a": 3e-3, "b": 5e-3}

    events = []
    for name, value in {
        "synchronize": 0,
        "reset_peak_memory_stats": 0,
        "memory_allocated": 10,
        "max_memory_allocated": 50,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: events.append(name) or value)
    peak, _, answer = measure.peak_bytes(
        lambda: events.append("step") or torch.tensor(2.0), lambda: events.append("clear"), "cuda"
    )
    assert (peak, answer) == (40, 2.0)
    assert [name for name in events if name != "synchronize"] == [
        *("clear", "reset_peak_memory_stats", "memory_allocated", "step", "max_memory_allocated")
    ]
    assert events.index("step") < len(events) - 1 - events[::-1].index("synchronize") < events.index("max_memory_allocated")


def test_sweep_shows_gradients_apart(monkeypatch, capsys):
    def apart(entry, args, keep_time=False):
        entry.peak_bytes = 1_000_000 * args.tokens_factor

    monkeypatch.setattr(runner, "_measure_apart", apart)
    assert runner.main([*QUICK, "--sweep"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [entry[-4:] for entry in rows[:3]] == [
        ["64", "1.0", "0.0", "1.0"],
        ["128", "2.0", "0.0", "2.0"],
        ["256", "4.0", "0.1", "3.9"],
    ]


def test_best_seconds_takes_turns(monkeypatch):
    """With a clock that only the steps move: short ones are repeated, and the best round counts."""
    order, now = [], [0.0]
    seconds = {"a": iter([0.5, 0.375, 0.125, 0.25]), "b": iter([0.5, 0.5, 0.625, 0.75])}

    def step(name):
        order.append(name)
        now[0] += next(seconds[name])

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    assert measure.best_seconds({name: lambda name=name: step(name) for name in "ab"}, 3, "cpu") == {"a": 0.125, "b": 0.5}
    assert order == list("ab" + "ab" * 3)
    order.clear()
    seconds["a"] = iter([2**-7] * 100)
    assert measure.best_seconds({"a": lambda: step("a")}, 2, "cpu") == {"a": 2**-7}
    assert len(order) == 1 + 2 * 2  # two of them last 0.02 s, or nearly


def test_floor_is_the_larger_of_the_two_bounds(monkeypatch):
    top = Peaks(1e9, 1e9, "made up")
    assert Cost(2 * 10**9, 10**9).floor_seconds(top.flops, top.bytes) == 2.0
    monkeypatch.setattr(measure, "best_seconds", lambda steps, *_: dict(zip(steps, (0.5, 0.25), strict=True)))
    found = measure.peaks("cpu", torch.float32, quick=True)
    assert found[:2] == (2 * 256**3 / 0.5, 2 * 2**20 / 0.25)
    assert "measured in this run" in found.origin


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth"),
    [
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA H200 NVL", 835e12, 4.8e12),
        ("NVIDIA GH200 480GB", 989e12, 4.0e12),
        ("NVIDIA GH200 144G HBM3e", 989e12, 4.9e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
        ("NVIDIA H100 PCIe", 756e12, 2.0e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12),
    ],
)
def test_peaks_of_known_gpus_come_from_their_data_sheets(monkeypatch, name, flops, bandwidth):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    top = measure.peaks("cuda", torch.bfloat16)
    assert top[:2] == (flops, bandwidth)
    assert "data sheet" in top.origin


@pytest.mark.parametrize("name", ["NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090"])
def test_peaks_of_other_gpus_are_measured(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(measure, "_measured", lambda *_: (2.0, 3.0))
    top = measure.peaks("cuda", torch.bfloat16)
    assert top[:2] == (2.0, 3.0)
    assert "measured in this run" in top.origin


def test_the_gate_has_tests_for_every_operation(monkeypatch, tmp_path):
    for op in OPS:
        assert len(gate.tests_of([op])) > len(gate.ALWAYS), op
    assert len(gate.tests_of(["linear_logprob"] * 2)) == len(gate.tests_of(["linear_logprob"]))
    monkeypatch.setattr(gate, "FOLDER", tmp_path)
    (tmp_path / "test_linear_logprob.py").write_text("")
    with pytest.raises(FileNotFoundError, match=r"has no test_head\*\.py, where .* expects tests of linear_logprob"):
        gate.tests_of(["linear_logprob"])


def test_the_gate_of_a_cpu_takes_the_tests_of_the_torch_backend():
    parts = ("segment_advantage_triton", "grad_norm", "logprob", "logits_kernels", "head_kernel")
    files = [str(gate.FOLDER / f"test_{part}.py") for part in parts]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", gate.SELECTED["cpu"], *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    taken = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    for part in ("the_size_of_rewards_costs_no_digits[torch", "ranks_add_up_to_the_norm", "temperatures[torch"):
        assert [test for test in taken if part in test], part
    for part in ("[triton", "-triton", "every_rule_agrees", "two_ranks_equal_one", "every_column_can_be_the_target"):
        assert not [test for test in taken if part in test], part


def test_no_number_is_printed_where_a_correctness_test_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    broken = tmp_path / "test_broken.py"
    monkeypatch.setattr(gate, "tests_of", lambda ops: [broken])
    broken.write_text("def test_it():\n    assert 'this' == 'that'\n")
    with pytest.raises(SystemExit, match="no numbers: the correctness tests failed on cpu"):
        gate.run_gate(["policy_loss"], "cpu")
    assert "'this' == 'that'" in capsys.readouterr().out
    broken.write_text("import os\n\ndef test_it():\n    assert os.environ['DRMAS_TEST_DEVICE'] == 'cpu'\n")
    gate.run_gate(["policy_loss"], "cpu")
    assert "1 passed" in capsys.readouterr().out
