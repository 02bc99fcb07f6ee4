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
from torch.utils.hooks import RemovableHandle

from farspan import files, hf
from farspan.lm import LM
from farspan.methods.temperature import SCALES, Temperature, log_n

PARAMETER = "log_n_scales"  # of a query projection, [heads]
# lengths of rows that are read before one backward pass, which can compute their queries again: `sparse`, `window`
LENGTHS = 2
PROBE = 32  # tokens
TOLERANCE = 0.01  # nats
REFUSAL = (
    "model.temperature scales queries after their projection and before RoPE, and {} normalises them, projects them "
    "together with keys, or turns them in another way: leave it out"
)


@torch.no_grad()
def check_scaling(lm: LM) -> None:
    """Check that a model whose queries are scaled gives the scores that the method `temperature` reads.

    Raises:
        ValueError: as `scale_queries`; a model that the method cannot read; or other scores, as where queries are
            normalised after RoPE, which removes the factor.
    """
    ids = torch.arange(1, PROBE + 1, device=lm.device)[None] % lm.vocabulary
    original = 2  # so that the factor of nearly all tokens is above 1
    with Temperature(original).on(lm) as reader:
        expected = reader.read(ids[:, :1]).score(ids[:, 1:]).nats
    hooks = scale_queries(lm.model, original)
    try:
        logits = lm.model(ids, use_cache=False).logits[0, :-1].float()
    finally:
        for hook in hooks:
            hook.remove()
    found = nn.functional.cross_entropy(logits, ids[0, 1:].to(logits.device), reduction="none")
    if float((found.cpu() - expected[0].cpu()).abs().max()) > TOLERANCE:
        raise ValueError(REFUSAL.format(type(lm.model).__name__))


def scale_queries(model: Any, original: int, *, learned: bool = False) -> list[RemovableHandle]:
    """Multiply the queries of `model` by max(1, ln(position + 1) / ln(original)), and return the hooks that do so.

    The factor is applied before RoPE, which rotates and so commutes with it.

    Args:
        original: tokens of the trained window.
        learned: give the factor of each head an exponent, a parameter that is 1 at first: training begins with the
            plain factor.

    Raises:
        ValueError: a family whose queries are not projected on their own, or without a module for RoPE.
    """
    config = model.config.get_text_config(decoder=True)
    layers, rotary = list(_projections(model)), hf.rotary_modules(model)
    if not rotary or len(layers) != config.num_hidden_layers:
        raise ValueError(REFUSAL.format(type(model).__name__))
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

    # each call of the decoder asks the rotary modules for its positions first
    hooks = [module.register_forward_pre_hook(positions, with_kwargs=True) for module in rotary]
    for module in layers:
        if learned:
            ones = torch.ones(config.num_attention_heads, device=next(module.parameters()).device)
            module.register_parameter(PARAMETER, nn.Parameter(ones))
        hooks.append(module.register_forward_hook(scaled))
    return hooks


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
