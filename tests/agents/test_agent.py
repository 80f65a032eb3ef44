from __future__ import annotations

import pytest
from pydantic import ValidationError

from drmas.agents.agent import AgentConfig


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"])
def test_I11_sampling_that_the_trainer_cannot_mirror_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match=f"{key} is 0.9; .* can't mirror {key}; remove it"):
        AgentConfig.model_validate({key: 0.9})


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 0},
        {"max_tokens": 0},
        {"invalid_penalty": -0.1},
        {"stop": [""]},
        {"parser": "boxd"},
        {"tempo": 1},
        {"retries": -1},
        {"on_invalid": "open"},
        {"overlong": "cut"},
        {"max_tool_calls": 0},
        {"max_staleness": -1},
        {"parser": None},
    ],
)
def test_bad_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValidationError):
        AgentConfig.model_validate(bad)


@pytest.mark.parametrize("buffer", [8, 9])
def test_a_length_buffer_that_holds_every_response_is_refused(buffer: int) -> None:
    with pytest.raises(ValidationError, match=f"length_buffer is {buffer} and max_tokens is 8; .*set length_buffer below"):
        AgentConfig(max_tokens=8, length_buffer=buffer)
    assert AgentConfig(max_tokens=8, length_buffer=7).length_penalty == 1.0


def test_placeholders_of_both_templates() -> None:
    agent = AgentConfig(system="You check {subject}.", prompt="{question} {{not_this}}")
    assert agent.placeholders == {"subject", "question"}


def test_tags_of_both_templates() -> None:
    agent = AgentConfig(system="Between <answer> and </answer>.", prompt="<solution>{solution}</solution>")
    assert agent.tags == {"answer", "solution"}
