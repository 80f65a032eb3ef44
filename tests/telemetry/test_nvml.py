"""GPU measurements through the real binding, which loads a stub of NVML that is compiled here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drmas.telemetry import perfetto
from drmas.telemetry.nvml import LIBRARY, visible

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stub of NVML")

GIB = 2**30


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> Path:
    """The folder of the stub, for LD_LIBRARY_PATH: the binding opens the library by its bare name."""
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stub.c")
    words = [COMPILER, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(folder / LIBRARY), str(source)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def run(program: str, stub: Path | None, **environment: str) -> tuple[object, str]:
    """(what the program puts into `result`, its stderr) of a process that finds the stub, or no NVML at all."""
    removed = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    whole = {name: value for name, value in os.environ.items() if name not in removed} | environment
    if stub is not None:
        whole["LD_LIBRARY_PATH"] = str(stub)
    program = f"import json\nfrom drmas.telemetry.nvml import gpu_sampler\n{program}\nprint(json.dumps(result))"
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=whole, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


TWO_STEPS = """
with gpu_sampler(period_seconds=3600) as sampler:
    result = [sampler.take(), sampler.take()]
"""


@needs_compiler
def test_two_cards_over_two_steps(stub, tmp_path):
    shutdown = tmp_path / "shutdown"
    (first, second), _ = run(TWO_STEPS, stub, NVML_STUB_SHUTDOWN_FILE=str(shutdown))
    # A sample at the start and one at the end of each step. The cards draw a watt more each time and count 3 and 6 J.
    expected = {
        "gpu/0/power_watts": 100.5,
        "gpu/0/power_watts_max": 101.0,
        "gpu/0/memory_bytes": 1.0 * GIB,
        "gpu/0/memory_bytes_max": 1.0 * GIB,
        "gpu/0/utilisation_percent": 50.0,
        "gpu/0/utilisation_percent_max": 50.0,
        "gpu/0/sm_clock_mhz": 1500.0,
        "gpu/0/sm_clock_mhz_max": 1500.0,
        "gpu/0/memory_clock_mhz": 2600.0,
        "gpu/0/memory_clock_mhz_max": 2600.0,
        "gpu/0/temperature_celsius": 40.0,
        "gpu/0/temperature_celsius_max": 40.0,
        "gpu/0/energy_joules": 3.0,
    }
    assert {name: value for name, value in first.items() if name.startswith("gpu/0/")} == expected
    assert list(first) == [*expected, *(name.replace("gpu/0/", "gpu/1/") for name in expected)]
    assert (first["gpu/1/power_watts"], first["gpu/1/memory_bytes"], first["gpu/1/energy_joules"]) == (200.5, 2 * GIB, 6.0)
    assert (second["gpu/0/power_watts"], second["gpu/0/power_watts_max"], second["gpu/0/energy_joules"]) == (102.0, 102.0, 3.0)
    assert shutdown.read_text() == "shutdown\n"


@needs_compiler
def test_the_thread_samples_by_itself(stub):
    program = """
import time
with gpu_sampler(period_seconds=0.01) as sampler:
    time.sleep(0.5)
    result = sampler.take()
"""
    found, _ = run(program, stub)
    samples = found["gpu/0/power_watts_max"] - 100 + 1
    assert 3 < samples <= 52
    assert found["gpu/0/power_watts"] == pytest.approx(100 + (samples - 1) / 2)
    assert found["gpu/0/energy_joules"] == 3 * (samples - 1)


@needs_compiler
def test_without_an_energy_counter_power_is_integrated(stub):
    program = """
import time
with gpu_sampler(period_seconds=3600) as sampler:
    sampler.take()
    start = time.perf_counter()
    time.sleep(0.5)
    result = [sampler.take(), time.perf_counter() - start]
