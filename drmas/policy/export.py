"""A policy as a Hugging Face folder that transformers and vLLM open: config.json, safetensors, tokenizer.

Everything but the weights comes from the folder that the policy was loaded from. Called by the trainer on all of the policy's
ranks; the first one writes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drmas.errors import CheckpointError
from drmas.policy import folders
from drmas.policy.convert import WeightSource

SHARD_BYTES = 4 * 2**30
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)

Metadata = list[tuple[str, torch.dtype, tuple[int, ...]]]


def write_hf_folder(source: WeightSource, *, model_path: Path, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `folder` from `source` and the other files of `model_path`. CheckpointError, on every rank: it can't be written."""
    writes = source.groups.whole.rank() == 0

    def lead(action: Callable[[], Any]) -> Any:
        return source.groups.on_leader(lambda: _guarded(action, folder))

    partial = lead(lambda: _begin(folder, model_path, source.metadata()))
    shards = _shards(source.metadata(), shard_bytes)
    tensors = iter(source)
    for number, names in enumerate(shards, start=1):
        # Gathering is collective: every rank draws the shard's tensors, the first keeps and writes them.
        held = dict(_drawn(tensors, len(names), keep=writes))
        file = partial / _file_name(number, len(shards))
        lead(lambda held=held, file=file: save_file(held, file, metadata={"format": "pt"}))
    lead(lambda: _finish(folder, partial, source.metadata(), shards))


def _guarded(action: Callable[[], Any], folder: Path) -> Any:
    try:
        return action()
    except (OSError, SafetensorError) as error:
        folders.abandon(folder)
        raise CheckpointError(f"{folder} can't be written: {error}") from error


def _drawn(tensors: Iterator[tuple[str, torch.Tensor]], count: int, *, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for _ in range(count):
        name, tensor = next(tensors)
        if keep:
            yield name, tensor.cpu().contiguous()


def _begin(folder: Path, model_path: Path, metadata: Metadata) -> Path:
    partial = folders.begin(folder)
    config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(metadata[0][1]).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in _COPIED:
        for file in model_path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, partial / file.name)
    return partial


def _finish(folder: Path, partial: Path, metadata: Metadata, shards: list[list[str]]) -> None:
    if len(shards) > 1:
        files = {name: _file_name(number, len(shards)) for number, names in enumerate(shards, start=1) for name in names}
        index = {"metadata": {"total_size": sum(_size(entry) for entry in metadata)}, "weight_map": files}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    folders.commit(folder)


def _size(entry: tuple[str, torch.dtype, tuple[int, ...]]) -> int:
    _, dtype, shape = entry
    return dtype.itemsize * torch.Size(shape).numel()


def _shards(metadata: Metadata, shard_bytes: int) -> list[list[str]]:
    """Names per file, in order; a file holds at most `shard_bytes` unless one tensor is larger."""
    shards: list[list[str]] = [[]]
    held = 0
    for entry in metadata:
        if shards[-1] and held + _size(entry) > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(entry[0])
        held += _size(entry)
    return shards


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
