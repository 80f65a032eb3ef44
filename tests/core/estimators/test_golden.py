"""The first implementation's recorded numbers, where its rule can be expressed; and where drmas differs on purpose."""

import math

import pytest

from drmas.core.estimators import Evidence, resolve
from drmas.core.estimators.gigpo import _step_returns
from drmas.types import Row


@pytest.fixture(scope="session")
def vectors(golden):
    return {vector["id"]: vector for vector in golden["vectors"]}


def rows_of(vector) -> list[Row]:
    """A score has its penalty in it. Steps of an environment, if there are any, are the turns; what was seen is the prompt."""
    seen: dict[str, int] = {}
    return [
        Row(
            task=row["task"],
            episode=row["episode"],
            agent=row["agent"],
            policy="main",
            turn=row.get("env_step", row["turn"]),
            prompt_ids=[seen.setdefault(row.get("anchor", ""), len(seen))],
            response_ids=[7] * row["response_len"],
            logprobs=[0.0] * row["response_len"],
            versions=[0] * row["response_len"],
            reward=row["score"],
        )
        for row in vector["rows"]
    ]


def tokens(vector) -> list[list[float]]:
    """Without what the first implementation writes beyond a response's end."""
    pairs = zip(vector["expected"]["token_advantage"], vector["rows"], strict=True)
    return [numbers[: row["response_len"]] for numbers, row in pairs]


def check_tokens(found, vector, tolerance):
    for got, expected in zip(found.tokens.values, tokens(vector), strict=True):
        assert got == pytest.approx(expected, **tolerance)


def test_reinforce_pp_baseline(vectors, golden):
    found = resolve("reinforce++-baseline")(rows_of(vectors["B01"]))
    assert found.values == pytest.approx(vectors["B01"]["expected"]["row_advantage"], **golden["tolerance"])


def test_reinforce_pp(vectors, golden):
    check_tokens(resolve("reinforce++")(rows_of(vectors["P01"])), vectors["P01"], golden["tolerance"])


def test_remax(vectors, golden):
    """The baseline comes with every row there, with every task here."""
    assert vectors["M01"]["reward_baselines"] == [0.5, 0.5]
    found = resolve("remax")(rows_of(vectors["M01"]), Evidence(baselines={"u1": {"greedy": [0.5]}}))
    assert found.values == pytest.approx(vectors["M01"]["expected"]["row_advantage"], **golden["tolerance"])


def test_gae_with_one_pool(vectors, golden):
    vector = vectors["V01"]
    values = [own[: row["response_len"]] for own, row in zip(vector["values"], vector["rows"], strict=True)]
    found = resolve("ppo", whiten="pooled")(rows_of(vector), Evidence({"main": values}))
    check_tokens(found, vector, golden["tolerance"])
    for got, expected, row in zip(found.tokens.returns, vector["expected"]["token_return"], vector["rows"], strict=True):
        assert got == pytest.approx(expected[: row["response_len"]], **golden["tolerance"])


@pytest.mark.parametrize(("name", "mean", "weighting"), [("S01", "task", "episode"), ("S03", "agent", "turn")])
def test_gigpo(vectors, golden, name, mean, weighting):
    """Its steps are those of an environment, in which all agents speak; ours are turns. A lone row keeps its score there."""
    settings = {"std": "none", "anchor_norm": "mean", "gamma": 0.95, "singleton": "raw", "penalty": "inside"}
    found = resolve("gigpo", mean=mean, weighting=weighting, **settings)(rows_of(vectors[name]))
    assert found.values == pytest.approx(vectors[name]["expected"]["row_advantage"], **golden["tolerance"])


def test_gigpo_lets_a_lone_row_be_zero(vectors):
    """No agent of S03 is alone; in its first two episodes the answer of each is in another state, and 1 against 0."""
    rows = [row for row in rows_of(vectors["S03"]) if row.agent == "Answer"][:1]
    assert resolve("gigpo", std="none", anchor_norm="mean", gamma=0.95)(rows).values == [0.0]
    assert resolve("gigpo", std="none", anchor_norm="mean", gamma=0.95, singleton="raw")(rows).values == [1.0]


def test_step_returns(golden):
    recorded = golden["auxiliary"]["discounted_step_returns"]
    totals: dict[str, dict[int, float]] = {}
    for row in recorded["rows"]:
        totals.setdefault(row["traj_index"], {})[row["env_step"]] = row["env_reward"]
    rows = [
        Row("t", row["traj_index"], "a", "main", row["env_step"], [1], [2], [0.0], [0], sum(totals[row["traj_index"]].values()))
        for row in recorded["rows"]
    ]
    found = _step_returns(rows, range(len(rows)), recorded["gamma"])
    assert [row.reward for row in found] == pytest.approx(recorded["expected"], **golden["tolerance"])


def test_penalties_are_normalised_where_asked_for(vectors, golden):
    """The recorded scores have them in; given apart, with penalty "inside", they make the same numbers."""
    vector = vectors["G15"]
    rows = rows_of(vector)
    for row in rows:
        row.penalty = 0.1 if not float(row.reward).is_integer() else 0.0
        row.reward = float(round(row.reward + row.penalty))
    assert sum(row.penalty for row in rows) == pytest.approx(0.2)
    found = resolve("dr-mas-paper")(rows)
    assert found.values == pytest.approx(vector["expected"]["row_advantage"], **golden["tolerance"])
    outside = resolve("dr-mas")(rows).values
    half = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert outside == pytest.approx([half, half, half - 0.1, half, -half, -half - 0.1, -half, -half])
    for preset in ("reinforce++", "reinforce++-baseline"):
        mixed = [row.reward - row.penalty for row in rows]
        bare = [Row(**{**row.to_dict(), "reward": score, "penalty": 0.0}) for row, score in zip(rows, mixed, strict=True)]
        assert resolve(preset, penalty="inside")(rows).values == pytest.approx(resolve(preset)(bare).values, abs=1e-12)
