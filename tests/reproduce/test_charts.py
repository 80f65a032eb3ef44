"""Charts: grpo is orange and the other method blue, wherever they are drawn."""

import re

from drmas.reproduce.analysis import analyse
from drmas.reproduce.charts import all_moments, identity, of_scenario
from drmas.reproduce.results import Results, Trial
from tests.reproduce.fabricated import reproduction


def charts(methods, scenario: str = "maths-shared") -> dict[str, str]:
    trials = reproduction(seeds=2, scenarios=(scenario,), methods=methods)
    found = analyse(Results([Trial.model_validate(one) for one in trials], {}, None, []))
    drawn = [*of_scenario(found["scenarios"][scenario]), all_moments(found, []), identity(found)]
    return {re.search('aria-label="(.*?)"', svg).group(1): svg for svg in drawn}


def legend(svg: str) -> list[tuple[str, str]]:
    """(colour, name)"""
    return re.findall(r'<rect class="bar (s\d)"[^>]*/><text class="legend"[^>]*>(.*?)</text>', svg)


def test_each_method_is_drawn_beside_grpo():
    found = charts(("grpo", "dr-mas", "rloo"))
    assert legend(found["Reward: rloo"]) == [("s1", "grpo"), ("s0", "rloo")]
    assert legend(found["Reward: dr-mas"]) == legend(found["Gradient norm: verifier"]) == [("s1", "grpo"), ("s0", "dr-mas")]
    assert "Reward: grpo" not in found
    assert found["Final reward less grpo&#x27;s"].count("<circle") == 2
    assert 'class="reference"' in found["Inflation factor: solver"]


def test_a_method_alone_keeps_its_colour():
    assert legend(charts(("grpo",))["Reward: grpo"]) == [("s1", "grpo")]
    assert legend(charts(("dr-mas",))["Reward: dr-mas"]) == [("s0", "dr-mas")]


def test_reward_charts_of_a_scenario_have_one_scale():
    found = charts(("grpo", "dr-mas", "rloo", "single-agent"))
    ticks = {tuple(re.findall(r'text-anchor="end">(.*?)<', svg)) for name, svg in found.items() if name.startswith("Reward")}
    assert len(ticks) == 1


def test_second_moments_are_dots_and_crosses():
    found = charts(("grpo", "dr-mas"))
    for name in ("Second moment, measured", "Second moment and factor"):
        dots, crosses = (
            re.search(f'class="{kind} s\\d"[^>]* d="(.*?)"', found[name]).group(1) for kind in ("points", "crosses")
        )
        assert dots.count("M") == crosses.count("M") == 2 * 2 * 2 * 6, "methods, seeds, agents, measured steps"
        assert legend(found[name]) == [("s0", "pooled"), ("s1", "per agent")]
        assert "<title>pooled: " in found[name]
    assert found["Arithmetic: with Δ"].count("h0") == 2 * 2 * 2 * 6
