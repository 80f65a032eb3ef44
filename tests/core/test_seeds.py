import itertools

from drmas.core.seeds import sample_seed


def test_I9_a_seed_is_a_known_function_of_the_call():
    assert sample_seed(0, 0, "sums/17", 0, "solver", 0) == 6577628060678439348


def test_every_call_of_a_step_has_its_own_seed():
    calls = itertools.product(range(2), (f"task/{i}" for i in range(48)), range(4), ("solver", "verifier"), range(4))
    seeds = [sample_seed(1, step, task, sample, agent, turn) for step, task, sample, agent, turn in calls]
    assert len(set(seeds)) == len(seeds) == 2 * 48 * 4 * 2 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_fields_do_not_run_into_each_other():
    assert sample_seed(0, 0, "a", 1, "b", 0) != sample_seed(0, 0, 'a", 1, "b', 1, "b", 0)
    assert sample_seed(1, 11, "a", 0, "b", 0) != sample_seed(11, 1, "a", 0, "b", 0)
    assert sample_seed(0, 0, "1", 0, "b", 0) != sample_seed(0, 0, "", 10, "b", 0)
