"""The distribution of a query's attention weights over the tokens before it, by distance and by rank.

    S(k) = Σ of the weights of k keys of one query, one head:   the k nearest ones   ("distance", and "bins" of it)
                                                                the k heaviest ones  ("rank")

"The Pareto principle of transformers" of SMT, section 2 and appendix B.4 (figures 2, 3, 4, 6 and 7): a quarter of the
keys holds most of the weight. `pareto` is that share: S by rank at a quarter of the visible keys (all up to the query
itself; in a layer with a window, those in the window). Everything is by layer and head, and keys are ranked per head:
the paper averages heads for its maps (figures 2 and 4) and does not describe its ranks; averaging heads first would
make them look less concentrated than they are.

A length of T tokens means the query at the T-th token of a text, the separator being the first; one reading serves all
lengths, and the map shows the longest. `rest` is the same without the first tokens of the text (the attention sinks),
the other weights divided by their sum. Weights are processed in blocks of queries, never [time, time].
"""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from farspan import hf
from farspan.lengths import LARGEST
from farspan.lm import LM
from farspan.reader import TOKENS_AT_ONCE, Memory, Reader
from farspan.specs import limited
from farspan.tasks.base import BoundText, Example, Parts, Quality, Result, Task, Work, digest
from farspan.text.corpora import Corpus

SINKS = 8  # the paper's, figure 7
MAP_BINS = 128
LARGEST_MAP = 512  # bins; a row of it is 0.7 MB
DECIMALS = 7  # of the shares in a row
LONGEST = 8192  # tokens, of default lengths: the cost of a reading grows with their square
PARTS = (8, 4, 2, 1)  # of the longest length: 512, 1024, 2048 and 4096 of the paper's models
BIN = 1024  # tokens; a quarter of the longest length, if that is less


