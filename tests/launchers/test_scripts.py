"""The shell scripts as such, and the environment that all of them share."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
SCRIPTS = sorted(str(path.relative_to(LAUNCHERS)) for kind in ("*.sh", "*.sbatch") for path in LAUNCHERS.rglob(kind))
SOURCED = ("env.sh", "slurm/job.sh")


def check(*command: str, **keywords) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=LAUNCHERS, capture_output=True, text=True, timeout=60, check=False, **keywords)


def test_there_are_scripts() -> None:
    assert {"env.sh", "torchrun/multi_node.sh", "slurm/disaggregated.sbatch"} <= set(SCRIPTS)


def test_shellcheck_finds_nothing() -> None:
    done = check(str(Path(sys.executable).with_name("shellcheck")), "--external-sources", "--severity=style", *SCRIPTS)
    assert (done.returncode, done.stdout) == (0, "")


def test_shellcheck_can_find_something(tmp_path) -> None:
    (tmp_path / "bad.sh").write_text("#!/usr/bin/env bash\nrm $1/*\n")
    assert check(str(Path(sys.executable).with_name("shellcheck")), str(tmp_path / "bad.sh")).returncode == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_reads_it_and_it_stops_at_the_first_failure(script) -> None:
    text = (LAUNCHERS / script).read_text(encoding="utf-8")
    assert check("bash", "-n", script).returncode == 0
    if script in SOURCED:
        assert text.startswith("# shellcheck shell=bash")
    else:
        assert text.startswith("#!/usr/bin/env bash\n# ")
        assert "\nset -euo pipefail\n" in text
        assert os.access(LAUNCHERS / script, os.X_OK) or script.endswith(".sbatch")
    assert max(map(len, text.splitlines())) <= 132


def exported(tmp_path: Path, **variables: str) -> dict[str, str]:
    """The environment after sourcing env.sh in an almost empty one."""
    done = check("bash", "-euo", "pipefail", "-c", "source ./env.sh; env -0", env=variables_of(tmp_path) | variables)
    assert done.returncode == 0, done.stderr
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def variables_of(tmp_path: Path) -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": "/home/me",
        "DRMAS_LOCAL": str(tmp_path / "local" / "mine"),
    }


def test_the_environment_of_one_host(tmp_path) -> None:
    found = exported(tmp_path)
    local = tmp_path / "local" / "mine"
    assert local.stat().st_mode & 0o777 == 0o700
    assert {name: found[name] for name in found.keys() - variables_of(tmp_path).keys() - {"PWD", "SHLVL", "_", "OLDPWD"}} == {
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
        "HF_HOME": "/home/me/.cache/huggingface",
        "DRMAS_CACHE": "/home/me/.cache/drmas",
        "TRITON_CACHE_DIR": str(local / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(local / "inductor"),
    }


def test_what_is_set_stays(tmp_path) -> None:
    text = (LAUNCHERS / "env.sh").read_text(encoding="utf-8")
    names = set(re.findall(r"^ *export (\w+)=\$\{", text, re.MULTILINE)) | {"GLOO_SOCKET_IFNAME"}
    assert {"NCCL_CUMEM_ENABLE", "HF_HOME", "TRITON_CACHE_DIR", "NCCL_SOCKET_IFNAME"} <= names
    found = exported(tmp_path, RENDEZVOUS="nobody.invalid:1", **dict.fromkeys(names, "theirs"))
    assert {name: found[name] for name in names} == dict.fromkeys(names, "theirs")


def test_several_hosts_take_the_interface_that_leads_to_the_rendezvous(tmp_path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python").write_text('#!/usr/bin/env bash\n[[ $1 == */interface_towards.py ]] && echo "towards-$2"\n')
    (tools / "python").chmod(0o755)
    path = f"{tools}:{variables_of(tmp_path)['PATH']}"
    found = exported(tmp_path, PATH=path, RENDEZVOUS="node1:29500")
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("towards-node1", "towards-node1")
    found = exported(tmp_path, PATH=path, RENDEZVOUS="[fe80::1]:29500", NCCL_SOCKET_IFNAME="ib0")
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("towards-[fe80::1]", "ib0")


def test_a_cache_that_somebody_else_could_fill_is_refused(tmp_path) -> None:
    """Code is loaded from there."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    variables = variables_of(tmp_path) | {"DRMAS_LOCAL": str(tmp_path / "link")}
    done = check("bash", "-c", "source ./env.sh; echo went on", env=variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert "belongs to somebody else; set DRMAS_LOCAL" in done.stderr


def test_waiting_for_who_listens_and_giving_up_on_who_does_not(free_port) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = check("bash", "wait_for.sh", f"127.0.0.1:{port}", f"tcp://localhost:{port}", f"tcp://127.0.0.1:{port}")
        assert (done.returncode, done.stderr) == (0, "")
    nobody = f"127.0.0.1:{free_port()}"
    done = check("bash", "wait_for.sh", nobody, env={**os.environ, "WAIT_SECONDS": "0"})
    assert done.returncode == 1
    assert f"nobody listens at {nobody}" in done.stderr
