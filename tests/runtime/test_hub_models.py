"""Models by their hub name: whole copies of the cache are used, others fetched, and what can't be had is said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from httpx import ConnectError, Request, Response
from httpx2 import ProxyError
from huggingface_hub import errors
from huggingface_hub.utils import validate_repo_id

from drmas.errors import ModelError
from drmas.runtime.hub_models import (
    FILES,
    cached_config,
    commit_of,
    hub_folder,
    is_hub_name,
    is_whole,
    missing_files,
    read_commits,
    write_commits,
)
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


@pytest.mark.parametrize("spec", [NAME, "meta-llama/Llama-3.2-3B-Instruct", "a/b", "a-1/b_", "0.x/y.z-1"])
def test_a_hub_name_is_an_owner_and_a_model(spec):
    assert is_hub_name(spec)
    validate_repo_id(spec)


@pytest.mark.parametrize("spec", ["runs/old--export", "a..b/c", "x/y.git", "x/y-", "x/y.", "x-/y", "x/ü", "x/" + "y" * 97])
def test_what_the_hub_could_not_have_is_a_folder_that_is_not_there(spec):
    with pytest.raises(errors.HFValidationError):
        validate_repo_id(spec)
    for ask in (resolve_model, sketched_model):
        with pytest.raises(
            ModelError, match=r"policies.a.reference: model .* is no folder, and no name that the hub could have"
        ):
            ask(spec, key="policies.a.reference")


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
    assert hub_folder(NAME, key="policies.main.model") == hub.root
    how = {"repo_type": "model", "revision": None, "allow_patterns": list(FILES), "ignore_patterns": ["*/*"]}
    assert hub.downloads == [(NAME, how)]
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
        (ProxyError("no proxy"), r"no whole copy of it, and the hub can't be reached \(no proxy\); where there is network"),
        (["config.json", "pytorch_model.bin"], r"'a/b': .*snapshot lacks model.safetensors, and no more could be fetched"),
    ],
)
def test_what_the_hub_cannot_give_is_one_line(hub, trouble, message):
    hub.repository = trouble
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model("a/b", key="policies.main.critic.model")
    assert str(caught.value).startswith("policies.main.critic.model: ")
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


FILES_OF_ALL = ["config.json", "model.safetensors", "README.md", "pytorch_model.bin", "LICENSE", "original/params.json"]


@pytest.fixture
def copies(hub_cache):
    """Two copies of a/b that drmas fetched, by its patterns, of a repository that has more; the newest is the second."""
    return [
        hub_cache(
            "models--a--b", digit * 40, {"config.json": f'{{"n": {digit}}}', "model.safetensors": ""}, listed=FILES_OF_ALL
        )
        for digit in "12"
    ]


def test_the_caches_copy_is_used_though_the_repository_has_files_that_are_never_fetched(copies):
    assert resolve_model("a/b") == cached_config("a/b") == copies[1]
    assert (commit_of(copies[1]), commit_of(Path("runs/a/export/main"))) == ("2" * 40, None)


def test_a_configuration_alone_is_enough_for_a_dry_run_and_for_no_start(hub_cache):
    folder = hub_cache("models--a--c", "1" * 40, {"config.json": "{}"}, listed=FILES_OF_ALL)
    assert sketched_model("a/c") == folder
    with pytest.raises(ModelError, match=r"policies.x.model: model 'a/c' is no folder here, .*no whole copy of it, and HF_HUB"):
        resolve_model("a/c", key="policies.x.model")


def test_a_run_goes_on_with_the_commit_that_it_began_with(copies, tmp_path, monkeypatch):
    assert resolve_model("a/b", commit="1" * 40) == copies[0]
    with pytest.raises(
        ModelError, match=f"whole copy of its commit {'3' * 40}, with which the run began, and .*--revision 333"
    ):
        resolve_model("a/b", commit="3" * 40)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "config.json").touch()
    assert resolve_model("a/b") == Path("a/b")
    assert resolve_model("a/b", commit="1" * 40) == copies[0]


def test_commits_stand_in_the_runs_folder_where_there_are_any(tmp_path):
    write_commits(tmp_path, {})
    assert (list(tmp_path.iterdir()), read_commits(tmp_path)) == ([], {})
    write_commits(tmp_path, {"a/b": "1" * 40})
    assert read_commits(tmp_path) == json.loads((tmp_path / "models.json").read_text()) == {"a/b": "1" * 40}


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": 1}', "{", ""])
def test_an_index_that_names_nothing_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model.safetensors.index.json has no weight_map; expected one") as caught:
        missing_files(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_parameters_of_a_copy_without_all_shards_are_those_of_its_shape(tmp_path):
    folder = sketched_model(NAME, tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}))
    header = b'{"a": {"shape": [2, 3]}}'
    (folder / SHARDS[0]).write_bytes(len(header).to_bytes(8, "little") + header)
    assert parameters(folder) == KNOWN[NAME].parameters
    (folder / SHARDS[1]).write_bytes((2).to_bytes(8, "little") + b"{}")
    assert parameters(folder) == 6


def test_a_resumed_run_takes_the_copy_that_it_began_with(hub_cache, run, tmp_path):
    """Between start and resume the name's newest copy becomes another one, without a usable model."""
    model = files_of(resolve_model(TINY))
    first = hub_cache("models--a--tiny", "1" * 40, model)
    cache = str(first.parents[2])
    words = ["--policies.main.model", "a/tiny", "--train.steps"]
    environment = {"HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": "1"}
    done, folder = run(*words, "1", **environment)
    assert done.returncode == 0, done.stderr
    assert read_commits(folder) == {"a/tiny": "1" * 40}
    hub_cache("models--a--tiny", "2" * 40, model | {"config.json": '{"model_type": "another"}'})
    done, folder = run(*words, "2", "--resume", **environment)
    assert done.returncode == 0, done.stderr
    assert read_commits(folder) == {"a/tiny": "1" * 40}
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    done, _ = run(*words, "2", name="new", **environment)
    assert done.returncode == 2
    assert "another" in done.stderr


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
