"""The shape of the source: direction of imports, sizes, style."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILE_LINES = 600
FUNCTION_LINES = 80


def sources(root: Path) -> list[Path]:
    return [path for folder in ("drmas", "kernels") for path in sorted((root / folder).rglob("*.py"))]


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found, f"{name} is not installed beside {sys.executable}"
    return found


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def test_imports_point_down(root):
    done = run(root, tool("lint-imports"), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_ruff_finds_nothing(root):
    folders = [name for name in ("drmas", "kernels", "tests", "bench") if (root / name).is_dir()]
    done = run(root, tool("ruff"), "check", "--no-cache", *folders)
    assert done.returncode == 0, done.stdout


def test_no_file_is_longer_than_the_ceiling(root):
    lengths = {str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources(root)}
    assert len(lengths) > 30
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_no_function_is_longer_than_the_ceiling(root):
    found = {}
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES:
                    found[f"{path.relative_to(root)}:{node.lineno} {node.name}"] = length
    assert found == {}


def test_every_module_says_what_it_is(root):
    silent = [str(path.relative_to(root)) for path in sources(root) if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_the_kernels_folder_is_no_package(root):
    assert not (root / "kernels" / "__init__.py").exists()
    assert (root / "kernels" / "drmas_kernels" / "__init__.py").exists()


@pytest.mark.parametrize(("package", "allowed"), [("megatron", ["policy"]), ("vllm", ["rollout", "weights"])])
def test_heavy_packages_are_imported_in_their_place_only(root, package, allowed):
    elsewhere = []
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            if any(name.split(".")[0] == package for name in names) and path.parent.name not in allowed:
                elsewhere.append(f"{path.relative_to(root)}:{node.lineno}")
    assert elsewhere == []


def test_no_model_folder_runs_code_of_its_own(root):
    """Left unset, transformers asks on the terminal whether a folder's code may run, and waits there."""
    silent = []
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
                settings = [ast.unparse(word.value) for word in node.keywords if word.arg == "trust_remote_code"]
                if settings != ["False"] and not any(word.arg is None for word in node.keywords):  # **offline has it
                    silent.append(f"{path.relative_to(root)}:{node.lineno}")
    assert silent == []
