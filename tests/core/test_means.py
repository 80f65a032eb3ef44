"""The mean: of equal values that value, of nothing nothing."""

import math

from drmas.core.means import mean_of


def test_of_equal_values_it_is_that_value_and_in_any_order_the_same():
    assert mean_of([0.1] * 3) == 0.1
    values = [1e16, 1.0, -1e16, 3.0]
    assert mean_of(values) == mean_of(values[::-1]) == 1.0
    assert mean_of([True, True]) == 1.0
    assert type(mean_of([True])) is float


def test_of_nothing_it_is_none_and_what_is_not_finite_stays_so():
    assert mean_of([]) is None
    assert mean_of([math.inf, math.inf]) == math.inf
    for values in ([1.0, math.nan], [math.nan, 1.0], [math.nan]):
        assert math.isnan(mean_of(values))
