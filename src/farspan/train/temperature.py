"""Log-n scaling of attention while a model trains: the factor of the method `temperature`, applied to queries.

A trained model is a plain checkpoint and has no place for the factor: it is to be read under `temperature` too. Learned
scales, the exponents of the factor, are parameters of the query projections, and are saved in a file of their own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farspan import files, hf
from farspan.methods.temperature import SCALES, log_n

PARAMETER = "log_n_scales"  # of a query projection, [heads]
# lengths of rows that are read before one backward pass, which can compute their queries again: `sparse`, `window`
LENGTHS = 2


def scale_queries(model: Any, original: int, *, learned: bool = False) -> None:
    """Multiply the queries of `model` by max(1, ln(position + 1) / ln(original)), for good.

    The factor is applied before RoPE, which rotates and so commutes with it.

    Args:
        original: tokens of the trained window.
        learned: give the factor of each head an exponent, a parameter that is 1 at first: training begins with the
            plain factor.

    Raises:
        ValueError: a family whose queries are normalised, or not projected on their own.
    """
    decoder, family, config = hf.decoder_of(model), type(model).__name__, model.config.get_text_config(decoder=True)
    named = {name.rpartition(".")[2] for name, _ in decoder.named_modules()}
    layers = list(_projections(model))
    if named & {"q_norm", "q_layernorm"} or len(layers) != config.num_hidden_layers:
        raise ValueError(
            f"model.temperature scales queries after their projection, and {family} normalises them or projects them "
            "together with keys: leave it out"
        )
    seen: dict[int, Tensor] = {}  # positions by the length of a row, of the last calls

    def positions(module: nn.Module, given: Any, options: Any) -> None:
        here = options["position_ids"] if "position_ids" in options else given[1]
        seen.pop(here.shape[-1], None)
        seen[here.shape[-1]] = here
        if len(seen) > LENGTHS:
            del seen[next(iter(seen))]

    def scaled(module: nn.Module, given: Any, queries: Tensor) -> Tensor:
        factor = log_n(seen[queries.shape[1]], original)[..., None]
        if learned:
            factor = factor ** getattr(module, PARAMETER)
        heads = queries.unflatten(-1, (factor.shape[-1], -1))
        return (heads * factor[..., None]).to(queries.dtype).flatten(-2)

    for module in hf.rotary_modules(model):  # each call of the decoder asks them for its positions first
        module.register_forward_pre_hook(positions, with_kwargs=True)
    for module in layers:
        if learned:
            ones = torch.ones(config.num_attention_heads, device=next(module.parameters()).device)
            module.register_parameter(PARAMETER, nn.Parameter(ones))
        module.register_forward_hook(scaled)


def save_scales(model: Any, original: int, folder: Path) -> None:
    """Move learned scales from the model into a file that the method `temperature` reads: transformers knows no such
    parameters. Write nothing where there are none."""
    layers = [module for module in _projections(model) if hasattr(module, PARAMETER)]
    if not layers:
        return
    scales = [getattr(module, PARAMETER).detach().float().tolist() for module in layers]
    for module in layers:
        delattr(module, PARAMETER)
    files.write(folder / SCALES, json.dumps({"original": original, "scales": scales}, indent=2) + "\n")


def learns_scales(model: Any) -> bool:
    """Return whether learned scales of the model are trained."""
    return any(getattr(module, PARAMETER).requires_grad for module in _projections(model))


def _projections(model: Any) -> Iterator[nn.Module]:
    """Yield the query projections, by layer."""
    return (module for name, module in hf.decoder_of(model).named_modules() if name.endswith("q_proj"))
