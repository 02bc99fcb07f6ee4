"""The cross-attention of a decoder layer to an encoded context.

    q = W_q ln_x(h)    k = W_k Φ    v = W_v Φ    out = W_o softmax(q kᵀ · scale) v

No positions, and no mask except for padding. Yen et al. 2024, section 2.1. Because keys have no positions,

    q (W_k φ) = (W_kᵀ q) φ        Σ_j a_j W_v φ_j = W_v Σ_j a_j φ_j

so one decoding step over a long context needs no keys and values (mode `absorb`). In a decoder that normalises its keys
(q/k-norm), each token and head has a further factor; only these factors are kept.
"""

from dataclasses import dataclass
from itertools import repeat

import torch
from jaxtyping import Float
from torch import Tensor, nn

from farspan.cepe.context import Context

SCORES_AT_ONCE = 1 << 24  # attention weights that `absorb` holds at once
UNFUSED = 3  # time of a multiplication in `absorb`, relative to one in a fused kernel; approximate
BALANCE = 64  # multiplications in the time that it takes to read one number from memory; approximate


@dataclass(frozen=True)
class Shape:
    """The geometry of a decoder layer's self-attention, which its cross-attention shares."""

    hidden: int
    heads: int
    key_heads: int
    dim: int
    scale: float
    query_bias: bool = False
    key_bias: bool = False  # only before a k-norm: elsewhere a bias of the keys cannot change the softmax
    value_bias: bool = False


