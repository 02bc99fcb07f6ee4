"""Attention that replaces a model's own, through transformers' interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from farspan.hf.attend import Attend, Call, Eviction, Layer, SinkWindow, Turned, keeps_to_its_own
from farspan.hf.scope import Scope, changed

_NUMBERS = count()
LEARNED_SINKS = ("s_aux", "sinks")  # names under which models hold the learned weight of no key, and pass it on


def more_than_keys(name: str, family: str) -> str:
    """Return the error of attention that cannot be computed from its queries, keys and values alone."""
    return f"{name} cannot be used with {family}: its attention is more than queries, keys and values"


@dataclass
class StreamAttentionState:
    """The part of a stream's state that its attention uses."""

    start: int = 0  # position of the first query of a forward
    positions: dict[int, Tensor] = field(default_factory=dict)  # by layer: of the keys that an eviction has chosen
    last_queries: dict[int, Call] = field(default_factory=dict)  # by layer, without keys; until the eviction
    turned: Turned | None = None  # within `Stream.unchanged`
    evicted: bool = False


class CustomAttention(Scope):
    """The attention function that replaces a model's own while a method is on."""

    def __init__(
        self,
        attend: Attend,
        layers: list[Layer],
        *,
        name: str,
        family: str,
        shape: SinkWindow | None,
        padding: bool,
        eviction: Eviction | None = None,
    ) -> None:
        super().__init__(name)
        self.family = family  # of the model, for error messages
        self.attend, self.layers = attend, layers
        self.shape = shape  # caches drop keys outside of it during reading; None: they keep all
        self.eviction = eviction  # chooses the keys to keep after the text has been read; None: all
        self.padding = padding  # whether a padded batch can be read when the model is called directly
        self.state: StreamAttentionState | None = None  # of the stream that reads; None: the model is called directly
        self.offset: int | None = None  # position of the first query, from the model's masks, when called directly
        self.gapless: Tensor | None = None  # positions of this forward that an earlier layer has checked
        # of queries, from their positions and the layer; None: all are 1
        self.factor: Callable[[Tensor, int], Tensor] | None = None

    @contextmanager
    def reading(self, state: StreamAttentionState) -> Iterator[None]:
        self.state = state
        try:
            yield
        finally:
            self.state = None

    @contextmanager
    def scaled_queries(self, factor: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
        """Inside the `with`, multiply queries by `factor(positions, layer)`, [time] or [heads, time]."""
        before = self.factor, self.padding
        self.factor, self.padding = factor, False  # positions assume rows without padding
        try:
            yield
        finally:
            self.factor, self.padding = before

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the padding mask [batch, keys] of a model called directly; None without padding."""
        offset = kwargs.get("q_offset")
        self.offset, self.gapless = None if offset is None else int(offset), None
        return flash_attention_mask(*args, **kwargs)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend as transformers' attention functions do: [batch, heads, time, dim] to [batch, time, heads, dim].

        Raises:
            ValueError: a layer with weight on no key (attention sinks that are learned, as in gpt-oss), or inputs of a
                model called directly from which positions cannot be derived.
        """
        if any(kwargs.get(learned) is not None for learned in LEARNED_SINKS):
            raise ValueError(more_than_keys(self.name, self.family))
        layer, state = self.layers[module.layer_idx], self.state
        batch, heads, time, dim = query.shape
        if state is not None:
            start = state.start
        else:
            self._check_call(attention_mask, kwargs.get("position_ids"), layer, query, key)
            start = key.shape[2] - time if self.offset is None else self.offset  # its cache may have dropped keys
        if self.factor is not None:
            here = torch.arange(start, start + time, device=query.device)
            query = (query * self.factor(here, layer.index)[..., None]).to(query.dtype)
        call = Call(
            query=query.view(batch, key.shape[1], heads // key.shape[1], time, dim),
            key=key,
            value=value,
            scale=dim**-0.5 if scaling is None else scaling,
            softcap=softcap,
            layer=layer,
            start=start,
            real=attention_mask,
            positions=None if state is None else state.positions.get(layer.index),
            turned=None if state is None else state.turned,
        )
        if state is not None and self.eviction is not None and not state.evicted:
            before = state.last_queries.get(layer.index)
            state.last_queries[layer.index] = last_queries(call, before, self.eviction.window)
        out = self.attend(call)
        return out.reshape(batch, heads, time, -1).transpose(1, 2).contiguous(), None

    def _check_call(
        self, mask: Tensor | None, positions: Tensor | None, layer: Layer, query: Tensor, key: Tensor
    ) -> None:
        """Raise ValueError if positions cannot be derived from the inputs of a model called directly."""
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"{self.name} has a mask of its own: leave out attention masks that are not [batch, time]")
        if mask is not None and not self.padding:
            raise ValueError(f"{self.name} reads rows of one length: leave out the padding, or read rows one by one")
        if mask is None and positions is not None and positions is not self.gapless:
            if bool((positions.diff(dim=-1) != 1).any()):
                raise ValueError(f"{self.name} reads one text in each row: positions {positions.tolist()} have gaps")
            self.gapless = positions
        missing = 0 if self.offset is None else self.offset + query.shape[2] - key.shape[2]
        only_near = self.padding or (self.shape is not None and keeps_to_its_own(layer, self.shape))
        if missing < 0 or (missing and not only_near):
            raise ValueError(f"{self.name} needs a cache that holds all tokens and no empty slots: use DynamicCache()")


def last_queries(call: Call, before: Call | None, most: int) -> Call:
    """Return a call without keys that holds the last queries (at most `most`) of `before` followed by `call`."""
    queries = call.query if before is None else torch.cat([before.query, call.query], 3)
    empty = call.key[:, :, :0].clone(), call.value[:, :, :0].clone()  # no views, which would keep the keys in memory
    return replace(call, query=queries[..., -most:, :].clone(), key=empty[0], value=empty[1])


@contextmanager
def replaced_attention(
    model: Any,
    attend: Attend,
    layers: list[Layer],
    *,
    name: str,
    shape: SinkWindow | None = None,
    eviction: Eviction | None = None,
    padding: bool = False,
    reserved: bool = False,
) -> Iterator[CustomAttention]:
    """Replace the attention of `model` with `attend` inside the `with`. `reserved`: refuse other readers meanwhile.

    Raises:
        ValueError: another method has replaced it already.
    """
    key = f"farspan_{next(_NUMBERS)}"
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(c, c._attn_implementation_internal) for c in configs if hasattr(c, "_attn_implementation_internal")]
    if any(str(own).startswith("farspan_") for _, own in before):
        raise ValueError(f"{name} cannot be put on a model whose attention another method has replaced")
    kinds: dict[str, Any] = {"shape": shape, "padding": padding, "eviction": eviction}
    stand_in = CustomAttention(attend, layers, name=name, family=type(model).__name__, **kinds)
    AttentionInterface.register(key, stand_in)
    AttentionMaskInterface.register(key, stand_in.mask)

    def switch() -> None:
        for config, _ in before:
            config._attn_implementation_internal = key

    def restore() -> None:
        for config, own in before:
            config._attn_implementation_internal = own

    try:
        with changed(model, stand_in, switch, restore, reserved=reserved):
            yield stand_in
    finally:
        del AttentionInterface._global_mapping[key], AttentionMaskInterface._global_mapping[key]


def attention_names() -> list[str]:
    """Return the names of the attention implementations of transformers."""
    return ["eager", *sorted(AttentionInterface().valid_keys())]
