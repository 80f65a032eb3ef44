"""Models by their name on the Hugging Face hub: the copy in the hub's cache, or one that is fetched into it.

Only safetensors, configuration and tokenizer files are fetched: no pickles, and no code of a repository is ever run. A copy is
used where it is whole, that is where all shards are there that its index names. Called by `models`; a dry run asks for
`cached_config` alone and never fetches.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from drmas.errors import ModelError

FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.json", "chat_template.jinja"),
)
_SUBFOLDERS = "*/*"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ELSEWHERE = "where there is network, hf download {name} fetches it; or set policies.NAME.model to a Hugging Face folder"
_INDEX = "model.safetensors.index.json"


def is_hub_name(spec: str) -> bool:
    """Whether `spec` has the form OWNER/MODEL. A folder of that name goes first (`models.resolve_model`)."""
    return _NAME.fullmatch(spec) is not None


def hub_folder(name: str) -> Path:
    """The folder of the model `name` in the hub's cache, fetched if need be.

    ModelError: it isn't there whole and can't be fetched, or its repository has no safetensors.
    """
    folder = _snapshot(name)
    if folder is not None and is_whole(folder):
        return folder
    folder = _fetch(name)
    if lacking := missing_files(folder):  # also where the hub can't be reached: then what the cache has comes back
        raise ModelError(
            f"model {name!r}: {folder} lacks {', '.join(lacking)}, and no more could be fetched; {_ELSEWHERE.format(name=name)}"
        )
    return folder


def cached_config(name: str) -> Path | None:
    """The cache's folder of the model, if its config.json is there; its weights may be missing."""
    folder = _snapshot(name)
    return folder if folder is not None and (folder / "config.json").is_file() else None


def is_whole(folder: Path) -> bool:
    return not missing_files(folder)


def missing_files(folder: Path) -> list[str]:
    """What the folder lacks of config.json and the safetensors files that its index names, or of the one without an index."""
    weights = {"model.safetensors"}
    if (folder / _INDEX).is_file():
        weights = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
    return [name for name in ("config.json", *sorted(weights)) if not (folder / name).is_file()]


def _snapshot(name: str) -> Path | None:
    """The newest copy that the cache knows of; the network isn't asked."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (errors.LocalEntryNotFoundError, OSError):
        return None


def _fetch(name: str) -> Path:
    import httpx
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.constants import is_offline_mode

    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES), ignore_patterns=[_SUBFOLDERS]))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"model {name!r} is gated; accept its terms on the hub and set HF_TOKEN, or set policies.NAME.model to a folder"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"model {name!r} is no folder here, and the hub has no such model, or it is private; expected a folder or a public "
            "name such as Qwen/Qwen3-4B, or HF_TOKEN in the environment"
        ) from error
    except (OSError, httpx.HTTPError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else f"the hub can't be reached ({_first_line(error)})"
        raise ModelError(
            f"model {name!r} is no folder here, the hub's cache has no whole copy of it, and {why}; "
            f"{_ELSEWHERE.format(name=name)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
