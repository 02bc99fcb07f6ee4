"""Attention at other positions than the text's: one softmax over pieces of the keys, each with its own queries."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from farspan.hf.attend import FUSED_QUERIES, Call, angles, dense, mixed, slices, turned, written
from farspan.hf.flash import flash, hidden_mask, joined, takes

SPARE = 256  # tokens of spare capacity for rotated keys, which are copied when it is full


@dataclass(frozen=True)
class Piece:
    """A range of keys (by position in the text) that a block of queries sees, and the positions both are rotated to."""

    start: int  # position of the first key
    stop: int  # position after the last one
    nearest: int = 0  # a query sees the keys at least this many tokens before it,
    farthest: int | None = None  # and fewer than this many; None: all earlier ones
    query: Callable[[Tensor], Tensor] | None = None  # to the positions that the queries are rotated to; None: their own
    moved: bool = False  # whether the keys are rotated to `Remap.key`; all such pieces have the same `nearest`


@runtime_checkable
class Remap(Protocol):
    """The positions that queries and keys are rotated to before they are compared."""

    @property
    def block(self) -> int | None: ...  # no block of queries crosses a multiple of it; None: any may

    def key(self, position: Int[Tensor, "keys"]) -> Int[Tensor, "keys"]:
        """Return the positions of moved keys."""

    def pieces(self, here: range) -> list[Piece]:
        """Return the pieces for consecutive queries at these positions; together they hold every key seen."""


@dataclass(frozen=True)
class InPlace:
    """The positions of the text."""

    block: ClassVar[int | None] = None

    def key(self, position: Int[Tensor, "keys"]) -> Int[Tensor, "keys"]:
        return position

    def pieces(self, here: range) -> list[Piece]:
        return [Piece(0, here.stop)]


def in_place(call: Call) -> Float[Tensor, "batch heads groups time value_dim"]:
    """Return the same as `dense`, faster where keys are consecutive and none is padding."""
    return dense(call) if call.real is not None or call.positions is not None else remapped(call, InPlace())


def remapped(call: Call, remap: Remap) -> Float[Tensor, "batch heads groups time value_dim"]:
    """Attend with one softmax to all pieces, within the layer's own window; layers without RoPE keep the text's."""
    if (inv_freq := call.layer.inv_freq) is None:
        remap, inv_freq = InPlace(), torch.empty(0)
    missing, end = call.num_missing, call.start + call.query.shape[3]
    fused = call.softcap is None and takes(call.query, call.key, call.value)
    moved: Tensor | None = None
    out = call.query.new_empty(*call.query.shape[:4], call.value.shape[-1])
    for block in _blocks(call, remap, fused):
        # numbers, not a tensor: to read one of these, the host would wait for a GPU in every block of every layer
        here = range(call.start + block.start, call.start + block.stop)
        parts = []
        for piece in remap.pieces(here):
            query = call.query[..., block, :]
            if piece.query is not None:
                own = _positions(call, here)
                query = turned(query, angles(own, inv_freq), angles(piece.query(own), inv_freq))
            key = call.key
            if piece.moved:
                if moved is None:  # no query sees a later one moved
                    moved = _moved(call, remap, inv_freq, max(missing, end - piece.nearest))
                key = moved
            for one in _visible(call, piece, here, fused):
                keys = slice(one.start - missing, one.stop - missing)
                causal, mirrored = fused and _is_causal(one, here), fused and _is_mirrored(one, here)
                hidden = None if causal or mirrored else _hidden(call, one, here)
                parts.append((query, key[:, :, keys], call.value[:, :, keys], hidden, causal, mirrored))
        out[..., block, :] = (_fused if fused else _plain)(call, parts)
    return out


def _moved(call: Call, remap: Remap, inv_freq: Tensor, stop: int) -> Float[Tensor, "batch heads some dim"]:
    """Return the keys before position `stop`, rotated to `Remap.key`. While single tokens are generated they are
    kept: to rotate all of them again takes several times as long as attending to them."""

    def rotated(some: range) -> Tensor:
        own = _positions(call, some)
        keys = call.key[:, :, some.start - call.num_missing : some.stop - call.num_missing]
        return turned(keys, angles(own, inv_freq), angles(remap.key(own), inv_freq))

    if call.turned is None or call.query.shape[3] > 1 or call.num_missing or torch.is_grad_enabled():
        return rotated(range(call.num_missing, stop))
    before, count = call.turned.get(call.layer.index, (None, 0))
    kept = written(before, rotated(range(count, stop)), count, stop + SPARE)
    call.turned[call.layer.index] = kept, stop
    return kept[:, :, :stop]


# queries, keys, values, hidden pairs [some, keys], whether causal, whether mirrored (`flash`)
Part = tuple[Tensor, Tensor, Tensor, Tensor | None, bool, bool]


def _blocks(call: Call, remap: Remap, fused: bool) -> Iterator[slice]:
    keys, time, multiple = call.key.shape[2], call.query.shape[3], remap.block
    at_once = isinstance(remap, InPlace) and call.layer.window is None  # the kernel hides nothing by a mask
    for block in slices(time, time if at_once else FUSED_QUERIES) if fused else call.blocks(lambda size: keys):
        first = block.start
        while first < block.stop:
            left = block.stop - first if multiple is None else multiple - (call.start + first) % multiple
            yield slice(first, min(block.stop, first + left))
            first += left


def _positions(call: Call, some: range) -> Int[Tensor, "some"]:
    return torch.arange(some.start, some.stop, device=call.query.device)


def _visible(call: Call, piece: Piece, here: range, split: bool) -> Iterator[Piece]:
    """Yield the part of a piece that is held and in reach. `split`: divide it into keys that all queries see and
    others, for a kernel that is faster without a mask. One query sees all of them."""
    first, last = here[0], here[-1]
    split = split and first < last
    limits = [limit for limit in (piece.farthest, call.layer.window) if limit is not None]
    farthest = min(limits, default=last + 1)  # no key is so far away
    start = max(piece.start, call.num_missing, first - farthest + 1)
    stop = min(piece.stop, last - piece.nearest + 1)
    all_from, all_to = max(start, last - farthest + 1), min(stop, first - piece.nearest)  # later ones are causal
    if start == first - farthest + 1 and all_from < all_to - 1:
        all_from += 1  # earlier ones are mirrored
    cuts = [start, all_from, all_to, stop] if split and start <= all_from < all_to <= stop else [start, stop]
    for low, high in pairwise(cuts):
        if low < high:
            yield replace(piece, start=low, stop=high, farthest=farthest)


def _hidden(call: Call, piece: Piece, here: range) -> Bool[Tensor, "some keys"] | None:
    """Return which keys of the piece each query does not see; None: it sees all."""
    assert piece.farthest is not None
    if here[0] - piece.stop + 1 >= piece.nearest and here[-1] - piece.start < piece.farthest:
        return None
    far = _positions(call, here)[:, None] - _positions(call, range(piece.start, piece.stop))
    return (far < piece.nearest) | (far >= piece.farthest)


def _is_causal(piece: Piece, here: range) -> bool:
    """Return whether the first query sees only the first key, and each later query one key more."""
    assert piece.farthest is not None
    start, stop = here.start - piece.nearest, here.stop - piece.nearest
    return (piece.start, piece.stop) == (start, stop) and piece.farthest >= piece.nearest + len(here)


def _is_mirrored(piece: Piece, here: range) -> bool:
    """Return whether the last query sees only the last key, and each earlier query one key more."""
    assert piece.farthest is not None
    start = here.start - piece.farthest + 1
    return (piece.start, piece.stop) == (start, start + len(here)) and piece.stop <= here.start - piece.nearest + 1


def _plain(call: Call, parts: list[Part]) -> Float[Tensor, "batch heads groups some value_dim"]:
    scores = []
    for query, key, _, hidden, *_ in parts:
        some = call.scores(query, key)
        scores.append(some if hidden is None else some.masked_fill_(hidden, -torch.inf))
    weights = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(call.query.dtype)
    each = weights.split([key.shape[2] for _, key, *_ in parts], -1)
    first, *others = (mixed(weight, value) for weight, (_, _, value, *_) in zip(each, parts, strict=True))
    return sum(others, first)


def _fused(call: Call, parts: list[Part]) -> Float[Tensor, "batch heads groups some value_dim"]:
    """Return the same as `_plain`."""
    outputs = []
    for query, key, value, hidden, causal, mirrored in parts:
        mask = None if hidden is None else hidden_mask(hidden, query.dtype)[None, None]
        rows = query.flatten(1, 2)
        outputs.append(flash(rows, key, value, causal=causal, mirrored=mirrored, mask=mask, scale=call.scale))
    return joined(outputs).unflatten(1, call.query.shape[1:3])
