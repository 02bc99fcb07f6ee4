"""Reading and replacing the frequencies of a model's RoPE."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from farspan.hf.attend import angles
from farspan.hf.decoder import decoder_of
from farspan.hf.facts import input_device
from farspan.hf.masks import FULL, SLIDING
from farspan.hf.scope import Scope, changed

LENGTH_DEPENDENT = ("dynamic", "longrope")  # types whose frequencies depend on the length of the text
POSITIONS = (1, 4096)  # at which cosines are compared with those of the frequencies
TOLERANCE = 1e-3  # the largest difference of equal cosines


def plain_rope(model: Any, *, name: str) -> tuple[float, Tensor]:
    """Return theta and the frequencies of the RoPE of layers that attend to the whole text, if it is not scaled.

    Layers with a sliding window may have a RoPE of their own, as in Gemma 3: they see no distance beyond their window.

    Raises:
        ValueError: no RoPE, one that differs between layers in another way, or one that is scaled already.
    """
    family = type(model).__name__
    parameters, kind = full_attention_rope(model)
    modules = rotary_modules(model)
    several = list(parameters) if any(isinstance(value, dict) for value in parameters.values()) else []
    if not several and kind is None:  # Granite-SWA has a theta for each layer; without weights: no values to compare
        known = [tuple(one.inv_freq.tolist()) for one in modules if one.inv_freq.device.type != "meta"]
        several = [f"{len(set(known))} sets of frequencies"] if len(set(known)) > 1 else []
    if several:
        raise ValueError(
            f"{name} changes one RoPE, and {family} has several ({', '.join(several)}): leave RoPE unchanged, "
            "as selfextend and dca do"
        )
    if not modules or not parameters:
        raise ValueError(f"{name} changes RoPE frequencies, and {family} has none that can be changed")
    if (how := parameters.get("rope_type", "default")) != "default":
        raise ValueError(
            f"{name} needs RoPE that is not scaled, and that of {family} is scaled already ({how}): use full"
        )
    return float(parameters["rope_theta"]), modules[0]._buffers[f"{_prefix(kind)}inv_freq"]


def full_attention_rope(model: Any) -> tuple[dict[str, Any], str | None]:
    """Return the `rope_parameters` of layers that attend to the whole text, and these layers' type if those with a
    sliding window have others."""
    parameters = _parameters(model)
    if parameters.keys() == {FULL, SLIDING} and isinstance(parameters[FULL], dict):
        return parameters[FULL], FULL
    return parameters, None


@contextmanager
def rope(model: Any, inv_freq: Float[Tensor, "pairs"], scale: float, *, name: str) -> Iterator[Scope]:
    """Inside the `with`, let layers that attend to the whole text rotate by `inv_freq` in float32, with cosines and
    sines multiplied by `scale`. For a model that `plain_rope` accepts.

    Raises:
        ValueError: a model that computes its cosines from other frequencies, as PhiMoE from those of its config.
    """
    kind = full_attention_rope(model)[1]
    prefix = _prefix(kind)
    frequencies, factor = f"{prefix}inv_freq", f"{prefix}attention_scaling"
    before = [(one, one._buffers[frequencies], getattr(one, factor)) for one in rotary_modules(model)]
    scope = Scope(name)

    def scaled() -> None:
        for module, own, own_scale in before:
            module._buffers[frequencies] = inv_freq.to(own.device)
            setattr(module, factor, own_scale * scale)
            if rotation_error(module, POSITIONS, inv_freq, own_scale * scale, kind) > TOLERANCE:
                raise ValueError(
                    f"{name} changes RoPE frequencies, and {type(model).__name__} does not rotate by those that it is "
                    "given: leave RoPE unchanged, as selfextend and dca do"
                )

    def restore() -> None:
        for module, own, own_scale in before:
            module._buffers[frequencies] = own
            setattr(module, factor, own_scale)

    with changed(model, scope, scaled, restore, reserved=True):
        yield scope


def set_rope(model: Any, parameters: dict[str, Any]) -> None:
    """Give `model` another RoPE permanently: in its config, as `rope_parameters`, and in its frequencies.

    Args:
        parameters: of layers that attend to the whole text; those of layers with a sliding window may be beside them,
            each under the type of its layers.

    Raises:
        ValueError: a model that cannot rotate by such a RoPE, as PhiMoE by one that is scaled linearly.
    """
    config, (_, kind) = model.config.get_text_config(decoder=True), full_attention_rope(model)
    if kind is not None and kind not in parameters:
        parameters = config.rope_parameters | {kind: dict(parameters)}
    config.rope_parameters = dict(parameters)
    for module in rotary_modules(model):
        made = type(module)(config=config)
        for name, value in made._buffers.items():
            module._buffers[name] = value.to(input_device(model))
        for name, value in vars(made).items():
            if name.endswith(("attention_scaling", "rope_type")):
                setattr(module, name, value)
    full, prefix = full_attention_rope(model)[0], _prefix(kind)
    if full.get("rope_type") in LENGTH_DEPENDENT:
        return
    for module in rotary_modules(model):
        inv_freq, scale = module._buffers[f"{prefix}inv_freq"], getattr(module, f"{prefix}attention_scaling")
        if rotation_error(module, POSITIONS, inv_freq, scale, kind) > TOLERANCE:
            raise ValueError(
                f"{type(model).__name__} cannot rotate by a RoPE of type {full.get('rope_type')}: choose another type, "
                "such as ntk, or leave RoPE unchanged"
            )


def set_context(model: Any, tokens: int) -> None:
    """Set `max_position_embeddings` in the config of `model`, and keep its RoPE: YaRN without a factor derives it from
    this limit, so it is written into the config first."""
    config = model.config.get_text_config(decoder=True)
    for parameters in _each_parameters(model):
        if parameters.get("rope_type") == "yarn" and parameters["factor"] is None:
            parameters["factor"] = config.max_position_embeddings / parameters["original_max_position_embeddings"]
    config.max_position_embeddings = tokens


def rotation_error(
    module: Any, positions: Sequence[int], inv_freq: Float[Tensor, "pairs"], scale: float, kind: str | None
) -> float:
    """Return the largest difference of a rotary module's cosines from cos(position · inv_freq) · scale, in the
    nearest layout: half and half, interleaved, or pairs in another order (Ernie 4.5 VL). Infinite if it gives no such
    cosines. Of a model without weights (meta): of a copy with these frequencies; 0 if they have no values.

    Args:
        kind: the type of layers, if the module has a RoPE for each type (`full_attention_rope`).
    """
    if next(module.buffers()).is_meta:
        if inv_freq.is_meta or not hasattr(module, "config"):
            return 0.0
        module = type(module)(config=module.config)
        module._buffers[f"{_prefix(kind)}inv_freq"] = inv_freq
        setattr(module, f"{_prefix(kind)}attention_scaling", scale)
    device = next(module.buffers()).device
    here = torch.tensor([positions], device=device)
    expected = angles(here[0], inv_freq.to(device)).cos() * scale
    for ids in (here, here.expand(3, 1, -1)):  # the second for positions in time, height and width, as of Qwen2-VL
        try:
            found = module(torch.zeros(1, 1, 1, device=device), ids, *([] if kind is None else [kind]))
        except (IndexError, KeyError, RuntimeError, TypeError):
            continue
        cosines = (found[0] if isinstance(found, tuple) else found.real).float()
        cosines = cosines.reshape(-1, *cosines.shape[-2:])
        if cosines.shape[-1] == len(inv_freq):
            return float((cosines - expected).abs().max())
        twice = expected.repeat(1, 2)
        if cosines.shape[1:] != twice.shape:
            return math.inf
        apart = cosines - twice, cosines[..., ::2] - expected, cosines.sort(-1).values - twice.sort(-1).values
        return min(float(one.abs().max()) for one in apart)
    return math.inf


def rope_precision(model: Any) -> set[torch.dtype]:
    """Return the dtypes of a model's RoPE frequencies."""
    return {values.dtype for _, values in rope_frequencies(model)}


def length_dependent_rope(model: Any) -> str | None:
    """Return the model's RoPE scaling if it depends on the text's length, which makes cached keys stale; else None."""
    for parameters in _each_parameters(model):
        if parameters.get("rope_type") in LENGTH_DEPENDENT:
            return str(parameters["rope_type"])
    return None


def _parameters(model: Any) -> dict[str, Any]:
    """Return `rope_parameters` of a config, with a dict for each kind of layer if they differ; empty without RoPE."""
    return getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}


def _each_parameters(model: Any) -> Iterator[dict[str, Any]]:
    """Yield `rope_parameters` of a config, and those in it of each kind of layer."""
    parameters = _parameters(model)
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))


def rope_frequencies(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each set of RoPE frequencies that a model rotates by."""
    for name, values in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            yield name, values


def rotary_modules(model: Any) -> list[Any]:
    """Return the modules that turn positions into cosines and sines."""
    wanted = f"{_prefix(full_attention_rope(model)[1])}inv_freq"
    return [module for module in decoder_of(model).modules() if wanted in module._buffers]


def _prefix(kind: str | None) -> str:
    """Return the prefix of the names of a layer type's frequencies and factor; none if all layers share them."""
    return "" if kind is None else f"{kind}_"