@dataclass(frozen=True)
class Attention(Task):
    """Shares of attention by distance and by rank, at chosen queries of windows of the text, and an averaged map."""

    layers: tuple[int, ...] | None = None  # from 0, or from the end with -1; None: all
    sinks: int = limited(SINKS)  # first tokens of a text, the separator included
    bin: int | None = limited(None, 1, LARGEST)  # tokens of distance; None: 1,024, or less on short lengths
    map_bins: int = limited(MAP_BINS, 0, LARGEST_MAP)  # most bins for the queries and keys of the map; 0: no map

    name: ClassVar[str] = "attention"
    quality: ClassVar[Quality] = Quality("all.pareto", "weight of the heaviest quarter", higher_is_better=None)

    def resolved(self, lengths: Sequence[int] | None, trained: Sequence[int]) -> Self:
        quarter = max(1, (lengths or self.lengths(trained))[-1] // 4)
        return replace(self, bin=self.bin or min(BIN, 1 << (quarter.bit_length() - 1)))

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return an eighth, a quarter, half and all of the largest trained length, at most LONGEST."""
        longest = min(LONGEST, max(trained))
        return tuple(sorted({longest // part for part in PARTS} - set(range(self.sinks + 1)))) or (longest,)

    def on(self, lm: LM, text: str) -> "BoundAttention":
        self.refuse_open(bin=self.bin)
        return BoundAttention.of(self, lm, text)


@dataclass(frozen=True, kw_only=True)
class BoundAttention(Attention, BoundText[np.ndarray]):
    """Attention statistics on one text. An example's payload is a window, [largest length less the separator]."""

    task: ClassVar[str] = "attention"
    version: ClassVar[int] = 1

    @property
    def width(self) -> int:
        """Tokens of distance in a bin."""
        assert self.bin is not None
        return self.bin

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "bin": self.width,
            "sinks": self.sinks,
            "layers": list(self.layers) if self.layers is not None else None,
            "map_bins": self.map_bins,
            **self.text.named,
        }

    def batch(self, longest: int) -> int:
        """Return more than one repeat only for short texts."""
        return max(1, TOKENS_AT_ONCE // longest)

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[np.ndarray]]:
        """Return a window of the largest length for each repeat, from as many documents as possible.

        Raises:
            ValueError: a length of no more than the sinks and the separator, or a text too short.
        """
        separator = len(lm.separator.ids)
        if lengths[0] <= max(self.sinks, separator):
            raise ValueError(
                f"a length of {lengths[0]:,} leaves no key beside {self.sinks} sinks and a separator of {separator}: "
                f"give lengths from {max(self.sinks, separator) + 1:,} on, or fewer --sinks"
            )
        what = f"{self.task} {self.version} {self.width} {self.sinks} {self.layers} {self.map_bins} {lm.separator.ids}"
        return [
            Example(digest(f"{what} {seed} {repeat}", tokens), repeat, tuple(lengths), tokens)
            for repeat, tokens in enumerate(self.text.windows(lengths[-1] - separator, repeats, seed))
        ]

    def windows_read(self, lm: LM, lengths: Sequence[int], repeats: int) -> list[tuple[Corpus, int, int]]:
        return [(self.text, lengths[-1] - len(lm.separator.ids), repeats)]

    def shortened(self, lm: LM, example: Example[np.ndarray], lengths: tuple[int, ...]) -> Example[np.ndarray]:
        """Return the example at these lengths, with the tokens of the longest one, which has the map."""
        return replace(example, lengths=lengths, payload=example.payload[: lengths[-1] - len(lm.separator.ids)])

    def work(self, lm: LM, example: Example[np.ndarray]) -> Iterator[Work]:
        read = 0
        for length in example.cuts:
            yield Work(1, read, length - read, int(length in example.lengths))
            read = length

    def run(self, reader: Reader, batch: Sequence[Example[np.ndarray]]) -> Iterator[Result]:
        """Yield results of a batch, shortest length first.

        Raises:
            ValueError: as `check_watchable` and `hf.watch_attention`.
        """
        check_watchable(reader)
        text = torch.from_numpy(np.stack([example.payload for example in batch])).long()
        ids = torch.cat([torch.tensor([reader.lm.separator.ids]).expand(len(batch), -1), text], 1)
        lengths, longest = batch[0].lengths, ids.shape[1]
        picture = _Map(len(batch), longest, self.map_bins) if self.map_bins and lengths[-1] == longest else None
        found: dict[int, dict[int, dict[str, Any]]] = {length: {} for length in lengths}  # by length and layer

        def see(layer: int, queries: Tensor, keys: Tensor, scores: Tensor) -> None:
            if picture is not None:
                picture.add(queries, keys, scores.softmax(-1, dtype=torch.float32))
            for at, query in enumerate(queries.tolist()):
                if query + 1 in found:
                    end = query + 1 - int(keys[0])
                    row = scores[:, :, at, :end].cpu().double()
                    hidden = int((row[0, 0] == -torch.inf).sum())  # before the layer's own window
                    first = int(keys[0]) + hidden
                    found[query + 1][layer] = spread(row[..., hidden:], first, self.sinks, self.width, query + 1)

        memory: Memory | None = None
        read = 0
        watched = None if picture is not None else {length - 1 for length in lengths}
        with hf.watch_attention(reader.lm, self.layers, watched, see):
            for length in lengths if reader.fallback else batch[0].cuts:
                if memory is None or reader.fallback:
                    if picture is not None:
                        picture.sums.zero_()
                    memory = None  # freed before the next one is read
                    memory = reader.read(ids[:, :length])
                else:
                    memory.read(ids[:, read:length])
                read = length
                if length not in lengths:
                    continue
                memory.score(ids[:, :1])  # some memories run the model only when they score
                for index, example in enumerate(batch):
                    yield self._result(example, index, length, found[length], picture, memory)

    def parts(self, lm: LM, example: Example[np.ndarray], length: int) -> Parts:
        """Return the parts, the last of which is the query."""
        read = example.payload[: length - len(lm.separator.ids)]
        return [("separator", lm.separator.ids), ("read", read[:-1]), ("asked", read[-1:])], 1

    @contextmanager
    def around(self, reader: Reader) -> Iterator[None]:
        """Watch the attention of a plan's trial forwards, which is most of the task's cost."""
        check_watchable(reader)

        def see(layer: int, queries: Tensor, keys: Tensor, scores: Tensor) -> None:
            scores.softmax(-1, dtype=torch.float32).mean(1)

        with hf.watch_attention(reader.lm, self.layers, None if self.map_bins else (), see):
            yield

    def _result(
        self,
        example: Example[np.ndarray],
        index: int,
        length: int,
        found: dict[int, dict[str, Any]],
        picture: "_Map | None",
        memory: Memory,
    ) -> Result:
        layers = sorted(found)
        broken = [layer for layer in layers if bool(found[layer]["all"]["pareto"][index].isnan().any())]
        if broken:
            reason = f"at {length:,} tokens layer {broken[0]} has attention weights that are not numbers"
            return Result(example, length, status="nan", reason=reason, num_seen=memory.num_seen)

        def listed(sums: str, part: str = "") -> list[Any]:
            values = [(found[layer][part] if part else found[layer])[sums][index] for layer in layers]
            return [np.round(value.numpy(), DECIMALS).tolist() for value in values]

        scores: dict[str, Any] = {
            "context": length,
            "layers": layers,
            "visible": [found[layer]["visible"] for layer in layers],
            "ends": powers(length),
            "sinks": listed("sinks"),
            **{
                part: {sums: listed(sums, part) for sums in ("distance", "bins", "rank", "pareto")}
                for part in ("all", "rest")
            },
        }
        if picture is not None and length == picture.length:
            scores["map"] = packed(picture.mean(index, len(layers)))
        return Result.of(example, length, memory, scores)


