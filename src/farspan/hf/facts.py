"""Facts about a model that measuring and training need: devices, limits, sizes, the first non-finite output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from farspan.hf.cache import tensors
from farspan.hf.decoder import decoder_of

POSITION_TABLES = ("wpe", "embed_positions", "position_embedding", "position_embeddings")


def input_device(model: Any) -> torch.device:
    """Return the device for token ids; with weights offloaded by accelerate, the device they are loaded to."""
    embeddings = model.get_input_embeddings()
    execution = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return embeddings.weight.device if execution is None else torch.device(execution)


def position_limit(model: Any) -> int | None:
    """Return the longest text that a decoder with learned positions can read, in tokens; None where positions do not
    end. The positions of a vision tower or an encoder do not count."""
    for name, module in decoder_of(model).named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES:
            return module.num_embeddings - int(getattr(module, "offset", 0))
    return None


def key_bytes_per_token(model: Any) -> int:
    """Return the bytes of one token's keys and values over all layers, by the config; an upper bound for windows."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * key_value_heads * dim * model.dtype.itemsize


def flops(model: Any) -> tuple[float, float, float]:
    """Return the multiplications and additions for a token fed, for a pair of query and key, and for a position at
    which the output head runs. Matrices and attention count; norms and activations do not."""
    config = model.config.get_text_config(decoder=True)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {id(p) for module in ends if module for p in module.parameters()}
    body = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
    vocabulary = ends[0].num_embeddings
    return 2.0 * body, 4.0 * config.num_hidden_layers * config.hidden_size, 2.0 * config.hidden_size * vocabulary


@contextmanager
def first_not_finite(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Watch the outputs of every module inside the `with`. Yield a function that returns the name of the first module
    whose output is not finite, "" if there is none."""
    found: list[str] = []

    def watching(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def watch(module: nn.Module, given: Any, result: Any) -> None:
            floats = (t for t in tensors(result) if t.is_floating_point())
            if not found and any(not bool(t.isfinite().all()) for t in floats):
                found.append(name)

        return watch

    hooks = [module.register_forward_hook(watching(name)) for name, module in model.named_modules() if name]
    try:
        yield lambda: found[0] if found else ""
    finally:
        for hook in hooks:
            hook.remove()


def checkpoint_activations(model: Any) -> None:
    """Recompute activations inside layers for the gradient instead of keeping them."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})  # positional: the parameter's name has changed between versions
