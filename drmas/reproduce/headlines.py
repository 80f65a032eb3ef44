"""A handful of sentences for who has two minutes: what was confirmed, what wasn't, what couldn't differ, where anything does.

Each is made of the numbers of `analysis` and the verdicts of `words`. Pure; called by `drmas.reproduce.page`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from drmas.reproduce import bandit_tables
from drmas.reproduce.analysis import BASE
from drmas.reproduce.words import (
    CLAIMS,
    CONFIRMED,
    CONTRADICTED,
    MOMENTS,
    NO_INFLATION,
    NO_ROOM,
    OPEN,
    TRAINING,
    UNTESTED,
    Verdict,
    difference,
    of_kind,
    shown,
    silence,
)


def headlines(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> list[str]:
    """The sentences, in the order in which they are to be read."""
    lines = []
    if analysis["scenarios"]:
        lines += [_answer(found), _decided(found), _undecided(analysis, found), _no_room(found), _failed(analysis)]
        lines += [_moments(analysis, found), _regime(analysis)]
    if analysis["bandit"]:
        lines += bandit_tables.sentences(analysis["bandit"])
    return [line for line in lines if line]


def _answer(found: Sequence[Verdict]) -> str:
    """What dr-mas did to the final reward, in one sentence."""
    words = Counter(one.word for one in found if one.claim == "reward")
    if (tested := words.total() - words[UNTESTED]) == 0:
        return "Unfinished: no scenario has the seeds that it takes to compare dr-mas with grpo."
    alike = tested - words[CONFIRMED] - words[CONTRADICTED]
    return (
        f"Final training reward, dr-mas against grpo: better in {words[CONFIRMED]}, worse in {words[CONTRADICTED]}, no "
        f"difference seen in {alike} of {words.total()} scenarios."
    )


def _decided(found: Sequence[Verdict]) -> str:
    training = of_kind(found, TRAINING)
    parts = []
    for word in (CONFIRMED, CONTRADICTED):
        named = _named([one for one in training if one.word == word])
        parts.append(f"{word.capitalize()}: {named or 'nothing'}")
    return f"Of {len(training)} claims about training, each in one scenario. {'. '.join(parts)}."


def _failed(analysis: Mapping[str, Any]) -> str:
    """How many trials crashed or diverged, by method; nothing where none did."""
    counts: dict[str, Counter[str]] = {}
    for one in analysis["failures"]:
        counts.setdefault(one["status"], Counter())[one["trial"].split("/")[1]] += 1
    parts = [f"{status}: {', '.join(f'{method} {n}' for method, n in sorted(by.items()))}" for status, by in counts.items()]
    return f"Trials that failed, by method. {'. '.join(part.capitalize() for part in parts)}." if parts else ""


def _undecided(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> str:
    training = of_kind(found, TRAINING)
    unclear, untested = (sum(one.word == word for one in training) for word in (OPEN, UNTESTED))
    pairs = [difference(scenario, "dr-mas", BASE) for scenario in analysis["scenarios"].values()]
    finals = [one["final"]["value"] for one in pairs if one and one["final"]["value"] is not None]
    text = f"Not confirmed: {unclear} of them, whose intervals hold zero; not tested: {untested}."
    if finals:
        text += f" The final reward under dr-mas less that under grpo is between {min(finals):+.3f} and {max(finals):+.3f}."
    excluding, total = analysis["excluding"], analysis["intervals"]
    text += (
        f" Of all {total} intervals between methods {excluding} exclude zero, {analysis['excluding_single']} of them with the "
    )
    return text + f"single agent, where chance alone makes {total / 20:.1f}."


def _no_room(found: Sequence[Verdict]) -> str:
    named = _named([one for one in of_kind(found, TRAINING) if one.word == NO_ROOM], numbers=False)
    return f"What could not differ, at the ceiling or alike in every seed: {named}." if named else ""


def _moments(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> str:
    if not analysis["moments"]:
        return ""
    own = [one for one in of_kind(found, MOMENTS) if one.claim == "inflates"]
    flat = [one.scenario for one in own if one.word == NO_INFLATION]
    text = f"Nothing to remove, a mean factor of about 1, in {len(flat)} of {len(own)} scenarios"
    text += f" ({', '.join(flat)})" if flat else ""
    more = _named([one for one in own if one.word == CONFIRMED])
    less = _named([one for one in own if one.word == CONTRADICTED])
    text += f". The pooled second moment above that of per-agent statistics on the same rows: {more or 'nowhere'}"
    whole = analysis["moments"]
    text += f"; below it: {less}." if less else "."
    return text + (
        f" Over all scenarios measured / factor is {shown(whole['ratio'], '.2f')}, measured / (factor + Δ) "
        f"{shown(whole['identity'], '.2f')}: what the factor leaves unsaid is the covariance Δ, "
        f"{shown(whole['covariance'], '+.2f')}."
    )


def _regime(analysis: Mapping[str, Any]) -> str:
    """The agent whose mean factor is farthest above 1 under the pooled baseline, and what is different there."""
    known = {name: one for name, one in analysis["scenarios"].items() if one["moments"] and BASE in one["methods"]}
    factors = {
        (name, agent): numbers["inflation_mean"]
        for name, one in known.items()
        for agent, numbers in one["methods"][BASE]["agents"].items()
        if numbers["inflation_mean"]["value"] is not None
    }
    if not factors:
        return ""
    name, agent = max(factors, key=lambda key: factors[key]["value"])
    scenario = known[name]
    norms = {method: own["agents"][agent]["grad_mean"] for method, own in scenario["methods"].items() if agent in own["agents"]}
    text = f"The largest mean factor under {BASE} is {shown(factors[name, agent], '.2f')}, of the {agent} in {name}"
    if "dr-mas" in norms:
        text += f": its gradient norm is {shown(norms[BASE], '.2f')} there and {shown(norms['dr-mas'], '.2f')} under dr-mas"
    pair = difference(scenario, "dr-mas", BASE)
    text += f"; final reward of dr-mas less grpo's {shown(pair['final'], '+.3f')}." if pair else "."
    return " ".join([text, *silence(scenario)])


def _named(verdicts: Sequence[Verdict], *, numbers: bool = True) -> str:
    """Each claim once, with the scenarios of which it is said."""
    parts = []
    for claim in CLAIMS:
        own = [one for one in verdicts if one.claim == claim.key]
        if own:
            places = ", ".join(f"{one.scenario} {one.numbers}" if numbers else one.scenario for one in own)
            parts.append(f"{claim.text} ({places})")
    return "; ".join(parts)
