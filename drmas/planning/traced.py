"""Which calls a team makes, in which order and on what prompts: found by running the team itself with stubs for its models.

    trace(team) -> shapes: calls, what each waits for, what each reads -> workload draws episodes of these shapes

Every team works, a user's too, since it is plain Python: agents answer with filler in the form that their parser asks for, a
verdict or a choice at random, tools with a text of their usual size. Nobody is asked anything. It is no rollout: what models
would decide isn't known, and a team that looks at the text itself, not at what was parsed, may go a way that it rarely goes.
Where branches run at once, one that ends early counts as waited for by what another asks next. Called by `workload`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
from drmas.agents.parsers import make_parser
from drmas.agents.prompts import fill
from drmas.agents.team import TeamConfig
from drmas.types import Task, Turn

SAMPLES = 64
MOST_CALLS = 500
"""Of an episode; a team that asks on until it likes the answer is cut there."""
CHARACTERS_PER_TOKEN = 4
CHAT_TOKENS = 24
"""Assumption: what a chat template adds to a prompt: role markers, a default system message."""
TOOL_CHARACTERS = 1200
_FILLER, _FIRST = 64, 0xE000
"""Characters of a response's filler, one of Unicode's private ones for each call: what is heard of it can be counted."""
_PASSES = 12
"""Of the event loop, until a team that can go on has asked its next calls."""

Tokens = TypeVar("Tokens")


class Piece(NamedTuple):
    """A text, by what it is made of."""

    tokens: float
    heard: tuple[tuple[int, float], ...] = ()
    """(an earlier call of the episode, how often its response stands here)."""

    def length(self, responses: Sequence[Tokens]) -> Tokens | float:
        """In tokens, where the episode's calls so far had responses of so many tokens: numbers, or arrays of them."""
        return self.tokens + sum(share * responses[call] for call, share in self.heard)


class Step(NamedTuple):
    """One call of a shape. `own` is the start of the prompt that an earlier call to the same policy has read already; `shared`
    are the tokens at the prompt's start that every episode of the group reads."""

    agent: str
    after: tuple[int, ...]
    prompt: Piece
    own: Piece
    shared: float
    tools: int = 0
    """Tool calls that follow, before the episode goes on."""


Shape = tuple[Step, ...]


def trace(
    team: TeamConfig,
    *,
    question_tokens: int = 128,
    tool_characters: int = TOOL_CHARACTERS,
    samples: int = SAMPLES,
    seed: int = 0,
) -> dict[Shape, float]:
    """The shapes of `samples` stubbed episodes, with how often each came. Empty: the team can't be run with stubs."""
    draw = random.Random(seed)
    found: Counter[Shape] = Counter()
    for _ in range(samples):
        shape = asyncio.run(_play(team, question_tokens, tool_characters, draw))
        if shape is None:
            return {}
        found[shape] += 1
    return {shape: count / samples for shape, count in found.items()}


async def _play(team: TeamConfig, question_tokens: int, tool_characters: int, draw: random.Random) -> Shape | None:
    """One stubbed episode. None: it raised, asked nobody, or waits for something that isn't an agent or a tool."""
    calls = _Calls(team.agents, tool_characters, draw)
    task = Task("trace", "q" * CHARACTERS_PER_TOKEN * question_tokens, "")
    running = asyncio.ensure_future(team.run(task, Agents(calls)))
    try:
        while len(calls.steps) < MOST_CALLS:
            for _ in range(_PASSES):
                await asyncio.sleep(0)
            calls.settle()
            if running.done():
                failed = running.cancelled() or running.exception() is not None
                return None if failed or not calls.steps else calls.shape()
            if not calls.open:
                return None
            calls.answer()
        return calls.shape()
    finally:
        running.cancel()


class _Result(NamedTuple):
    text: str
    ok: bool = True


