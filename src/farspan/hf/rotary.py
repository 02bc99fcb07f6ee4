"""Reading and replacing the frequencies of a model's RoPE."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from farspan.hf.decoder import decoder_of
from farspan.hf.facts import input_device
from farspan.hf.scope import Scope, changed


def plain_rope(model: Any, *, name: str) -> tuple[float, Tensor]:
    """Return theta and the frequencies of a model with a single RoPE that is not scaled.

    Raises:
        ValueError: no RoPE, one that differs between layers, or one that is scaled already.
    """
    family = type(model).__name__
    modules = rotary_modules(model)
    parameters = _parameters(model)
    several = list(parameters) if any(isinstance(value, dict) for value in parameters.values()) else []
    if not several:  # Granite-SWA has a theta for each layer; without weights there are no values to compare
        known = [tuple(one.inv_freq.tolist()) for one in modules if one.inv_freq.device.type != "meta"]
        several = [f"{len(set(known))} sets of frequencies"] if len(set(known)) > 1 else []
    if several:
        raise ValueError(
            f"{name} changes one RoPE, and {family} has several ({', '.join(several)}): leave RoPE unchanged, "
            "as selfextend and dca do"
        )
    if not modules or not parameters:
        raise ValueError(f"{name} changes RoPE frequencies, and {family} has none that can be changed")
    if (kind := parameters.get("rope_type", "default")) != "default":
        raise ValueError(
            f"{name} needs RoPE that is not scaled, and that of {family} is scaled already ({kind}): use full"
        )
    return float(parameters["rope_theta"]), modules[0].inv_freq


@contextmanager
def rope(model: Any, inv_freq: Float[Tensor, "pairs"], scale: float, *, name: str) -> Iterator[Scope]:
    """Inside the `with`, let `model` rotate by `inv_freq` in float32, with cosines and sines multiplied by `scale`."""
    modules = rotary_modules(model)
    before = [(module, module._buffers["inv_freq"], module.attention_scaling) for module in modules]
    scope = Scope(name)

    def scaled() -> None:
        for module, own, own_scale in before:
            module._buffers["inv_freq"] = inv_freq.to(own.device)
            module.attention_scaling = own_scale * scale

    def restore() -> None:
        for module, own, own_scale in before:
            module._buffers["inv_freq"], module.attention_scaling = own, own_scale

    with changed(model, scope, scaled, restore, reserved=True):
        yield scope


def set_rope(model: Any, parameters: dict[str, Any]) -> None:
    """Give `model` another RoPE permanently: in its config, as `rope_parameters`, and in its frequencies."""
    config = model.config.get_text_config(decoder=True)
    config.rope_parameters = dict(parameters)
    for module in rotary_modules(model):
        made = type(module)(config=config)
        for name, value in made._buffers.items():
            module._buffers[name] = value.to(input_device(model))
        for name in ("attention_scaling", "rope_type"):
            setattr(module, name, getattr(made, name))


def rope_precision(model: Any) -> set[torch.dtype]:
    """Return the dtypes of a model's RoPE frequencies."""
    return {module.inv_freq.dtype for module in rotary_modules(model)}


def length_dependent_rope(model: Any) -> str | None:
    """Return the model's RoPE scaling if it depends on the text's length, which makes cached keys stale; else None."""
    rope = _parameters(model)
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            return str(parameters["rope_type"])
    return None


def _parameters(model: Any) -> dict[str, Any]:
    """Return `rope_parameters` of a config, with a dict for each kind of layer if they differ; empty without RoPE."""
    return getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}


def rope_frequencies(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each set of RoPE frequencies that a model rotates by."""
    for name, values in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            yield name, values


def rotary_modules(model: Any) -> list[Any]:
    """Return the modules that turn positions into cosines and sines."""
    return [module for module in decoder_of(model).modules() if "inv_freq" in module._buffers]
