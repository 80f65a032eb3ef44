"""The words of the report: what became of each claim in each scenario, by rule from the numbers of `analysis`.

A claim about a difference looks at the 95 % interval over seeds of the paired difference:

    confirmed      all of it lies on the side that is claimed, and the seeds' differences aren't one number
    contradicted   all of it lies on the other side, and likewise
    not confirmed  anything else: the data don't tell
    no room        nothing could differ: see `no_room` in `analysis`
    not tested     fewer than 3 seeds have both sides, a method wasn't run, or they lost unequal numbers of trials

and the claims of kind "moments":

    factor    the measured second moment over the factor alone, for factors up to `SPLIT` and above: confirmed if both
              intervals lie in 0.8 to 1.25, contradicted if one lies outside; not tested where factors have next to no spread
    inflates  the measured second moment under the pooled baseline less that under per-agent statistics, of the same rows, as a
              difference; "no inflation" where the mean factor is 0.95 to 1.05, so that there is nothing to be removed
    one       the second moment under per-agent statistics: confirmed if its interval lies in 0.8 to 1.25, contradicted if
              outside wholly

Those of kind "arithmetic" follow from definitions and check the code, not the method: they hold, fail, or aren't tested.

    lemma     the measured second moment over factor + Delta: holds if its interval lies in 0.8 to 1.25
    row-sum   mean |sum of advantages| / rows: holds if dr-mas has at most 1e-5 and grpo more

std: the std-only ablation's avg less that of the mean-only one, as a difference; confirmed only if all of dr-mas gains over
grpo, too, since otherwise there is nothing whose larger part it could be.

Pure; called by `drmas.reproduce.page`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drmas.reproduce.analysis import BASE
from drmas.reproduce.fit import SPLIT

CONFIRMED, OPEN, CONTRADICTED, UNTESTED = "confirmed", "not confirmed", "contradicted", "not tested"
NO_ROOM, NO_INFLATION = "no room", "no inflation"
HOLDS, FAILS = "holds", "fails"
TRAINING, MOMENTS, ARITHMETIC = "training", "moments", "arithmetic"
KINDS = {
    TRAINING: (CONFIRMED, OPEN, CONTRADICTED, NO_ROOM, UNTESTED),
    MOMENTS: (CONFIRMED, OPEN, CONTRADICTED, NO_INFLATION, UNTESTED),
    ARITHMETIC: (HOLDS, OPEN, FAILS, UNTESTED),
}
"""Kind of claim -> the words that are said of it."""
FEWEST_SEEDS = 3
CLOSE = (0.8, 1.25)
NOTHING = (0.95, 1.05)
"""A mean factor within leaves nothing to be removed."""
SPREAD = 0.05
"""Standard deviation of factors below which they can't be told from a constant."""
SILENT = 0.05
"""Share of rows compared with nothing, beyond grpo's, from which the report speaks of it."""
ZERO = 1e-5

Scenario = Mapping[str, Any]
Outcome = tuple[str, str]
"""The word, and the numbers behind it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """`rule` makes the outcome of a scenario's numbers; `intervals` of them decide."""

    key: str
    text: str
    rule: Callable[[Scenario], Outcome]
    intervals: int = 1
    kind: str = TRAINING


@dataclass(frozen=True, slots=True)
class Verdict:
    claim: str
    scenario: str
    word: str
    numbers: str


def verdicts(analysis: Mapping[str, Any]) -> list[Verdict]:
    """One per claim and scenario, in the order of `CLAIMS` and of scenarios."""
    found = []
    for claim in CLAIMS:
        for name, scenario in analysis["scenarios"].items():
            word, numbers = claim.rule(scenario)
            found.append(Verdict(claim.key, name, word, numbers + NOTES.get((claim.key, name), "")))
    return found


def of_kind(found: Sequence[Verdict], kind: str) -> list[Verdict]:
    keys = {claim.key for claim in CLAIMS if claim.kind == kind}
    return [one for one in found if one.claim in keys]


def shown(estimate: Mapping[str, Any] | None, form: str = ".3f", *, seeds: bool = True) -> str:
    """`0.412 [0.361, 0.466]`, and unless told otherwise the number of seeds where some are missing or fewer than 3; or '-'."""
    if estimate is None or estimate["value"] is None:
        return "-"
    if max(abs(estimate[part] or 0.0) for part in ("value", "low", "high")) >= 1e6:
        form = form.replace("f", "g")
    text = f"{estimate['value']:{form}}"
    if estimate["low"] is not None:
        text += f" [{estimate['low']:{form}}, {estimate['high']:{form}}]"
    n, of = estimate["n"], estimate["of"]
    return f"{text} ({n} of {of} seeds)" if seeds and n < max(of, FEWEST_SEEDS) else text


def difference(scenario: Scenario, left: str, right: str) -> Mapping[str, Any] | None:
    return next((one for one in scenario["differences"] if (one["left"], one["right"]) == (left, right)), None)


