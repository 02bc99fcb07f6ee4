"""Checks before a training on positions with gaps. Without them such a training could be wrong without an error."""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan import hf
from farspan.hf.device import is_out_of_memory
from farspan.hf.training import evaluating
from farspan.train.draws import draw
from farspan.train.objective import decoded, last_hidden

PROBE = 128  # tokens
REFUSAL = "Sparse Memory Training cannot train {}"
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # largest relative difference of hidden states


def preflight(model: Any, core: Any, window: int, longest: int) -> None:
    """Run a row with gaps through `model` as in the training, and refuse a model that cannot learn from such rows.

    Args:
        model: the trained model: `core`, the transformers model, or a wrapper of it.
        window: tokens of a row.
        longest: tokens of the longest documents, which is the number of positions.

    Raises:
        ValueError: the model takes no positions, ignores them, or has a table of fewer than `longest`; its RoPE depends
            on the length, or is not fp32; a layer's attention is of an unknown kind; it takes no explicit mask, or
            hidden states differ from those under one; memory tokens have no effect on the target; or sliding windows
            are not counted in positions.
    """
    windows = usable(core, longest)
    refusal = REFUSAL.format(type(core).__name__)
    targets = min(window, PROBE) // 2
    rng = np.random.default_rng(0)
    memory = draw(longest - targets, min(targets, longest - targets), rng)
    positions = torch.from_numpy(np.concatenate([memory, np.arange(longest - targets, longest)]))[None]
    positions = positions.to(hf.input_device(core))
    vocabulary = core.get_input_embeddings().num_embeddings
    ids = torch.from_numpy(rng.integers(vocabulary, size=positions.shape)).to(positions.device)

    with evaluating(model):
        with torch.no_grad():
            hidden, _ = decoded(model, core, ids, positions)
            near, _ = decoded(model, core, ids, torch.arange(positions.shape[1], device=ids.device)[None])
            if _distance(hidden, near) == 0:
                raise ValueError(f"{refusal}: it does not use its positions, so gaps between them have no effect")
            if set(windows.values()) == {None} and "flash" not in str(core.config._attn_implementation):
                try:
                    expected = _under_explicit_mask(core, ids, positions)
                except RuntimeError as error:
                    if is_out_of_memory(error):
                        raise
                    raise ValueError(
                        f"{refusal}: its attention takes no explicit mask, so whether it is cut at gaps between "
                        "positions cannot be checked"
                    ) from error
                if (apart := _distance(hidden, expected)) > TOLERANCE.get(hidden.dtype, 5e-2):
                    raise ValueError(
                        f"{refusal}: on positions with gaps its hidden states are {apart:.2g} away from those under an "
                        "explicit causal mask, so attention is cut somewhere; use another trainer.attention"
                    )
        model.train()
        effect = memory_effect(model, core, ids, positions, len(memory))
        lost = int((effect == 0).sum())
        if lost and set(windows.values()) & {None}:
            raise ValueError(
                f"{refusal}: {lost} of {len(memory)} memory tokens have no effect on the target, so attention is cut "
                "at the gaps between positions; use another trainer.attention"
            )
        if None not in windows.values():
            layers = core.config.get_text_config(decoder=True).num_hidden_layers
            reach = layers * (max(filter(None, windows.values())) - 1)
            if bool((effect[memory < longest - targets - reach] != 0).any()):
                raise ValueError(f"{refusal}: its sliding windows are not counted in positions")


def memory_effect(model: Any, core: Any, ids: Tensor, positions: Tensor, num_memory: int) -> Tensor:
    """Return the effect of each memory token, the first `num_memory` of one row, on the hidden states of the target:
    the norm of the gradient, with respect to the token's embedding, of a random projection of these states."""
    leaves: list[Tensor] = []

    def detached(module: Any, given: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # CTRL scales it in place

    hook = core.get_input_embeddings().register_forward_hook(detached)
    try:
        hidden, _ = decoded(model, core, ids, positions)
    finally:
        hook.remove()
    target = hidden[:, num_memory:]
    directions = torch.randn(target.shape, generator=torch.Generator().manual_seed(0)).to(target)
    (gradient,) = torch.autograd.grad((target * directions).sum(), leaves[0])
    return gradient[0, :num_memory].float().norm(dim=-1).cpu()


def usable(core: Any, longest: int) -> dict[str, int | None]:
    """Return the sliding window, in tokens, of each kind of layer of the model; None for full attention.

    Raises:
        ValueError: as `preflight`, for the checks that need no forward pass.
    """
    refusal = REFUSAL.format(type(core).__name__)
    if "position_ids" not in inspect.signature(core.forward).parameters:
        raise ValueError(f"{refusal}: it has no argument position_ids, so a row cannot have gaps")
    limit = hf.position_limit(core)
    if limit is not None and limit < longest:
        raise ValueError(
            f"{refusal} to {longest:,} tokens: it has learned positions, a table of {limit:,}; use a model with RoPE"
        )
    if (rope := hf.length_dependent_rope(core)) is not None:
        raise ValueError(
            f"{refusal}: its {rope} RoPE depends on the largest position of a batch, so its rows affect each other"
        )
    if precisions := hf.rope_precision(core) - {torch.float32}:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in precisions)
        raise ValueError(
            f"{refusal}: its RoPE frequencies are {names}, expected float32. Errors of up to 0.4 % are many turns at "
            "large positions. Load it with dtype=..., instead of casting it afterwards"
        )
    try:
        return hf.sliding_windows(core)
    except ValueError as error:
        raise ValueError(f"{refusal}: {error}") from error


def _under_explicit_mask(core: Any, ids: Tensor, positions: Tensor) -> Tensor:
    mask = hf.causal_mask(core, positions, None)
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
    return last_hidden(core, core, **inputs)[0]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())
