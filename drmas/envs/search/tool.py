"""The tool `search`: passages for a query, from a server or from an index in this process.

    search = Search(SearchTool(corpus="facts"))
    await search.start()
    text, ok = await search.call("search", {"query": "tungsten"})

Passages are numbered, and each is cut to `max_passage_chars`:

    [1] Tungsten
    Tungsten is the chemical element with the symbol W and the atomic number 74. ...

Trouble (no server, no answer in time, an answer of another shape) is a ToolError, which fails the episode (I3); what the agent
did wrong (an empty query) is a text that it reads. Made by the run's tools; all calls are in one event loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from drmas.config.tasks import SearchTool
from drmas.core.endpoints import key_of
from drmas.envs.search.batcher import Batcher, Busy
from drmas.envs.search.cache import LruCache
from drmas.envs.search.client import RetrieverClient
from drmas.envs.search.corpus import PACKAGED, Passage, check_corpus, read_corpus
from drmas.envs.search.encoder import encoder_folder
from drmas.envs.search.index import Hit, Index, open_index
from drmas.errors import ConfigError, ToolError

NO_QUERY = "Nothing was searched: the query is empty. Give `query`, a text with the words to look for."
NO_HITS = "No passage fits the query."
_CUT = " [...]"
_OWN_SHARE = 0.95
"""Of `timeout_seconds`, after which a call ends by itself: the caller's own deadline is the whole, and would hide the cause."""

_indices: dict[tuple[Any, ...], Index] = {}
_building = threading.Lock()


class Search:
    """A `tools.NAME` section of type search."""

    def __init__(self, config: SearchTool, section: str = "search") -> None:
        """Nothing is read yet. ConfigError: the url is none, or its key isn't there. DataError, ModelError: no such corpus or
        encoder.
        """
        self.timeout_seconds = config.timeout_seconds
        self.specs: Sequence[dict[str, Any]] = [
            {
                "type": "function",
                "function": {
                    "name": "search",
                    "description": f"Search a collection of texts. Returns the {config.topk} passages that fit the query best.",
                    "parameters": {
                        "type": "object",
                        "properties": {"query": {"type": "string", "description": "What to look for, in a few words."}},
                        "required": ["query"],
                        "additionalProperties": False,
                    },
                },
            }
        ]
        self._config = config
        self._cache: LruCache[str, str] = LruCache(config.cache_size)
        self._batcher: Batcher | None = None
        self._client: RetrieverClient | None = None
        self._deadline_seconds = config.timeout_seconds * _OWN_SHARE
        if config.url is not None:
            urls = config.url.split()
            if not urls:
                raise ConfigError(f"tools.{section}.url is empty; expected such as http://127.0.0.1:8000, or leave it unset")
            self._client = RetrieverClient(
                urls,
                timeout_seconds=self._deadline_seconds,
                max_retries=config.max_retries,
                key=key_of(f"tools.{section}.api_key_env", config.api_key_env),
                section=section,
            )
            return
        check_corpus(config.corpus)
        if config.index == "dense":
            encoder_folder(config.encoder)

    async def start(self) -> None:
        """Ask each server once, or build the index (in a thread; Search objects with the same settings share it).

        ToolError: a server doesn't answer as it should. DataError, ModelError: corpus, encoder or saved index can't be read.
        """
        if self._client is not None:
            await self._client.check(self._config.topk)
        elif self._batcher is None:
            index = await asyncio.wrap_future(_in_daemon(_shared_index, self._config))
            # one query at a time: what an agent reads must not depend on who else asks (I9)
            self._batcher = Batcher(index, max_batch=1)

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The passages for `arguments["query"]`, and whether the call was a proper one. ToolError: trouble."""
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            return NO_QUERY, False
        query = query.encode("utf-8", "replace").decode().strip()
        text = self._cache.get(query)
        if text is None:
            hits = await self._hits(query)
            text = shown([hit.passage for hit in hits], self._config.max_passage_chars)
            self._cache.put(query, text)
        return text, True

    async def close(self) -> None:
        """Let go of connections and of the search thread; idempotent."""
        if self._client is not None:
            await self._client.close()
        if self._batcher is not None:
            self._batcher.close()
            self._batcher = None

    async def _hits(self, query: str) -> list[Hit]:
        if self._client is not None:
            return await self._client.search(query, self._config.topk)
        if self._batcher is None:
            raise ToolError("search: it was called before its start, or after its close")
        try:
            async with asyncio.timeout(self._deadline_seconds):
                return (await self._batcher.search([query], self._config.topk))[0]
        except TimeoutError as error:
            raise ToolError(
                f"search: no answer from the {self._config.index} index within {self._deadline_seconds:g} s; raise the tool's "
                "timeout_seconds, or serve the corpus (drmas serve-retriever) and set url"
            ) from error
        except Busy as error:
            raise ToolError(f"search: {error}; serve the corpus (drmas serve-retriever) and set url") from error
        except Exception as error:
            raise ToolError(f"search: the {self._config.index} index failed: {type(error).__name__}: {error}") from error


def shown(passages: Sequence[Passage], max_chars: int) -> str:
    """What an agent reads: the passages numbered from 1, each with its title and at most `max_chars` of its contents."""
    return "\n\n".join(f"[{number}] {_one(passage, max_chars)}" for number, passage in enumerate(passages, start=1)) or NO_HITS


def _one(passage: Passage, max_chars: int) -> str:
    title, contents = passage.title, passage.contents.strip()
    first, _, rest = contents.partition("\n")
    if len(first) > 2 and first[0] == first[-1] == '"' and title in ("", first[1:-1]):
        title, contents = first[1:-1], rest.strip()
    if len(contents) > max_chars:
        contents = contents[: max(0, max_chars - len(_CUT))].rstrip() + _CUT
    return f"{title[:max_chars]}\n{contents}" if title else contents


def _in_daemon(make: Callable[[SearchTool], Index], config: SearchTool) -> Future[Index]:
    """`make(config)` in a thread that doesn't keep a process alive which is told to end; the event loop's own threads do."""
    made: Future[Index] = Future()

    def work() -> None:
        if made.set_running_or_notify_cancel():
            try:
                made.set_result(make(config))
            except Exception as error:
                made.set_exception(error)

    threading.Thread(target=work, name="search-index", daemon=True).start()
    return made


def _cache() -> Path:
    """Where dense indices are kept, beside the models that drmas makes."""
    return Path(os.environ.get("DRMAS_CACHE") or Path.home() / ".cache" / "drmas") / "search"


def _shared_index(config: SearchTool) -> Index:
    """The index that `config` asks for, built once in this process as long as the corpus file doesn't change."""
    key: tuple[Any, ...] = (config.corpus, config.index, config.encoder if config.index == "dense" else None)
    if config.corpus not in PACKAGED and (file := Path(config.corpus)).is_file():
        status = file.stat()
        key = (*key, str(file.resolve()), status.st_mtime_ns, status.st_size)
    with _building:
        if key not in _indices:
            cache = _cache() if config.index == "dense" else None  # words take a moment, vectors minutes
            _indices[key] = open_index(read_corpus(config.corpus), config.index, encoder=config.encoder, cache=cache)
        return _indices[key]