class _Calls:
    """What `Agents` needs of an episode's calls: it notes them, and answers one whenever it is told to."""

    def __init__(self, configs: Mapping[str, AgentConfig], tool_characters: int, draw: random.Random) -> None:
        self.configs = configs
        self._tool_characters, self._draw = tool_characters, draw
        self.steps: list[Step] = []
        self.open: list[tuple[int, asyncio.Future[None]]] = []
        self._prompts: list[tuple[str, str]] = []
        self._new: list[int] = []
        self._delivered: list[int] = []
        self._tools: Counter[int] = Counter()

    async def call(self, name: str, template: str | None, values: Mapping[str, object]) -> Turn:
        config, index = self.configs[name], len(self.steps)
        text = "\n".join((fill(config.system or "", values), fill(config.prompt if template is None else template, values)))
        earlier = [other for policy, other in self._prompts if policy == config.policy]
        own = max((_common_start(text, other) for other in earlier), key=len, default="")
        self.steps.append(Step(name, (), _piece(text), _piece(own) if own else Piece(0.0), _unheard(text) + CHAT_TOKENS))
        self._prompts.append((config.policy, text))
        self._new.append(index)
        answered = asyncio.get_running_loop().create_future()
        self.open.append((index, answered))
        await answered
        return _turn(name, config, index, self._draw)

    async def use_tool(self, name: str, arguments: dict[str, Any]) -> _Result:
        mark = ""
        if self._delivered:
            self._tools[self._delivered[-1]] += 1
            mark = chr(_FIRST + self._delivered[-1])  # what a tool finds is the episode's own, as its query is
        return _Result(mark + "t" * self._tool_characters)

    def settle(self) -> None:
        """What was asked since the last look waits for all that was answered meanwhile."""
        if self._new:
            for index in self._new:
                self.steps[index] = self.steps[index]._replace(after=tuple(self._delivered))
            self._new, self._delivered = [], []

    def answer(self) -> None:
        """The call that has waited for longest."""
        index, answered = self.open.pop(0)
        self._delivered.append(index)
        answered.set_result(None)

    def shape(self) -> Shape:
        return tuple(step._replace(tools=self._tools[index]) for index, step in enumerate(self.steps))


def _turn(name: str, config: AgentConfig, index: int, draw: random.Random) -> Turn:
    """An answer in the form that the agent's parser asks for, as `drmas.agents.calls` would read it."""
    filler = chr(_FIRST + index) * _FILLER
    kind, _, words = config.parser.partition(":")
    match kind:
        case "verdict":
            text = f"{filler}<verdict>{draw.choice((words or 'approve,reject').split(','))}</verdict>"
        case "choice":
            text = f"{filler}<choice>{draw.choice(words.split(','))}</choice>"
        case "tag":
            text = f"{filler}<{words}>{filler[:1]} a few words</{words}>"
        case "boxed":
            text = f"{filler}\\boxed{{1}}"
        case _:
            text = filler
    parsed = make_parser(config.parser)(text)
    turn = Turn(name, config.policy, index, [], [], [], [], finish_reason="stop", text=text, valid=parsed.valid)
    turn.parsed = parsed.value if parsed.valid or config.on_invalid == "fail_closed" else parsed.lenient
    return turn


def _piece(text: str) -> Piece:
    """A prompt's start: filler is counted as what is heard of a response, the rest by its length."""
    counts = Counter(character for character in text if 0 <= ord(character) - _FIRST < MOST_CALLS)
    plain = len(text) - sum(counts.values())
    heard = tuple((ord(character) - _FIRST, count / _FILLER) for character, count in sorted(counts.items()))
    return Piece(CHAT_TOKENS + plain / CHARACTERS_PER_TOKEN, heard)


def _common_start(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _unheard(text: str) -> float:
    """Tokens before the first that an agent said."""
    first = next((at for at, character in enumerate(text) if 0 <= ord(character) - _FIRST < MOST_CALLS), len(text))
    return first / CHARACTERS_PER_TOKEN
