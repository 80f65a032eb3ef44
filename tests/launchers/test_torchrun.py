"""What the torchrun launchers start, read from recorders in the place of torchrun and drmas."""

import os

from drmas.config.load import split_words

AWKWARD = ["my recipe; touch pwned.toml", "--team.solver.prompt", "$(touch pwned) `touch pwned` \"'{question}", "--a=b c"]
"""Words that a shell would make something of."""


def train_words(call: dict) -> list[str]:
    """What `drmas train` gets of a recorded torchrun."""
    words = call["words"]
    place = words.index("--module")
    assert words[place : place + 3] == ["--module", "drmas.cli", "train"]
    return words[place + 3 :]


def test_one_host(stage, launchers) -> None:
    done = stage.run(str(launchers / "torchrun" / "single_node.sh"), "4", *AWKWARD, RENDEZVOUS="left over from another job:1")
    assert (done.status, done.output) == (0, "")
    (call,) = stage.recorded("torchrun")
    assert call["words"][:3] == ["--standalone", "--nproc-per-node", "4"]
    assert train_words(call) == AWKWARD
    assert call["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert call["environment"]["PYTHONSAFEPATH"] == "1"
    assert "RENDEZVOUS" not in call["environment"]
    assert sorted(path.name for path in stage.folder.iterdir()) == ["bin", f"drmas-{os.getuid()}", "records"]


def test_the_exit_status_is_torchruns(stage, launchers) -> None:
    assert stage.run(str(launchers / "torchrun" / "single_node.sh"), "1", "quickstart", FAIL="torchrun").status == 7


def test_what_is_missing_is_named(stage, launchers) -> None:
    for script, words, variables, named in (
        ("single_node.sh", [], {}, "how many trainer ranks"),
        ("single_node.sh", ["2"], {}, "a recipe name or file"),
        ("single_node.sh", ["quickstart", "2"], {}, "the first argument is quickstart; expected how many trainer ranks"),
        ("single_node.sh", ["0", "quickstart"], {}, "the first argument is 0"),
        ("multi_node.sh", ["x", "q"], {"NODES": "2", "RENDEZVOUS": "a:1", "NODE_RANK": "0"}, "the first argument is x"),
        (
            "multi_node.sh",
            ["2", "quickstart"],
            {"NODES": "2", "RENDEZVOUS": "node1", "NODE_RANK": "0"},
            "RENDEZVOUS is node1; expected HOST:PORT",
        ),
        ("multi_node.sh", ["2", "quickstart"], {}, "NODES"),
        ("multi_node.sh", ["2", "quickstart"], {"NODES": "2"}, "RENDEZVOUS"),
        ("multi_node.sh", ["2", "quickstart"], {"NODES": "2", "RENDEZVOUS": "node1:29500"}, "NODE_RANK"),
        ("engine_node.sh", [], {}, "the address that trainers see"),
        ("engine_node.sh", ["node5"], {}, "DRMAS_ENGINE_TOKEN"),
    ):
        done = stage.run(str(launchers / "torchrun" / script), *words, **variables)
        assert done.status != 0
        assert named in done.output
    assert stage.recorded("torchrun") == []


def test_several_hosts_meet_at_the_first(stage, launchers) -> None:
    script = str(launchers / "torchrun" / "multi_node.sh")
    for rank in range(3):
        done = stage.run(script, "8", *AWKWARD, NODES="3", RENDEZVOUS="node1.cluster:29500", NODE_RANK=str(rank))
        assert (done.status, done.output) == (0, "")
    for rank, call in enumerate(stage.recorded("torchrun")):
        words = call["words"][: call["words"].index("--module")]
        assert dict(zip(words[::2], words[1::2], strict=True)) == {
            "--nnodes": "3",
            "--nproc-per-node": "8",
            "--node-rank": str(rank),
            "--master-addr": "node1.cluster",
            "--master-port": "29500",
            "--rdzv-conf": "timeout=900",
        }
        assert train_words(call) == AWKWARD


def test_the_number_of_a_host_comes_from_who_starts_it(stage, launchers) -> None:
    script, shared = str(launchers / "torchrun" / "multi_node.sh"), {"NODES": "4", "RENDEZVOUS": "node1:29500"}
    for variables in ({"SLURM_PROCID": "1"}, {"JOB_COMPLETION_INDEX": "2"}, {"NODE_RANK": "3", "SLURM_PROCID": "1"}):
        assert stage.run(script, "1", "quickstart", **shared, **variables).status == 0
    words = [call["words"] for call in stage.recorded("torchrun")]
    assert [each[each.index("--node-rank") + 1] for each in words] == ["1", "2", "3"]


def test_an_engine_host(stage, launchers, free_port) -> None:
    secret, port = "a secret of the job", str(free_port())
    variables = {"DRMAS_ENGINE_TOKEN": secret, "SLURMD_NODENAME": "127.0.0.1", "ENGINE_LOGS": "/data/logs"}
    process = stage.start(
        str(launchers / "torchrun" / "engine_node.sh"), "0.0.0.0", "--port", port, "--gpus", "0-3", **variables
    )
    call = stage.await_record("drmas")
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")
    plain, options = split_words(call["words"])
    assert plain == ["serve-engines"]
    assert options[:3] == ["--host", "0.0.0.0", "--logs"]
    assert options[3].startswith("/data/logs/")
    assert options[4:] == ["--port", port, "--gpus", "0-3"]
    assert call["environment"]["DRMAS_ENGINE_TOKEN"] == secret
    assert not any(secret in word for word in call["words"])
