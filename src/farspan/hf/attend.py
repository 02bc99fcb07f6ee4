"""The attention of methods as pure mathematics: which keys are visible, at which distance, in blocks of queries.

Nothing here depends on transformers; `hf.replaced_attention` replaces a model's own attention with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from farspan.hf.flash import Part, flash, hidden_mask, joined, takes

SCORES_AT_ONCE = {"cpu": 1 << 20}  # scores of one block of queries: as many as fit into a CPU's cache
SCORES_AT_ONCE_ELSEWHERE = 1 << 26
Position = TypeVar("Position", int, Tensor)
SMALLEST_BLOCK = 16  # queries; below that each block's overhead outweighs what it frees
FUSED_QUERIES = 1024  # per block of the fused kernel: fewer add overhead, more compute more hidden pairs


@dataclass(frozen=True)
class Layer:
    """The properties of one attention layer that methods need."""

    index: int
    inv_freq: Float[Tensor, "pairs"] | None  # angle per position of its rotary dimensions; None: no RoPE
    window: int | None  # tokens of the layer's own sliding window, the current one included; None: none


# by layer: a buffer of keys that were rotated to other positions in earlier steps, and how many it holds
Turned = dict[int, tuple[Float[Tensor, "batch heads capacity dim"], int]]


@dataclass(frozen=True)
class Call:
    """One layer's queries, keys and values of one forward, after RoPE.

    Keys have consecutive positions that end at the last query's. `num_missing` keys may be missing after the first keys
    of the text. If an `Eviction` has chosen keys, the first keys of each head are at `positions`, and the rest are
    consecutive.
    """

    query: Float[Tensor, "batch heads groups time dim"]  # groups: query heads that share a key head
    key: Float[Tensor, "batch heads keys dim"]
    value: Float[Tensor, "batch heads keys value_dim"]
    scale: float
    softcap: float | None
    layer: Layer
    start: int  # position of the first query in the text
    real: Bool[Tensor, "batch keys"] | None  # False at padding; None without any
    positions: Int[Tensor, "batch heads chosen"] | None = None  # of the chosen keys in the text; None: not evicted
    turned: Turned | None = None  # None: none are kept

    @property
    def num_missing(self) -> int:
        return self.start + self.query.shape[3] - self.key.shape[2]

    def key_positions(self, keys: slice) -> Int[Tensor, "*heads keys"]:
        """Return the positions of these keys: [keys], or [batch, heads, 1, 1, keys] if they differ by head."""
        end, device = self.start + self.query.shape[3], self.key.device
        if self.positions is None:
            return torch.arange(end - self.key.shape[2], end, device=device)[keys]
        since = torch.arange(end - self.key.shape[2] + self.positions.shape[2], end, device=device)
        since = since.expand(*self.positions.shape[:2], -1)
        return torch.cat([self.positions.to(since), since], -1)[:, :, None, None, keys]

    def hidden(self, queries: slice, keys: slice) -> Bool[Tensor, "*heads some keys"]:
        """Return True where a query must not see a key: a later one, or one before the layer's own window."""
        here = torch.arange(self.start + queries.start, self.start + queries.stop, device=self.query.device)[:, None]
        there = self.key_positions(keys)
        hidden = there > here if there.dim() > 1 else there[None] > here
        return hidden if self.layer.window is None else hidden | (there <= here - self.layer.window)

    def blocks(self, num_keys: Callable[[int], int]) -> Iterator[slice]:
        """Yield slices of queries whose scores fit; `num_keys` returns how many keys a block of n queries needs."""
        batch, heads, groups, time, _ = self.query.shape
        limit = SCORES_AT_ONCE.get(self.query.device.type, SCORES_AT_ONCE_ELSEWHERE) // (batch * heads * groups)
        size = time
        while size > SMALLEST_BLOCK and size * num_keys(size) > limit:
            size = max(SMALLEST_BLOCK, size // 2)
        yield from slices(time, size)

    def scores(self, query: Tensor, key: Tensor) -> Float[Tensor, "batch heads groups some keys"]:
        """Return scaled (and capped) scores of queries [batch, heads, groups, some, dim] and keys, in their dtype."""
        batch, heads, groups, some, dim = query.shape
        keys = key.shape[2]
        rows = query.reshape(batch * heads, groups * some, dim)
        columns = key.reshape(batch * heads, keys, dim).transpose(1, 2)
        scores = torch.baddbmm(rows.new_empty(()), rows, columns, beta=0, alpha=self.scale)
        return self.capped(scores.view(batch, heads, groups, some, keys))

    def capped(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap


def slices(num: int, size: int) -> Iterator[slice]:
    for first in range(0, num, size):
        yield slice(first, min(num, first + size))


def written(
    buffer: Tensor | None, states: Float[Tensor, "*batch time dim"], start: int, capacity: int
) -> Float[Tensor, "*batch capacity dim"]:
    """Return a buffer that holds `states` from token `start` on: the same one, or, if they do not fit or there is none,
    a copy for at least `capacity` tokens."""
    end = start + states.shape[-2]
    if buffer is None or end > buffer.shape[-2]:
        grown = states.new_empty((*states.shape[:-2], max(end, capacity), states.shape[-1]))
        if buffer is not None:
            grown[..., :start, :] = buffer[..., :start, :]
        buffer = grown
    buffer[..., start:end, :] = states
    return buffer


Attend = Callable[[Call], Float[Tensor, "batch heads groups time value_dim"]]


def mixed(weights: Float[Tensor, "batch heads groups some keys"], value: Tensor) -> Tensor:
    """Return the weighted sums of values [batch, heads, keys, value_dim]."""
    batch, heads, groups, some, keys = weights.shape
    rows = weights.reshape(batch * heads, groups * some, keys)
    summed = rows @ value.reshape(batch * heads, keys, value.shape[-1])
    return summed.view(batch, heads, groups, some, value.shape[-1])


def frequencies(theta: float, dim: int) -> Float[Tensor, "pairs"]:
    """Return RoPE's angle per position of each pair of `dim` dimensions (Su et al. 2021, arXiv 2104.09864, eq. 15)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)


def angles(positions: Int[Tensor, "time"], inv_freq: Tensor) -> Float[Tensor, "time pairs"]:
    """Return position · inv_freq in float32, rounded as rotary embeddings round it."""
    return positions[:, None].float() * inv_freq.to(positions.device, torch.float32)


def turned(x: Float[Tensor, "*batch time dim"], before: Tensor, after: Tensor) -> Float[Tensor, "*batch time dim"]:
    """Re-rotate `x` from the angles `before` to the angles `after`; both are [..., time, pairs].

    Dimension m is rotated together with m + pairs; dimensions from 2 · pairs on are not rotated. The difference of two
    angles is computed from their sines and cosines, so that it is equally exact at all positions.
    """
    cos = after.cos() * before.cos() + after.sin() * before.sin()
    sin = after.sin() * before.cos() - after.cos() * before.sin()
    pairs = before.shape[-1]
    first, second = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
    parts = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat([*(part.to(x.dtype) for part in parts), x[..., 2 * pairs :]], -1)


def dense(
    call: Call,
    *,
    scores: Callable[[Call, slice, slice], Tensor] | None = None,
    select: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Attend to all earlier tokens within the layer's own window; only padding may be missing.

    `scores` replaces the model's scores of queries and keys; `select` takes masked scores [..., keys] and returns them
    with more set to -inf.
    """
    time, keys, window = call.query.shape[3], call.key.shape[2], call.layer.window
    before = keys - time  # held keys before the first query; the layer's own window may have dropped others
    out = call.query.new_empty(*call.query.shape[:4], call.value.shape[-1])
    for block in call.blocks(lambda size: keys if window is None else min(keys, window + size)):
        low = 0 if window is None or call.positions is not None else max(0, before + block.start - window + 1)
        visible = slice(low, before + block.stop)
        if scores is None:
            some = call.scores(call.query[..., block, :], call.key[:, :, visible])
        else:
            some = scores(call, block, visible)
        hidden = call.hidden(block, visible)
        if call.real is not None:
            hidden = hidden | ~call.real[:, None, None, None, visible]
        nothing = torch.finfo(some.dtype).min if call.real is not None else -torch.inf  # padding rows see no key
        some = some.masked_fill_(hidden, nothing)
        if select is not None:
            some = select(some)
        weights = some.softmax(-1, dtype=torch.float32).to(out.dtype)
        out[..., block, :] = mixed(weights, call.value[:, :, visible])
    return out


@runtime_checkable
class Eviction(Protocol):
    """Chooses the keys to keep for scoring and generation after a text has been read."""

    @property
    def window(self) -> int: ...  # number of last queries of the text that the choice needs

    def choose(self, call: Call) -> Int[Tensor, "batch heads chosen"] | None:
        """Return the indices of the keys to keep for each head, ascending; None: all.

        `call` holds the last `window` queries of the text (all if it is shorter) and the keys that the layer holds.
        """

    def kept_to_answer(self, num_tokens: int) -> int:
        """Return the number of keys that are kept of a text of `num_tokens`."""


@runtime_checkable
class SinkWindow(Protocol):
    """Near tokens seen at their own distance, and first tokens of the text seen at another one if farther away."""

    @property
    def window(self) -> int: ...  # tokens, the current one included

    @property
    def reach(self) -> int: ...  # the most near tokens that a query sees

    @property
    def sinks(self) -> int: ...  # first tokens of the text

    def first_near(self, position: Position) -> Position:
        """Return the position of this query's earliest near token (may be below zero); never decreases."""

    def far_query(self, position: Int[Tensor, "time"]) -> Tensor:
        """Return the position that this query is rotated to when it attends to the first tokens."""

    def far_key(self, position: Int[Tensor, "sinks"]) -> Tensor:
        """Return the position that a first token is rotated to for such a query."""


def sink_window(call: Call, shape: SinkWindow) -> Tensor:
    """Attend with one softmax to near and re-rotated first tokens, within the layer's own window if it is narrower."""
    if keeps_to_its_own(call.layer, shape):
        return dense(call)
    keys, missing, inv_freq = call.key.shape[2], call.num_missing, call.layer.inv_freq
    sinks = slice(0, min(shape.sinks, keys))
    first_keys = call.key[:, :, sinks]
    if inv_freq is not None:
        # held sinks are rotated by their positions in the text, as all keys are
        whose = torch.arange(sinks.stop, device=call.key.device)
        first_keys = turned(first_keys, angles(whose, inv_freq), angles(shape.far_key(whose), inv_freq))
    out = call.query.new_empty(*call.query.shape[:4], call.value.shape[-1])
    fused = call.softcap is None and takes(call.query, call.key, call.value)
    blocks = call.blocks(lambda size: min(keys, shape.window + size))
    for block in slices(call.query.shape[3], FUSED_QUERIES) if fused else blocks:
        last_query = call.start + block.stop - 1
        low = max(shape.first_near(call.start + block.start) - missing, sinks.stop if missing else 0)
        near = slice(low, last_query + 1 - missing)
        far_query = None
        if sinks.stop and shape.first_near(last_query) > 0:
            here = torch.arange(call.start + block.start, last_query + 1, device=call.query.device)
            far_query = call.query[..., block, :]
            if inv_freq is not None:
                far_query = turned(far_query, angles(here, inv_freq), angles(shape.far_query(here), inv_freq))
        attend = _fused_block if fused else _block
        out[..., block, :] = attend(call, shape, block, near, far_query, first_keys)
    return out


def _block(
    call: Call, shape: SinkWindow, block: slice, near: slice, far_query: Tensor | None, first_keys: Tensor
) -> Float[Tensor, "batch heads groups some value_dim"]:
    """Attend with a block's queries to the keys in `near` and, with `far_query`, to the first keys."""
    here = torch.arange(call.start + block.start, call.start + block.stop, device=call.query.device)[:, None]
    there, first = call.key_positions(near), shape.first_near(here)
    scores = call.scores(call.query[..., block, :], call.key[:, :, near])
    scores = scores.masked_fill_((there > here) | (there < first), -torch.inf)
    values = call.value[:, :, near]
    if far_query is None:
        return mixed(scores.softmax(-1, dtype=torch.float32).to(values.dtype), values)
    sinks = first_keys.shape[2]
    far = call.scores(far_query, first_keys).masked_fill_(torch.arange(sinks, device=here.device) >= first, -torch.inf)
    weights = torch.cat([far, scores], -1).softmax(-1, dtype=torch.float32).to(values.dtype)
    return mixed(weights[..., :sinks], call.value[:, :, :sinks]).add_(mixed(weights[..., sinks:], values))


def _fused_block(
    call: Call, shape: SinkWindow, block: slice, near: slice, far_query: Tensor | None, first_keys: Tensor
) -> Float[Tensor, "batch heads groups some value_dim"]:
    """Return the same as `_block`, joined from parts; the part that all queries see needs no mask."""
    here = torch.arange(call.start + block.start, call.start + block.stop, device=call.query.device)[:, None]
    own = near.stop - (block.stop - block.start)  # the first key of the block itself
    all_see = min(max(shape.first_near(call.start + block.stop - 1) - call.num_missing, near.start), own)
    query = call.query[..., block, :].flatten(1, 2)
    part = partial(_fused_part, call)
    first = shape.first_near(here)
    positions = call.key_positions(slice(own, near.stop))
    narrow = shape.first_near(call.start + block.stop - 1) - call.num_missing > own  # window narrower than the block
    hidden = (positions > here) | (positions < first) if narrow else None
    parts = [part(query, call.key[:, :, own : near.stop], slice(own, near.stop), hidden, causal=not narrow)]
    if all_see < own:
        parts.append(part(query, call.key[:, :, all_see:own], slice(all_see, own)))
    if near.start < all_see:
        some = slice(near.start, all_see)
        parts.append(part(query, call.key[:, :, some], some, call.key_positions(some) < first))
    if far_query is not None:
        some = slice(0, first_keys.shape[2])
        sinks = torch.arange(some.stop, device=here.device)
        parts.append(part(far_query.flatten(1, 2), first_keys, some, sinks >= first))
    return joined(parts).unflatten(1, call.query.shape[1:3])


def _fused_part(
    call: Call, query: Tensor, key: Tensor, keys: slice, hidden: Tensor | None = None, causal: bool = False
) -> Part:
    mask = None if hidden is None else hidden_mask(hidden, query.dtype)[None, None]
    return flash(query, key, call.value[:, :, keys], causal=causal, mask=mask, scale=call.scale)


def keeps_to_its_own(layer: Layer, shape: SinkWindow) -> bool:
    return layer.window is not None and layer.window < shape.reach
