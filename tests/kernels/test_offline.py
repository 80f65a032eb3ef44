"""The shipped kernels compiled without a GPU: budgets, the JIT's own cache, cubins with their manifest."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drmas_kernels.offline import budgets, measure
from drmas_kernels.offline.compilation import CannotCompile

ROOT = Path(__file__).parents[2]
TOYS = ("--module", "tests.kernels.toy_kernels")
CARELESS = ("--module", "tests.kernels.careless_kernels")


@pytest.fixture(scope="session")
def offline(request, tmp_path_factory):
    """Runs the tool in a clean process: offline("check", ...) -> the finished process.

    What was compiled is kept in pytest's cache: Triton's keys hold all that it depends on.
    """
    kept = getattr(request.config, "cache", None)
    shared = kept.mkdir("triton") if kept else tmp_path_factory.mktemp("triton")

    def offline(*arguments, cache=shared, module="drmas_kernels.offline", **variables):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
        environment |= {"PYTHONPATH": str(ROOT / "kernels"), "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"} | variables
        command = [sys.executable, "-m", module, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)

    return offline


@pytest.fixture(scope="module")
def toy_budgets(offline, tmp_path_factory):
    """The budgets of the toy kernels, fresh."""
    path = tmp_path_factory.mktemp("budgets") / "budgets.json"
    done = offline("update", *TOYS, "--budgets", path)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.mark.parametrize("part", [("--arch", "sm_90"), ("--arch", "all", "--only", "adamw")], ids=["sm_90", "one kernel"])
def test_shipped_kernels_are_within_their_budgets(offline, part):
    """All of them on the architecture that the tile tables are for; `check` without options takes all architectures."""
    done = offline("check", *part)
    if done.returncode == 3:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels are within their budgets" in done.stdout


def test_the_report_measures_what_the_kernels_do(offline):
    """sum_rows: a load of 128 bits per 4 elements; the masked scale: 16-bit loads; products by tensor core and TMA."""
    done = offline("report", *TOYS, "--arch", "sm_90")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    head, rows = lines[0], {line[0]: line for line in lines[1:]}
    assert head[:4] == ["kernel", "regs", "stack", "spill"]
    assert set(rows) == {"sum_rows@sm_90", "scale@sm_90", "product@sm_90"}
    assert "8x128" in rows["sum_rows@sm_90"]
    assert {"8x16", "8x32"} <= set(rows["scale@sm_90"])
    assert "4xHGMMA" in rows["product@sm_90"]
    assert float(rows["sum_rows@sm_90"][-2]) < 2


def test_all_that_a_spec_can_do_wrong(offline, tmp_path):
    done = offline("check", *CARELESS, "--budgets", tmp_path / "none.json")
    assert done.returncode == 1
    assert [line.removeprefix("careless@sm_90: ") for line in sorted(done.stdout.splitlines()) if line[:3] == "car"] == [
        '1 atomics without "atomics" in expects',
        '10 instructions of 64-bit floats without "fp64" in expects',
        "aligned has gaol, which the signature has not",
        "count is i64 without the annotation tl.int64: a small value would compile it as i32",
        "count is neither in the spec's aligned nor in the kernel's do_not_specialize: its values would compile more kernels",
        "expects 'fast', which is none of hgmma, tma, wide, fp64, atomics",
        "expects hgmma: no HGMMA instruction",
        "expects tma: no UTMALDG or UTMASTG instruction",
        "expects wide: 1 loads of 32 bits",
        "no budget",
        "source is neither in the spec's aligned nor in the kernel's do_not_specialize_on_alignment: "
        "its values would compile more kernels",
        "step is neither in the spec's aligned nor in the kernel's do_not_specialize: its values would compile more kernels",
    ]
    assert "12 findings" in done.stdout


def test_the_tool_holds_kernels_to_the_file(offline, toy_budgets, tmp_path):
    content = json.loads(toy_budgets.read_text())
    content["kernels"]["sum_rows@sm_90"]["registers"] -= 1
    content["kernels"]["scale@sm_90"]["registers"] += 1
    content["kernels"]["gone@sm_90"] = content["kernels"]["scale@sm_90"]
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps(content))
    done = offline("check", *TOYS, "--arch", "sm_90", "--budgets", path)
    assert done.returncode == 1
    registers = {name: content["kernels"][f"{name}@sm_90"]["registers"] for name in ("sum_rows", "scale")}
    assert done.stdout.splitlines()[:3] == [
        f"sum_rows@sm_90: registers {registers['sum_rows'] + 1}, budget {registers['sum_rows']}",
        "gone@sm_90: a budget without a kernel",
        f"better than the budget: scale@sm_90: registers {registers['scale'] - 1}, budget {registers['scale']}",
    ]


def test_another_compiler_s_numbers_are_not_compared_but_the_rules_hold(offline, toy_budgets, tmp_path):
    content = json.loads(toy_budgets.read_text())
    here = content["compiler"]["triton"]
    content["compiler"]["triton"] = "3.1.4"
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps(content))
    done = offline("check", *TOYS, "--budgets", path)
    assert done.returncode == 3
    assert f"was measured with triton 3.1.4, ptxas 12.9, ptxas-blackwell 13.4; here is triton {here}," in done.stdout
    assert "No numbers were compared; 4 kernels were held to what their specs expect." in done.stdout
    careless = offline("check", *CARELESS, "--budgets", path)
    assert careless.returncode == 1
    assert "careless@sm_90: expects wide: 1 loads of 32 bits\n" in careless.stdout
    assert "no budget" not in careless.stdout
    assert careless.stdout.endswith("11 findings.\n")
    mixed = offline("update", *TOYS, "--only", "scale", "--budgets", path)
    assert mixed.returncode == 2
    assert "please update them all" in mixed.stderr


def test_update_of_some_kernels_keeps_the_others(offline, toy_budgets, tmp_path):
    content = json.loads(toy_budgets.read_text())
    content["kernels"]["product@sm_90"]["registers"] = 1
    content["kernels"]["scale@sm_90"]["registers"] = 1
    content["kernels"]["gone@sm_90"] = {}
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps(content))
    assert offline("update", *TOYS, "--only", "scale", "--budgets", path).returncode == 0
    after = json.loads(path.read_text())["kernels"]
    assert set(after) == {"sum_rows@sm_90", "scale@sm_90", "product@sm_80", "product@sm_90"}
    assert after["product@sm_90"]["registers"] == 1
    assert after["scale@sm_90"]["registers"] > 1


def test_interpreted_kernels_are_refused(offline):
    done = offline("report", *TOYS, TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "please unset it" in done.stderr


def test_a_build_is_of_one_architecture(offline, tmp_path):
    done = offline("build", *TOYS, "--arch", "all", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "--arch is 'all'; expected one architecture" in done.stderr


def test_nothing_to_compile_is_said(offline):
    done = offline("report", *TOYS, "--only", "scail*")
    assert done.returncode == 2
    assert done.stderr == "no kernel matches --only scail* --arch sm_90\n"


def test_a_missing_tool_is_named(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.NvidiaTool, "from_path", staticmethod(lambda path: None))
    with pytest.raises(
        CannotCompile, match=r"bin/nvdisasm is missing .* install that again from PyPI, .* TRITON_NVDISASM_PATH"
    ):
        measure.tool("nvdisasm")


def test_launches_after_prefill_compile_nothing(offline, tmp_path):
    """`KernelSpec.launch` on a driver that runs nothing, with other addresses, counts and strides; then with other options."""
    done = offline("prefill", *TOYS, "--cache", tmp_path)
    assert done.stdout == f"{tmp_path}: 3 kernels compiled, 0 were there\n", done.stderr
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    ranks = [
        offline(module="tests.kernels.offline_rank", cache=tmp_path),
        offline(8, module="tests.kernels.offline_rank", cache=tmp_path),
    ]
    said = [json.loads(rank.stdout) for rank in ranks]
    assert said[0]["launched"] == ["sum_rows"] * 4 + ["scale"] * 3 + ["product"] * 3
    assert said[0]["compiled"] == []
    assert said[1]["compiled"] == ["sum_rows"]
    assert set(files) < {path for path in tmp_path.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(offline, tmp_path_factory):
    """A folder with the toy kernels for sm_90."""
    out = tmp_path_factory.mktemp("built") / "cubins"
    done = offline("build", *TOYS, "--arch", "sm_90", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}/manifest.json: 3 kernels for sm_90\n"
    return out


def test_the_manifest_describes_its_cubins(built):
    manifest = json.loads((built / "manifest.json").read_text())
    assert (manifest["schema"], manifest["arch"]) == (1, "sm_90")
    kernels = {kernel["name"]: kernel for kernel in manifest["kernels"]}
    assert sorted(path.name for path in built.iterdir()) == ["manifest.json", "product.cubin", "scale.cubin", "sum_rows.cubin"]
    for kernel in kernels.values():
        cubin = (built / kernel["cubin"]).read_bytes()
        assert hashlib.sha256(cubin).hexdigest() == kernel["sha256"]
        assert kernel["symbol"].encode() in cubin
        assert str(ROOT).encode() not in cubin
        assert kernel["threads"] == 32 * kernel["num_warps"]
    scale = kernels["scale"]
    assert scale["arguments"] == [
        {"name": "source", "type": "*bf16", "aligned": False},
        {"name": "goal", "type": "*fp32", "aligned": False},
        {"name": "count", "type": "i32", "aligned": False},
        {"name": "factor", "type": "fp32", "aligned": False},
    ]
    assert scale["constants"] == {"BLOCK": 1024}
    places = [(part["argument"], part["role"], part["offset"], part["size"]) for part in scale["parameters"]]
    assert places == [
        ("source", "value", 0, 8),
        ("goal", "value", 8, 8),
        ("count", "value", 16, 4),
        ("factor", "value", 20, 4),
        (None, "global_scratch", 24, 8),
        (None, "profile_scratch", 32, 8),
    ]
    assert scale["parameter_bytes"] == 40


def test_a_descriptor_is_a_tensor_map_and_its_shape(built):
    manifest = json.loads((built / "manifest.json").read_text())
    product = next(kernel for kernel in manifest["kernels"] if kernel["name"] == "product")
    assert product["shared"] > 48 * 1024
    left = product["arguments"][0]
    assert left["tensordesc"] == {
        "swizzle": 3,
        "elem_size": 2,
        "elem_type": 10,
        "block_size": [128, 64],
        "fp4_padded": False,
        "is_im2col": False,
    }
    parts = [part for part in product["parameters"] if part["argument"] == "left"]
    assert [(part["role"], part["type"], part["size"], part.get("dimension")) for part in parts] == [
        ("tensor_map", "nvTmaDesc", 128, None),
        ("shape", "i32", 4, 0),
        ("shape", "i32", 4, 1),
        ("stride", "i64", 8, 0),
        ("stride", "i64", 8, 1),
    ]
    assert [part["ordinal"] for part in product["parameters"]] == list(range(2 * 5 + 3 + 2))


def test_a_build_replaces_its_own_files_only(offline, tmp_path):
    """For sm_80, where a descriptor is a pointer with its shape: the sizes in the cubin are held against that."""
    (tmp_path / "scale.cubin").write_text("old")
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": [{"cubin": "scale.cubin"}]}))
    done = offline("build", *TOYS, "--arch", "sm_80", "--only", "product", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "product.cubin"]
    product = json.loads((tmp_path / "manifest.json").read_text())["kernels"][0]
    roles = [part["role"] for part in product["parameters"] if part["argument"] == "left"]
    assert roles == ["base", *["shape"] * 2, *["stride"] * 2, "padding_nan", "round_tf32", *["shape"] * 2, *["stride"] * 2]
    assert "tensordesc" not in product["arguments"][0]
    (tmp_path / "mine.txt").write_text("not yours")
    done = offline("build", *TOYS, "--arch", "sm_80", "--only", "product", "--out", tmp_path)
    assert done.returncode == 2
    assert "holds mine.txt" in done.stderr
    assert (tmp_path / "product.cubin").exists()


RECORD = {
    "registers": 40,
    "stack": 0,
    "spills": 0,
    "shared": 1024,
    "ctas_per_sm": 12,
    "loads": {"128": 4, "16": 3},
    "stores": {"32": 1},
    "work_loads": {"128": 4},
    "work_stores": {},
    "tma_loads": 2,
    "tma_stores": 0,
    "tensor_core": {"HGMMA": 8},
    "fp64": 0,
    "atomics": 0,
    "instructions": 1000,
    "instructions_per_element": 10.0,
    "ex2_per_element": 1.125,
    "missing": [],
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"registers": 41}, "registers 41, budget 40"),
        ({"stack": 8}, "stack 8, budget 0"),
        ({"spills": 1}, "spills 1, budget 0"),
        ({"shared": 1040}, "shared 1040, budget 1024"),
        ({"ctas_per_sm": 11}, "ctas per sm 11, budget 12"),
        ({"fp64": 1}, "fp64 1, budget 0"),
        ({"atomics": 1}, "atomics 1, budget 0"),
        ({"instructions": 1101}, "instructions 1101, budget 1000"),
        ({"instructions_per_element": 11.2}, "instructions per element 11.2, budget 10.0"),
        ({"ex2_per_element": 1.25}, "ex2 per element 1.25, budget 1.125"),
        ({"loads": {"128": 4, "16": 4}}, "loads of 16 bits 4, budget 3"),
        ({"loads": {"128": 4, "16": 3, "64": 1}}, "loads of 64 bits 1, budget 0"),
        ({"work_stores": {"32": 2}}, "work stores of 32 bits 2, budget 0"),
        ({"tensor_core": {"HMMA": 8}}, "HGMMA 0, budget 8"),
        ({"tma_loads": 0}, "tma loads 0, budget 2"),
        ({"missing": ["expects wide"]}, "expects wide"),
    ],
)
def test_what_is_over_budget(change, problem):
    verdict = budgets.compare({"k@sm_90": budgets.entry(RECORD)}, {"k@sm_90": RECORD | change}, ["k@sm_90"])
    assert verdict.problems == [f"k@sm_90: {problem}"]


@pytest.mark.parametrize(
    "change",
    [
        {"instructions": 1100},
        {"instructions": 900},
        {"instructions_per_element": 10.9},
        {"loads": {"128": 9, "16": 3}},
        {"tensor_core": {"HGMMA": 4, "HMMA": 1}},
        {"tma_loads": 1},
        {"tma_stores": 1},
    ],
)
def test_what_is_within_a_budget(change):
    verdict = budgets.compare({"k@sm_90": budgets.entry(RECORD)}, {"k@sm_90": RECORD | change}, ["k@sm_90"])
    assert verdict == ([], [])


def test_better_than_a_budget_is_said():
    better = RECORD | {"registers": 32, "ctas_per_sm": 16, "loads": {"128": 4}}
    verdict = budgets.compare({"k@sm_90": budgets.entry(RECORD)}, {"k@sm_90": better}, ["k@sm_90"])
    assert verdict.problems == []
    assert verdict.better == [
        "k@sm_90: registers 32, budget 40",
        "k@sm_90: ctas per sm 16, budget 12",
        "k@sm_90: loads of 16 bits 0, budget 3",
    ]


def test_kernels_and_budgets_must_pair_up():
    known = budgets.entry(RECORD)
    without = {key: value for key, value in RECORD.items() if key != "ex2_per_element"}
    verdict = budgets.compare(
        {"a@sm_90": known, "b@sm_90": known, "c@sm_90": known, "d@sm_90": known},
        {"a@sm_90": without, "new@sm_90": RECORD, "d@sm_90": {"missing": ["d for sm_90: CompilationError"]}},
        ["a@sm_90", "b@sm_90", "new@sm_90", "d@sm_90", "unmeasured@sm_80"],
    )
    assert verdict.problems == [
        "a@sm_90: ex2 per element is budgeted only",
        "d@sm_90: d for sm_90: CompilationError",
        "new@sm_90: no budget",
        "unmeasured@sm_80: no budget",
        "c@sm_90: a budget without a kernel",
    ]


def test_budgets_come_back_as_they_were(tmp_path):
    written = budgets.Budgets({"triton": "3.9.0"}, {"b@sm_90": budgets.entry(RECORD), "a@sm_90": {}})
    budgets.write(written, tmp_path / "budgets.json")
    assert budgets.read(tmp_path / "budgets.json") == written
    assert budgets.read(tmp_path / "other.json") == budgets.Budgets({}, {})


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        ("sm_90", 128, 40, 0, 12),
        ("sm_90", 128, 255, 98 * 1024, 2),
        ("sm_90", 256, 128, 0, 2),
        ("sm_90", 256, 255, 196672, 1),
        ("sm_90", 32, 16, 0, 32),
        ("sm_90", 128, 32, 4096, 16),
        ("sm_90", 128, 32, 113 * 1024 + 512, 1),
        ("sm_80", 128, 32, 80 * 1024, 2),
        ("sm_80", 128, 32, 82 * 1024, 1),
    ],
)
def test_programs_on_a_multiprocessor(arch, threads, registers, shared, expected):
    """By registers (units of 256 a warp, four partitions), by warps, by shared memory (1 KiB of it for the system)."""
    assert measure.ctas_per_sm(arch, threads, registers, shared) == expected
