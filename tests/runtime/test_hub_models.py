"""Models by their hub name: whole copies of the cache are used, others fetched, and what can't be had is said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from httpx import ConnectError, Request, Response
from huggingface_hub import errors

from drmas.errors import ModelError
from drmas.runtime.hub_models import FILES, cached_config, hub_folder, is_hub_name, is_whole, missing_files
from drmas.runtime.known_models import KNOWN
from drmas.runtime.models import TINY, resolve_model, sketched_model
from drmas.runtime.placement import parameters, read_architecture

NAME = "Qwen/Qwen3-4B"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


class Hub:
    """Stands in for the hub and its cache: `cached` is what the cache knows, `repository` what a download brings."""

    def __init__(self, root: Path) -> None:
        self.root, self.downloads = root, []
        self.cached: list[str] | None = None
        self.repository: list[str] | Exception = ["config.json", "model.safetensors"]

    def snapshot(self, name: str, *, local_files_only: bool = False, **patterns) -> str:
        if local_files_only:
            if self.cached is None:
                raise errors.LocalEntryNotFoundError("nothing there")
            return str(self.folder(self.cached))
        self.downloads.append((name, patterns))
        if isinstance(self.repository, Exception):
            raise self.repository
        return str(self.folder(self.repository))

    def folder(self, files: list[str]) -> Path:
        self.root.mkdir(exist_ok=True)
        for name in files:
            text = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}) if name.endswith("index.json") else "{}"
            (self.root / name).write_text(text)
        return self.root


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    made = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot)
    return made


@pytest.mark.parametrize("spec", [NAME, "meta-llama/Llama-3.2-3B-Instruct", "a/b"])
def test_a_hub_name_is_an_owner_and_a_model(spec):
    assert is_hub_name(spec)


@pytest.mark.parametrize("spec", ["a", "a/b/c", "./a", "../a", "/a", "~/a", ".a/b", "a/", "tiny:qwen3", "a b/c", ""])
def test_what_is_no_hub_name(spec):
    assert not is_hub_name(spec)


def test_a_whole_copy_of_the_cache_is_used_without_a_word_to_the_hub(hub):
    hub.cached = ["config.json", "model.safetensors"]
    assert resolve_model(NAME) == hub.root
    assert hub.downloads == []


def test_a_copy_is_whole_with_all_the_shards_that_its_index_names(hub):
    folder = hub.folder(["config.json", "model.safetensors.index.json", SHARDS[0]])
    assert (missing_files(folder), is_whole(folder)) == ([SHARDS[1]], False)
    assert is_whole(hub.folder([SHARDS[1]]))
    (folder / "config.json").unlink()
    assert missing_files(folder) == ["config.json"]


def test_a_copy_that_lacks_shards_is_fetched_and_nothing_but_weights_configuration_and_tokenizer(hub):
    hub.cached = ["config.json", "model.safetensors.index.json", SHARDS[0]]
    hub.repository = SHARDS
    assert hub_folder(NAME) == hub.root
    [(name, patterns)] = hub.downloads
    assert (name, patterns) == (NAME, {"allow_patterns": list(FILES), "ignore_patterns": ["*/*"]})
    from fnmatch import fnmatch

    for refused in ("pytorch_model.bin", "model.pkl", "modeling_qwen.py", "consolidated.00.pth", "training_args.bin", "x.gguf"):
        assert not any(fnmatch(refused, pattern) for pattern in FILES), refused
    for wanted in (*SHARDS, "model.safetensors", "tokenizer.json", "merges.txt", "chat_template.jinja"):
        assert any(fnmatch(wanted, pattern) for pattern in FILES), wanted


def test_a_folder_here_goes_before_the_hubs_name(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-4B").mkdir(parents=True)
    (tmp_path / "Qwen" / "Qwen3-4B" / "config.json").write_text("{}")
    assert resolve_model(NAME) == sketched_model(NAME) == Path(NAME)
    assert hub.downloads == []


RESPONSE = Response(404, request=Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (errors.GatedRepoError("403", response=RESPONSE), "'a/b' is gated; accept its terms on the hub and set HF_TOKEN"),
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "'a/b' is no folder here, and the hub has no such model"),
        (
            ConnectError("no route"),
            r"'a/b' is no folder here, .* no whole copy of it, and .*; where there is network, hf download a/b",
        ),
        (["config.json", "pytorch_model.bin"], r"'a/b': .*snapshot lacks model.safetensors, and no more could be fetched"),
    ],
)
def test_what_the_hub_cannot_give_is_one_line(hub, trouble, message):
    hub.repository = trouble
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model("a/b")
    assert "\n" not in str(caught.value)


def test_offline_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"cache has no whole copy of it, and HF_HUB_OFFLINE is set; .*policies.NAME.model"):
        resolve_model("nobody/nothing")


def test_a_dry_run_fetches_nothing(hub, tmp_path):
    hub.repository = AssertionError("a dry run asked the hub")
    folder = sketched_model(NAME, tmp_path / "cache")
    assert json.loads((folder / "config.json").read_text()) == KNOWN[NAME].config
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert sketched_model(NAME, tmp_path / "cache") == folder
    hub.cached = ["config.json"]
    assert cached_config(NAME) == sketched_model(NAME, tmp_path / "cache") == hub.root  # the hub's own goes first
    assert hub.downloads == []


def test_a_dry_run_of_what_nobody_knows_says_how_to_know_it(hub, tmp_path):
    with pytest.raises(ModelError, match=r"'a/b' is no folder here, .*hf download a/b config.json is enough for a dry run"):
        sketched_model("a/b", tmp_path)
    assert sketched_model(TINY) == resolve_model(TINY)


@pytest.mark.parametrize("name", list(KNOWN))
def test_published_configurations_have_the_published_number_of_parameters(hub, tmp_path, name):
    folder = sketched_model(name, tmp_path)
    assert parameters(folder) == KNOWN[name].parameters
    architecture = read_architecture(folder)
    assert architecture.family == ("llama" if "Llama" in name else "qwen3" if "Qwen3" in name else "qwen2")
    assert architecture.heads * 128 == architecture.qkv_rows - 2 * architecture.kv_heads * 128


@pytest.mark.parametrize(
    ("name", "billions", "outside_of_the_embedding"),
    [
        ("Qwen/Qwen3-0.6B", 0.6, 0.44),
        ("Qwen/Qwen3-1.7B", 1.7, 1.4),
        ("Qwen/Qwen3-4B", 4.0, 3.6),
        ("Qwen/Qwen3-8B", 8.2, 6.95),
        ("Qwen/Qwen2.5-3B", 3.09, 2.77),
        ("Qwen/Qwen2.5-7B", 7.61, 6.53),
        ("meta-llama/Llama-3.2-3B-Instruct", 3.21, None),
    ],
)
def test_the_model_cards_say_the_same(hub, tmp_path, name, billions, outside_of_the_embedding):
    """The cards' "Number of Parameters" and "(Non-Embedding)", to their last digit; some are cut there and not rounded."""
    count, architecture = KNOWN[name].parameters, read_architecture(sketched_model(name, tmp_path))
    inner = count - (1 if architecture.tied else 2) * architecture.vocab * architecture.hidden
    for found, card in ((count, billions), (inner, outside_of_the_embedding)):
        if card is not None:
            assert found / 1e9 == pytest.approx(card, abs=10.0 ** -len(str(card).partition(".")[2]))


def test_llamas_frequencies_are_scaled_as_published(hub, tmp_path):
    """llama3 scaling with factor 32: the slowest frequency turns 32 times slower, the fastest as ever."""
    architecture = read_architecture(sketched_model("meta-llama/Llama-3.2-3B-Instruct", tmp_path))
    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]
    assert architecture.inverse_frequencies[0].item() == pytest.approx(plain[0])
    assert architecture.inverse_frequencies[-1].item() == pytest.approx(plain[-1] / 32, rel=1e-5)
