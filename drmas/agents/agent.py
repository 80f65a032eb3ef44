"""What a role is: who speaks, what it is asked, how it samples and how its text is read. One `AgentConfig` per agent.

Agents are fields of their team's settings (`team`); how a team calls them stands in `calls`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from drmas.agents.parsers import make_parser
from drmas.agents.prompts import placeholders
from drmas.config.schema import NonNegativeFloat, Section

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
    temperature: PositiveFloat = 1.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end the response."""
    parser: str = "text"
    """text, boxed or verdict; verdict takes its two words: `verdict:approve,reject`."""
    invalid_penalty: NonNegativeFloat = 0.0
    """Taken off the reward of a call whose text the parser finds invalid."""
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

    @property
    def placeholders(self) -> set[str]:
        """What the templates of this agent ask for."""
        return placeholders(self.prompt) | placeholders(self.system or "")
