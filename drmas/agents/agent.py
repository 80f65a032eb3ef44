"""What a role is: who speaks, what it is asked, how it samples and how its text is read. One `AgentConfig` per agent.

Agents are fields of their team's settings (`team`); how a team calls them stands in `calls`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from drmas.agents.parsers import make_parser
from drmas.agents.prompts import placeholders, tags
from drmas.config.section import NonNegativeFloat, Section

_UNMIRRORED = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
"""Sampling settings of engines that change the sampled distribution in a way the trainer doesn't compute (I11)."""


class AgentConfig(Section):
    """One role of a team: who speaks, what it is asked, how it samples and how its text is read."""

    policy: str = "main"
    """The policy that this agent speaks with; agents may share one."""
    system: str | None = None
    """System message; none if unset (a chat template may then put its own). Takes the same placeholders as `prompt`."""
    prompt: str = "{question}"
    """User message. {name} is replaced by what the team passes under that name; {{name}} is the text {name}."""
    max_tokens: PositiveInt = 256
    """Longest response."""
    overlong: Literal["drop", "truncate"] = "drop"
    """A prompt that leaves no room for `max_tokens`: its episode is dropped and counted, or the longest text in its user
    messages is cut in the middle; what the chat template writes stays whole."""
    temperature: PositiveFloat = 1.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end the response."""
    parser: str = "text"
    """How the response is read: text, boxed, `tag:answer`, `verdict:approve,reject`, `choice:a,b,c`, or a function of yours,
    `path/to/file.py:name`."""
    on_invalid: Literal["fail_closed", "fail_open"] = "fail_closed"
    """What a text that the parser finds invalid counts as: the parser's strict value (no answer, a rejection), or its lenient
    one (the whole text, an approval)."""
    retries: Annotated[int, Field(ge=0)] = 0
    """How often an invalid response is sampled anew, with another seed; each attempt is a turn of its own."""
    invalid_penalty: NonNegativeFloat = 0.0
    """Taken off the reward of a turn whose text the parser finds invalid."""
    length_buffer: Annotated[int, Field(ge=0)] = 0
    """The last so many tokens before `max_tokens` in which a response is penalised for its length (DAPO's overlong buffer)."""
    length_penalty: NonNegativeFloat = 1.0
    """Taken off the reward of a turn that fills `length_buffer` or is cut, in proportion of a turn that ends within it."""
    tools: tuple[str, ...] = ()
    """The tools that the agent may call: names of `tools` sections, or SECTION.NAME for one tool of an MCP server."""
    max_tool_calls: PositiveInt = 4
    """Tool calls per agent call; further ones are answered with a word that the budget is spent."""
    trainable: bool = True
    """False freezes the agent: its turns are in the statistics and not in the loss, also where it shares a policy."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Steps by which the weights that sampled a turn may lag behind those it is trained with; `rollout.max_staleness` if unset.
    Older turns of this agent are left out of statistics and loss, and counted."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, `enable_thinking` for instance."""

    @model_validator(mode="before")
    @classmethod
    def _mirrored_sampling_only(cls, data: Any) -> Any:
        for key in _UNMIRRORED if isinstance(data, dict) else ():
            if key in data:
                raise ValueError(
                    f"{key} is {data[key]}; the trainer computes log-probs of the whole distribution at a temperature and "
                    f"can't mirror {key}; remove it, or set `temperature`"
                )
        return data

    @field_validator("parser")
    @classmethod
    def _known_parser(cls, value: str) -> str:
        make_parser(value)
        return value

    @model_validator(mode="after")
    def _buffer_within_the_response(self) -> AgentConfig:
        if self.length_buffer >= self.max_tokens:
            raise ValueError(
                f"length_buffer is {self.length_buffer} and max_tokens is {self.max_tokens}; every response would be penalised "
                "for its length: set length_buffer below max_tokens"
            )
        return self

    @property
    def placeholders(self) -> set[str]:
        """What the templates of this agent ask for."""
        return placeholders(self.prompt) | placeholders(self.system or "")

    @property
    def tags(self) -> set[str]:
        """The tags that the templates of this agent write, which nothing that fills them may forge (`prompts.quote`)."""
        return tags(self.prompt) | tags(self.system or "")
