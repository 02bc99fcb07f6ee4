"""torch's fused attention over parts of the keys, joined into one softmax, on CPUs and NVIDIA GPUs."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.functional import pad

from farspan.hf.products import is_used

HIDDEN = -1e30  # added to scores; the GPU's kernel multiplies it by log2(e), which must not overflow
FEW = 32  # queries for which making keys and values float32 takes longer than it saves
MASK_ROW = 16  # the GPU's kernel reads rows of a mask that begin at multiples of so many values

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
    """Attend with one of torch's kernels. `causal`: the first query sees the first key only; `mirrored`: the last
    query sees the last key only (both: as many keys as queries); `mask`: additive."""
    if mirrored:  # as a causal call, of which the kernel skips what is hidden
        out, total = flash(query.flip(2), key.flip(2), value.flip(2), causal=True, scale=scale)
        return out.flip(2), total.flip(2)
    batch, heads, time, dim = query.shape
    if single := time == 1 and mask is None and not causal:
        # make the query heads of a key head queries of one head: alone, each takes up to 7 times as long in bf16
        query = query.reshape(batch, key.shape[1], -1, dim)
    out, total = _kernel(query, key, value, causal, mask, scale)
    return (out.reshape(batch, heads, 1, dim), total.reshape(batch, heads, 1)) if single else (out, total)


def _kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Part:
    """Call the kernel that `scaled_dot_product_attention` would call, which also returns the log-sum-exp."""
    if query.device.type == "cpu":
        dtype = query.dtype
        if query.shape[2] >= FEW and dtype != torch.float32 and is_used():  # forwards then use oneDNN
            query, key, value = query.float(), key.float(), value.float()
            mask = None if mask is None else mask.float()
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, total = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        return out.to(dtype), total
    if mask is None and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, causal, True)):
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    groups = query.shape[1] // key.shape[1]  # this kernel takes one key head for each query head
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if mask is not None:
        mask = pad(mask, (0, -mask.shape[-1] % MASK_ROW))[..., : mask.shape[-1]]  # a view of longer rows
        mask = mask.expand(*query.shape[:3], -1)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out, total = kernel(query, key, value, mask, True, 0.0, causal, scale=scale)[:2]
    return out, total[..., : query.shape[2]]  # the kernel pads its rows


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether a kernel accepts these tensors; it has no gradient of the log-sum-exp, and casts nothing."""
    same = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if torch.is_grad_enabled() or not same:
        return False
    if query.device.type == "cuda" and torch.version.hip is None:
        return can_use_efficient_attention(SDPAParams(key, key, key, None, 0.0, False, False))
    return query.device.type == "cpu"


def hidden_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of a boolean one (True: hidden); it is finite, so that hidden rows have no NaN."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, max(HIDDEN, torch.finfo(dtype).min))


def joined(parts: Sequence[Part]) -> Float[Tensor, "batch heads time dim"]:
    """Return the attention over all keys: the outputs of the parts, weighted by their sums of exponentials."""
    if len(parts) == 1:  # no copy in float32
        return parts[0][0]
    return combined(parts)[0].to(parts[0][0].dtype)


def combined(parts: Sequence[Part]) -> Part:
    """Return the result of `joined` in float32, with its log-sum-exp."""
    (out, total), *others = parts
    out = out.float()
    for other, log_sum in others:
        out = out.lerp_(other.float(), torch.sigmoid(log_sum - total)[..., None])
        total = torch.logaddexp(total, log_sum)
    return out, total
