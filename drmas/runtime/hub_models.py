"""Models by their name on the Hugging Face hub: the copy in the hub's cache, or one that is fetched into it.

Only safetensors, configuration and tokenizer files are fetched: no pickles, and no code of a repository is ever run. A copy is
used where it is whole, that is where all shards are there that its index names. A run keeps the commits of the copies that it
began with (`models.json` in its folder) and takes no others, since a name's newest copy may be another model by the time that
the run is resumed. Called by `models`; a dry run asks for `cached_config` alone and never fetches.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from drmas.envs.snapshots import HubError, cached, snapshot
from drmas.errors import ModelError

FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.json", "chat_template.jinja"),
)
_FILES = {"repo_type": "model", "allow": FILES, "ignore": ["*/*"]}
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"(?!.*(?:--|\.\.|\.git$)){_PART}/{_PART}", re.ASCII)
_INDEX = "model.safetensors.index.json"


def is_hub_name(spec: str) -> bool:
    """Whether `spec` is an OWNER/MODEL that the hub could have. A folder of that name goes first (`models.resolve_model`)."""
    return _NAME.fullmatch(spec) is not None


def hub_folder(name: str, *, key: str, commit: str | None = None) -> Path:
    """The folder of the model `name` in the hub's cache, fetched if need be: of `commit`, or of the newest one that is known.

    ModelError: it isn't there whole and can't be fetched, or its repository has no safetensors. It says which `key` to change.
    """
    folder = cached(name, revision=commit, **_FILES)
    if folder is not None and is_whole(folder):
        return folder
    elsewhere = (
        f"where there is network, hf download {name}{f' --revision {commit}' if commit else ''} fetches it; or set {key} to a "
        "Hugging Face folder"
    )
    folder = _fetch(name, key, commit, elsewhere)
    if lacking := missing_files(folder):  # also where the hub can't be reached: then what the cache has comes back
        raise ModelError(
            f"{key}: model {name!r}: {folder} lacks {', '.join(lacking)}, and no more could be fetched; {elsewhere}"
        )
    return folder


def cached_config(name: str) -> Path | None:
    """The cache's folder of the model, if its config.json is there; its weights may be missing."""
    folder = cached(name, repo_type="model", allow=["config.json"])
    return folder if folder is not None and (folder / "config.json").is_file() else None


def commit_of(folder: Path) -> str | None:
    """The commit of a folder of the hub's cache; None of any other."""
    return folder.name if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--") else None


def read_commits(run_dir: Path) -> dict[str, str]:
    """Name -> commit of the hub's models that the run began with; empty where it hasn't begun, or has none of them."""
    file = run_dir / "models.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def write_commits(run_dir: Path, commits: dict[str, str]) -> None:
    """What `read_commits` reads; no file where there are none."""
    if commits:
        (run_dir / "models.json").write_text(json.dumps(commits, indent=2) + "\n")


def is_whole(folder: Path) -> bool:
    return not missing_files(folder)


def missing_files(folder: Path) -> list[str]:
    """What the folder lacks of config.json and the safetensors files that its index names, or of the one without an index.

    ModelError: the index names none.
    """
    weights = {"model.safetensors"}
    if (folder / _INDEX).is_file():
        weights = _indexed(folder / _INDEX)
    return [name for name in ("config.json", *sorted(weights)) if not (folder / name).is_file()]


def _indexed(index: Path) -> set[str]:
    try:
        files = json.loads(index.read_text())["weight_map"].values()
        return {str(file) for file in files}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index} has no weight_map; expected one of tensors to safetensors files: fetch the model anew"
        ) from error


def _fetch(name: str, key: str, commit: str | None, elsewhere: str) -> Path:
    try:
        return snapshot(name, revision=commit, **_FILES)
    except HubError as error:
        which = f"{key}: model {name!r}"
        copy = f"whole copy of its commit {commit}, with which the run began," if commit else "whole copy of it,"
        raise ModelError(
            {
                "name": f"{which} is no folder here, and no name that the hub could have; expected a folder or a name such as "
                "Qwen/Qwen3-4B",
                "gated": f"{which} is gated; accept its terms on the hub and set HF_TOKEN, or set {key} to a folder",
                "unknown": f"{which} is no folder here, and the hub has no such model, or it is private; expected a folder or "
                "a public name such as Qwen/Qwen3-4B, or HF_TOKEN in the environment",
                "unreachable": f"{which} is no folder here, the hub's cache has no {copy} and {error}; {elsewhere}",
            }[error.kind]
        ) from error
