"""Add a cross-attention to the layers of any decoder, after its self-attention, without changes to its code.

The class of each layer is replaced by a subclass that receives the context as an argument. A hook on the module whose
output is added to the residual stream adds the cross-attention to that output. Since the context is an argument,
gradient checkpointing calls `forward` again with the same context. Where attention and feed-forward read the same input
(parallel blocks), the cross-attention is added with the attention's output, and the feed-forward of the next layer is
the first to see it.

Modules are found by their names and shapes in transformers; `check_sites` verifies the result.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from farspan.cepe.context import Context
from farspan.cepe.cross_attention import CrossAttention, Shape
from farspan.hf import decoder_of
from farspan.hf.training import evaluating

ATTENTIONS = ("self_attn", "attention", "attn", "self_attention")
NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "final_layer_norm", "ln_mlp", "mlp_norm",
         "input_layernorm", "ln_1")  # fmt: skip  # the norm before the feed-forward, else the block's
FUSED = ("qkv_proj", "query_key_value", "c_attn")  # queries, keys and values in one matrix
# families with such a matrix in a layout of `matrices`
KNOWN = ("bloom", "falcon", "gpt_neox", "gpt_neox_japanese", "persimmon", "gpt2", "gpt_bigcode", "phi3",
         "phi4_multimodal")  # fmt: skip
PROBE = 1e4  # a shift of the residual stream, much larger than the output of any module that follows a norm


@dataclass(frozen=True)
class Site:
    """The place where the output of a layer's attention is added to the residual stream."""

    module: str
    has_residual: bool  # its output is the sum of residual stream and attention (BLOOM)
    multiplier: float  # by which the layer multiplies the output before adding it (Granite)


class ContextHolder:
    """The context that a model's layers currently read."""

    def __init__(self) -> None:
        self.context: Context | None = None

    @contextmanager
    def of(self, context: Context | None) -> Iterator[None]:
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before


def layers_of(model: Any) -> Any:
    """Return the decoder's layers in order, as a ModuleList.

    Raises:
        ValueError: the decoder has no list `layers` or `h`.
    """
    decoder = decoder_of(model)
    for name in ("layers", "h"):
        if isinstance(found := getattr(decoder, name, None), nn.ModuleList):
            return found
    raise ValueError(f"{type(model).__name__} cannot be extended: {type(decoder).__name__} has no list `layers` or `h`")


def attach(model: Any) -> None:
    """Add a cross-attention of random weights to the last layers of a model with an encoder, as its config describes.

    Raises:
        ValueError: a layer in which a module is not found; names the layer and the module.
    """
    layers, num_cross, width = layers_of(model), model.config.num_cross_attn_layers, model.encoder.config.hidden_size
    found = []
    for index in range(len(layers) - num_cross, len(layers)):
        layer = layers[index]
        where = f"layer {index} of {type(model).__name__} ({type(layer).__name__})"
        attention = _attention(layer, where)
        norms = _norm(layer, where), *_qk_norms(attention)
        if any(hasattr(attention, name) for name in FUSED) and (family := model.config.model_type) not in KNOWN:
            raise ValueError(
                f"{where} cannot be extended: the layout of its queries, keys and values in one matrix is unknown for "
                f"models of type {family}. Use another decoder"
            )
        found.append((index, layer, _site(layer, attention, where), shape_of(attention, where), norms))
    for index, layer, site, shape, norms in found:  # the model is changed only after all modules are found
        layer.cross_attn = CrossAttention(
            shape, width, *deepcopy(norms), from_end=len(layers) - index, num_cross=num_cross
        )
        layer._cepe_reading, layer._cepe_site, layer._cepe_at = model.reading, site, None
        kind: Any = type(layer)
        layer.__class__ = _reading_class(kind)
        if hasattr(layer, "_old_forward"):  # of accelerate's hooks; bound to the former class
            layer._old_forward = MethodType(type(layer).forward, layer)
        getattr(layer, site.module).register_forward_hook(partial(_join, layer))


