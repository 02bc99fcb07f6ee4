"""A model's decoder and its output head, run separately."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from farspan.hf.products import by_onednn


def decoder_of(model: Any) -> Any:
    """Return the module that turns token ids into the last hidden states, without a vision tower or an encoder."""
    found = model.get_decoder()
    # ModernBERT-decoder names its output matrix `decoder`, so transformers returns that matrix
    return model.base_model if found is model.get_output_embeddings() else found


def forward(model: Any, ids: Tensor, start: int | Tensor, arguments: dict[str, Any], parameters: Any) -> Any:
    """Run the model on `ids`. `start`: the position of the first token, or of every token."""
    if "position_ids" in parameters:
        if not isinstance(start, Tensor):
            start = torch.arange(start, start + ids.shape[1], device=ids.device)
        arguments["position_ids"] = start.expand(ids.shape[0], -1)
    with by_onednn(ids.device):
        return decoder_of(model)(input_ids=ids, **arguments)


def plain_hidden(
    model: Any, ids: Int[Tensor, "batch time"], start: int = 0
) -> tuple[Float[Tensor, "batch time hidden"], Any]:
    """Return the last hidden states of one forward over a whole text, and the decoder's output that holds them."""
    parameters = inspect.signature(model.forward).parameters
    _reset_dynamic_rope(model)
    output = forward(model, ids, start, {"use_cache": False}, parameters)
    return output[0], output


def _reset_dynamic_rope(model: Any) -> None:
    """Give RoPE of type dynamic its frequencies for short texts: transformers keeps those of the longest text so far,
    which would make scores depend on earlier texts."""
    for module in decoder_of(model).modules():
        kinds = getattr(module, "rope_type", None)
        # a model with several RoPEs has one module, with a dictionary by type of layer
        named = [(f"{layer}_", kind) for layer, kind in kinds.items()] if isinstance(kinds, dict) else [("", kinds)]
        for prefix, kind in named:
            if kind == "dynamic" and hasattr(module, f"{prefix}original_inv_freq"):
                own = getattr(module, f"{prefix}original_inv_freq")
                setattr(module, f"{prefix}inv_freq", own.to(getattr(module, f"{prefix}inv_freq").device))
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def logits(
    model: Any, hidden: Float[Tensor, "batch time hidden"], output: Any
) -> Float[Tensor, "batch time vocabulary"]:
    """Return the logits of hidden states from `output`, as the model itself computes them.

    The model runs with its decoder stubbed to return `hidden`, so that family-specific post-processing (soft caps,
    scaling) is the model's own code.
    """
    part = copy(output)
    part[next(iter(part.keys()))] = hidden
    any_ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with stubbed(decoder_of(model), part), by_onednn(hidden.device):
        return model(input_ids=any_ids).logits


@contextmanager
def stubbed(base: nn.Module, output: Any) -> Iterator[None]:
    """Let `base` return `output` for any input inside the `with`."""
    before = base.__dict__.get("forward")  # accelerate stores its own there
    base.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before


@contextmanager
def watched_decoder(model: Any) -> Iterator[list[Any]]:
    """Yield a list that collects the decoder's output of each forward; `logits` computes logits from it."""
    seen: list[Any] = []
    hook = decoder_of(model).register_forward_hook(lambda module, given, output: seen.append(output))
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def head_at(model: Any, wanted: Tensor) -> Iterator[None]:
    """Run the output head only on the hidden states at `wanted` [batch, time], as one row, inside the `with`."""

    def chosen(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (given[0][wanted][None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        hook.remove()
