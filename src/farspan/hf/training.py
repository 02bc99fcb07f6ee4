"""A model in training: without its wrappers, in eval mode, or set aside for a measurement."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Set a model to eval mode; afterwards restore the mode of each of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def unwrapped(model: Any) -> Any:
    """Return the model without the wrappers of data parallelism, torch.compile and PEFT.

    Raises:
        ValueError: the model's parameters are sharded, or PEFT puts trained tokens before each text.
    """
    from accelerate.utils import extract_model_from_parallel

    kinds: tuple[type, ...] = ()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.tensor import DTensor

        kinds = (FullyShardedDataParallel, DTensor)
    parts = [*model.modules(), *model.parameters()]
    if any(isinstance(part, kinds) or hasattr(part, "ds_id") for part in parts):
        raise ValueError(
            "the model's parameters are sharded over processes (FSDP, DeepSpeed ZeRO-3 or tensor parallel), but this "
            "callback measures in one process: train without it and measure the checkpoints with `farspan curve`, or "
            "train with DDP or ZeRO-2"
        )
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__} puts trained tokens before each text, which this callback would leave out: train "
            "LoRA or the weights themselves, or train without the callback"
        )
    return model.get_base_model()


@contextmanager
def evaluated_weights(model: Any, optimizer: Any) -> Iterator[None]:
    """Give a model in training the weights that its optimizer evaluates with, as the Trainer's evaluation does: those
    of a schedule-free one are averages. Afterwards restore the weights in training, bit for bit.

    Args:
        optimizer: accelerate's wrapper of an optimizer, which has `eval` and `train` for all; None: there is none.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not callable(getattr(getattr(inner, "optimizer", inner), "eval", None)):  # DeepSpeed wraps it once more
        yield
        return
    held = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
    optimizer.eval()
    moved = any(not torch.equal(p, before) for p, before in held)  # not if it was in its eval mode
    try:
        yield
    finally:
        if moved:
            optimizer.train()
            with torch.no_grad():
                for p, before in held:
                    p.copy_(before)


@contextmanager
def set_aside(model: Any, *, gradients: bool = False) -> Iterator[None]:
    """Set the model to eval mode, without gradients unless a method may need `gradients`. Afterwards restore the mode
    of each module, and the random generators of Python, NumPy and torch."""
    devices = [device for device in {p.device for p in model.parameters()} if device.type not in ("cpu", "meta")]
    kind = devices[0].type if devices else "cuda"  # what older torch takes every device for
    python, numpy, forward = random.getstate(), np.random.get_state(), model.__dict__.get("forward")
    try:
        # without the autocast of accelerate, which its public extract_model_from_parallel removes for good
        if "_original_forward" in model.__dict__:
            model.forward = model._original_forward
        no_grad = nullcontext() if gradients else torch.no_grad()
        with evaluating(model), torch.random.fork_rng(devices, device_type=kind), no_grad:
            yield
    finally:
        if forward is not None:
            model.forward = forward
        random.setstate(python)
        np.random.set_state(numpy)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # frees the memory of the keys for the training