@cache
def _reading_class(kind: Any) -> type:
    """Return a subclass of a layer's class, with the same name, whose `forward` receives the context."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return kind.__call__(self, *args, cepe_context=self._cepe_reading.context, **kwargs)

    def forward(self: Any, hidden_states: Tensor, *args: Any, cepe_context: Context | None, **kwargs: Any) -> Any:
        training = self.training
        self._cepe_at = None if cepe_context is None else (hidden_states, cepe_context)
        if training:  # no dropout in the code of the frozen layer
            self.training = False
        try:
            return kind.forward(self, hidden_states, *args, **kwargs)
        finally:
            self._cepe_at = None
            if training:
                self.training = True

    return type(kind.__name__, (kind,), {"__call__": __call__, "forward": forward, "__module__": kind.__module__})


def _join(layer: Any, module: nn.Module, args: Any, output: Any) -> Any:
    if layer._cepe_at is None:
        return None
    residual, context = layer._cepe_at
    attended = output[0] if isinstance(output, tuple) else output
    if residual.shape != attended.shape:
        raise ValueError(
            f"layers of class {type(layer).__name__} cannot be extended: their residual stream has shape "
            f"{tuple(residual.shape)}, the output of their {layer._cepe_site.module} {tuple(attended.shape)}; expected "
            "one shape. Use another decoder"
        )
    times = layer._cepe_site.multiplier
    stream = attended if layer._cepe_site.has_residual else residual + (attended if times == 1 else attended * times)
    added = layer.cross_attn(stream, context)
    joined = attended + (added if times == 1 else added / times)
    return (joined, *output[1:]) if isinstance(output, tuple) else joined


def _attention(layer: nn.Module, where: str) -> Any:
    found = [getattr(layer, name) for name in ATTENTIONS if isinstance(getattr(layer, name, None), nn.Module)]
    if not found:
        raise ValueError(f"{where} cannot be extended: it has no self-attention called {' or '.join(ATTENTIONS)}")
    return found[0]


def _site(layer: nn.Module, attention: nn.Module, where: str) -> Site:
    name = next(name for name, child in layer.named_children() if child is attention)
    if hasattr(layer, "post_feedforward_layernorm"):  # a norm is between attention and residual stream
        name = "post_attention_layernorm"
        if not hasattr(layer, name):
            raise ValueError(f"{where} cannot be extended: it has post_feedforward_layernorm but no {name}")
    has_residual = "residual" in inspect.signature(attention.forward).parameters
    return Site(name, has_residual, float(getattr(layer, "residual_multiplier", 1.0)))


def _norm(layer: nn.Module, where: str) -> nn.Module:
    for name in NORMS:
        if isinstance(norm := getattr(layer, name, None), nn.Module):
            return norm
    raise ValueError(f"{where} cannot be extended: it has no norm called {' or '.join(NORMS)}")


def _qk_norms(attention: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    def of(side: str) -> nn.Module | None:
        names = f"{side[0]}_norm", f"{side[0]}_layernorm", f"{side}_layernorm"
        found = (getattr(attention, name, None) for name in names)
        return next((norm for norm in found if isinstance(norm, nn.Module)), None)

    return of("query"), of("key")


def shape_of(attention: Any, where: str) -> Shape:
    """Return the geometry of a self-attention module.

    Raises:
        ValueError: projections or a head's dimension that are not found.
    """
    dim = next((int(getattr(attention, name)) for name in ("head_dim", "head_size") if hasattr(attention, name)), 0)
    names = [name for name in ("q_proj", *FUSED) if hasattr(attention, name)]
    if not dim or not names:
        raise ValueError(
            f"{where} cannot be extended: its {type(attention).__name__} has no head_dim or head_size, or no "
            "projection called q_proj (and k_proj, v_proj), qkv_proj, query_key_value or c_attn"
        )
    kind = names[0]
    first = getattr(attention, kind)
    for name in ("q_proj", "k_proj", "v_proj") if kind == "q_proj" else (kind,):
        part = getattr(attention, name, None)
        if not isinstance(part, Conv1D) and not hasattr(part, "out_features"):
            raise ValueError(
                f"{where} cannot be extended: its {name} is a {type(part).__name__}, expected a linear layer. "
                "Use another decoder"
            )
    out, hidden = _size(first)
    if kind == "q_proj":
        heads, key_heads = out // dim, _size(attention.k_proj)[0] // dim
        if (values := _size(attention.v_proj)[0]) != key_heads * dim:
            raise ValueError(
                f"{where} cannot be extended: its values have {values // key_heads} dimensions per head, its keys "
                f"{dim}, expected as many. Use another decoder"
            )
        biased = [getattr(attention, f"{p}_proj").bias is not None for p in "qkv"]
    else:
        named = getattr(attention, "num_heads", None) or getattr(attention, "num_attention_heads", None)
        heads = int(named or attention.config.num_attention_heads)
        key_heads = (out // dim - heads) // 2
        biased = [getattr(first, "bias", None) is not None] * 3
    normed = _qk_norms(attention)[1] is not None
    scale = getattr(attention, "scaling", None) or getattr(attention, "inv_norm_factor", None)
    scale = scale or (1 / attention.scale_attn if hasattr(attention, "scale_attn") else dim**-0.5)
    return Shape(hidden, heads, key_heads, dim, float(scale), biased[0], biased[1] and normed, biased[2])


def _size(projection: Any) -> tuple[int, int]:
    """Return the number of outputs and of inputs of a projection."""
    if isinstance(projection, Conv1D):
        return projection.weight.shape[1], projection.weight.shape[0]
    return projection.out_features, projection.in_features


@torch.no_grad()
def matrices(
    attention: Any, shape: Shape
) -> tuple[list[Float[Tensor, "out hidden"]], list[Float[Tensor, "out"] | None]]:
    """Return the weights and the biases of query, key and value, from any of the module's known layouts."""
    if hasattr(attention, "q_proj"):
        parts = [_matrix(getattr(attention, f"{p}_proj")) for p in "qkv"]
        return [weight for weight, _ in parts], [bias for _, bias in parts]
    sizes = [shape.heads * shape.dim, shape.key_heads * shape.dim, shape.key_heads * shape.dim]
    weight, bias = _matrix(next(getattr(attention, name) for name in FUSED if hasattr(attention, name)))
    if hasattr(attention, "query_key_value") or not getattr(attention, "multi_query", True):  # the latter: GPTBigCode
        # for each key head: its queries, its key, its value
        group = shape.heads // shape.key_heads
        cut = weight.view(shape.key_heads, group + 2, shape.dim, -1).split([group, 1, 1], 1)
        weights = [part.reshape(size, -1) for part, size in zip(cut, sizes, strict=True)]
        if bias is None:
            return weights, [None] * 3
        parts = bias.view(shape.key_heads, group + 2, shape.dim).split([group, 1, 1], 1)
        return weights, [part.reshape(-1) for part in parts]
    return list(weight.split(sizes)), [None] * 3 if bias is None else list(bias.split(sizes))