"""
    (found, seconds), stderr = run(program, stub, NVML_STUB_NO_ENERGY="1")
    assert found["gpu/1/energy_joules"] == pytest.approx((201 + 202) / 2 * seconds, rel=0.3)
    assert "measured" not in stderr


@needs_compiler
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("1", {"gpu/0/memory_bytes": 2 * GIB}),
        ("1,0", {"gpu/0/memory_bytes": 2 * GIB, "gpu/1/memory_bytes": 1 * GIB}),
        ("GPU-2", {"gpu/0/memory_bytes": 2 * GIB}),
        ("MIG-12345678-aaaa-bbbb-cccc-dddddddddddd,0", {"gpu/1/memory_bytes": 1 * GIB}),
        ("", None),
    ],
)
def test_only_the_cards_that_this_process_may_see(stub, setting, expected):
    program = """
sampler = gpu_sampler()
result = sampler and {name: value for name, value in sampler.take().items() if name.endswith("memory_bytes")}
"""
    found, stderr = run(program, stub, CUDA_VISIBLE_DEVICES=setting)
    assert found == expected
    assert stderr == ""


UUIDS = ["GPU-10aa", "GPU-10bb", "GPU-20cc"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("2, 0", [2, 0]),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
        ("NoDevFiles", []),
        ("GPU-20,GPU-10bb", [2, 1]),
        ("GPU-10,0", []),
        ("MIG-GPU-10aa/1/0,2", [None, 2]),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(setting, expected):
    assert visible(setting, UUIDS) == expected


@needs_compiler
def test_an_error_ends_the_measuring_and_not_the_run(stub):
    program = """
import time
with gpu_sampler(period_seconds=0.01) as sampler:
    time.sleep(0.3)
    result = [sampler.take(), sampler.take()]
"""
    (found, later), stderr = run(program, stub, NVML_STUB_FAIL_AFTER="2")
    assert found["gpu/0/power_watts_max"] == 101.0
    assert later == {}
    assert stderr.count("GPUs are no longer measured: NVML says GPU is lost") == 1


@needs_compiler
def test_a_library_that_never_answers_holds_up_one_step(stub):
    program = """
import time
from drmas.telemetry import nvml
nvml._PATIENCE_SECONDS = 0.2
sampler = gpu_sampler(period_seconds=3600)
start = time.perf_counter()
sampler.take()
first = time.perf_counter() - start
sampler.take()
sampler.close()
result = [first, time.perf_counter() - start - first]
"""
    (first, rest), stderr = run(program, stub, NVML_STUB_HANG_AFTER="1")
    assert 0.2 <= first < 10
    assert 0.2 <= rest < 10  # closing waits once more, a step doesn't
    assert stderr.count("NVML doesn't answer") == 1


@needs_compiler
def test_a_driver_that_cannot_be_used_is_said(stub):
    found, stderr = run("result = gpu_sampler()", stub, NVML_STUB_INIT="18")
    assert found is None
    assert stderr.count("GPUs are not measured: NVML says") == 1


def test_without_nvml_nothing_is_imported():
    program = "import sys\nresult = [gpu_sampler(), [name for name in ('pynvml', 'torch', 'numpy') if name in sys.modules]]"
    (sampler, imported), stderr = run(program, None)
    if sampler is not None or "NVML says" in stderr:
        pytest.skip("this machine has NVML")
    assert imported == []
    assert stderr == ""


@needs_compiler
def test_samples_are_counters_of_the_trace(stub, tmp_path):
    program = f"""
from pathlib import Path
from drmas.telemetry.trace import Profile, Steps
profile = Profile(Steps(1, 1), Path({str(tmp_path)!r}), rank=0, num_ranks=1)
with gpu_sampler(period_seconds=3600) as sampler:
    for step in (1, 2):
        with profile.step(step):
            result = sampler.take()
"""
    run(program, stub)
    counters = [(each.name, each.value) for each in perfetto.read(tmp_path).counters]
    # Of the first step only, the one that was traced; the sample at the start came before it.
    assert len(counters) == 12
    assert ("gpu/0/power_watts", 101.0) in counters
    assert ("gpu/1/memory_bytes", 2.0 * GIB) in counters
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "C"]) == 12
