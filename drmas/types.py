"""The nouns of drmas and the invariants that its tests cite by number.

Every process speaks these types; nothing here imports torch. A reader who knows this page can read the rest.

Words: a *task* is a question with its truth; a *group* is the `group_size` episodes of one task; an *episode* is one run of the
team on a task; a *turn* is one agent call and one training row; an *agent* is a role; a *policy* is one trainable model that
one or more agents speak with; a *segment* is a set of rows that are compared with each other; a *version* is a policy's weight
version, an integer that grows by one per optimiser update that is synced; a *probe* is an episode beside a group that only a
baseline is made of.

Invariants
  I1   Tokens in are tokens trained: a row holds exactly the ids that the engine read and sampled. Sampled text is never
       re-tokenised for its own row; another agent reads it as text, with forged role markers made harmless.
  I2   Every response token carries the version that sampled it. A row of unknown version is refused.
  I3   Trouble is never a reward of 0. A failed episode is out of the statistics and out of the loss for every agent in it,
       is counted by kind, and never cancels its siblings.
  I4   Padding and duplicates never change a statistic or a loss. Any number of rows per agent works, 0, 1 and 3 included.
  I5   The loss of an update is one exact weighted sum over its rows: equal for every microbatch split, packing order, data- and
       tensor-parallel size.
  I6   A constant segment and a segment of one give advantage exactly 0 (the raw reward only if asked for by name).
  I7   Penalties are added outside the normalisation unless asked otherwise: 0.01 in an equal group stays 0.01.
  I8   Every metric that can be split by agent is, also when agents share a policy.
  I9   One seed, one machine, one result: a sample's seed is a function of (run seed, step, task, sample, agent, turn), never of
       scheduling. Resume continues the same run or refuses.
  I10  After a sync the engine holds the trainer's weights, and no cached prefix of an older version is used.
  I11  The behaviour log-prob is the log-prob of the distribution that was sampled. Engine and trainer agree on it, the gap is
       measured every step, and a setting that the trainer can't mirror is refused at start.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

FailureKind = Literal["engine", "team", "grader", "timeout", "tool", "overlong"]
"""Where an episode failed: the engine died or refused, the team raised, the grader died or hung, a deadline passed, a tool did
not answer, a prompt did not fit."""


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its truth. Produced by `drmas.envs.source`; consumed by teams and graders.

    Example: Task(id="sums/17", question="What is 12 + 7?", truth="19", source="sums")
    """

    id: str
    question: str
    truth: str
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Turn:
    """One request of an agent: what the engine read, what it sampled, and how that parsed. One turn is one training row.

    `logprobs` and `versions` have one entry per response token (I1, I2, I11). A turn of a remote model has no ids:
    `prompt_text` holds what it was asked, and there is no row. `trained` is False where the agent is frozen, `stale` where its
    tokens are older than the agent's bound; both keep the turn out of the loss.

    Example: Turn(agent="solver", policy="main", index=0, prompt_ids=[1, 5, 9], response_ids=[7, 2],
                  logprobs=[-0.1, -0.02], versions=[3, 3], finish_reason="stop", text="19")
    """

    agent: str
    policy: str
    index: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    text: str
    parsed: Any = None
    valid: bool = True
    penalty: float = 0.0
    trained: bool = True
    stale: bool = False
    prompt_text: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool call of an episode. `turn` is the index of the turn that asked for it; None where the team itself did.

    `ok` is False where the tool answered with an error that the agent reads (bad arguments, no such tool, budget spent).

    Example: ToolUse(tool="search", arguments='{"query": "tungsten"}', result="[1] Tungsten ...", ok=True, agent="searcher")
    """

    tool: str
    arguments: str
    result: str
    ok: bool = True
    agent: str | None = None
    turn: int | None = None
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a team may return in place of its answer alone: per-agent rewards, for teams whose agents don't share one.

    `rewards`: agent -> the reward of its rows in place of the episode's; agents that aren't named get the episode's.

    Example: Outcome(answer="B won", rewards={"a": -1.0, "b": 1.0})
    """

    answer: str | None
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode has no reward (I3)."""

    kind: FailureKind
    message: str


@dataclass(slots=True)
class Episode:
    """One run of the team on a task. `reward` is None exactly when `failure` is set.

    Example: Episode(task=task, sample=0, turns=[turn], answer="19", reward=1.0)
    """

    task: Task
    sample: int
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None
    reward: float | None = None
    failure: Failure | None = None
    seconds: float = field(default=0.0, compare=False)
    agent_rewards: dict[str, float] = field(default_factory=dict)
    """The rewards of agents that the team rewards by itself (`Outcome`)."""
    tool_uses: list[ToolUse] = field(default_factory=list)
    retried: int = 0
    """Requests that were put again because their engine had died or stalled; the turns before them stand."""
    probe: str | None = None
    """The name of the probe that the episode runs for; None for one of the group. A probe's episodes have samples of their own,
    from -1 downwards, so that no seed of theirs is one of the group's (I9); they give no rows."""

    @property
    def id(self) -> str:
        """Distinct among the episodes of a step: `TASK#SAMPLE`, or `TASK#PROBE/NUMBER` with the number counted over all of the
        task's probes."""
        return f"{self.task.id}#{self.sample}" if self.probe is None else f"{self.task.id}#{self.probe}/{-1 - self.sample}"

    @property
    def status(self) -> str:
        return "ok" if self.failure is None else self.failure.kind


@dataclass(slots=True)
class Row:
    """One turn with the outcome of its episode: what the trainer sees.

    `status` other than "ok" is excluded (I3): the kind of the episode's failure, or "stale". A row that isn't `trained` counts
    in the statistics and not in the loss: its agent is frozen.

    Produced by `rows_of`; consumed by `drmas.core.advantages` and by the policies.

    Example: Row(task="sums/17", episode="sums/17#0", agent="solver", policy="main", turn=0, prompt_ids=[1, 5, 9],
                 response_ids=[7, 2], logprobs=[-0.1, -0.02], versions=[3, 3], reward=1.0, penalty=0.0, status="ok")
    """

    task: str
    episode: str
    agent: str
    policy: str
    turn: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float | None
    penalty: float = 0.0
    status: str = "ok"
    trained: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def to_dict(self) -> dict[str, Any]:
        """The fields; lists are the row's own, since there may be millions of tokens."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def rows_of(episodes: list[Episode]) -> list[Row]:
    """The training rows of `episodes`, in order. A turn with an empty response has nothing to train and gives no row, nor does
    an episode of a probe."""
    return [
        Row(
            task=episode.task.id,
            episode=episode.id,
            agent=turn.agent,
            policy=turn.policy,
            turn=turn.index,
            prompt_ids=turn.prompt_ids,
            response_ids=turn.response_ids,
            logprobs=turn.logprobs,
            versions=turn.versions,
            reward=None if episode.failure else episode.agent_rewards.get(turn.agent, episode.reward),
            penalty=turn.penalty,
            status="stale" if turn.stale and not episode.failure else episode.status,
            trained=turn.trained,
        )
        for episode in episodes
        if episode.probe is None
        for turn in episode.turns
        if turn.response_ids
    ]
