"""Attention masks for tokens whose positions have gaps."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of types of layers


def gapped_mask(model: Any, positions: Int[Tensor, "batch time"]) -> Tensor | dict[str, Tensor]:
    """Return the attention_mask for positions with gaps: [batch, time], or [batch, 1, time, time] per kind of layer.

    Without a mask and a cache, as in training, transformers treats every gap as the beginning of another text and masks
    across it (masking_utils). A mask of ones prevents that, but counts sliding windows in tokens instead of positions:
    these layers get masks of their own, over `0 <= position - position' < window`.
    """
    windows = sliding_windows(model)
    if not any(windows.values()):
        return torch.ones_like(positions)
    masks = {kind: causal_mask(model, positions, window) for kind, window in windows.items()}
    return masks if getattr(model.config.get_text_config(decoder=True), "layer_types", None) else masks[SLIDING]


def causal_mask(model: Any, positions: Int[Tensor, "batch time"], window: int | None) -> Tensor:
    """Return the causal mask by position, in the form that the model's attention takes: [batch, 1, time, time]."""
    distance = positions[:, None, :, None] - positions[:, None, None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if model.config._attn_implementation != "eager":
        return visible
    return torch.zeros(visible.shape, device=positions.device).masked_fill_(~visible, torch.finfo(model.dtype).min)


def sliding_windows(model: Any) -> dict[str, int | None]:
    """Return the window in tokens of each kind of attention layer of a model; None: no window.

    Raises:
        ValueError: layers that are neither full nor sliding attention.
    """
    windows, others = layer_windows(model)
    if others or not windows:
        raise ValueError(f"{type(model).__name__} has layers of {', '.join(others) or 'no attention'}")
    return {FULL if window is None else SLIDING: window for window in set(windows)}


def layer_windows(model: Any) -> tuple[list[int | None], list[str]]:
    """Return the window of each layer (None: no window), and the kinds of layers besides full and sliding attention."""
    layers = DynamicCache(config=model.config).layers
    config = model.config.get_text_config(decoder=True)
    others = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}
    others |= {type(one).__name__ for one in layers if type(one) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    return [getattr(one, "sliding_window", None) for one in layers], sorted(others)
