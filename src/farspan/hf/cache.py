"""Caches for the keys and values of a text, layer by layer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from farspan.hf.attend import Layer, SinkWindow, keeps_to_its_own, written


class BufferLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with spare capacity.

    Reading n tokens in chunks of c copies O(n) keys; concatenation would copy O(n² / c). Setting `length` back drops
    the last tokens.
    """

    def __init__(self, capacity: int = 0, **kwargs: Any) -> None:
        super().__init__()
        self.capacity = capacity  # tokens to allocate for at the first update
        self.length = 0
        self.num_dropped = 0  # tokens read whose keys are not held
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.key_buffer = self._written(self.key_buffer, key_states)
        self.value_buffer = self._written(self.value_buffer, value_states)
        self.length = end
        self.keys, self.values = self.key_buffer[..., :end, :], self.value_buffer[..., :end, :]
        return self.keys, self.values

    def _written(self, buffer: Tensor | None, states: Tensor) -> Tensor:
        return written(buffer, states, self.length, self.capacity if buffer is None else buffer.shape[-2] * 5 // 4)

    def get_seq_length(self) -> int:
        return self.length + self.num_dropped

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, num_seen: int) -> "BufferLayer":
        """Return a layer that holds these keys and values of the `num_seen` tokens read."""
        layer = cls()
        layer.update(keys, values)
        layer.num_dropped = num_seen - layer.length
        return layer


class SinkLayer(DynamicLayer):
    """Keys and values of one layer: of the first tokens, and of the last tokens that the next one may see."""

    is_croppable = False

    def __init__(self, shape: SinkWindow, **kwargs: Any) -> None:
        super().__init__()
        self.shape = shape
        self.num_seen = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values that these queries may see, and drop those that later queries cannot."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        keys, values = torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)
        self.num_seen += key_states.shape[-2]
        last = self.num_seen - max(self.shape.first_near(self.num_seen), 0)
        dropped = keys.shape[-2] - self.shape.sinks - last
        self.keys, self.values = (keys, values) if dropped <= 0 else (self._kept(keys, last), self._kept(values, last))
        return keys, values

    def _kept(self, states: Tensor, last: int) -> Tensor:
        first_kept = states.shape[-2] - last
        return torch.cat([states[..., : self.shape.sinks, :], states[..., first_kept:, :]], -2)

    def get_seq_length(self) -> int:
        return self.num_seen


def new_cache(model: Any, capacity: int, layers: list[Layer], shape: SinkWindow | None) -> DynamicCache:
    """Return an empty cache for `capacity` tokens; with a shape, its layers keep only the tokens that it sees."""
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if shape is not None:
        bounded = [keeps_to_its_own(layer, shape) for layer in layers]
        cache.layers = [own if keep else SinkLayer(shape) for own, keep in zip(cache.layers, bounded, strict=True)]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = BufferLayer
    return cache


def saved(layer: Any) -> dict[str, Any]:
    """Return a layer's state. Sliding layers replace their tensors at each step; recurrent ones write into them."""
    return {name: value if name in ("keys", "values") else cloned(value) for name, value in vars(layer).items()}


def cloned(value: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, value)


def tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
