"""What a team's work is taken to be where no run has measured it: calls, prompts and responses, from the configuration alone.

Nobody knows these before the first run, and predictions stand and fall with them: every number can be given on the command line
(`--calls`, `--prompt`, `--response`), and a plan says which ones were assumed. Called by `drmas plan`.
"""

from __future__ import annotations

from collections.abc import Mapping

from drmas.agents.team import TeamConfig
from drmas.config.schema import RunConfig
from drmas.core.names import expected_names
from drmas.errors import ConfigError
from drmas.planning.types import AgentLoad, Lengths, Workload

CALLS = {"solver": 1.5, "verifier": 1.0, "router": 2.0, "searcher": 1.5, "answerer": 1.0}
"""Calls per episode: half of the answers are sent back once; three searches in two episodes. 1 of other agents."""
RESPONSE_SHARE = 0.25
"""Mean response, of `max_tokens`."""
SPREAD = 0.6
"""Standard deviation of the logarithm of response lengths."""
MOST_CALLS, MOST_TOKENS, MOST_EPISODES = 1000, 10**7, 10**6
QUESTION_TOKENS = 128
CHARACTERS_PER_TOKEN = 4
TOOL_SECONDS = 0.1
"""Per call of an agent with tools, or of a team that calls one itself."""

Given = Mapping[str, float]
"""Agent -> number; "" stands for all that aren't named."""


def assumed(
    run: RunConfig,
    team: TeamConfig,
    *,
    calls: Given | None = None,
    prompt: Given | None = None,
    response: Given | None = None,
    spread: float = SPREAD,
) -> Workload:
    """The work of one step of `run`. What isn't given follows the rules above.

    A prompt is the agent's templates, a question, and one response of each agent that spoke before; siblings of a group share
    all but the responses in their engine's prefix cache. ConfigError: an agent that isn't there, or a number below zero or
    beyond the agent's room.
    """
    given = {"calls": calls or {}, "prompt": prompt or {}, "response": response or {}}
    for option, values in given.items():
        _check(option, values, team)
    loads: list[AgentLoad] = []
    group = run.rollout.group_size
    for name, agent in team.agents.items():
        lengths = _lengths(name, agent.max_tokens, given["response"], spread)
        own = QUESTION_TOKENS + len(f"{agent.prompt}{agent.system or ''}") / CHARACTERS_PER_TOKEN
        heard = sum(load.response.moment(1) for load in loads)
        room = prompt_room(run, agent.policy, agent.max_tokens)
        tokens = _of(given["prompt"], name, min(own + heard, room))
        if tokens > room:
            raise ConfigError(
                f"--prompt is {tokens:g} for {name}; policies.{agent.policy}.engine.max_model_tokens less "
                f"team.{name}.max_tokens leaves {room:g}"
            )
        loads.append(
            AgentLoad(
                name=name,
                policy=agent.policy,
                calls=_of(given["calls"], name, CALLS.get(name.rpartition(".")[2], 1.0)),
                prompt_tokens=tokens,
                cached_tokens=min(own, tokens - 1) * (1 - 1 / group),
                response=lengths,
                trained=agent.trainable,
                tool_seconds=TOOL_SECONDS if agent.tools or team.tool_sections else 0.0,
            )
        )
    if not any(load.calls for load in loads):
        raise ConfigError("--calls leaves no agent that is called")
    if (episodes := run.rollout.tasks_per_step * group) > MOST_EPISODES:
        raise ConfigError(
            f"rollout.tasks_per_step x rollout.group_size is {episodes} episodes; a plan takes at most {MOST_EPISODES}"
        )
    said = [f"--{option}" for option, values in given.items() if values]
    return Workload(
        agents=tuple(loads),
        tasks=run.rollout.tasks_per_step,
        group_size=group,
        max_concurrent_episodes=run.rollout.max_concurrent_episodes,
        source=f"{', '.join(said)} as given, the rest assumed" if said else "assumed from the configuration",
    )


def prompt_room(run: RunConfig, policy: str, max_tokens: int) -> float:
    """Tokens that a prompt may have at most."""
    if policy not in run.policies:
        return float("inf")
    return run.policies[policy].engine.max_model_tokens - max_tokens


def _lengths(name: str, cap: int, given: Given, spread: float) -> Lengths:
    mean = _of(given, name, RESPONSE_SHARE * cap)
    if mean > cap:
        raise ConfigError(f"--response is {mean:g} for {name}, whose team.{name}.max_tokens is {cap}; expected at most that")
    return Lengths.fitted(max(1.0, mean), spread, cap)


def _of(given: Given, name: str, otherwise: float) -> float:
    return given.get(name, given.get("", otherwise))


def _check(option: str, values: Given, team: TeamConfig) -> None:
    for name, value in values.items():
        if name and name not in team.agents:
            raise ConfigError(f"--{option} names {name!r}; {expected_names(name, team.agents)}")
        least, most = (0, MOST_CALLS) if option == "calls" else (1, MOST_TOKENS)
        if not least <= value <= most:
            raise ConfigError(f"--{option} is {value:g}{f' for {name}' if name else ''}; expected {least} to {most}")
