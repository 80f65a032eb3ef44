"""Which of vLLM's engine arguments a user may set."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from vllm.config.lora import MaxLoRARanks

from drmas.errors import EngineStartError
from drmas.rollout.vllm_options import ALLOWED, DEFAULTS, OWN_KEYS, check_options
from drmas.rollout.vllm_process import ADAPTER_RANKS, adapter_arguments, engine_arguments


@pytest.mark.parametrize(
    "name",
    [
        "quantization",
        "hf_overrides",
        "kv_cache_dtype",
        "speculative_config",
        "logits_processors",
        "enable_lora",
        "model_class_overrides",
        "distributed_executor_backend",
        "scheduler_cls",
        "compilation_config",
        "model_impl",
        "load_format",
    ],
)
def test_I11_what_changes_the_distribution_or_loads_code_is_refused_by_name(name):
    with pytest.raises(EngineStartError, match=rf"policies\.p\.engine\.options\.{name} can't be passed on.*\(I11\)"):
        check_options("p", {"block_size": 16, name: "x"}, fixed=())


def test_an_unknown_option_is_refused_with_the_nearest_one():
    with pytest.raises(EngineStartError, match="nearest is 'max_num_batched_tokens'"):
        check_options("p", {"max_num_batched_token": 512}, fixed=())


def test_an_option_for_which_there_is_a_key_names_the_key():
    with pytest.raises(EngineStartError, match=r"max_num_seqs is set by drmas; use policies\.p\.engine\.max_concurrent"):
        check_options("p", {"max_num_seqs": 4}, fixed=())


def test_what_drmas_fixes_on_a_cpu_may_be_set_on_a_gpu():
    options = {"enforce_eager": True, "block_size": 16, "max_num_batched_tokens": 8192}
    check_options("p", options, engine_arguments("cuda") | {"max_num_batched_tokens": 4096})
    with pytest.raises(EngineStartError, match=r"options\.enforce_eager is set by drmas for this device; leave it out"):
        check_options("p", options, engine_arguments("cpu"))


def test_every_name_is_one_of_vllms():
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert known >= ALLOWED | OWN_KEYS.keys() | DEFAULTS
    assert not ALLOWED & OWN_KEYS.keys()
    assert known >= adapter_arguments(4).keys()


def test_adapters_get_the_least_room_that_vllm_has_for_their_rank():
    assert get_args(MaxLoRARanks) == ADAPTER_RANKS
    assert [adapter_arguments(rank)["max_lora_rank"] for rank in (1, 4, 8, 9, 512, 513)] == [1, 8, 8, 16, 512, 513]
