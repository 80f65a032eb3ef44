"""`drmas eval` with a real engine, and with the models of a real run."""

import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from drmas.cli.evaluate import resolve
from drmas.config.load import load
from drmas.runtime.models import write_tiny_qwen3

TOKENS = 4


@pytest.fixture(scope="module")
def evaluate(workplace: Path, environment, command) -> Callable[..., subprocess.CompletedProcess[str]]:
    command()  # writes the recipe

    def go(*words: str) -> subprocess.CompletedProcess[str]:
        line = [str(Path(sys.executable).with_name("drmas")), "eval", *words]
        return subprocess.run(line, cwd=workplace, env=environment, capture_output=True, text=True, timeout=240, check=False)

    return go


def greedy_answer(model, tokenizer, question: str) -> str:
    """What the likeliest tokens say, by transformers."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{question}="}], add_generation_prompt=True, return_dict=False
    )
    start = len(ids)
    while len(ids) < start + TOKENS and ids[-1] != tokenizer.eos_token_id:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()


def test_a_greedy_evaluation_of_a_folder_finds_what_transformers_finds(workplace: Path, evaluate) -> None:
    """Of the tasks every other one has the model's own greedy answer as its truth: exactly those are solved, at every k."""
    folder = workplace / "evaluated"
    write_tiny_qwen3(folder, seed=11, tied=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    tasks = []
    for number in range(12):
        question, source = f"{number}+{number % 5}", "ab"[number % 3 == 0]
        truth = greedy_answer(model, tokenizer, question) if number % 2 == 0 else "never said"
        assert truth
        tasks.append({"id": f"t{number}", "prompt": question, "answer": truth, "source": source})
    (workplace / "greedy.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    done = evaluate(
        *("tiny.toml", "--model", f"main={folder}", "--samples", "3", "--output", "runs/greedy", "--json"),
        *("--eval.data", "{type = 'jsonl', path = 'greedy.jsonl'}", "--eval.temperature", "0"),
        *("--policies.main.price-per-million-tokens", "2.0"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measures = found["team"]["measures"]
    for name in ("reward", "avg@3", "pass@1", "pass@2", "pass@3"):
        assert measures[name]["micro"]["value"] == 0.5, name
    assert measures["avg@3"]["macro"]["value"] == pytest.approx((sum(n % 2 == 0 for n in range(12) if n % 3) / 8 + 2 / 4) / 2)
    assert found["team"]["failed"] == {}
    episodes = [json.loads(line) for line in (workplace / "runs/greedy/episodes/step_0.jsonl").read_text().splitlines()]
    assert len(episodes) == 36
    said, tokens = defaultdict(set), 0
    for episode in episodes:
        said[episode["task"]].add(tuple(turn["text"] for turn in episode["turns"]))
        tokens += sum(len(turn["prompt_ids"]) + len(turn["response_ids"]) for turn in episode["turns"])
    assert all(len(texts) == 1 for texts in said.values())
    assert found["team"]["solved"]["tokens"] == tokens
    assert found["team"]["solved"]["cost_each"] == pytest.approx(tokens * 2e-6 / 18)
    assert math.isfinite(found["team"]["agents"]["solver"]["seconds_mean"])
    assert (workplace / "runs/greedy/logs/engine-main.log").is_file()


def test_the_exported_model_of_a_run_and_its_checkpoint_are_the_same(uninterrupted: Path, tmp_path: Path) -> None:
    config = load(str(uninterrupted / "config.json"))
    newest = resolve(config, uninterrupted, {}, None, tmp_path)["main"]
    assert (newest.folder, list(tmp_path.iterdir())) == (uninterrupted / "export" / "main", [])
    saved = resolve(config, uninterrupted, {}, 4, tmp_path)["main"]
    assert saved.origin == f"{uninterrupted}, checkpoint of step 4"
    one, other = (load_file(model.folder / "model.safetensors") for model in (newest, saved))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (saved.folder / "tokenizer.json").is_file()
