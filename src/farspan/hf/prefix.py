"""SDPA of a chunk in two parts: over the tokens read before, and over the chunk itself.

With a cache, transformers gives SDPA an explicit mask of all pairs. This repeats the keys of grouped queries, converts
the mask in every layer, and computes the pairs that it hides. The two parts need no such mask: the first sees
everything, and the second is causal. Their outputs are averaged, weighted by their sums of exponentials.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from farspan.hf.flash import Part, flash, hidden_mask, joined, takes


@dataclass(frozen=True)
class PrefixMask:
    """A mask [batch, heads, time, keys] that hides only pairs among the last `time` keys."""

    before: int  # keys that every query sees
    own: Tensor | None  # additive mask of the other keys; None: causal

    @classmethod
    def of(cls, mask: Tensor, dtype: torch.dtype) -> "PrefixMask | None":
        """Return the parts of a boolean mask (True: visible) or an additive one; None if it has other gaps."""
        time, keys = mask.shape[-2:]
        before = keys - time
        if before <= 0:
            return None
        visible = mask if mask.dtype == torch.bool else mask == 0
        own = visible[..., before:]
        causal = (own == own.new_ones(time, time).tril()).all()
        is_whole, is_causal = torch.stack([visible[..., :before].all(), causal]).tolist()  # one wait for a GPU
        if not is_whole:
            return None
        if is_causal:
            return cls(before, None)
        if mask.dtype != torch.bool:
            return cls(before, mask[..., before:].to(dtype))
        return cls(before, hidden_mask(~own, dtype))


class _Reading(threading.local):
    """The masks of this thread's forward, by their `id`."""

    masks: dict[int, tuple[Tensor, PrefixMask | None]] | None = None


_reading = _Reading()
_lock = threading.Lock()
_num_reading = 0
_whole: Any = None  # transformers' own function, while a thread reads


@contextmanager
def in_two_parts() -> Iterator[None]:
    """Compute the SDPA of forwards with a cache in two parts inside the `with`, in this thread."""
    global _num_reading, _whole
    with _lock:
        if not _num_reading:
            _whole = AttentionInterface._global_mapping["sdpa"]
            AttentionInterface.register("sdpa", sdpa)
        _num_reading += 1
    _reading.masks = {}
    try:
        yield
    finally:
        _reading.masks = None
        with _lock:
            _num_reading -= 1
            if not _num_reading:
                AttentionInterface.register("sdpa", _whole)


def sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' SDPA: [batch, heads, time, dim] to [batch, time, heads, dim]."""
    found: list[Part] = []
    if _is_plain(query, key, value, options):
        part = partial(flash, query, scale=options.get("scaling"))
        if attention_mask is None and query.shape[2] == 1:  # a new token, which sees every key
            found = [part(key, value)]
        elif (parts := _parts(query, key, attention_mask)) is not None:
            read, own = slice(None, parts.before), slice(parts.before, None)
            found = [
                part(key[:, :, read], value[:, :, read]),
                part(key[:, :, own], value[:, :, own], causal=parts.own is None, mask=parts.own),
            ]
    if not found:
        return _whole(module, query, key, value, attention_mask, **options)
    return joined(found).transpose(1, 2).contiguous(), None


def _is_plain(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Return whether this call comes from this thread's reading, and is one that the kernel computes."""
    others = ("position_bias", "softcap", "cache")
    if _reading.masks is None or options.get("dropout") or any(options.get(name) is not None for name in others):
        return False
    return takes(query, key, value) and query.shape[0] == key.shape[0]


def _parts(query: Tensor, key: Tensor, mask: Tensor | None) -> PrefixMask | None:
    """Return how to split a call; None: it cannot be split."""
    assert _reading.masks is not None
    if mask is None or mask.dim() != 4 or mask.shape[-2:] != (query.shape[2], key.shape[2]):
        return None
    if id(mask) not in _reading.masks:
        _reading.masks[id(mask)] = mask, PrefixMask.of(mask, query.dtype)
    return _reading.masks[id(mask)][1]
