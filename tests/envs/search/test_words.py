import pytest

from drmas.envs.search.words import words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The lakes of São Tomé", ["lake", "sao", "tome"]),
        ("vitamin C, element 7, U.S.", ["vitamin", "c", "element", "7", "u", "s"]),
        ("cities, horses, boxes, glass, radius, buses", ["city", "horse", "boxe", "glass", "radius", "buse"]),
        ("heroes trees gas is", ["heroes", "trees", "gas"]),
        ("東京 Tower タワー", ["東", "京", "tower", "タ", "ワ", "ー"]),
        ("ＦＵＬＬ ﬁre straße", ["full", "fire", "strasse"]),
        ("Москва Ελλάδα", ["москва", "ελλαδα"]),
        ("the of _ — !?", []),
        ("", []),
    ],
)
def test_words(text, words):
    assert words_of(text) == words
