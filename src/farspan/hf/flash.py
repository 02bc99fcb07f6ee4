"""torch's fused attention on CPUs over parts of the keys, joined into one softmax."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

# returns the output and its log-sum-exp, and accepts fewer key heads than query heads; called by
# `scaled_dot_product_attention` itself
_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

Part = tuple[Float[Tensor, "batch heads time dim"], Float[Tensor, "batch heads time"]]  # output and log-sum-exp


def flash(
    query: Float[Tensor, "batch heads time dim"],
    key: Float[Tensor, "batch key_heads keys dim"],
    value: Float[Tensor, "batch key_heads keys dim"],
    *,
    causal: bool = False,
    mirrored: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Part:
    """Attend with torch's kernel. `causal`: the first query sees the first key only; `mirrored`: the last query sees
    the last key only (as many keys as queries); `mask`: additive."""
    if mirrored:  # as a causal call, of which the kernel skips what is hidden
        out, total = flash(query.flip(2), key.flip(2), value.flip(2), causal=True, scale=scale)
        return out.flip(2), total.flip(2)
    batch, heads, time, dim = query.shape
    if single := time == 1 and mask is None and not causal:
        # make the query heads of a key head queries of one head: alone, each takes up to 7 times as long in bf16
        query = query.reshape(batch, key.shape[1], -1, dim)
    out, total = _kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return (out.reshape(batch, heads, 1, dim), total.reshape(batch, heads, 1)) if single else (out, total)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel accepts these tensors; it has no gradient of the log-sum-exp, and casts nothing."""
    same = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
    return same and query.device.type == "cpu" and not torch.is_grad_enabled()


def hidden_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of a boolean one (True: hidden); it is finite, so that hidden rows have no NaN."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


def joined(parts: Sequence[Part]) -> Float[Tensor, "batch heads time dim"]:
    """Return the attention over all keys: the outputs of the parts, weighted by their sums of exponentials."""
    return combined(parts)[0].to(parts[0][0].dtype)


def combined(parts: Sequence[Part]) -> Part:
    """Return the result of `joined` in float32, with its log-sum-exp."""
    (out, total), *others = parts
    out = out.float()
    for other, log_sum in others:
        out = out.lerp_(other.float(), torch.sigmoid(log_sum - total)[..., None])
        total = torch.logaddexp(total, log_sum)
    return out, total
