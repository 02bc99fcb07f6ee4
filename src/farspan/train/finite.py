"""Refuse weights, losses and gradients that are not finite."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState, TrainingArguments

from farspan.train.checkpoint import steps


def not_finite(parameters: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first parameter that holds NaN or infinity in this process; None if all are finite. Waits
    once for the device."""
    named = [(name, p.to_local() if hasattr(p, "to_local") else p) for name, p in parameters]
    named = [(name, p.detach()) for name, p in named if p.numel()]
    if not named:
        return None
    finite = torch.stack([p.isfinite().all().to(named[0][1].device) for _, p in named]).tolist()
    return next((name for (name, _), fine in zip(named, finite, strict=True) if not fine), None)


def refuse_not_finite(model: Any, what: str) -> None:
    """Raise ValueError, with the first of them, if weights of a model are not finite, before it is trained or used in a
    training.

    Args:
        what: the name of the model, for the error.
    """
    if (name := not_finite(model.named_parameters())) is not None:
        raise ValueError(
            f"{what} cannot be used: its weight {name} holds NaN or infinity, expected finite numbers. Choose another "
            "model, or download it again"
        )


def refuse_not_finite_values(values: Mapping[str, Any], state: TrainerState, args: TrainingArguments) -> None:
    """Raise ValueError, with the steps, if a training diverged: a loss or the gradient's norm is NaN or infinite.

    Args:
        values: the values being logged. A loss is the mean over all processes and all steps since the previous line,
            so no step is left out. It is on the CPU already, so the check does not wait for the device.
    """
    for key, name in (("loss", "loss"), ("eval_loss", "held-out loss"), ("grad_norm", "norm of the gradient")):
        value = values.get(key)
        if value is None or math.isfinite(value):
            continue
        now = state.global_step
        before = max((e["step"] for e in state.log_history if "loss" in e and e["step"] < now), default=0)
        when = f"at step {now:,}" if key != "loss" or before + 1 == now else f"in steps {before + 1:,} to {now:,}"
        raise diverged(f"the {name} is {value} {when}, expected a finite number", args)


def diverged(what: str, args: TrainingArguments) -> ValueError:
    """Return the error for a training that diverged; it names the last checkpoint."""
    folder = Path(args.output_dir)
    kept = max(steps(folder), default=0)
    last_one = f"the last checkpoint is {folder / f'checkpoint-{kept}'}" if kept else "there is no checkpoint"
    return ValueError(
        f"the training diverged: {what}. No model was saved; {last_one}. Lower optimizer.lr = {args.learning_rate:g} "
        "or optimizer.weight_decay, or give more optimizer.warmup_steps, and train into another folder (out)"
    )
