"""Optimizers and their schedule: AdamW, or Muon for matrices and AdamW for all other parameters, as one optimizer."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn
from transformers import get_wsd_schedule

from farspan.train.config import Settings


class OptimizerSettings(Settings):
    """[optimizer]: AdamW or Muon, and a warmup-stable-decay schedule (WSD) of the learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)  # of matrices, of experts too; never of norms, biases and embeddings
    clip: float = Field(1.0, gt=0)  # largest norm of the gradient; a larger gradient is scaled down to it
    momentum: float = Field(0.95, ge=0, lt=1)  # of Muon
    warmup_steps: int | float = Field(0.05, ge=0)  # a number of steps, or, below 1, a share of all steps
    decay_fraction: float = Field(0.2, ge=0, le=1)  # share of all steps, the last ones, in which the rate falls to zero
    decay: Literal["linear", "cosine"] = "linear"  # how the rate falls

    @field_validator("warmup_steps")
    @classmethod
    def _steps_or_share(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("expected a whole number of steps, or a share of all steps below 1")
        return value

    @model_validator(mode="after")
    def _has_effect(self) -> "OptimizerSettings":
        if self.name != "muon":
            self.refuse_unused(("momentum",), f"name = {self.name!r}", 'name = "muon"')
        if not self.decay_fraction and "decay_fraction" not in self.model_fields_set:  # a given 0 turns a decay off
            self.refuse_unused(("decay",), "decay_fraction = 0", "a decay_fraction above 0")
        return self


def warmup_and_decay(settings: OptimizerSettings, num_steps: int) -> tuple[int, int]:
    """Return the number of warm-up steps, which are the first, and of decay steps, which are the last.

    Raises:
        ValueError: warm-up and decay together have more steps than the training.
    """
    given, share = settings.warmup_steps, settings.decay_fraction
    warmup = round(num_steps * given) if given < 1 else int(given)
    decay = round(num_steps * share)
    two_shares = given < 1 and given + share < 1 + 1e-9  # these can exceed num_steps only by rounding
    if warmup + decay > num_steps and not two_shares:
        raise ValueError(
            f"optimizer.warmup_steps = {given} and a decay over {decay} steps do not fit into "
            f"trainer.steps = {num_steps}: give optimizer.warmup_steps <= {num_steps - decay}, or a share of all "
            f"steps, as with --set optimizer.warmup_steps={(1 - share) / 10:.2g}, or a lower optimizer.decay_fraction"
        )
    return warmup, min(decay, num_steps - warmup)


def build(
    model: nn.Module, settings: OptimizerSettings, num_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return the optimizer of the trainable parameters of `model`, and its schedule over `num_steps` steps.

    Raises:
        ValueError: as `warmup_and_decay`.
    """
    spared = {id(p) for m in model.modules() if _not_decayed(m) for p in m.parameters(recurse=False)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    spared |= {id(p) for p in head.parameters()} if head is not None else set()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if p.ndim > 1 and id(p) not in spared and not name.endswith("bias")]
    known = {id(p) for p in decayed}
    others = {"params": [p for _, p in trained if id(p) not in known], "weight_decay": 0.0}

    adam: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    optimizer: torch.optim.Optimizer
    if settings.name == "adamw":
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, others]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], **adam)
    else:
        parts: list[torch.optim.Optimizer] = []
        if matrices := [p for p in decayed if p.ndim == 2]:
            # match_rms_adamw scales Muon's update to the size of AdamW's, so that both use one rate
            parts.append(
                Muon(
                    matrices,
                    lr=settings.lr,
                    weight_decay=settings.weight_decay,
                    momentum=settings.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        stacks = {"params": [p for p in decayed if p.ndim > 2], "weight_decay": settings.weight_decay}
        if groups := [group for group in (stacks, others) if group["params"]]:
            parts.append(torch.optim.AdamW(groups, **adam))
        optimizer = Together(*parts)
    return optimizer, _schedule(optimizer, settings, num_steps)


def _not_decayed(module: nn.Module) -> bool:
    """Return whether the weights of a module are embeddings, or of a norm, which can be one for each head: a matrix."""
    return isinstance(module, nn.Embedding) or "Norm" in type(module).__name__


def rates(settings: OptimizerSettings, num_steps: int, count: int) -> list[float]:
    """Return the learning rates of the first `count` steps of a training of `num_steps` steps, relative to `lr`.

    Raises:
        ValueError: as `warmup_and_decay`.
    """
    schedule = _schedule(torch.optim.SGD([torch.zeros(1)]), settings, num_steps)
    return [schedule.lr_lambdas[0](step) for step in range(count)]


def _schedule(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    warmup, decay = warmup_and_decay(settings, num_steps)
    return get_wsd_schedule(
        optimizer,
        num_warmup_steps=warmup,
        num_decay_steps=decay,
        num_training_steps=num_steps,
        decay_type=settings.decay,
    )


class Muon(torch.optim.Muon):
    """torch's Muon. It orthogonalises in bfloat16; on CPUs, most of which emulate bfloat16, this one uses float32."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if any(p.device.type != "cpu" for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                rate = group["lr"] * 0.2 * max(p.shape) ** 0.5  # match_rms_adamw
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(_orthogonal(update.float(), group["ns_coefficients"], group["ns_steps"]), alpha=-rate)
        return loss


def _orthogonal(matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """Return approximately U Vᵀ for a matrix U S Vᵀ, by the Newton-Schulz iteration of Muon (Jordan et al. 2024)."""
    a, b, c = coefficients
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


class Together(torch.optim.Optimizer):
    """Several optimizers, each with its own parameters, that step and are saved as one.

    `param_groups` has the groups of the parts themselves, so that a scheduler changes the learning rates of the parts.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure else None
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share()
