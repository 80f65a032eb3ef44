"""Which stack is chosen on machines that are not there, and in which words the rest is refused."""

import subprocess
import sys

import pytest

from drmas.config.schema import PolicyConfig
from drmas.core.stack import FP8_TOKENS, PACKAGES, Stack, choose_stack
from drmas.errors import ConfigError

ALL = dict.fromkeys(PACKAGES, True)
NONE = dict.fromkeys(PACKAGES, False)
ONLY_TRITON = NONE | {"triton": True}


def choose(cuda: bool, packages: dict[str, bool], *, replicas: int = 1, **wishes) -> Stack:
    return choose_stack("main", PolicyConfig(model="", **wishes), cuda=cuda, packages=packages, replicas=replicas)


@pytest.mark.parametrize(
    ("cuda", "packages", "dtype", "layers", "attention", "why"),
    [
        (True, ALL, "bfloat16", "Transformer Engine", "transformer-engine", "on flash-attn or cuDNN"),
        (
            True,
            ALL | {"flash_attn": False},
            "bfloat16",
            "Transformer Engine",
            "transformer-engine",
            "flash-attn isn't installed",
        ),
        (True, ALL, "float32", "torch", "flex", "not transformer-engine: it takes packed rows in bfloat16, not in float32"),
        (
            True,
            ONLY_TRITON,
            "bfloat16",
            "torch",
            "flex",
            "not transformer-engine: the package transformer-engine isn't installed",
        ),
        (True, NONE, "bfloat16", "torch", "sdpa", "not flex: triton, which compiles it, isn't installed"),
        (False, ALL, "bfloat16", "torch", "sdpa", "not transformer-engine or flex: it trains on CUDA only"),
        (False, NONE, "float32", "torch", "sdpa", "not transformer-engine or flex: it trains on CUDA only"),
    ],
)
def test_auto_takes_the_fastest_that_can_be_had_and_says_why_not_the_others(cuda, packages, dtype, layers, attention, why):
    stack = choose(cuda, packages, dtype=dtype)
    assert (stack.layers, stack.attention, stack.thd) == (layers, attention, attention == "transformer-engine")
    assert stack.reasons["attention"].taken == attention
    assert why in stack.reasons["attention"].why
    assert f"attention {attention} ({stack.reasons['attention'].why})" in str(stack)


@pytest.mark.parametrize(
    ("cuda", "packages", "wishes", "message"),
    [
        (
            False,
            ALL,
            {"attention": "transformer-engine", "dtype": "bfloat16"},
            r"policies.main.attention is 'transformer-engine': it trains on CUDA only, .*; expected sdpa here, or auto",
        ),
        (
            True,
            ONLY_TRITON,
            {"attention": "transformer-engine", "dtype": "bfloat16"},
            r"attention is 'transformer-engine': the package transformer-engine isn't installed .*; expected flex or sdpa here",
        ),
        (
            True,
            ALL,
            {"attention": "transformer-engine", "dtype": "float32"},
            r"attention is 'transformer-engine': it takes packed rows in bfloat16, not in float32; expected flex or sdpa here",
        ),
        (False, ALL, {"attention": "flex"}, r"policies.main.attention is 'flex': it trains on CUDA only"),
        (
            True,
            NONE,
            {"attention": "flex"},
            r"attention is 'flex': triton, which compiles it, isn't installed; expected sdpa here",
        ),
        (False, ALL, {"fp8": "hybrid"}, r"policies.main.fp8 is 'hybrid', of TransformerEngine: it trains on CUDA only"),
        (
            True,
            ONLY_TRITON,
            {"fp8": "e4m3", "dtype": "bfloat16"},
            r"fp8 is 'e4m3', of .*: the package transformer-engine isn't",
        ),
        (True, ALL, {"fp8": "hybrid", "dtype": "float32"}, r"fp8 is 'hybrid', of .*: it takes packed rows in bfloat16"),
        (
            True,
            ALL,
            {"fp8": "hybrid", "dtype": "bfloat16", "attention": "flex"},
            r"fp8 is 'hybrid', of TransformerEngine: its layers aren't taken with attention = 'flex'; unset fp8",
        ),
    ],
)
def test_a_wish_that_cannot_be_had_is_refused_with_what_can(cuda, packages, wishes, message):
    with pytest.raises(ConfigError, match=message):
        choose(cuda, packages, **wishes)


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_another_attention_can_be_wished_for_beside_transformer_engine(attention):
    stack = choose(True, ALL, dtype="bfloat16", attention=attention)
    assert (stack.layers, stack.attention, stack.thd) == ("torch", attention, False)
    assert stack.reasons["attention"].why == "as configured"


def test_prefixes_are_shared_by_our_attention_and_the_fallback_says_how_to_get_it():
    fused = choose(True, ALL, dtype="bfloat16")
    assert not fused.shares_prefixes
    assert fused.reasons["prefix sharing"].why.endswith("keeps rows apart; attention = 'flex' shares")
    without_triton = choose(True, ALL | {"triton": False}, dtype="bfloat16")
    assert without_triton.reasons["prefix sharing"].why.endswith("attention = 'sdpa' shares")
    assert choose(True, ALL, dtype="bfloat16", attention="flex").shares_prefixes
    assert choose(False, NONE).shares_prefixes
    off = choose(False, NONE, prefix_sharing=False)
    assert (off.shares_prefixes, off.reasons["prefix sharing"]) == (False, ("off", "as configured"))


@pytest.mark.parametrize(
    ("cuda", "replicas", "wish", "expected"),
    [
        (True, 4, None, True),
        (True, 1, None, False),
        (False, 4, None, False),
        (False, 4, True, True),  # gloo can, if asked
        (True, 4, False, False),
        (True, 1, True, False),
    ],
)
def test_overlap_is_on_for_several_replicas_on_gpus_unless_said_otherwise(cuda, replicas, wish, expected):
    stack = choose(cuda, ALL, replicas=replicas, overlap=wish)
    assert stack.overlap is expected
    assert stack.reasons["overlap"].taken == ("on" if expected else "off")


def test_fp8_names_its_scaling_and_pads_the_tokens():
    plain, hybrid = choose(True, ALL, dtype="bfloat16"), choose(True, ALL, dtype="bfloat16", fp8="hybrid")
    assert (plain.fp8, plain.token_multiple) == (None, 1)
    assert (hybrid.fp8, hybrid.token_multiple) == ("hybrid", FP8_TOKENS)
    assert hybrid.reasons["fp8"].taken == "hybrid, tensorwise scaling"
    assert choose(True, ALL, dtype="bfloat16", fp8="e4m3").reasons["fp8"].taken == "e4m3, blockwise scaling"
    assert "fp8" not in plain.reasons


def test_context_parallel_says_how_keys_travel():
    ring = choose(True, ALL, dtype="bfloat16", context_parallel=2)
    assert "ring" in ring.reasons["context parallel"].why
    assert "gathers" in choose(False, NONE, context_parallel=2).reasons["context parallel"].why
    assert "context parallel" not in choose(False, NONE).reasons


def test_the_rule_can_be_asked_without_torch():
    program = "import sys, drmas.core.stack; print([name for name in ('torch', 'numpy', 'megatron') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
