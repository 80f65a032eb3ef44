"""What one agent call says to its policy, round by round: a prompt, and after a response with tool calls the tools' answers.

A `LocalDialogue` grows in ids, so that what was sampled is read again exactly as it was sampled (I1); a `RemoteDialogue` grows
in messages. Made by `calls`, one per agent call:

    said = await dialogue.ask(seed=seed, key=key)     # asked twice without `extend`, it samples the same prompt anew
    dialogue.extend(answers)
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from drmas.agents.agent import AgentConfig
from drmas.agents.chat import CUT, ChatRenderer, Message
from drmas.agents.chat_template import results_as_user, with_described_tools
from drmas.agents.prompts import break_markers, quote, scrub
from drmas.errors import PromptTooLong

_TOOL_TAGS = ("tool_call", "tool_response")


class Response(Protocol):
    """What a policy answered; `drmas.rollout.engine.Completion` is one."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...
    @property
    def versions(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str: ...


class Generate(Protocol):
    """Asks the engine of `agent.policy`; EngineError if it can't be served."""

    def __call__(self, agent: AgentConfig, prompt_ids: Sequence[int], *, seed: int, key: str) -> Awaitable[Response]: ...


class RemoteAnswer(Protocol):
    """What a remote model answered; `drmas.rollout.remote` makes them."""

    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...


class AskRemote(Protocol):
    """Asks the remote model `agent.policy`; EngineError if it doesn't answer."""

    def __call__(self, agent: AgentConfig, messages: Sequence[Message], *, seed: int, key: str) -> Awaitable[RemoteAnswer]: ...


@dataclass(frozen=True, slots=True)
class Said:
    """One response, and what it answers."""

    text: str
    finish_reason: str
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_text: str = ""


class LocalDialogue:
    """With a policy whose engine reads ids. `limit`: its most prompt and response tokens; `tools`: schemas for its template.

    PromptTooLong, where the agent's `overlong` is drop: the prompt leaves no room for `max_tokens`.
    """

    def __init__(
        self,
        name: str,
        config: AgentConfig,
        messages: Sequence[Message],
        *,
        renderer: ChatRenderer,
        generate: Generate,
        limit: int | None,
        tools: list[dict[str, Any]] | None,
    ) -> None:
        self._name, self._config, self._renderer, self._generate = name, config, renderer, generate
        self._limit, self._tools = limit, tools
        options = config.chat_template_options
        self._prompt = renderer.render(messages, options, tools)
        self._response: list[int] = []
        if self._over(self._prompt) > 0:
            self._refuse_to_drop(self._prompt)
            try:
                self._prompt = renderer.fit(messages, limit - config.max_tokens, options, tools)
            except PromptTooLong as error:
                raise self._too_long(self._prompt, str(error)) from error

    async def ask(self, *, seed: int, key: str) -> Said:
        response = await self._generate(self._config, self._prompt, seed=seed, key=key)
        self._response = response.token_ids
        return Said(
            text=scrub(self._renderer.decode(response.token_ids)),
            finish_reason=response.finish_reason,
            prompt_ids=self._prompt,
            response_ids=response.token_ids,
            logprobs=response.logprobs,
            versions=response.versions,
        )

    def extend(self, answers: Sequence[Message]) -> None:
        """The next prompt: this one, its response as it was sampled, and the tools' `answers`, cut where they don't fit."""
        longer = self._extended(answers)
        if self._over(longer) > 0:
            self._refuse_to_drop(longer)
            fits, too_long = -1, max(len(answer["content"]) for answer in answers)
            while too_long - fits > 1:
                length = (fits + too_long) // 2
                cut = self._extended([{**answer, "content": _cut(answer["content"], length)} for answer in answers])
                if self._over(cut) > 0:
                    too_long = length
                else:
                    fits, longer = length, cut
            if fits < 0:
                raise self._too_long(longer, "it is too long without the tools' answers already")
        self._prompt = longer

    def _extended(self, answers: Sequence[Message]) -> list[int]:
        options = self._config.chat_template_options
        return self._renderer.extend(self._prompt, self._response, answers, options, self._tools)

    def _over(self, prompt: Sequence[int]) -> int:
        return 0 if self._limit is None else len(prompt) + self._config.max_tokens - self._limit

    def _refuse_to_drop(self, prompt: Sequence[int]) -> None:
        if self._config.overlong == "drop":
            raise self._too_long(prompt, f'team.{self._name}.overlong is "drop"; "truncate" cuts the longest text')

    def _too_long(self, prompt: Sequence[int], why: str) -> PromptTooLong:
        most_tokens = self._config.max_tokens
        return PromptTooLong(
            f"the prompt of agent {self._name} has {len(prompt)} tokens and max_tokens is {most_tokens}; together at most "
            f"{self._limit} (policies.{self._config.policy}.engine.max_model_tokens); {why}"
        )


class RemoteDialogue:
    """With a model behind a URL, which reads messages. Tools are described and their answers given as text.

    Role markers that others wrote are broken in all that is sent, as far as they are known (`break_markers`).
    """

    def __init__(
        self,
        config: AgentConfig,
        messages: Sequence[Message],
        *,
        ask: AskRemote,
        tools: list[dict[str, Any]] | None,
    ) -> None:
        self._config, self._ask = config, ask
        self._messages = _harmless(with_described_tools(messages, tools) if tools else messages)
        self._text = ""

    async def ask(self, *, seed: int, key: str) -> Said:
        messages = list(self._messages)
        answer = await self._ask(self._config, messages, seed=seed, key=key)
        self._text = scrub(answer.text)
        asked = "\n\n".join(f"{message['role']}:\n{message['content']}" for message in messages)
        return Said(text=self._text, finish_reason=answer.finish_reason, prompt_text=asked)

    def extend(self, answers: Sequence[Message]) -> None:
        quoted = [{**answer, "content": quote(answer["content"], _TOOL_TAGS)} for answer in answers]
        self._messages += _harmless([{"role": "assistant", "content": self._text}, *results_as_user(quoted)])


def _harmless(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "content": break_markers(message["content"])} for message in messages]


def _cut(text: str, length: int) -> str:
    """`text` with its middle left out: `length` of its characters around the mark of a cut."""
    if len(text) <= length:
        return text
    return text[: length - length // 2] + CUT + text[len(text) - length // 2 :]