def by_sign(estimate: Mapping[str, Any] | None, claimed: int, form: str = "+.3f") -> Outcome:
    """The rule of a difference; `claimed` is 1 where the claim is that it is above zero, -1 below."""
    if estimate is None or estimate["n"] < FEWEST_SEEDS:
        return UNTESTED, shown(estimate, form) if estimate else "-"
    low, high = sorted((claimed * estimate["low"], claimed * estimate["high"]))
    word = OPEN if low == high else CONFIRMED if low > 0 else CONTRADICTED if high < 0 else OPEN
    return word, shown(estimate, form)


def _judged(found: Mapping[str, Any] | None, measure: str, claimed: int) -> Outcome:
    """`by_sign` of a difference between methods, unless nothing could differ or one of them lost more trials."""
    if found is None:
        return UNTESTED, "-"
    word, numbers = by_sign(found[measure], claimed)
    left, right = found["crashed"]
    if left != right:
        return UNTESTED, f"{numbers}; {left} trials of {found['left']} crashed and {right} of {found['right']}"
    return (NO_ROOM if measure in found["no_room"] and word != UNTESTED else word), numbers


def _compared(left: str, right: str, measure: str, claimed: int) -> Callable[[Scenario], Outcome]:
    def rule(scenario: Scenario) -> Outcome:
        return _judged(difference(scenario, left, right), measure, claimed)

    return rule


def _near_one(estimates: Sequence[Mapping[str, Any]]) -> str:
    if any(one["n"] < FEWEST_SEEDS for one in estimates):
        return UNTESTED
    if all(CLOSE[0] <= one["low"] and one["high"] <= CLOSE[1] for one in estimates):
        return CONFIRMED
    outside = any(one["high"] < CLOSE[0] or one["low"] > CLOSE[1] for one in estimates)
    return CONTRADICTED if outside else OPEN


def _factor(scenario: Scenario) -> Outcome:
    found = scenario["moments"]
    if not found:
        return UNTESTED, "-"
    halves = [found["ratio_low"], found["ratio_high"]]
    low, high = (shown(half, ".2f") for half in halves)
    numbers = f"measured / factor {low} up to {SPLIT:g}, {high} above; Δ {shown(found['covariance'], '+.2f')}"
    if found["spread"] < SPREAD:
        return UNTESTED, f"factors don't vary (standard deviation {found['spread']:.2f}); {numbers}"
    return _near_one(halves), numbers


def _lemma(scenario: Scenario) -> Outcome:
    found = scenario["moments"].get("identity")
    if found is None or found["value"] is None:
        return UNTESTED, "-"
    words = {CONFIRMED: HOLDS, CONTRADICTED: FAILS}
    word = _near_one([found])
    return words.get(word, word), f"measured / (factor + Δ) {shown(found, '.2f')}"


def _inflates(scenario: Scenario) -> Outcome:
    found = scenario["moments"]
    if not found:
        return UNTESTED, "-"
    word, numbers = by_sign(found["excess"], 1, "+.2f")
    factor = found["predicted"]["value"]
    if word != UNTESTED and NOTHING[0] <= factor <= NOTHING[1]:
        word = NO_INFLATION
    return word, f"{numbers}; factor {factor:.2f}"


def _one(scenario: Scenario) -> Outcome:
    found = scenario["moments"].get("per_agent")
    if found is None or found["value"] is None:
        return UNTESTED, "-"
    why = "; rows compared with nothing count as 0" if found["value"] < CLOSE[0] else ""
    return _near_one([found]), shown(found, ".2f") + why


def _std(scenario: Scenario) -> Outcome:
    ablation = difference(scenario, "mean=task,std=agent", "mean=agent,std=task")
    whole = difference(scenario, "dr-mas", BASE)
    if ablation is None or whole is None:
        return UNTESTED, "-"
    word, numbers = _judged(ablation, "avg", 1)
    total, of_whole = _judged(whole, "avg", 1)
    if word == CONFIRMED and total != CONFIRMED:
        word = total if total in (UNTESTED, NO_ROOM) else OPEN
    return word, f"{numbers}; dr-mas less grpo {of_whole}"


def _row_sum(scenario: Scenario) -> Outcome:
    own, base = (scenario["methods"].get(method, {}).get("imbalance") for method in ("dr-mas", BASE))
    if own is None or base is None or min(own["n"], base["n"]) < FEWEST_SEEDS:
        return UNTESTED, "-"
    numbers = f"dr-mas {own['value']:.1e}, grpo {shown(base, '.1e')}"
    return (HOLDS if own["value"] <= ZERO < base["value"] else FAILS), numbers


