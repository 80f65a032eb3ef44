"""The kernels without Python: the CMake project configures with what is there, builds, and its own tests pass.

One shipped kernel is compiled; the launcher's tests in C (kernels/native/tests) bring their own table and a stub of the driver.
"""

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels import interpreter

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "kernels" / "native"
KERNEL = "slot_squares"

needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
needs_compiler = pytest.mark.skipif(
    not all(any(map(shutil.which, names)) for names in (("cc", "gcc", "clang"), ("c++", "g++", "clang++"))),
    reason="there is no C and C++ compiler",
)


def run(*words, succeeds=True, **variables):
    """The output of a command, run as from a test process that interprets its kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", **variables}
    done = subprocess.run([str(word) for word in words], text=True, capture_output=True, env=environment)
    output = done.stdout + done.stderr
    assert (done.returncode == 0) == succeeds, output
    return output


def configure(folder, *options, **variables):
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DDRMAS_KERNELS_ONLY={KERNEL}", *options]
    return run("cmake", *generator, "-S", ROOT, "-B", folder, *options, **variables)


def names_of_tests(folder):
    return {test["name"] for test in json.loads(run("ctest", "--test-dir", folder, "--show-only=json-v1"))["tests"]}


@pytest.fixture(scope="module")
def manifest_tool():
    module = importlib.util.spec_from_file_location("native_manifest", NATIVE / "manifest.py")
    loaded = importlib.util.module_from_spec(module)
    module.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    assert "left out" not in configure(folder, "-DCMAKE_C_FLAGS=-Werror", "-DCMAKE_CXX_FLAGS=-Werror")
    run("cmake", "--build", folder)
    return folder


@pytest.fixture
def manifest(built, tmp_path):
    """A copy of the manifest that was built, with its cubin, to spoil."""
    return shutil.copytree(built / "kernels/native/cubins/sm_90", tmp_path / "cubins") / "manifest.json"


KERNEL_TESTS = {"kernels.budgets.sm_90", "kernels.manifest"}
LAUNCHER_TESTS = {"launcher.stub", "launcher.table", "launcher.no_driver"}


@needs_cmake
@needs_compiler
def test_the_library_is_built_and_its_tests_pass(built):
    assert names_of_tests(built) == KERNEL_TESTS | LAUNCHER_TESTS
    listing = run("ctest", "--test-dir", built, "--verbose", "--exclude-regex", "budgets")
    assert f"{KERNEL} sm_90: 3 arguments" in listing


@needs_cmake
@needs_compiler
def test_a_second_build_does_nothing(built):
    def times():
        return {path: path.stat().st_mtime_ns for path in built.rglob("*") if path.suffix in (".json", ".cubin", ".so", ".cpp")}

    before = times()
    assert len(before) >= 4
    run("cmake", "--build", built)
    assert times() == before


class Value(ctypes.Structure):
    """drmas_value"""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


def launch(library, name, grid, stream, *tensors):
    """Run a kernel whose arguments are all pointers, as a C caller does."""
    library.drmas_message.restype = ctypes.c_char_p
    kernel = ctypes.c_void_p()
    assert library.drmas_find(name.encode(), None, ctypes.byref(kernel)) == 0, library.drmas_message()
    addresses = [ctypes.c_uint64(tensor.data_ptr()) for tensor in tensors]
    values = (Value * len(tensors))(*(Value(ctypes.addressof(address), 8) for address in addresses))
    done = library.drmas_launch(kernel, *grid, ctypes.c_void_p(stream), values, ctypes.c_size_t(len(tensors)))
    assert done == 0, library.drmas_message()


@needs_cmake
@needs_compiler
@pytest.mark.skipif(interpreter.DEVICE == "cpu", reason="DRMAS_TEST_DEVICE names no GPU")
def test_a_launch_on_the_gpu(built, device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the kernel was compiled for sm_90")
    partial = torch.arange(2500, dtype=torch.float32, device=device)
    slot_tiles = torch.tensor([0, 1500, 1500, 2500], dtype=torch.int32, device=device)
    squared = torch.full((3,), -1.0, dtype=torch.float64, device=device)
    library = ctypes.CDLL(str(built / "kernels/native/libdrmas_kernels.so"))
    launch(library, KERNEL, (3, 1, 1), torch.cuda.current_stream(device).cuda_stream, partial, slot_tiles, squared)
    assert squared.tolist() == [sum(range(1500)), 0, sum(range(1500, 2500))]


@needs_cmake
def test_without_a_compiler_the_kernels_remain(tmp_path):
    output = configure(tmp_path, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert "left out: the launcher library (no C and C++ compiler)" in output
    assert names_of_tests(tmp_path) == KERNEL_TESTS


@needs_cmake
@needs_compiler
def test_without_triton_the_launcher_remains(tmp_path):
    environment = tmp_path / "bare"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    build = tmp_path / "build"
    output = configure(build, f"-DPython_EXECUTABLE={environment / 'bin' / 'python'}")
    assert "left out: the compiled kernels and their library" in output
    no_header = "left out: the launcher library (no cuda.h" in output  # Triton has one, and so may a CUDA toolkit
    assert names_of_tests(build) == (set() if no_header else {"launcher.stub"})


@needs_cmake
def test_a_wheel_needs_no_compiler_and_compiles_nothing(tmp_path):
    output = configure(tmp_path, "-DSKBUILD=2", CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert "left out: the kernels without Python (DRMAS_NATIVE is off" in output
    assert "Looking for" not in output
    run("cmake", "--build", tmp_path)
    assert not list(tmp_path.rglob("*.cubin"))


def but(key, value):
    def spoil(entry):
        entry[key] = value

    return spoil


def but_argument(key, value):
    def spoil(entry):
        entry["arguments"][0][key] = value

    return spoil


@needs_cmake
@needs_compiler
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (but("sha256", "0"), "the manifest says 0"),
        (but("cubin", "missing.cubin"), "the manifest says"),
        (but("symbol", "nothing"), "has no function nothing, but _slot_squares"),
        (but("arch", "sm_100"), "architecture: sm_90; expected by manifest and launcher: sm_100"),
        (but("threads", 256), "threads of a block: 128; expected by manifest and launcher: 256"),
        (but("shared", 228 << 10), "233472 bytes of shared memory"),
        (but("parameters", []), "bytes of parameters: [8, 8, 8, 8, 8]; expected by manifest and launcher: []"),
        (
            but_argument("type", "i32"),
            "bytes of parameters: [8, 8, 8, 8, 8]; expected by manifest and launcher: [4, 8, 8, 8, 8]",
        ),
        (but("num_ctas", 2), "num_ctas is 2; the launcher does 1 only"),
        (but("global_scratch_size", 64), "global_scratch_size is 64"),
        (but("launch_pdl", True), "the launcher doesn't do launch_pdl"),
        (but_argument("type", "tuple"), "partial is tuple; the launcher takes pointers"),
        (but_argument("type", "tensordesc<bf16[8,64]>"), "without a tensor map"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(manifest, spoil, message):
    tool = (sys.executable, NATIVE / "manifest.py", "check", manifest)
    assert run(*tool).endswith("1 kernels, 0 faults\n")
    content = json.loads(manifest.read_text())
    spoil(content["kernels"][0])
    manifest.write_text(json.dumps(content))
    assert message in run(*tool, succeeds=False)


def test_a_matrix_in_the_table(manifest_tool, tmp_path):
    """Row and column of the box, and CUDA's number for bf16 where Triton's is another."""
    box = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [128, 64], "fp4_padded": False, "is_im2col": False}
    entry = {
        "name": "product", "arch": "sm_90", "cubin": "product.cubin", "sha256": "5a", "symbol": "entry", "threads": 256,
        "shared": 131104, "num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, "launch_pdl": False,
        "launch_cooperative_grid": False,
        "arguments": [
            {"name": "a", "type": "tensordesc<bf16[128,128]>", "aligned": True, "tensordesc": box},
            {"name": "depth", "type": "i32", "aligned": True},
        ],
        "parameters": [{"size": size} for size in (128, 4, 4, 8, 8, 4, 8, 8)],
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": [entry]}))
    (tmp_path / "product.cubin").write_bytes(b"code")
    (kernel,) = manifest_tool.read(tmp_path / "manifest.json")
    assert kernel.passed == kernel.parameters
    table = manifest_tool.table([kernel])
    assert '{"a", "tensordesc<bf16[128,128]>", 32, 1, 9, 2, 3, {128, 64}},' in table
    assert '{"depth", "i32", 4, 16, 0, 0, 0, {0, 0}},' in table
    assert '{"product", "sm_90", "entry", 256, 131104, arguments_0, 2, drmas_image_0, 4},' in table
