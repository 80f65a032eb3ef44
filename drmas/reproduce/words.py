"""The words of the report: what became of each claim in each scenario, by rule from the numbers of `analysis`.

A claim about a difference looks at the 95 % interval over seeds of the paired difference:

    confirmed      all of it lies on the side that is claimed
    contradicted   all of it lies on the other side
    not confirmed  it holds zero: the data don't tell
    not tested     fewer than 3 seeds have both sides, or a method wasn't run

and the claims that aren't:

    formula   the measured second moment over the predicted one, for predictions up to their median and above it: confirmed if
              both intervals lie in 0.8 to 1.25, contradicted if one lies outside wholly
    inflates  the measured second moment under the pooled baseline less 1, as a difference
    one       that under per-agent statistics: confirmed if its interval lies in 0.8 to 1.25, contradicted if outside wholly
    std       the std-only ablation's avg less that of the mean-only one, as a difference; confirmed only if all of dr-mas gains
              over grpo, too, since otherwise there is nothing whose larger part it could be
    row-sum   mean |sum of advantages| / rows: confirmed if dr-mas has at most 1e-5 and grpo's interval lies above that,
              contradicted if dr-mas has more, or grpo no more

Pure; called by `drmas.reproduce.page`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drmas.reproduce.analysis import BASE

CONFIRMED, OPEN, CONTRADICTED, UNTESTED = "confirmed", "not confirmed", "contradicted", "not tested"
WORDS = (CONFIRMED, OPEN, CONTRADICTED, UNTESTED)
FEWEST_SEEDS = 3
CLOSE = (0.8, 1.25)
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


@dataclass(frozen=True, slots=True)
class Verdict:
    claim: str
    scenario: str
    word: str
    numbers: str


def verdicts(analysis: Mapping[str, Any]) -> list[Verdict]:
    """One per claim and scenario, in the order of `CLAIMS` and of scenarios."""
    return [
        Verdict(claim.key, name, *claim.rule(scenario)) for claim in CLAIMS for name, scenario in analysis["scenarios"].items()
    ]


def shown(estimate: Mapping[str, Any] | None, form: str = ".3f", *, seeds: bool = True) -> str:
    """`0.412 [0.361, 0.466]`, and unless told otherwise the number of seeds where some are missing or fewer than 3; or '-'."""
    if estimate is None or estimate["value"] is None:
        return "-"
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
    word = CONFIRMED if low > 0 else CONTRADICTED if high < 0 else OPEN
    return word, shown(estimate, form)


def _compared(left: str, right: str, measure: str, claimed: int) -> Callable[[Scenario], Outcome]:
    def rule(scenario: Scenario) -> Outcome:
        found = difference(scenario, left, right)
        return by_sign(found and found[measure], claimed)

    return rule


def _near_one(estimates: Sequence[Mapping[str, Any]]) -> str:
    if any(one["n"] < FEWEST_SEEDS for one in estimates):
        return UNTESTED
    if all(CLOSE[0] <= one["low"] and one["high"] <= CLOSE[1] for one in estimates):
        return CONFIRMED
    outside = any(one["high"] < CLOSE[0] or one["low"] > CLOSE[1] for one in estimates)
    return CONTRADICTED if outside else OPEN


def _formula(scenario: Scenario) -> Outcome:
    found = scenario["moments"]
    if not found:
        return UNTESTED, "-"
    halves = [found["ratio_low"], found["ratio_high"]]
    fitted = found["r2_log"]
    low, high = (shown(half, ".2f") for half in halves)
    return _near_one(halves), (
        f"measured / predicted {low} up to {found['median_predicted']:.2f}, {high} above; "
        f"R² {'-' if fitted is None else f'{fitted:.2f}'}"
    )


def _inflates(scenario: Scenario) -> Outcome:
    pooled = scenario["moments"].get("pooled")
    if pooled is None:
        return UNTESTED, "-"
    less_one = {**pooled, **{key: pooled[key] and pooled[key] - 1 for key in ("value", "low", "high")}}
    return by_sign(less_one, 1)[0], shown(pooled, ".2f")


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
    word, numbers = by_sign(ablation["avg"], 1)
    total, of_whole = by_sign(whole["avg"], 1)
    if word == CONFIRMED and total != CONFIRMED:
        word = UNTESTED if total == UNTESTED else OPEN
    return word, f"{numbers}; dr-mas less grpo {of_whole}"


def _row_sum(scenario: Scenario) -> Outcome:
    own, base = (scenario["methods"].get(method, {}).get("imbalance") for method in ("dr-mas", BASE))
    if own is None or base is None or min(own["n"], base["n"]) < FEWEST_SEEDS:
        return UNTESTED, "-"
    numbers = f"dr-mas {own['value']:.1e}, grpo {shown(base, '.1e')}"
    if own["value"] > ZERO or base["value"] <= ZERO:
        return CONTRADICTED, numbers
    return (CONFIRMED if base["low"] > ZERO else OPEN), numbers


CLAIMS = (
    Claim("formula", "The inflation factor of Lemma 4.2 predicts the measured second moment", _formula, 2),
    Claim("inflates", "The pooled baseline inflates the second moment (measured above 1)", _inflates),
    Claim("one", "Per-agent normalisation brings the measured second moment to about 1", _one),
    Claim("spikes", "dr-mas has fewer gradient spikes than grpo (share of steps)", _compared("dr-mas", BASE, "spikes", -1)),
    Claim("reward", "dr-mas ends with a higher training reward than grpo", _compared("dr-mas", BASE, "final", 1)),
    Claim("avg", "dr-mas has a higher avg@16 than grpo on held-out tasks", _compared("dr-mas", BASE, "avg", 1)),
    Claim("pass", "dr-mas has a higher pass@16 than grpo on held-out tasks", _compared("dr-mas", BASE, "pass", 1)),
    Claim("std", "Most of the gain comes from the std: std alone per agent beats the mean alone (avg@16)", _std, 2),
    Claim("row-sum", "Advantages of an agent's rows sum to zero under dr-mas and not under grpo", _row_sum),
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
        for word in WORDS:
            names = [one.scenario for one in found if one.claim == claim.key and one.word == word]
            if names:
                parts.append(f"{word} in {len(names)} ({', '.join(names)})")
        if parts:
            sentences.append(f"{claim.text}: {'; '.join(parts)}.")
    return sentences


def comparisons(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> str:
    """How many intervals were looked at, and how many would mislead if nothing differed from anything."""
    total = analysis["intervals"]
    cost = {claim.key: claim.intervals for claim in CLAIMS}
    deciding = sum(cost[one.claim] for one in found if one.word != UNTESTED)
    return (
        f"{total} intervals of differences between trained methods were computed. At 95 % about {total / 20:.1f} would exclude "
        f"zero if no method differed from any other. {deciding} intervals decide the claims above; by the same count about "
        f"{deciding / 20:.1f} would mislead, half of them in favour of the claim. Nothing is corrected for that, and the "
        "measures of a scenario are correlated, so that false ones come together."
    )


def limits(analysis: Mapping[str, Any]) -> list[str]:
    """At what scale this was, and what it doesn't say."""
    scenarios = analysis["scenarios"]
    alike: dict[str, list[str]] = {}
    for name, scenario in scenarios.items():
        size = f"{scenario['steps']} steps, {scenario['tasks']} held-out tasks, {scenario['of']} seeds"
        alike.setdefault(_sizes(scenario["parameters"]) + size, []).append(name)
    sizes = [f"{', '.join(names)}: {size}" for size, names in alike.items()]
    few = [name for name, scenario in scenarios.items() if scenario["of"] < FEWEST_SEEDS]
    lines = ["Scale. " + "; ".join(sizes) + ". A t-interval assumes that the values of seeds are normal."] if sizes else []
    if few:
        lines.append(f"Fewer than {FEWEST_SEEDS} seeds were run of {', '.join(few)}: no claim about training is tested there.")
    lines.append(
        "What this doesn't say. Models are tiny and tasks synthetic, so that a whole comparison fits on one machine: no result "
        "here says that a claim holds, or fails, for pretrained models of billions of parameters on real questions. "
        "Not confirmed is no proof of absence: a small difference needs more seeds than these."
    )
    return lines


def _sizes(parameters: Mapping[str, int]) -> str:
    """How large the policies are, where the trials tell."""
    return "".join(f"{name} of {number:,} parameters, " for name, number in parameters.items())
