from __future__ import annotations

from drmas.core.names import expected_names


def test_nearest_and_the_whole_list_where_it_is_short() -> None:
    assert expected_names("sover", ["verifier", "solver"]) == "the nearest is 'solver'; expected one of solver, verifier"


def test_nearest_alone_in_a_long_list() -> None:
    names = [f"generator_{i}" for i in range(100)]
    assert expected_names("generator_7x", names).startswith("the nearest is 'generator_")
    assert "expected one of" not in expected_names("generator_7x", names)


def test_nothing_near_lists_the_first_names() -> None:
    assert expected_names("zzz", [f"generator_{i:03d}" for i in range(20)]).endswith("generator_011 and 8 more")


def test_nothing_to_choose_from() -> None:
    assert expected_names("x", []) == "there are none to choose from"
