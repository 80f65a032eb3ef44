"""What sections of a configuration take from one another before they are checked, so that every value stands in the result.

Two rules, which `RunConfig` applies to the table that it is made from: a policy that is `like` another has that one's settings
where it sets none of its own, and an advantage preset brings settings of other sections that its paper names. What the table
itself sets goes first, so that a run's config.json, which sets everything, reads back as it is.
"""

from __future__ import annotations

from typing import Any

Table = dict[str, Any]

COMPANIONS: dict[str, Table] = {
    "dapo": {
        "loss": {"clip_high": 0.28, "aggregation": "token", "kl": None},
        "rollout": {"dynamic": {"enabled": True}},
    },
}
"""Advantage preset -> what it sets elsewhere. DAPO's (arXiv 2503.14476, sections 2.3 and 3.1 to 3.3) are a wider upper bound of
the ratio, the loss over tokens, dynamic sampling, and no KL term."""


def completed(table: Table) -> Table:
    """`table` with what its sections take from one another. ValueError: a policy is like one that isn't there, or itself."""
    preset = table["advantage"].get("preset") if isinstance(table.get("advantage"), dict) else None
    policies = table.get("policies")
    if isinstance(policies, dict) and all(isinstance(policy, dict) for policy in policies.values()):
        table = {**table, "policies": {name: _like(name, policies) for name in policies}}
    return merged(COMPANIONS[preset], table) if isinstance(preset, str) and preset in COMPANIONS else table


def merged(under: Table, over: Table) -> Table:
    """Both tables as one; where both set a key, `over` goes first, and tables in tables are merged alike."""
    tables = [key for key in under.keys() & over.keys() if isinstance(under[key], dict) and isinstance(over[key], dict)]
    return {**under, **over, **{key: merged(under[key], over[key]) for key in tables}}


def _like(name: str, policies: Table, *, asked: tuple[str, ...] = ()) -> Table:
    own = {key: value for key, value in policies[name].items() if key != "like"}
    other = policies[name].get("like")
    if other is None:
        return own
    if not isinstance(other, str) or other not in policies or other in (*asked, name):
        others = ", ".join(key for key in policies if key not in (*asked, name))
        expected = f"one of {others}" if others else "another policy, and there is none"
        raise ValueError(f"policies.{name}.like is {other!r}; expected {expected}")
    return merged(_like(other, policies, asked=(*asked, name)), own)
