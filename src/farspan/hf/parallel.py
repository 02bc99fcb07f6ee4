"""Models divided among several processes by matrices (tensor parallelism of transformers): facts and refusals.

Each process has a part of the heads of every layer, and of their keys. All processes run the same forwards and get the
same hidden states and logits.
"""

from typing import Any

import torch
import torch.distributed
from torch import Tensor
from transformers.distributed import DistributedConfig

from farspan.hf.facts import input_device, layer_configs


def num_parts(model: Any) -> int:
    """Return the number of processes that the model is divided among; 1: it is whole."""
    return getattr(model, "tp_size", None) or 1


def bytes_here(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of the part of it that this process has."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.numel() * part.element_size()


def least(number: int, model: Any) -> int:
    """Return the smallest `number` over the processes of a divided model, so that all of them decide alike."""
    numbers = torch.tensor(number, device=input_device(model))
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN)
    return int(numbers)


def refuse_divided(model: Any, name: str) -> None:
    """Raise ValueError if the model is divided: `name` needs all heads of a layer in one place."""
    if (parts := num_parts(model)) > 1:
        raise ValueError(
            f"{name} needs all heads of a layer together, and this model's are divided among {parts} devices: use one "
            "device for each model, or --device-map auto, which divides it by layers"
        )


def check_divides(config: Any, wanted: DistributedConfig | None, name: str) -> None:
    """Raise ValueError if the model cannot be divided among as many processes as `wanted` has."""
    if wanted is None or (num_parts := wanted.tp_size) in (None, 1):
        return
    text = config.get_text_config(decoder=True)
    instead = "or divide it by layers with --device-map auto"
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"model {name!r} cannot be divided among {num_parts} devices: transformers has no plan for the tensor "
            f"parallelism of {config.model_type}. Use one device for each model, {instead}"
        )
    for layer in layer_configs(text):
        heads = layer.num_attention_heads
        key_value_heads = getattr(layer, "num_key_value_heads", None) or heads
        if heads % num_parts == 0 and key_value_heads % num_parts == 0:
            continue
        raise ValueError(
            f"model {name!r} has {heads} heads and {key_value_heads} key-value heads, which {num_parts} devices cannot "
            f"divide evenly: choose a number that divides both (--gpus-per-model), {instead}"
        )
