"""The state of a model that a method might change, by name, before and after."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from farspan.doctor.subject import Check
from farspan.lm import LM


def state(lm: LM) -> dict[str, Any]:
    """Return all state that a method might change, by name."""
    model = lm.model
    state: dict[str, Any] = {}
    for where, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for key, value in kind.items():
                if value is not None:
                    state[f"{where}.{key}"] = id(value), value.dtype, tuple(value.shape), _bits(value)
        state[f"{where} attributes"] = sorted(vars(module))
        state[f"{where} settings"] = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str)}
        state[f"{where} hooks"] = {k: len(v) for k, v in vars(module).items() if k.endswith("hooks") and v is not None}
    state["config"] = deepcopy(model.config.to_dict())
    state["attention implementation"] = model.config._attn_implementation
    state["attention functions"] = sorted(AttentionInterface().valid_keys())
    state["mask functions"] = sorted(AttentionMaskInterface().valid_keys())
    return state


def no_trace(before: dict[str, Any], after: dict[str, Any], same: bool, promise: str) -> Check:
    """Return the check that two states are equal; `same`: whether the model's own logits are."""
    moved = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    note = promise
    if moved:
        note = f"left changed: {', '.join(moved[:3])}{' and more' if len(moved) > 3 else ''}"
    elif not same:
        note = "the model's own logits have changed, although its weights, hooks and config have not"
    return Check("no trace", not moved and same, f"{len(moved)} changed", f"0 of {len(before):,}", note)


def _bits(value: Tensor) -> int | None:
    """Return a checksum of the bits of a tensor; None for offloaded weights."""
    if value.device.type == "meta" or not value.numel():
        return None
    flat = value.detach().reshape(-1)
    aligned = flat.storage_offset() * flat.itemsize % 8 == 0 and flat.numel() * flat.itemsize % 8 == 0
    return int(flat.view(torch.int64 if aligned else torch.uint8).sum())
