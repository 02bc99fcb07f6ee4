"""The tokens of a long document that make one training row, and their positions.

Sparse Memory Training (SMT), section 3.2 and Algorithm 1: the last tokens of a document of C tokens are the target, the
M before them the memory, of which N are sampled, fewer the further away. With n = N, w = W, hi = M:

    while hi >= 2w and n >= 2:  n // 2 positions, distinct and uniform, from [hi - w, hi)
                                hi -= w;  n -= n // 2;  w *= 2
    n positions, distinct and uniform, from [0, hi)

For N = W a token at distance d is sampled with probability 1/2, 1/8, 1/32, ... as d doubles: about (W / d)². Every
token can be sampled, and each keeps its position in the document. Positions count from 0 and intervals are half-open.
The prose of appendix B.1 gives other thresholds than Algorithm 1, section 3.2 and Table 6, which agree; ours are those
of Algorithm 1.

The other ways of sampling are baselines. All are functions of the document's length and a random generator;
`recurrences` also of two places in the document.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int

from farspan.specs import one_of


def levels(
    memory_length: int, num_sampled: int, window: int | None = None, max_iterations: int | None = None
) -> list[tuple[int, int, int]]:
    """Return the levels (low, high, count) of Algorithm 1, nearest first: `count` positions sampled from [low, high).

    Args:
        memory_length: M, tokens.
        num_sampled: N, tokens.
        window: W, tokens of the nearest level; default N.
        max_iterations: T, levels at most; 1 is uniform sampling.

    Raises:
        ValueError: M < N, W < N / 2, or a number below 1.
    """
    width = num_sampled if window is None else window
    if num_sampled < 1 or (max_iterations is not None and max_iterations < 1):
        raise ValueError(f"num_sampled = {num_sampled} and max_iterations = {max_iterations} must be at least 1")
    if memory_length < num_sampled:
        raise ValueError(
            f"a memory of {memory_length:,} tokens holds no {num_sampled:,} different ones: use a longer memory or "
            "sample fewer"
        )
    if 2 * width < num_sampled:
        raise ValueError(
            f"window = {width:,} cannot hold the nearest half of {num_sampled:,} sampled tokens; use at least "
            f"{-(-num_sampled // 2):,}"
        )
    found: list[tuple[int, int, int]] = []
    high, count = memory_length, num_sampled
    while high >= 2 * width and count >= 2 and len(found) + 1 != max_iterations:
        found.append((high - width, high, count // 2))
        high, count, width = high - width, count - count // 2, 2 * width
    return [*found, (0, high, count)]


def draw(
    memory_length: int,
    num_sampled: int,
    rng: np.random.Generator,
    window: int | None = None,
    max_iterations: int | None = None,
) -> Int[np.ndarray, "sampled"]:
    """Return positions of a memory sampled by Algorithm 1, distinct and ascending; see `levels`."""
    parts = [
        low + rng.choice(high - low, count, replace=False, shuffle=False)
        for low, high, count in levels(memory_length, num_sampled, window, max_iterations)
    ]
    positions = np.concatenate(parts)
    positions.sort()
    return positions


@dataclass(frozen=True)
class Drawn:
    """One training row."""

    tokens: Int[np.ndarray, "row"]  # places in the document, in the order of the row
    positions: Int[np.ndarray, "row"]  # positions given to the model, ascending
    num_targets: int  # tokens at the end of the row that are predicted
    has_memory: bool = False  # the other tokens are a sampled memory

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.positions)


class Draw(Protocol):
    """A function that makes a row of `row` tokens, the last `targets` of them predicted, of a document of `length`.

    Raises:
        ValueError: the settings do not fit rows of `row` tokens. Whether it raises does not depend on `rng`: the first
            row of a training shows whether all others can be made.
    """

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn: ...


def _with_target(memory: Int[np.ndarray, "sampled"], length: int, targets: int) -> Drawn:
    """Return sampled memory before the target, each token at its own position."""
    tokens = np.concatenate([memory, np.arange(length - targets, length)])
    return Drawn(tokens, tokens, targets, has_memory=True)


@dataclass(frozen=True)
class SparseMemory:
    """SMT's sampling: the memory becomes sparser with distance."""

    window: int | None = None  # W; default as many tokens as are sampled
    max_iterations: int | None = None  # T
    keep_first: int = 0  # tokens of the document that are always in the memory, as attention sinks

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn:
        first = np.arange(self.keep_first)
        memory, sampled = length - targets - self.keep_first, row - targets - self.keep_first
        if sampled < 1:
            raise ValueError(
                f"keep_first = {self.keep_first:,} leaves no token to sample for a memory of {row - targets:,} tokens"
            )
        positions = draw(memory, sampled, rng, self.window, self.max_iterations) + self.keep_first
        return _with_target(np.concatenate([first, positions]), length, targets)


@dataclass(frozen=True)
class Uniform:
    """Every token of the memory is as likely as any other: Algorithm 1 with a single level."""

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn:
        return _with_target(draw(length - targets, row - targets, rng, max_iterations=1), length, targets)