NOTES = {
    ("identity", "maths-unequal"): "; grpo-turns has rewards of 0 to 1 and of 0 to 5 in one mean here: that is all it says",
}
"""(claim, scenario) -> what has to be said beside the numbers."""
CLAIMS = (
    Claim("lemma", "Lemma 4.2: the measured second moment is factor + Δ, but for chance", _lemma, kind=ARITHMETIC),
    Claim(
        "row-sum",
        "Advantages of an agent's rows sum to zero under dr-mas and not under grpo (agents without penalties)",
        _row_sum,
        kind=ARITHMETIC,
    ),
    Claim("factor", "The factor alone predicts the measured second moment: Δ is small", _factor, 2, MOMENTS),
    Claim("inflates", "Pooled statistics have a larger second moment than per-agent ones, same rows", _inflates, kind=MOMENTS),
    Claim("one", "Per-agent normalisation brings the measured second moment to about 1", _one, kind=MOMENTS),
    Claim("spikes", "dr-mas has fewer gradient spikes than grpo (share of steps)", _compared("dr-mas", BASE, "spikes", -1)),
    Claim("reward", "dr-mas ends with a higher training reward than grpo", _compared("dr-mas", BASE, "final", 1)),
    Claim("avg", "dr-mas has a higher avg@16 than grpo in the evaluation", _compared("dr-mas", BASE, "avg", 1)),
    Claim("pass", "dr-mas has a higher pass@16 than grpo in the evaluation", _compared("dr-mas", BASE, "pass", 1)),
    Claim("std", "Most of the gain comes from the std: std alone per agent beats the mean alone (avg@16)", _std, 2),
    Claim(
        "identity",
        "It is agents, not turn weighting: dr-mas ends with a higher reward than grpo-turns",
        _compared("dr-mas", "grpo-turns", "final", 1),
    ),
    Claim("team", "A team under dr-mas beats a single agent (avg@16)", _compared("dr-mas", "single-agent", "avg", 1)),
)


def summary(found: Sequence[Verdict]) -> list[str]:
    """One sentence per claim: in which scenarios it was confirmed, contradicted, open, not tested."""
    sentences = []
    for claim in CLAIMS:
        parts = []
        for word in KINDS[claim.kind]:
            names = [one.scenario for one in found if one.claim == claim.key and one.word == word]
            if names:
                parts.append(f"{word} in {len(names)} ({', '.join(names)})")
        if parts:
            sentences.append(f"{claim.text}: {'; '.join(parts)}.")
    return sentences


def comparisons(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> str:
    """How many intervals were looked at, how many exclude zero, and how many would if nothing differed from anything."""
    total = analysis["intervals"]
    cost = {claim.key: claim.intervals for claim in CLAIMS}
    deciding = sum(cost[one.claim] for one in of_kind(found, TRAINING) if one.word not in (UNTESTED, NO_ROOM))
    return (
        f"{analysis['excluding']} of {total} intervals of differences between trained methods exclude zero; at 95 % about "
        f"{total / 20:.1f} would if no method differed from any other (row sums, which differ by construction, and differences "
        f"that are one number in all seeds are not counted). {deciding} intervals decide the claims about "
        "training; by the same "
        f"count about {deciding / 20:.1f} would mislead, half of them in favour of the claim. Nothing is "
        "corrected for that, and "
        "the measures of a scenario are correlated, so that false ones come together. A t-interval of 3 seeds reaches 4.3 "
        "standard errors to each side: it is wide, and may pass the largest value that there can be; charts of differences "
        "have a small dot for each seed."
    )


def silence(scenario: Scenario) -> list[str]:
    """A sentence per agent of whose rows dr-mas compares fewer than grpo does."""
    own, base = (scenario["methods"].get(method, {}).get("agents", {}) for method in ("dr-mas", BASE))
    lines = []
    for agent in own.keys() & base.keys():
        share, usual = (of[agent]["uncompared"]["value"] for of in (own, base))
        if share is not None and usual is not None and share - usual >= SILENT:
            lines.append(
                f"{share:.0%} of the rows of {agent} are compared with nothing under dr-mas, {usual:.0%} under grpo: "
                "such a row "
                "has advantage 0, so that a lower gradient norm of this agent is partly silence, not steadiness."
            )
    return sorted(lines)


def limits(analysis: Mapping[str, Any]) -> list[str]:
    """At what scale this was, and what it doesn't say."""
    scenarios = analysis["scenarios"]
    alike: dict[str, list[str]] = {}
    for name, scenario in scenarios.items():
        size = f"{scenario['steps']} steps, {scenario['tasks']} evaluation tasks, {scenario['of']} seeds"
        alike.setdefault(_sizes(scenario["parameters"]) + size, []).append(name)
    sizes = [f"{', '.join(names)}: {size}" for size, names in alike.items()]
    few = [name for name, scenario in scenarios.items() if scenario["of"] < FEWEST_SEEDS]
    lines = ["Scale. " + "; ".join(sizes) + ". A t-interval assumes that the values of seeds are normal."] if sizes else []
    if few:
        lines.append(f"Fewer than {FEWEST_SEEDS} seeds were run of {', '.join(few)}: no claim about training is tested there.")
    lines.append(
        "What this doesn't say. Models are tiny and tasks synthetic, so that a whole comparison fits on one machine, and the "
        "evaluation draws anew from the same few dozen sums and keys as training, so that it measures what was learnt and not "
        "what carries over: no result here says that a claim holds, or fails, for pretrained models of billions of parameters "
        "on real questions. "
        "Not confirmed is no proof of absence: a small difference needs more seeds than these."
    )
    return lines


def _sizes(parameters: Mapping[str, int]) -> str:
    """How large the policies are, where the trials tell."""
    return "".join(f"{name} of {number:,} parameters, " for name, number in parameters.items())
