from __future__ import annotations

from collections import Counter

import pytest

from drmas.reproduce.plan import ALONE, METHODS, PILOT_SEED, SCENARIOS, SINGLE, START, scale, trials


@pytest.mark.parametrize("quick", [True, False])
def test_every_method_runs_in_every_scenario_with_every_seed(quick) -> None:
    planned, seeds = trials(quick=quick), range(scale(quick=quick).seeds)
    assert len({trial.key for trial in planned}) == len(planned)
    run = {(trial.scenario, trial.method, trial.seed) for trial in planned if trial.method != START}
    teams = [(scenario, method) for scenario in SCENARIOS for method in METHODS if method != SINGLE]
    alone = [(scenario, SINGLE) for scenario in ALONE]
    assert run == {(*each, seed) for each in teams + alone for seed in seeds}
    assert PILOT_SEED not in seeds
    assert len(seeds) >= (3 if quick else 5)


def test_starts_come_first_and_all_methods_of_a_seed_share_one() -> None:
    seen, shared = set(), Counter()
    for trial in trials(quick=True):
        assert all(key in seen for key in trial.after)
        seen.add(trial.key)
        if trial.method not in (START, SINGLE):
            (start,) = trial.after
            assert start.endswith(f"/{START}/seed-{trial.seed}")
            shared[start] += 1
    assert set(shared.values()) == {6, 12}  # maths-unequal starts where maths-shared does