def _matrix(projection: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight [out, in] and bias. The weight of a quantised projection is computed from its outputs for the unit
    vectors."""
    bias = getattr(projection, "bias", None)
    if isinstance(projection, Conv1D):
        return projection.weight.T, bias
    if projection.weight.is_floating_point() and projection.weight.shape == _size(projection):
        return projection.weight, bias
    dtype = torch.get_default_dtype() if bias is None else bias.dtype
    out = projection(torch.eye(projection.in_features, dtype=dtype, device=projection.weight.device))
    return (out if bias is None else out - bias).T, bias


@torch.no_grad()
def initialise(model: Any) -> None:
    """Set the initial weights of every cross-attention (Yen et al. 2024, section 2.2 and appendix A.2).

    The query projection is a copy of the decoder's. The key and value projections are copies of the decoder's first
    columns, as many as the encoder is wide; further columns are zero. The output projection is zero, so the model's
    outputs do not change. The norm of the input is a copy of the norm before the feed-forward, made by `attach`. Where
    there is no such norm (OLMo2), its weights are 1.
    """
    for layer in layers_of(model):
        if (cross := getattr(layer, "cross_attn", None)) is None:
            continue
        weights, biases = matrices(_attention(layer, type(layer).__name__), cross.shape)
        for projection, weight, bias in zip((cross.q_proj, cross.k_proj, cross.v_proj), weights, biases, strict=True):
            columns = min(projection.in_features, weight.shape[1])
            projection.weight.zero_()
            projection.weight[:, :columns] = weight[:, :columns]
            if projection.bias is not None:
                projection.bias.copy_(bias)
        cross.o_proj.weight.zero_()
        if hasattr(layer, "post_feedforward_layernorm") and not hasattr(layer, "pre_feedforward_layernorm"):
            cross.layernorm.weight.fill_(1.0)


class _Shift(nn.Module):
    """A cross-attention that returns a constant, which `check_sites` puts in place of each cross-attention."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        return torch.full_like(hidden, self.shift)


@torch.no_grad()
def check_sites(model: Any) -> None:
    """Check that the output of each cross-attention is added to the residual stream once, unchanged.

    One forward pass runs with each cross-attention replaced by a large constant, of alternating sign. All other modules
    of a layer read their input through a norm, so their outputs are small in comparison.

    Raises:
        ValueError: a layer whose output does not change by the constant; names the layer, and the share of the
            constant that is in its output.
    """
    layers = layers_of(model)
    crossed = [(i, layer) for i, layer in enumerate(layers) if hasattr(layer, "cross_attn")]
    own = [layer.cross_attn for _, layer in crossed]
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = []

    def watch(index: int) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            seen[index] = args[0], output[0] if isinstance(output, tuple) else output

        return hook

    embeddings = model.get_input_embeddings()
    ids = torch.tensor([[3, 4, 5]], device=embeddings.weight.device) % embeddings.num_embeddings
    try:
        for number, (index, layer) in enumerate(crossed):
            layer.cross_attn = _Shift(PROBE * (-1) ** number)
            hooks.append(layer.register_forward_hook(watch(index)))
        with evaluating(model), model.reading.of(Context((torch.empty(1, 1, 1),))):
            decoder_of(model)(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        for (_, layer), cross in zip(crossed, own, strict=True):
            layer.cross_attn = cross
    for number, (index, layer) in enumerate(crossed):
        before, after = (x.float().to("cpu") for x in seen[index])
        entered = (after - before).mean().item() / (PROBE * (-1) ** number)
        if not 0.9 < entered < 1.1:
            raise ValueError(
                f"layer {index} of {type(model).__name__} ({type(layer).__name__}) cannot be extended: the vector "
                f"added to the output of its {layer._cepe_site.module} should reach the layer's output once; "
                f"{entered:.2g} of it does"
            )
