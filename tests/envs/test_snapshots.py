"""Copies of the hub's repositories, on the hub's own cache layout and by its own code, with no network asked."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import httpx2
import huggingface_hub
import pytest
from huggingface_hub.utils import HfHubHTTPError

from drmas.envs.snapshots import HubError, cached, snapshot

COMMIT = "1" * 40
ASKED = {"repo_type": "model", "allow": ["config.json", "*.safetensors"], "ignore": ["*/*"]}


@pytest.fixture
def repository(hub_cache):
    """A copy that was fetched by patterns: the cache's list of the repository names files that were never asked for."""
    files = ["config.json", "model.safetensors", "README.md", "pytorch_model.bin", "original/consolidated.safetensors"]
    return hub_cache("models--a--b", COMMIT, {"config.json": "{}", "model.safetensors": ""}, listed=files)


def test_a_copy_is_whole_with_the_files_that_were_asked_for(repository: Path) -> None:
    assert cached("a/b", **ASKED) == repository == snapshot("a/b", **ASKED, fetch=False)
    assert cached("a/b", repo_type="model", allow=["*"]) is None  # of all files there are some missing
    (repository / "model.safetensors").unlink()
    assert cached("a/b", **ASKED) is None


def test_a_commit_is_found_where_the_name_means_another(repository: Path, hub_cache) -> None:
    newer = hub_cache("models--a--b", "2" * 40, {"config.json": "{}", "model.safetensors": ""})
    assert cached("a/b", **ASKED) == newer
    assert cached("a/b", **ASKED, revision=COMMIT) == repository
    assert cached("a/b", **ASKED, revision="3" * 40) is None


def test_nothing_cached_is_none_and_offline_the_reason(hub_cache) -> None:
    assert cached("a/b", **ASKED) is None
    with pytest.raises(HubError, match=r"^HF_HUB_OFFLINE is set$") as caught:
        snapshot("a/b", **ASKED)
    assert caught.value.kind == "unreachable"


@pytest.mark.parametrize("name", ["runs/old--export", "a..b/c", "x/y.git", "x/y-", "x/y.", "a b/c"])
def test_no_name_is_said_by_both(name: str) -> None:
    for ask in (cached, snapshot):
        with pytest.raises(HubError) as caught:
            ask(name, **ASKED)
        assert caught.value.kind == "name"


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("no way"),
        httpx.ProxyError("no way"),
        httpx2.ConnectError("no way"),
        httpx2.ProxyError("no way"),
        httpx2.InvalidURL("no way"),
        HfHubHTTPError("no way", response=httpx2.Response(500, request=httpx2.Request("GET", "https://hub"))),
        ValueError("no way\nat all"),
        TimeoutError("no way"),
    ],
)
def test_what_is_wrong_with_the_network_is_one_kind(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **how) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(HubError, match=r"^the hub can't be reached \(no way\)$") as caught:
        snapshot("a/b", **ASKED)
    assert caught.value.kind == "unreachable"


def test_the_cache_of_the_tests_is_one_that_the_hubs_code_calls_incomplete(repository: Path) -> None:
    """What a look without patterns does, so that the tests above can't pass by an empty list."""
    with pytest.raises(huggingface_hub.errors.IncompleteSnapshotError):
        huggingface_hub.snapshot_download("a/b", local_files_only=True)
    assert len(json.loads((repository.parents[1] / "trees" / f"{COMMIT}.json").read_text())["files"]) == 5