class CrossAttention(nn.Module):
    """Cross-attention from the residual stream to a context. Parameters are named as in the authors' checkpoints."""

    def __init__(
        self,
        shape: Shape,
        width: int,
        layernorm: nn.Module,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        *,
        from_end: int,
        num_cross: int,
    ) -> None:
        super().__init__()
        inner, keys = shape.heads * shape.dim, shape.key_heads * shape.dim
        self.shape = shape
        self.from_end = from_end  # 1: the decoder's last layer
        self.num_cross = num_cross  # layers with cross-attention
        self.q_proj = nn.Linear(shape.hidden, inner, bias=shape.query_bias)
        self.k_proj = nn.Linear(width, keys, bias=shape.key_bias)
        self.v_proj = nn.Linear(width, keys, bias=shape.value_bias)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)
        self.layernorm = layernorm
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(
        self, hidden: Float[Tensor, "batch time hidden"], context: Context
    ) -> Float[Tensor, "batch time hidden"]:
        """Return the output to add to the residual stream. Row i of the batch reads row i // (batch / rows) of the
        context.

        Raises:
            ValueError: a batch that is not a multiple of the context's rows, or states of another width than the
                encoder's.
        """
        shape, weight = self.shape, self.q_proj.weight
        states = context.of_layer(self.from_end).to(weight.dtype)
        rows, batch, time = context.rows, *hidden.shape[:2]
        if batch % rows:
            raise ValueError(f"{batch} rows cannot read a context of {rows} rows: give {rows} rows, or a multiple")
        if states.shape[2] != self.k_proj.in_features:
            raise ValueError(
                f"the context has states of width {states.shape[2]}, this model's encoder gives "
                f"{self.k_proj.in_features}: encode it with this model"
            )
        query = self.q_proj(self.layernorm(hidden.to(weight.dtype)))
        query = _normed(self.q_norm, query.view(batch, time, shape.heads, shape.dim)) * context.score_factor
        # rows that share a context and heads that share keys are treated as more queries
        cut = (rows, batch // rows, time, shape.key_heads, shape.heads // shape.key_heads, shape.dim)
        query = query.reshape(cut).permute(0, 3, 1, 4, 2, 5).reshape(rows, shape.key_heads, -1, shape.dim)
        mode = self._mode(context, query, states)
        if mode == "absorb":
            out = self._absorbed(query, states, context)
        else:
            keys, values = self._keys_and_values(states, context, keep=mode == "cache")
            mask = None if context.mask is None else context.mask[:, None, None]
            out = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=shape.scale)
        if context.visible is not None:
            out = out * context.visible.to(out.dtype)[:, None, None, None]
        order = (rows, shape.key_heads, batch // rows, shape.heads // shape.key_heads, time, shape.dim)
        out = out.reshape(order).permute(0, 2, 4, 1, 3, 5).reshape(batch, time, -1)
        return self.o_proj(out).to(hidden.dtype)

    def cache_bytes(self, context: Context) -> int:
        """Return the bytes of keys and values of this layer."""
        width = 2 * self.shape.key_heads * self.shape.dim
        return context.rows * context.num_tokens * width * self.k_proj.weight.dtype.itemsize

    def _mode(self, context: Context, query: Tensor, states: Tensor) -> str:
        wants_gradients = torch.is_grad_enabled() and (query.requires_grad or states.requires_grad)
        offloaded = self.k_proj.weight.is_meta  # weights are then loaded only while the layer is called
        if context.mode != "auto":
            again = (wants_gradients and context.mode == "cache") or (offloaded and context.mode == "absorb")
            return "recompute" if again else context.mode
        shape, width, queries = self.shape, states.shape[2], query.shape[1] * query.shape[2]
        keys = 2 * shape.key_heads * shape.dim
        project, read = width * keys, max(queries * 2 * shape.dim, BALANCE * keys)  # for each token of the context
        costs = {"recompute": project + read, "absorb": max(UNFUSED * queries * 2 * width, BALANCE * width)}
        if not wants_gradients and self.cache_bytes(context) * self.num_cross <= context.budget:
            costs = {"cache": read + (0 if self.from_end in context.kept else project), **costs}
        if offloaded:
            del costs["absorb"]
        return min(costs, key=costs.__getitem__)

    def _keys_and_values(self, states: Tensor, context: Context, keep: bool) -> tuple[Tensor, Tensor]:
        """Return keys and values, [rows, key heads, tokens, dim] each."""
        if keep and self.from_end in context.kept:
            return context.kept[self.from_end]
        split = (*states.shape[:2], self.shape.key_heads, self.shape.dim)
        keys = _normed(self.k_norm, self.k_proj(states).view(split)).transpose(1, 2)
        values = self.v_proj(states).view(split).transpose(1, 2)
        if keep:
            context.kept[self.from_end] = keys.contiguous(), values.contiguous()
            return context.kept[self.from_end]
        return keys, values

    def _absorbed(self, query: Tensor, states: Tensor, context: Context) -> Tensor:
        """Return the attention's output, [rows, key heads, queries, dim], without keys and values."""
        rows, heads = query.shape[:2]
        tokens, width = states.shape[1:]
        split = (heads, self.shape.dim, width)
        key_weight, value_weight = self.k_proj.weight.view(split), self.v_proj.weight.view(split)
        query = query * self.shape.scale
        factor = constant = None
        if self.k_norm is not None:
            gain, centred = _linear_part(self.k_norm, states, heads, self.shape.dim)
            query = query * gain[:, None]
            query = query - centred * query.mean(-1, keepdim=True)
            if self.k_proj.bias is not None:
                constant = query @ self.k_proj.bias.view(1, heads, -1, 1)
            factor = self._factor(states, context, gain, centred)  # [rows, key heads, 1, tokens]
        absorbed = query @ key_weight  # [rows, key heads, queries, width]
        parts = []
        size = max(1, SCORES_AT_ONCE // (rows * heads * max(1, tokens)))
        slopes = repeat(None) if constant is None else constant.split(size, 2)
        for part, slope in zip(absorbed.split(size, 2), slopes, strict=False):
            many = part.shape[2]
            scores = (part.reshape(rows, heads * many, width) @ states.mT).view(rows, heads, many, tokens).float()
            if factor is not None:
                scores = (scores if slope is None else scores + slope) * factor
            if context.mask is not None:
                scores = scores.masked_fill(~context.mask[:, None, None], -torch.inf)
            weights = scores.softmax(-1).to(states.dtype).view(rows, heads * many, tokens)
            parts.append((weights @ states).view(rows, heads, many, width))
        out = torch.cat(parts, 2) @ value_weight.mT
        return out if self.v_proj.bias is None else out + self.v_proj.bias.view(1, heads, 1, -1)

    def _factor(self, states: Tensor, context: Context, gain: Tensor, centred: Tensor) -> Tensor:
        """Return the factor of the k-norm for each token's key, [rows, key heads, 1, tokens]."""
        if self.from_end in context.scales and not torch.is_grad_enabled():
            return context.scales[self.from_end]
        assert self.k_norm is not None
        raw = self.k_proj(states).view(*states.shape[:2], self.shape.key_heads, self.shape.dim)
        shift = _normed(self.k_norm, torch.zeros_like(raw[:1, :1]))
        plain = (raw - centred * raw.mean(-1, keepdim=True)) * gain
        along = ((_normed(self.k_norm, raw) - shift) * plain).float().sum(-1)
        factor = (along / plain.float().square().sum(-1).clamp_min(1e-30)).permute(0, 2, 1)[:, :, None]
        if not torch.is_grad_enabled():
            context.scales[self.from_end] = factor
        return factor


def _normed(norm: nn.Module | None, x: Float[Tensor, "batch time heads dim"]) -> Float[Tensor, "batch time heads dim"]:
    """Apply a q/k-norm as the decoder's family does: one norm to each head, one to all heads together, or one norm for
    each head."""
    if norm is None:
        return x
    if hasattr(norm, "norms"):
        return norm(x.transpose(1, 2)).transpose(1, 2)
    weight = getattr(norm, "weight", None)  # NanoChat's has none
    if weight is not None and weight.shape == (x.shape[2] * x.shape[3],):
        return norm(x.flatten(2)).view(x.shape)
    return norm(x)


def _linear_part(norm: nn.Module, like: Tensor, heads: int, dim: int) -> tuple[Float[Tensor, "heads dim"], Tensor]:
    """Return the gain of a norm x -> gain · x / size(x) + shift, and whether it is centred: x - mean(x) in place of
    x (LayerNorm). The latter is a tensor: to read it, the host would wait for a GPU in every layer."""
    zero = next(norm.parameters(), like).new_zeros(1, 1, heads, dim)
    shift = _normed(norm, zero)
    signs = torch.ones_like(zero)
    signs[..., 1::2] = -1  # of mean 0 and mean square 1
    gain = (_normed(norm, 1e3 * signs) - shift) * signs
    ones = _normed(norm, 1e3 * torch.ones_like(zero)) - shift
    return gain[0, 0], ones.abs().max() < 0.5 * gain.abs().max()
