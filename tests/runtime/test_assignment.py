"""Who speaks with which weights is configuration alone: shared, separate, of two families, an adapter per agent, mixed."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drmas.telemetry.episodes import read_episodes

QWEN = '[policies.{name}]\nmodel = "tiny:qwen3"\nlr = 1e-3\n'
LLAMA = '[policies.{name}]\nmodel = "llama"\nlr = 1e-3\n'
ADAPTER = QWEN + "lora = {{rank = 4}}\n"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small model of another family, whose tokenizer merges digits and signs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [f"{a}+{b}={a + b}?yes no" for a in range(10) for b in range(10)]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    folder = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("solver", "verifier", "policies"),
    [
        ("main", "main", [QWEN.format(name="main")]),
        ("first", "second", [QWEN.format(name="first"), QWEN.format(name="second")]),
        ("first", "second", [QWEN.format(name="first"), LLAMA.format(name="second")]),
        ("first", "second", [ADAPTER.format(name="first"), ADAPTER.format(name="second")]),
        ("first", "second", [LLAMA.format(name="first"), ADAPTER.format(name="second")]),
    ],
    ids=["shared", "separate", "two families", "an adapter each", "a family and an adapter"],
)
def test_agents_train_with_the_policies_that_the_recipe_names(
    scripted_run, metrics_of, tmp_path, llama, solver: str, verifier: str, policies: list[str]
) -> None:
    run = scripted_run(tmp_path, "\n".join(policies))
    done, folder = run("--team.solver.policy", solver, "--team.verifier.policy", verifier)
    assert done.returncode == 0, done.stderr
    steps = metrics_of(folder)
    by_agent = {"solver": solver, "verifier": verifier}
    for agent, policy in by_agent.items():
        assert all(step[f"train/{policy}/{agent}/grad_norm"] > 0 for step in steps)
        assert [step[f"sync/{policy}/version"] for step in steps] == [1, 2]
    assert sorted(path.name for path in (folder / "export").iterdir()) == sorted({solver, verifier})
    tokenizers = {policy: AutoTokenizer.from_pretrained(folder / "export" / policy) for policy in {solver, verifier}}
    for episode in read_episodes(folder, 2):
        for turn in episode["turns"]:
            assert turn["policy"] == by_agent[turn["agent"]]
            # what was trained are the ids of the agent's own tokenizer (I1), for the text that the agents exchanged
            said = tokenizers[turn["policy"]].decode(turn["response_ids"], skip_special_tokens=True)
            assert said == turn["text"]
        question = episode["question"]
        checked = next(turn for turn in episode["turns"] if turn["agent"] == "verifier")
        read = tokenizers[verifier].decode(checked["prompt_ids"], skip_special_tokens=True)
        assert read.startswith(f"{question}={episode['turns'][0]['text']}")
