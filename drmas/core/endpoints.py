"""The address of a server and the key for it, as settings give them: neither may end up in a file or on a screen.

    url = checked_url("remotes.judge.url", config.url, example="http://127.0.0.1:8000/v1")
    headers = bearer(key_of("remotes.judge.api_key_env", config.api_key_env))

An address stands in a run's config.json and in errors, so it holds no password; a key comes from the environment. Called by
whatever speaks with a server: remote models, retrievers, MCP servers.
"""

from __future__ import annotations

import os

import httpx

from drmas.errors import ConfigError


def checked_url(setting: str, text: str, *, example: str) -> str:
    """`text`, an http or https address without user, password, query or fragment.

    ConfigError names `setting`. It never shows `text`: what can't be read as an address may be, or hold, a key.
    """
    section = setting.rpartition(".")[0]
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        raise ConfigError(f"{setting} is no URL; expected such as {example}") from None
    if url.userinfo or url.query or url.fragment:
        raise ConfigError(f"{setting} holds more than host and path; use {section}.api_key_env for a key")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{setting} is no address of a server; expected such as {example}")
    return text


def key_of(setting: str, variable: str | None) -> str:
    """The key in the environment variable that `setting` names, empty where it names none.

    ConfigError: the variable isn't set, or no header can carry what is in it.
    """
    if variable is None:
        return ""
    found = os.environ.get(variable, "").strip()
    if not found:
        raise ConfigError(f"{setting} is {variable!r}, which isn't set in the environment; put the key there")
    if not found.isascii() or not found.isprintable():
        raise ConfigError(f"the environment variable {variable} ({setting}) has signs that no header can carry")
    return found


def bearer(key: str) -> dict[str, str]:
    """The header that carries `key`; none for an empty one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def without_key(text: str, key: str) -> str:
    """`text` with [key] in the place of `key`, which some servers send back."""
    return text.replace(key, "[key]") if key else text
