"""The CEPE model: a causal model of transformers that also takes a context."""

import inspect
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from farspan.cepe import config as fields
from farspan.cepe import surgery
from farspan.cepe.context import BUDGET, Context, Mode
from farspan.cepe.cross_attention import CrossAttention
from farspan.cepe.encoder import build, encode
from farspan.cepe.order import RANGE, ContextOrder
from farspan.cepe.saving import is_added, save
from farspan.hf import decoder_of

CONTEXT = ("context", "context_input_ids", "context_attention_mask", "encoder_input_ids", "encoder_attention_mask",
           "context_padding_mask", "context_offset")  # fmt: skip
FP32 = ("encoder", "cross_attn", "context_order")  # added modules, which can stay in float32 over a base in bfloat16


class CepeModel:
    """The part of a CEPE model that is added to its decoder; `cepe_class` makes it the first base class.

    The base is frozen: only encoder, cross-attention and order require gradients, and the base's dropout stays off.
    """

    encoder: Any
    context_order: ContextOrder | None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        fields.check(config)
        self.extend(build(config.encoder_config))
        self.post_init()  # type: ignore[attr-defined]

    def extend(self: Any, encoder: Any) -> None:
        """Add encoder and cross-attention to a decoder, as its config describes."""
        config = self.config
        self.reading = surgery.ContextHolder()
        self.encoder = encoder
        self.context_order = None
        self.loss_type = "ForCausalLM"  # transformers would derive it from the name of the class
        if getattr(config, "added_dtype", None) == "float32":
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *FP32}
        surgery.attach(self)
        if (order := fields.order_of(config)) != "none":
            self.add_order(order, layers=config.cepe_order_layers, longest=config.cepe_order_range)
        self.freeze_base()

    def add_order(self: Any, order: str, *, layers: int | None = None, longest: int = RANGE) -> None:
        """Add order to the context. Its weights are zero, so the outputs do not change until it is trained.

        Args:
            order: position or age, see `farspan.cepe.order`; none adds nothing.
            layers: the number of layers, the last ones, that read it; default all layers with cross-attention.
            longest: the largest distance in tokens, and so the tokens of the longest context; default 131,072.

        Raises:
            ValueError: an unknown order, more layers than have cross-attention, or a number below 1.
        """
        number = self.config.num_cross_attn_layers
        layers = number if layers is None else layers
        fields.check_order(order, layers, longest, number)
        if order == "none":
            return
        self.config.update({"cepe_order": order, "cepe_order_layers": layers, "cepe_order_range": longest})
        width, like = self.encoder.config.hidden_size, next(self.encoder.parameters())
        made = ContextOrder(order, width, layers=layers, num_cross=number, longest=longest)
        self.context_order = made.to(like.device, like.dtype)

    # added and frozen parameters

    def added_modules(self: Any) -> list[nn.Module]:
        """Return the encoder, the cross-attention of each layer, and the order if there is one."""
        order = [] if self.context_order is None else [self.context_order]
        return [self.encoder, *self.cross_attentions(), *order]

    def cross_attentions(self: Any) -> list[CrossAttention]:
        return [layer.cross_attn for layer in surgery.layers_of(self) if hasattr(layer, "cross_attn")]

    def freeze_base(self: Any) -> None:
        """Require gradients for the added parameters only."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_added(name) and parameter.is_floating_point())

    def train(self: Any, mode: bool = True) -> Any:
        """Set training mode for the added modules. The base's modules stay in eval mode, without dropout, except the
        model, its decoder and its layers, whose mode gradient checkpointing reads."""
        super().train(mode)  # type: ignore[misc]
        checked = {id(self), id(decoder_of(self)), *map(id, surgery.layers_of(self))}
        for name, module in self.named_modules():
            if id(module) not in checked and not is_added(name):
                module.training = False
        return self

    # reading a context

    def encode_context(
        self: Any,
        ids: Int[Tensor, "batch chunks length"],
        mask: Int[Tensor, "batch chunks length"] | None = None,
        *,
        padding_mask: Int[Tensor, "batch chunks length"] | None = None,
        offset: int | Int[Tensor, "batch"] = 0,
        mode: Mode = "auto",
        budget: int = BUDGET,
    ) -> Context:
        """Encode chunks, each separately. The result can be kept, moved and read by many prompts.

        Args:
            mask: 0 for tokens to leave out; default: none are left out.
            padding_mask: 0 for padding, 1 for tokens, left out or not; used only by a model with order, which counts
                tokens and no padding. Default: all tokens that are left out are padding.
            offset: tokens between the context and the decoder; used only by a model with order.
            mode: how the cross-attention uses the context, see `Context`.
            budget: bytes of keys and values that mode `auto` may keep; default 1 GiB.

        Raises:
            ValueError: an empty context, chunks longer than the encoder's window, another device, unknown tokens, or
                a context beyond the range of the model's order.
        """
        order: dict[str, Any] = {"order": self.context_order, "padding_mask": padding_mask, "offset": offset}
        how: dict[str, Any] = {"num_states": fields.num_states(self.config), "mode": mode, "budget": budget}
        return encode(self.encoder, ids, mask, **order, **how)

    def attending(self: Any, context: Context | None) -> AbstractContextManager[None]:
        """Return a context manager, inside which each forward pass of the model, or of its decoder alone, reads this
        context.

        Raises:
            ValueError: a context on another device than the model.
        """
        if context is not None and context.num_tokens == 0:
            context = None
        where = self.get_input_embeddings().weight.device
        spread = len(set(getattr(self, "hf_device_map", {}).values())) > 1 or hasattr(self, "_hf_hook")
        if context is not None and context.device != where and not spread:
            raise ValueError(
                f"the context is on {context.device}, the model on {where}: use context.to({str(where)!r})"
            )
        return self.reading.of(context)

    @torch.no_grad()
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers' `generate` does, with a context, which is encoded once, also for several beams."""
        context = self._context(kwargs)
        if context is not None:
            kwargs["context"] = context
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _context(self: Any, kwargs: dict[str, Any]) -> Context | None:
        """Remove the context from the arguments of a call and return it."""
        context, ids, mask, other_ids, other_mask, padding, offset = (kwargs.pop(name, None) for name in CONTEXT)
        if sum(given is not None for given in (context, ids, other_ids)) > 1:
            raise ValueError("give one of context, context_input_ids and encoder_input_ids, not several")
        ids = other_ids if ids is None else ids
        if ids is None:
            if any(given is not None for given in (mask, other_mask, padding, offset)):
                raise ValueError(
                    "masks and context_offset are for context_input_ids: give them to encode_context instead"
                )
            return context
        order: dict[str, Any] = {"padding_mask": padding, "offset": 0 if offset is None else offset}
        return self.encode_context(ids, other_mask if mask is None else mask, **order)

    def save_pretrained(self: Any, save_directory: Any, *, adapter_only: bool = False, **kwargs: Any) -> None:
        """Write config and weights in the authors' layout; with `adapter_only`, write the added weights, and the base's
        name, revision and a hash of its weights."""
        save(self, save_directory, super().save_pretrained, adapter_only=adapter_only, **kwargs)  # type: ignore[misc]


@cache
def cepe_class(base: Any) -> type:
    """Return the class of CEPE models whose decoder is of class `base`, such as LlamaForCausalContextLM."""
    own = inspect.signature(base.forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = self._context(kwargs)
        if context is None:  # also inside `attending`
            return base.forward(self, *args, **kwargs)
        with self.attending(context):
            return base.forward(self, *args, **kwargs)

    # generate and the Trainer read the model's arguments here
    kind, parameters = inspect.Parameter.KEYWORD_ONLY, list(own.parameters.values())
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD and p.name not in CONTEXT]
    rest = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    more = [inspect.Parameter(name, kind, default=None) for name in CONTEXT]
    forward.__signature__ = own.replace(parameters=[*named, *more, *rest])  # type: ignore[attr-defined]
    name = base.__name__.replace("CausalLM", "CausalContextLM")
    name = name if name != base.__name__ else base.__name__.replace("LMHead", "ContextLMHead")
    return type(name, (CepeModel, base), {"forward": forward, "__module__": base.__module__})
