"""Where tasks come from, how answers are rewarded, and what agents may call: those sections of a run that know of the tasks.

Part of `schema`, which holds the whole run; the same rules stand there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from drmas.config.section import Name, Section


class SearchTool(Section):
    """A retriever as a tool: `search(query)` gives the passages that fit best, numbered."""

    type: Literal["search"] = "search"
    url: str | None = None
    """A server of `POST /retrieve` (`drmas serve-retriever`, Search-R1's, the method's first implementation's); several
    separated by spaces take turns. If unset, an index in this process over `corpus`."""
    api_key_env: str | None = None
    """The environment variable that holds the servers' key; the key itself never stands in a configuration."""
    corpus: str = "facts"
    """`facts` (packaged), `lookups` (of `data.type = "lookups"`), or a JSONL file of passages: `contents`, and optionally `id`
    and `title`."""
    index: Literal["bm25", "dense"] = "bm25"
    encoder: str = "packaged:all-minilm-l6-v2"
    """Of a dense index: the packaged one or a Hugging Face folder."""
    topk: PositiveInt = 3
    max_passage_chars: PositiveInt = 600
    timeout_seconds: PositiveFloat = 20.0
    """Of one call, its retries included."""
    max_retries: Annotated[int, Field(ge=0)] = 4
    cache_size: Annotated[int, Field(ge=0)] = 10000
    """Answers that are kept, by query and number of passages."""

    @model_validator(mode="after")
    def _key_for_a_server(self) -> SearchTool:
        if self.api_key_env is not None and self.url is None:
            raise ValueError("api_key_env holds the key of the servers at url; set url, or leave it out")
        return self


class McpTool(Section):
    """The tools of a Model Context Protocol server, started by `command` or reached at `url`."""

    type: Literal["mcp"] = "mcp"
    command: list[str] = []
    url: str | None = None
    api_key_env: str | None = None
    """The environment variable that holds the key of the server at `url`; the key itself never stands in a configuration."""
    allow: list[str] = []
    """The server's tools that agents may be given; all it lists if empty."""
    pass_env: list[str] = []
    """Environment variables that the command gets besides PATH and HOME."""
    start_timeout_seconds: PositiveFloat = 30.0
    timeout_seconds: PositiveFloat = 20.0
    """Of one call."""
    max_result_chars: PositiveInt = 4000

    @model_validator(mode="after")
    def _one_way(self) -> McpTool:
        if bool(self.command) == (self.url is not None):
            raise ValueError("an MCP server is started by command or reached at url; set one of the two")
        if self.api_key_env is not None and self.url is None:
            raise ValueError("api_key_env holds the key of a server at url; a command gets its key by pass_env")
        return self


class PythonTool(Section):
    """A Python function of yours, `path/to/file.py:name`; its signature and docstring are its schema. It may be async."""

    type: Literal["python"] = "python"
    path: str
    timeout_seconds: PositiveFloat = 20.0
    max_result_chars: PositiveInt = 4000


ToolConfig = Annotated[SearchTool | McpTool | PythonTool, Field(discriminator="type")]


class ReasoningGymData(Section):
    """Procedural tasks of the package reasoning-gym."""

    type: Literal["reasoning-gym"] = "reasoning-gym"
    name: str = "basic_arithmetic"
    """The generator's name."""
    size: PositiveInt = 1000
    seed: int = 0
    difficulty: Annotated[int, Field(ge=0)] | None = None
    """Level of the generator's own curriculum, from 0; `options` go before it. The generator's defaults if unset."""
    options: dict[str, Any] = {}
    """The generator's own settings."""


class JsonlData(Section):
    """One JSON object per line with `prompt` (or `question`) and `answer` (a list holds the accepted ones), and optionally `id`
    and `source`."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """A file; several separated by spaces are read one after the other."""


class SumsData(Section):
    """Small additions with one accepted answer, for models that learn from nothing in minutes."""

    type: Literal["sums"] = "sums"
    largest: PositiveInt = 9
    """Operands are 0 to `largest`."""
    terms: Annotated[int, Field(ge=2)] = 2
    size: PositiveInt = 1000
    seed: int = 0


class LookupsData(Section):
    """Made-up keys whose values stand in a made-up corpus, some of them behind another key; for models that learn from nothing
    in minutes. `tools.search.corpus = "lookups"` is the corpus."""

    type: Literal["lookups"] = "lookups"
    size: PositiveInt = 1000
    seed: int = 0


class ParquetData(Section):
    """Parquet files in the row schema of verl and of the method's first implementation, unchanged: `prompt` (chat messages),
    `data_source`, `reward_model.ground_truth`, `extra_info`, `env_kwargs`."""

    type: Literal["parquet"] = "parquet"
    path: str
    """A file; several separated by spaces are read one after the other."""


class HuggingFaceData(Section):
    """A dataset of the Hugging Face hub, or one already in its cache where there is no network."""

    type: Literal["huggingface"] = "huggingface"
    path: str
    """The dataset's name on the hub, or a folder."""
    name: str | None = None
    """Its configuration, where it has several."""
    split: str = "train"
    question: str = "question"
    """The column with the question; `a.b` is the field b of the column a."""
    answer: str = "answer"
    """The column with the truth; a list holds the accepted ones. Of a text with GSM8K's mark, what follows `####`."""


class FactsData(Section):
    """Questions about elements, countries and airports, with the packaged corpus that answers them, one or more hops away."""

    type: Literal["facts"] = "facts"
    split: Literal["train", "test"] = "train"
    """By entity: no entity that a test question asks about is asked about in training."""
    hops: Annotated[list[Annotated[int, Field(ge=1, le=3)]], Field(min_length=1)] = [1, 2]
    size: PositiveInt | None = None
    """All of them if unset, else so many, drawn by `seed`."""
    seed: int = 0


TaskData = Annotated[
    ReasoningGymData | JsonlData | ParquetData | HuggingFaceData | FactsData | SumsData | LookupsData,
    Field(discriminator="type"),
]


class MixPart(Section):
    """One source of a mix."""

    weight: PositiveFloat = 1.0
    """Its share of the tasks, in parts of the weights' sum."""
    data: TaskData


class MixData(Section):
    """Several sources at once, in stated shares. A task's source is its part's name."""

    type: Literal["mix"] = "mix"
    parts: Annotated[dict[Name, MixPart], Field(min_length=1)]
    """The sources by name."""


DataConfig = Annotated[
    ReasoningGymData | JsonlData | ParquetData | HuggingFaceData | FactsData | SumsData | LookupsData | MixData,
    Field(discriminator="type"),
]


class CurriculumConfig(Section):
    """Which tasks come next, by how often they were solved. The shares of a mix stay what they are: each part has its own."""

    enabled: bool = False
    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The success rate at which a task is drawn most often; tasks that never came count as if they had it."""
    explore: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of draws that go through all tasks in turn and don't look at success rates, so that no task is forgotten."""
    smoothing: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of a task's newest success rate against its older ones."""


RewardType = Literal["math", "exact", "em", "f1", "gym"]


class RewardConfig(Section):
    """How an episode's answer becomes its reward."""

    type: RewardType = "math"
    """`math` grades with math-verify in killable workers; `exact` compares the stripped text; `em` and `f1` compare words
    without case, punctuation and articles (SQuAD); `gym` asks the reasoning-gym generator that made the task, in killable
    workers too. Of several accepted answers the best counts."""
    by_source: dict[str, RewardType] = {}
    """Task source -> the type that its tasks have instead, for mixes. What stands before a source's first "/" names it too:
    `facts` is `facts/1` and `facts/2`. A name that no source of `data` or `eval.data` has is refused."""
    timeout_seconds: PositiveFloat = 10.0
    """Of one verdict of `math` or `gym`."""
    workers: PositiveInt = 1
    """Processes per type that grade."""
