"""GiGPO: whole episodes against each other, and, beside that, turns that were taken in equal states (arXiv 2505.10978).

    A = E + step_weight Q
    E = (R - mean) / (std + eps) of the segment, by default the agent's rows in the task
    Q = (G - mean) / (std + eps) of the rows with an equal state (anchor) in the segment    G = gamma^(turns still to come) R

A state is a prompt, what the agent had read when it spoke. Turns still to come are those of the episode, of all agents. With
`anchor_norm=mean` Q isn't divided; with `anchor_similarity=s` prompts count as one state if `alike` gives s or more. A state
that was met once gives Q = 0, as do equal returns; so with gamma 1 a task of equal rewards has A = 0, while with gamma < 1 the
shorter way to the same reward is better where states repeat. `mean=task` pools states and episodes over the task's agents.
Penalties stay outside both terms (I7); "inside" takes them off R and G.

Fails where states don't repeat: sampled text makes nearly every later prompt another one, so that Q is 0 but for first turns,
where with gamma 1, the default here (the reference scripts have 0.95), it repeats E; similarity groups prompts that differ in
the one token that matters, too, and a low one over long prompts takes minutes. gamma < 1 makes long episodes worth less in Q,
wanted or not. Episodes that meet a state twice count twice in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any, Literal

from drmas.core.advantages import AdvantageRow, AdvantageRule, Advantages, Key, advantages, compared
from drmas.core.estimators.base import NOTHING, Evidence, Penalty, Stateless
from drmas.errors import ConfigError

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gigpo(Stateless):
    rule: AdvantageRule
    """Of E; Q takes its ddof, eps, min_std and penalty, and its mean says whether states are an agent's or the task's."""
    gamma: float = 1.0
    step_weight: float = 1.0
    anchor_norm: Literal["mean", "mean_std"] = "mean_std"
    anchor_similarity: float | None = None

    @property
    def penalty(self) -> Penalty:
        return self.rule.penalty

    @property
    def equal_groups_teach(self) -> bool:
        """As E has it: where whole episodes earn the same, the discount of Q alone is no reason to keep a group."""
        return self.rule.mean == self.rule.std == "none"

    def __call__(self, rows: Sequence[AdvantageRow], evidence: Evidence = NOTHING) -> Advantages:
        episodes = advantages(rows, self.rule)
        mine = [i for i, row in enumerate(rows) if row.status == "ok"]
        steps = _step_returns(rows, mine, self.gamma)
        if self.rule.penalty == "outside":
            steps = [replace(row, penalty=0.0) for row in steps]
        keys = self._states(steps)
        scaled = self.anchor_norm == "mean_std"
        rule = replace(self.rule, mean="agent", std="agent", weighting="turn", singleton="zero")
        found = compared(steps, rule, mean=keys, std=keys if scaled else None)
        values = list(episodes.values)
        for i, step in zip(mine, found.values, strict=True):
            values[i] += self.step_weight * step
        anchors = [
            replace(each, scope="anchor", rows=[mine[i] for i in each.rows]) for each in found.segments if each.scope == "mean"
        ]
        return Advantages(values, episodes.segments, anchors=anchors)

    def _states(self, rows: Sequence[AdvantageRow]) -> list[Key]:
        """Each row's state: its segment, and the number of its prompt's cluster there."""
        owners: list[Key] = [(row.task,) if self.rule.mean == "task" else (row.task, row.agent) for row in rows]
        prompts: dict[Key, set[Prompt]] = {}
        for owner, row in zip(owners, rows, strict=True):
            prompts.setdefault(owner, set()).add(tuple(row.prompt_ids))
        clusters = {owner: clustered(met, self.anchor_similarity) for owner, met in prompts.items()}
        return [(*owner, f"state {clusters[owner][tuple(row.prompt_ids)]}") for owner, row in zip(owners, rows, strict=True)]

    def __str__(self) -> str:
        prompts = "equal prompts" if self.anchor_similarity is None else f"prompts alike to {self.anchor_similarity:g}"
        scale = "mean and std" if self.anchor_norm == "mean_std" else "mean"
        return f"{self.rule}; plus {self.step_weight:g} x {scale} over {prompts}, gamma {self.gamma:g} per turn"


def gigpo(
    *,
    gamma: float = 1.0,
    step_weight: float = 1.0,
    anchor_norm: Literal["mean", "mean_std"] = "mean_std",
    anchor_similarity: float | None = None,
    **changes: Any,
) -> Gigpo:
    if anchor_norm not in ("mean", "mean_std"):
        raise ConfigError(f"advantage.anchor_norm is {anchor_norm!r}; expected mean or mean_std")
    return Gigpo(replace(AdvantageRule(), **changes), gamma, step_weight, anchor_norm, anchor_similarity)


def _step_returns(rows: Sequence[AdvantageRow], mine: Sequence[int], gamma: float) -> list[AdvantageRow]:
    """The rows of `mine` with gamma^(turns still to come) R for their reward; stale rows count among an episode's turns."""
    last: dict[tuple[str, str], int] = {}
    for row in rows:
        episode = (row.task, row.episode)
        last[episode] = max(last.get(episode, 0), row.turn)
    chosen = [rows[i] for i in mine]
    return [replace(row, reward=gamma ** (last[row.task, row.episode] - row.turn) * row.reward) for row in chosen]


def clustered(prompts: set[Prompt], similarity: float | None) -> dict[Prompt, int]:
    """The number of each prompt's cluster; in order of the prompts, each joins the first whose first member it is alike.

    Without `similarity` each prompt is one of its own.
    """
    firsts: list[Prompt] = []
    found: dict[Prompt, int] = {}
    for prompt in sorted(prompts):
        near = () if similarity is None else (i for i, first in enumerate(firsts) if alike(first, prompt, similarity))
        number = next(iter(near), len(firsts))
        if number == len(firsts):
            firsts.append(prompt)
        found[prompt] = number
    return found


def alike(a: Prompt, b: Prompt, similarity: float) -> bool:
    """Whether difflib's ratio, 2 x matches / (tokens of both), is at least `similarity`. A common start and end are matched
    first, as most of two prompts of an agent is; what bounds the ratio from above is asked before what is dear."""
    total = len(a) + len(b)
    if 2 * min(len(a), len(b)) < similarity * total:
        return False
    start = _common(a, b)
    a, b = a[start:], b[start:]
    end = _common(a[::-1], b[::-1])
    a, b = a[: len(a) - end], b[: len(b) - end]
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    needed = similarity * total / 2 - start - end  # matches among the rest
    rest = (len(a) + len(b)) / 2
    return all(ratio() * rest >= needed - 1e-9 for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio))


def _common(a: Prompt, b: Prompt) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