@dataclass(frozen=True)
class Spans:
    """SMT's sampling of spans of contiguous tokens instead of single tokens. Not in the paper.

    The memory is cut into spans. If its length is not a multiple of the span, the cut shifts from row to row, so that
    every token can be sampled. A remainder of the row that is shorter than a span is put right before the target.
    """

    span: int  # tokens
    window: int | None = None  # W, tokens
    max_iterations: int | None = None

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn:
        near = (row - targets) % self.span
        memory, sampled = length - targets - near, (row - targets) // self.span
        if not sampled:
            raise ValueError(
                f"spans of {self.span:,} tokens do not fit into a memory of {row - targets:,} sampled ones"
            )
        shift = int(rng.integers(memory % self.span + 1))
        window = None if self.window is None else self.window // self.span
        if window is not None and 2 * window < sampled:
            raise ValueError(
                f"window = {self.window:,} cannot hold the nearest half of {sampled:,} spans of {self.span:,} tokens; "
                f"use at least {-(-sampled // 2) * self.span:,}"
            )
        spans = draw(memory // self.span, sampled, rng, window, self.max_iterations)
        tokens = (shift + self.span * spans[:, None] + np.arange(self.span)).ravel()
        return _with_target(np.concatenate([tokens, np.arange(memory, memory + near)]), length, targets)


def _check_chunks(row: int, count: int) -> None:
    if count > row:
        raise ValueError(f"{count:,} chunks do not fit into a row of {row:,} tokens; use at most {row:,}")


def _chunks(row: int, count: int, rng: np.random.Generator) -> Int[np.ndarray, "chunks"]:
    """Return the number of tokens of each chunk of a row that is cut at random."""
    _check_chunks(row, count)
    cuts = np.sort(rng.choice(row - 1, count - 1, replace=False)) + 1
    return np.diff([0, *cuts, row])


@dataclass(frozen=True)
class Pose:
    """Positional skip-wise training, PoSE: chunks of the document at random distances; every token is predicted.

    Zhu et al. 2023, arXiv 2309.10400, section 3.2: the row is cut at random into chunks, each moved to the right by an
    offset that does not decrease; the first stays at 0. Text and positions have separate offsets.
    """

    chunks: int = 2

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn:
        sizes = _chunks(row, self.chunks, rng)

        def moved() -> Int[np.ndarray, "row"]:
            offsets = np.zeros(self.chunks, np.int64)
            for chunk in range(1, self.chunks):
                offsets[chunk] = rng.integers(offsets[chunk - 1], length - row + 1)
            return np.arange(row) + np.repeat(offsets, sizes)

        return Drawn(moved(), moved(), row - 1)


@dataclass(frozen=True)
class Skip:
    """One contiguous text, after the document's first token, whose later chunks have larger positions; every token is
    predicted. Not in the paper.

    PoSE's positions without its gaps in the text: from repetitions within a row a model can learn to attend to
    distant tokens. Natural text seldom repeats itself. With `repeat` a share of the rows is the first token
    and a passage of half a row, and then both again: the task that the forgetting curve measures.
    """

    chunks: int = 2
    repeat: float = 0.0  # share of the rows

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn:
        _check_chunks(row, self.chunks)  # also where this row has none, so that the first row of a training raises
        repeated = self.repeat > 0 and rng.random() < self.repeat
        size = row - row // 2 if repeated else row
        begin = int(rng.integers(1, length - size + 2))
        tokens = np.concatenate([[0], np.arange(begin, begin + size - 1)])
        if repeated:
            tokens, sizes = np.tile(tokens, 2)[:row], np.array([size, row - size])
        else:
            sizes = _chunks(row, self.chunks, rng)
        offsets = np.sort(rng.integers(0, length - row + 1, len(sizes) - 1))
        positions = np.arange(row) + np.repeat([0, *offsets], sizes)
        return Drawn(tokens, positions, row - 1)


@dataclass(frozen=True)
class Decoys:
    """Text that returns to spans far back, past nearer text that begins alike and goes on differently; every token is
    predicted. Not in the paper.

    In a share of the rows the first half is contiguous text, and the second half is made of pairs: a decoy, which is
    the middle `shared` tokens of a span of the first half followed by other text of the document, and then the span. So
    the nearest earlier text that ends like the present one is the wrong one to go on with, and the right one is far:
    the second half has larger positions. A span has `smallest` to `largest` tokens, uniform in their logarithm. The
    other rows are those of `skip`.
    """

    smallest: int = 8  # tokens of a span
    largest: int = 128
    shared: int = 4  # tokens at the middle of a span that its decoy has too
    share: float = 0.2  # of the rows

    def __post_init__(self) -> None:
        if not 2 * self.shared <= self.smallest <= self.largest:
            raise ValueError(
                f"decoys: got shared = {self.shared:,}, smallest = {self.smallest:,} and largest = {self.largest:,}, "
                "expected 2 x shared <= smallest <= largest"
            )

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn:
        half = row - row // 2
        if self.largest >= half:  # also where this row has no spans, so that the first row of a training raises
            raise ValueError(
                f"spans of largest = {self.largest:,} tokens do not fit into half a row of {row:,} tokens; use at most "
                f"{half - 1:,}"
            )
        if rng.random() >= self.share:
            return Skip()(length, row, targets, rng)
        begin = int(rng.integers(1, length - half + 2))
        parts, filled = [np.concatenate([[0], np.arange(begin, begin + half - 1)])], half
        while filled < row:
            size = round(np.exp(rng.uniform(np.log(self.smallest), np.log(self.largest))))
            span = int(rng.integers(begin, begin + half - size))
            middle, other = span + size // 2, int(rng.integers(1, length - size))
            parts += [
                np.arange(middle - self.shared, middle),
                np.arange(other, other + size - size // 2),
                np.arange(span, span + size),
            ]
            filled += sum(len(part) for part in parts[-3:])
        offset = int(rng.integers(0, length - row + 1))
        positions = np.arange(row) + np.repeat([0, offset], [half, row - half])
        return Drawn(np.concatenate(parts)[:row], positions, row - 1)


@dataclass(frozen=True)
class Recurrences:
    """Text around a later mention after text around an earlier one, far before it; every token is predicted. Not in a
    paper.

    `mining` finds the mentions in the corpus: tokens that are hard to predict after a short context and easy after a
    long one (LongPPL's criterion, Fang et al. 2024, arXiv 2410.23771), and the nearest earlier place, beyond the short
    context, that ends with the same `ngram` tokens. In a share of the rows the first half is the document's first token
    and contiguous text around the earlier place, and the second half contiguous text of the same document around the
    later one, each place anywhere in its half. The halves do not overlap, so that no text is there twice unless the
    document repeats it, and passages that the document repeats for more than `largest` tokens are left out. The second
    half has larger positions, as in `skip`. The other rows are those of `skip`.
    """

    share: float = 0.5  # of the rows
    ngram: int = 4  # tokens that both places end with, the one that needs the long context last
    largest: int = 128  # tokens of the passage around both places that is the same
    tokens: int = 131_072  # of the corpus that are read to find mentions, about

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn:
        return Skip()(length, row, targets, rng)

    def fits(self, earlier: int, later: int, size: int, row: int) -> bool:
        """Return whether `around` can make a row of two places in a document of `size` tokens."""
        first, last = self._begins(earlier, later, size, row)
        return first <= last and self.ngram <= min(earlier, row // 2)

    def around(self, earlier: int, later: int, size: int, length: int, row: int, rng: np.random.Generator) -> Drawn:
        """Return a row of two places in a document of `size` tokens, with positions below `length`."""
        half = row - row // 2
        first, last = self._begins(earlier, later, size, row)
        begin = int(rng.integers(first, last + 1))
        end = int(rng.integers(max(earlier + 1, half), min(earlier + half - self.ngram, begin) + 1))
        tokens = np.concatenate([[0], np.arange(end - half + 1, end), np.arange(begin, begin + row // 2)])
        offset = int(rng.integers(0, length - row + 1))
        return Drawn(tokens, np.arange(row) + np.repeat([0, offset], [half, row // 2]), row - 1)

    def _begins(self, earlier: int, later: int, size: int, row: int) -> tuple[int, int]:
        """Return the first and the last place where the second half can begin."""
        half = row // 2
        return max(earlier + 1, row - half, later - half + 1), min(later - self.ngram + 1, size - half)


@dataclass(frozen=True)
class RandomPositions:
    """Contiguous text at uniformly sampled, sorted positions; every token is predicted.

    Ruoss et al. 2023, arXiv 2305.16843, section 3.
    """

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn:
        begin = int(rng.integers(length - row + 1))
        positions = draw(length, row, rng, max_iterations=1)
        return Drawn(np.arange(begin, begin + row), positions, row - 1)


@dataclass(frozen=True)
class FullLength:
    """The whole document, every token predicted, at the cost that the other ways of sampling avoid."""

    def __call__(self, length: int, row: int, targets: int, rng: np.random.Generator) -> Drawn:
        everything = np.arange(length)
        return Drawn(everything, everything, length - 1)


MEMORIES = ("sparse", "uniform", "spans")  # draws with a target after a sampled memory; others predict every token
DRAWS: dict[str, type[Draw]] = {
    "sparse": SparseMemory,
    "uniform": Uniform,
    "spans": Spans,
    "pose": Pose,
    "skip": Skip,
    "decoys": Decoys,
    "recurrences": Recurrences,
    "random": RandomPositions,
    "full": FullLength,
}


def draw_named(text: str) -> Draw:
    """Return the way of sampling that `text` names, such as `sparse:window=256` or `spans:span=32`.

    Raises:
        ValueError: an unknown name or setting, or an impossible value.
    """
    made = one_of(DRAWS, text, "draw")
    for key, value in vars(made).items():
        smallest = 0 if key in ("keep_first", "repeat", "share") else 1
        if value is not None and value < smallest:
            raise ValueError(f"{key} = {value} of draw {text!r} must be at least {smallest}")
        if key in ("repeat", "share") and value > 1:
            raise ValueError(f"{key} = {value} of draw {text!r} is a share of the rows: at most 1")
    return made
