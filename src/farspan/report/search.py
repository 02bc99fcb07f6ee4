"""The candidates of a search of RoPE frequencies: a picture and a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farspan.report.figure import Figure, Line, Rule
from farspan.report.picture import draw_figure
from farspan.terminal import Terminal

PARTS = 4  # of the candidates in the order tried, each with its own colour
FARTHEST = 10.0  # multiples of the bound: candidates beyond this and twice YaRN's cost are not drawn


@dataclass(frozen=True)
class Tried:
    """A candidate, as it was measured."""

    number: int  # from 1; 0: not proposed by the search
    method: str
    by_length: tuple[float, ...] | None  # memory index; None: not finite
    nats: float | None  # per token, inside the window; None: not finite
    increase: float | None  # nats more than with the model's own RoPE

    @property
    def memory(self) -> float:
        """The mean of the memory index over the lengths."""
        return float("nan") if self.by_length is None else sum(self.by_length) / len(self.by_length)

    def within(self, max_nats: float) -> bool:
        """Return whether it keeps the bound."""
        return self.increase is not None and self.increase <= max_nats

    def __str__(self) -> str:
        if self.increase is None:
            return "no finite numbers"
        return f"memory index {self.memory:.3f}, {self.increase:+.3f} nats inside the window"


@dataclass(frozen=True)
class Searched:
    """The state of a search."""

    folder: Path
    shape: str
    lengths: tuple[int, ...]  # tokens, of the memory index
    max_nats: float
    own: Tried  # the model's own RoPE
    yarn: Tried  # untrained YaRN
    tried: tuple[Tried, ...]  # in order
    best: Tried | None  # of `tried` and YaRN, within the bound; None: all exceed it
    file: Path | None  # the factors of the best

    @property
    def nearest(self) -> Tried:
        """The candidate with the smallest cost inside the window."""
        finite = [one for one in (self.yarn, *self.tried) if one.increase is not None]
        return min(finite, key=lambda one: one.increase or 0.0, default=self.yarn)


def search_figure(found: Searched) -> Figure:
    """Return the candidates by memory index and cost inside the window, with the bound, YaRN and the best."""
    cost = [one.increase for one in (found.own, found.yarn, found.best) if one is not None and one.increase is not None]
    limit = max(FARTHEST * found.max_nats, *(2 * one for one in cost))
    shown = [one for one in found.tried if one.within(limit)]
    size = -(-len(found.tried) // PARTS)
    lines = []
    for part in range(PARTS):
        ones = [one for one in shown if part * size < one.number <= (part + 1) * size]
        if ones:
            first, last = part * size + 1, min(len(found.tried), (part + 1) * size)
            label = f"evaluations {first:,} to {last:,}" if first < last else f"evaluation {first:,}"
            shade = part / (PARTS - 1)
            lines.append(Line(label, _costs(ones), [one.memory for one in ones], 0, style="points", shade=shade))
    marked = [("the model's own RoPE", found.own), (f"untrained YaRN: {found.yarn}", found.yarn)]
    marked += [] if found.best is None else [(f"best within the bound: {found.best}", found.best)]
    for index, (label, one) in enumerate(marked):
        lines.append(Line(label, _costs([one]), [one.memory], 8 + index, style="points"))
    num_left_out = len(found.tried) - len(shown)
    left_out = f"; {num_left_out:,} beyond {limit:+.2f} nats left out" if num_left_out else ""
    return Figure(
        f"{len(found.tried):,} candidates of shape {found.shape}{left_out}",
        "nats per token inside the window, more than with the model's own RoPE",
        f"memory index, mean over {', '.join(f'{length:,}' for length in found.lengths)} tokens",
        lines,
        rules=[Rule(f"bound: {found.max_nats:+g} nats", x=found.max_nats)],
        counts=False,
        num_members=len(lines),
    )


def draw_search(found: Searched) -> list[Path]:
    """Draw the candidates into the folder of the search; return the paths."""
    return draw_figure(search_figure(found), found.folder, "search")


def print_search(found: Searched, console: Terminal) -> None:
    """Print the model's own RoPE, YaRN and the best: memory index by length, and nats inside the window."""
    named = [("the model's own RoPE", found.own), ("untrained YaRN", found.yarn)]
    if found.best is not None and found.best.number:
        named.append((f"best, evaluation {found.best.number}", found.best))
    head = ["RoPE", *(f"m({length:,})" for length in found.lengths), "mean", "nats", "more"]
    lines = []
    for name, one in named:
        values = ["" for _ in found.lengths] if one.by_length is None else [f"{value:.3f}" for value in one.by_length]
        nats = ["" if value is None else f"{value:{how}}" for value, how in ((one.nats, ".3f"), (one.increase, "+.3f"))]
        lines.append([name, *values, f"{one.memory:.3f}", *nats])
    console.print_table("memory index by length, and nats per token inside the window", head, lines, num_names=1)


def _costs(ones: Sequence[Tried]) -> list[float]:
    return [float("nan") if one.increase is None else one.increase for one in ones]
