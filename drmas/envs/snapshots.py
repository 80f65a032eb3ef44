"""Copies of repositories of the Hugging Face hub: the one in the hub's cache, or one that is fetched into it.

The one place that speaks to huggingface_hub, for datasets (`hub`) and for models (`drmas.runtime.hub_models`), so that what can
go wrong there comes as a `HubError` of a few kinds, and a look into the cache asks for the same files as the fetch before it:
the cache knows which files a repository has, and a copy without one that is asked for doesn't count as whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Trouble = Literal["name", "gated", "unknown", "unreachable"]


class HubError(Exception):
    """Why there is no copy. `kind`: no name that the hub could have, not for everybody, not there, or not to be reached."""

    def __init__(self, kind: Trouble, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def snapshot(
    name: str,
    *,
    repo_type: Literal["model", "dataset"],
    allow: Sequence[str],
    ignore: Sequence[str] | None = None,
    revision: str | None = None,
    fetch: bool = True,
) -> Path:
    """The folder of the files of `name` that match `allow`, and not `ignore`, at `revision` (a commit or a reference).

    Without `fetch` the network isn't asked. HubError: see there; of "unreachable" the text is the reason, in one line.
    """
    import httpx
    import httpx2
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.constants import is_offline_mode

    patterns = {"allow_patterns": list(allow)} | ({"ignore_patterns": list(ignore)} if ignore else {})
    how = {"repo_type": repo_type, "revision": revision, "local_files_only": not fetch, **patterns}
    try:
        return Path(snapshot_download(name, **how))
    except errors.HFValidationError as error:
        raise HubError("name", _line(error)) from error
    except errors.GatedRepoError as error:
        raise HubError("gated", _line(error)) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError("unknown", _line(error)) from error
    except (
        *(OSError, ValueError, RuntimeError, errors.EntryNotFoundError),
        *(httpx.HTTPError, httpx.InvalidURL, httpx2.HTTPError, httpx2.InvalidURL),
    ) as error:  # huggingface_hub 1 speaks through httpx, 2 through httpx2; a proxy that can't be one is a ValueError
        reason = "HF_HUB_OFFLINE is set" if is_offline_mode() else f"the hub can't be reached ({_line(error)})"
        raise HubError("unreachable", reason) from error


def cached(
    name: str,
    *,
    repo_type: Literal["model", "dataset"],
    allow: Sequence[str],
    ignore: Sequence[str] | None = None,
    revision: str | None = None,
) -> Path | None:
    """`snapshot` of the cache alone; None where it has no copy, or one that is known to lack files that are asked for."""
    try:
        return snapshot(name, repo_type=repo_type, allow=allow, ignore=ignore, revision=revision, fetch=False)
    except HubError as error:
        if error.kind == "name":
            raise
        return None


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
