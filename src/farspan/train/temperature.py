"""Log-n scaling of attention while a model trains: the factor of the method `temperature`, applied to queries.

A trained model is a plain checkpoint and has no place for the factor: it is to be read under `temperature` too.
"""

from typing import Any

from torch import Tensor, nn

from farspan import hf
from farspan.methods.temperature import log_n


def scale_queries(model: Any, original: int) -> None:
    """Multiply the queries of `model` by max(1, ln(position + 1) / ln(original)), for good.

    The factor is applied before RoPE, which rotates and so commutes with it.

    Args:
        original: tokens of the trained window.

    Raises:
        ValueError: a family whose queries are normalised, or not projected on their own.
    """
    decoder, family = hf.decoder_of(model), type(model).__name__
    named = {name.rpartition(".")[2] for name, _ in decoder.named_modules()}
    layers = [module for name, module in decoder.named_modules() if name.endswith("q_proj")]
    if named & {"q_norm", "q_layernorm"} or len(layers) != model.config.get_text_config(decoder=True).num_hidden_layers:
        raise ValueError(
            f"model.temperature scales queries after their projection, and {family} normalises them or projects them "
            "together with keys: leave it out"
        )
    seen: dict[str, Tensor] = {}

    def positions(module: nn.Module, given: Any, options: Any) -> None:
        seen["positions"] = options["position_ids"] if "position_ids" in options else given[1]

    def scaled(module: nn.Module, given: Any, queries: Tensor) -> Tensor:
        return queries * log_n(seen["positions"], original)[..., None].to(queries.dtype)

    for module in hf.rotary_modules(model):  # each call of the decoder asks them for its positions first
        module.register_forward_pre_hook(positions, with_kwargs=True)
    for module in layers:
        module.register_forward_hook(scaled)