def spread(scores: Float[Tensor, "batch heads keys"], first: int, sinks: int, bin: int, length: int) -> dict[str, Any]:
    """Return the distribution of one query's attention over its visible keys; the last key is its own.

    Args:
        scores: their softmax gives the weights.
        first: position of the first key in the text.
        sinks: first tokens of the text that `rest` excludes.
        bin, length: tokens; distances go up to the length, even if a window ends before.

    Returns:
        The number of `visible` keys; the share of the `sinks` [batch, heads]; `all` and `rest`, see `shares`.
    """
    cut = max(0, sinks - first)
    weights = scores.softmax(-1)
    # a separate softmax: if sinks had all the weight, dividing by the rest would divide by zero
    rest = scores[..., cut:].softmax(-1)
    return {
        "visible": scores.shape[-1],
        "sinks": weights[..., :cut].sum(-1),
        "all": shares(weights, bin, length),
        "rest": shares(rest, bin, length),
    }


def shares(weights: Float[Tensor, "batch heads keys"], bin: int, length: int) -> dict[str, Tensor]:
    """Return sums of one query's weights, the nearest key last: over the nearest and over the heaviest 1, 2, 4, ...
    `length` keys (`distance`, `rank` [batch, heads, powers]), by `bins` of distance [batch, heads, bins], and over the
    heaviest quarter (`pareto` [batch, heads])."""
    near = weights.flip(-1).cumsum(-1)
    heavy = weights.sort(-1, descending=True).values.cumsum(-1)

    def held(sums: Tensor, counts: Sequence[int]) -> Tensor:
        return sums[..., torch.tensor(counts).clamp_max(weights.shape[-1]) - 1]

    ends = [*range(bin, length, bin), length]
    return {
        "distance": held(near, powers(length)),
        "bins": held(near, ends).diff(dim=-1, prepend=near.new_zeros(*near.shape[:-1], 1)),
        "rank": held(heavy, powers(length)),
        "pareto": held(heavy, [-(-weights.shape[-1] // 4)])[..., 0],
    }


def powers(length: int) -> list[int]:
    """Return 1, 2, 4, ... and the length."""
    return [1 << i for i in range((length - 1).bit_length())] + [length]


class _Map:
    """Weights averaged over heads and summed over layers, by bin of queries and bin of keys."""

    def __init__(self, batch: int, length: int, bins: int) -> None:
        self.length = length
        self.width = -(-length // bins)  # tokens of a bin; the last one may have fewer
        side = -(-length // self.width)
        self.sums = torch.zeros(batch, side, side, dtype=torch.float64)

    def add(self, queries: Tensor, keys: Tensor, weights: Float[Tensor, "batch heads some keys"]) -> None:
        first, last = int(keys[0]), int(keys[-1]) + 1
        low, high = first // self.width, -(-last // self.width)
        padding = first - low * self.width, high * self.width - last
        wide = torch.nn.functional.pad(weights.mean(1), padding)
        binned = wide.unflatten(-1, (high - low, self.width)).sum(-1).cpu().double()
        self.sums[:, :, low:high].index_add_(1, queries // self.width, binned)

    def mean(self, index: int, layers: int) -> np.ndarray:
        """Return the mean weights [side, side] of one batch row by bin of queries and keys; each row sums to 1."""
        counts = torch.bincount(torch.arange(self.length) // self.width)
        return (self.sums[index] / (counts[:, None] * layers)).numpy()


def check_watchable(reader: Reader) -> None:
    """Raise ValueError unless the model's own attention reads the text as one sequence."""
    if not reader.watchable:
        raise ValueError(
            f"attention can be measured only if {reader.lm.name} reads the text as one sequence, and this method "
            "replaces its attention or reads in several passes: use full, or rope of a type other than dynamic"
        )


def packed(map: np.ndarray) -> str:
    """Return the lower triangle of a map, row by row, as little-endian float32 in base64."""
    return b64encode(map[np.tril_indices(len(map))].astype("<f4").tobytes()).decode()
