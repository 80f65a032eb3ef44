"""vLLM's layerwise reload, with what it lacks: a check before anything changes, a way back, and the tied head.

Layerwise reload puts a model's parameters on the meta device (`start`), buffers what the checkpoint loader hands over, and
rebuilds each layer once its last element is there. On its own it accepts missing tensors, keeps bad ones for the next
attempt, and on a CPU forgets that a tied head has a packed copy of its own. Runs inside the engine's workers.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, get_numel_loaded, to_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors, get_tensor_load_numel
from vllm.platforms import current_platform

from drmas.weights.wire import Named


def start(model: nn.Module) -> None:
    """Open the model for new weights. It can't run until `finish` or `abort`."""
    initialize_layerwise_reload(model)


def check(model: nn.Module, model_config: ModelConfig, tensors: Iterable[Named]) -> None:
    """Would `tensors` (Hugging Face names; without data, of full shapes) make a whole model? Call between `start` and loading.

    The model's own loader runs on tensors without data, so names, fusions (q, k, v into one), shards and shapes are judged by
    the code that would load them. Nothing is changed. ValueError: an unknown name, a wrong shape, or elements that are missing.
    """
    loaded: Counter[tuple[str, str]] = Counter()
    wrapped = []
    for layer_name, layer in model.named_modules():
        for name, tensor in get_layer_tensors(layer).items():
            if name not in SKIP_LOAD_TENSORS:
                wrapped.append((tensor, tensor.weight_loader))
                tensor.weight_loader = _counting_loader(_get_original_loader(tensor), loaded, (layer_name, name))
    try:
        for name, tensor in tensors:
            try:
                model.load_weights([(name, tensor)])
            except (AssertionError, RuntimeError, ValueError, KeyError, IndexError) as error:
                raise ValueError(f"{name} {list(tensor.shape)} doesn't fit the engine's model: {_brief(error)}") from error
    finally:
        for tensor, loader in wrapped:
            tensor.weight_loader = loader
    missing = _missing(model, loaded, tied=bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False)))
    if missing:
        raise ValueError(f"the update is incomplete: {len(missing)} parameters lack elements, the first are {missing[:4]}")


def finish(model: nn.Module, model_config: ModelConfig) -> None:
    """Close the model after all tensors were loaded."""
    finalize_layerwise_reload(model, model_config)
    repack_tied_heads(model)


def abort(model: nn.Module, model_config: ModelConfig) -> bool:
    """Close the model after a failure, with the old tensors put back wherever a layer isn't complete.

    Returns whether all layers hold their old weights. Buffered tensors are dropped: the next update would replay them.
    """
    whole = True
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():  # this layer was complete, so it was rebuilt from new weights and its old ones are gone
            whole = False
        elif info.load_numel:  # a bias is written at once, before its layer is complete
            whole = False
            info.loaded_weights = []
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)
    repack_tied_heads(model)
    return whole


def repack_tied_heads(model: nn.Module) -> None:
    """Give a head that shares the embedding's weight a fresh packed copy of it.

    On a CPU every linear layer computes from a packed copy. Reload renews the embedding and its copy, but no checkpoint tensor
    belongs to a tied head, so that its copy would stay as it was. A GPU has no such copies.
    """
    if not current_platform.is_cpu():
        return
    embeddings = {
        module.weight.data_ptr()
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead) and module.weight.numel()
    }
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embeddings:
            module.quant_method.process_weights_after_loading(module)


def _counting_loader(
    original: Callable[..., Any], loaded: Counter[tuple[str, str]], key: tuple[str, str]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def counting_loader(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        param = bound.arguments.get("param")
        if param is not None and not param.is_meta:  # biases keep their data during a reload; count on a stand-in
            bound.arguments["param"] = to_meta_tensor(param)
        count, result = get_numel_loaded(original, bound)
        loaded[key] += count
        return result

    return counting_loader


def _missing(model: nn.Module, loaded: Counter[tuple[str, str]], *, tied: bool) -> list[str]:
    missing = []
    for layer_name, layer in model.named_modules():
        for name, param in get_layer_params_buffers(layer)[0].items():
            if name in SKIP_LOAD_TENSORS or (tied and isinstance(layer, ParallelLMHead)):
                continue
            expected, got = get_tensor_load_numel(param), loaded[layer_name, name]
            padded = isinstance(layer, VocabParallelEmbedding)  # its loader checks the unpadded size by itself
            if got == 0 or (got < expected and not padded):
                missing.append(f"{layer_name}.{name} ({got} of {expected})")
    return missing


def _brief(error: Exception) -> str:
    text = str(error).split(". The available parameters")[0].strip()
    return (text or type(error).__name__)[:300]
