"""A model's decoder and its output head, run apart."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def decoder_of(model: Any) -> Any:
    """Return the module that turns token ids into the last hidden states, without a vision tower or an encoder."""
    found = model.get_decoder()
    # ModernBERT-decoder calls its output matrix `decoder`, which transformers then takes for it
    return model.base_model if found is model.get_output_embeddings() else found


def forward(model: Any, ids: Tensor, start: int | Tensor, arguments: dict[str, Any], parameters: Any) -> Any:
    """`start`: the position of the first token, or of each."""
    if "position_ids" in parameters:
        if not isinstance(start, Tensor):
            start = torch.arange(start, start + ids.shape[1], device=ids.device)
        arguments["position_ids"] = start.expand(ids.shape[0], -1)
    return decoder_of(model)(input_ids=ids, **arguments)


def plain_hidden(
    model: Any, ids: Int[Tensor, "batch time"], start: int = 0
) -> tuple[Float[Tensor, "batch time hidden"], Any]:
    """The last hidden states of one ordinary forward over a whole text, and the output they came in."""
    parameters = inspect.signature(model.forward).parameters
    output = forward(model, ids, start, {"use_cache": False}, parameters)
    return output[0], output


def logits(
    model: Any, hidden: Float[Tensor, "batch time hidden"], output: Any
) -> Float[Tensor, "batch time vocabulary"]:
    """The logits of some hidden states that came in `output`, as the model itself computes them.

    The model runs with its decoder standing still and giving `hidden`, so that what some families do behind
    the output matrix (soft caps, scales) is theirs and not repeated here.
    """
    part = copy(output)
    part[next(iter(part.keys()))] = hidden
    any_ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with standing_still(decoder_of(model), part):
        return model(input_ids=any_ids).logits


@contextmanager
def standing_still(base: nn.Module, output: Any) -> Iterator[None]:
    before = base.__dict__.get("forward")  # accelerate puts its own there
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
    """Inside, the list of what the decoder gave, forward by forward. `logits` turns it into logits."""
    seen: list[Any] = []
    hook = decoder_of(model).register_forward_hook(lambda module, given, output: seen.append(output))
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def head_at(model: Any, wanted: Tensor) -> Iterator[None]:
    """Inside, the output head runs on the hidden states at `wanted` [batch, time] alone, as one row."""

    def chosen(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (given[0][wanted][None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        hook.remove()
