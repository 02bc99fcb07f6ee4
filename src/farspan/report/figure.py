"""The content of a figure: `picture` draws it with matplotlib, `interactive` draws it with plotly for the page."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

RECALL = ("#ebe2d0", "#c9dbe4", "#83b3d3", "#3583b8", "#08386b")  # from nothing to all
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
SHAPES = (  # markers: the character, plotly's name, matplotlib's name
    ("●", "circle", "o"), ("■", "square", "s"), ("▲", "triangle-up", "^"), ("◆", "diamond", "D"),
    ("▼", "triangle-down", "v"), ("★", "star", "*"), ("✚", "cross", "P"),
)  # fmt: skip
FEW_TICKS = 12  # lengths that all have a tick of their own
MARKED = 20  # points of a line that have a marker, at most
LEAST_NUMBERS, MOST_NUMBERS = 4, 8  # on a logarithmic axis
EQUAL = 5e-4  # share by which equal costs, or equal qualities, may differ: rounding
INTERVALS = ", 95 % intervals"
FEW_BANDS = 4  # members whose intervals are bands, at most; with more, error bars, since bands would overlap
DESCRIBED = 8  # lines that a description names, at most
# mark: one hollow point with an interval of x, such as a half-life
Style = Literal["solid", "dashed", "dotted", "points", "mark"]


@dataclass(frozen=True)
class Line:
    """Values of one member of a group, with their intervals."""

    label: str  # a name that no other line has
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    index: int  # of the member: gives colour and marker
    low: Sequence[float] | np.ndarray | None = None  # NaN where there is no interval
    high: Sequence[float] | np.ndarray | None = None
    texts: Sequence[Sequence[str]] = ()  # hover texts of the points, in lines; the first line is a name
    kind: str = ""  # what the values are; the page can hide those of kind "control"
    style: Style = "solid"
    shade: float | None = None  # from 0 to 1: a colour by rank in an order, such as of steps, instead of by member
    legend: str | None = None  # its name in a legend of a picture; None: the label; "": it is left out

    @property
    def alone(self) -> bool:
        """Whether its points are not joined by a line."""
        return self.style in ("points", "mark")

    @property
    def marked(self) -> tuple[int, int]:
        """The index of the first point with a marker, which differs by member, and the step to the next."""
        step = 1 if self.alone else -(-len(self.x) // MARKED) or 1
        return self.index % step, step

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The lower and the upper end of the interval of each point, NaN where there is none."""
        none = np.full(len(self.x), np.nan)
        return none if self.low is None else np.asarray(self.low), none if self.high is None else np.asarray(self.high)

    @classmethod
    def of(
        cls,
        label: str,
        points: Sequence[Mapping[str, Any]],
        x: str,
        y: str,
        index: int,
        texts: Sequence[Sequence[str]] = (),
        **look: Any,
    ) -> "Line":
        """Return the line of one number over another.

        Args:
            points: numbers by name; `y` has an interval from `y`_low to `y`_high; None where unknown.
            x, y: names of the numbers on the axes.
            look: further fields of the line.
        """
        mean, low, high = (
            np.array([point.get(name) for point in points], float) for name in (y, f"{y}_low", f"{y}_high")
        )
        return cls(label, [point[x] for point in points], mean, index, low, high, texts, **look)


@dataclass(frozen=True)
class Failed:
    """Lengths at which rows of one member failed."""

    name: str
    label: str
    index: int
    statuses: dict[int, str]  # by length
    partly: frozenset[int]  # of these, lengths with other rows that were measured


@dataclass(frozen=True)
class Rule:
    """A straight line across the figure: vertical at `x`, or horizontal at `y`."""

    text: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Area:
    """A background from one x to another."""

    label: str
    start: float
    end: float
    colour: str


@dataclass(frozen=True)
class Figure:
    title: str
    x: str  # what the axes show, with units
    y: str
    lines: Sequence[Line]
    failed: Sequence[Failed] = ()
    rules: Sequence[Rule] = ()
    areas: Sequence[Area] = ()
    keys: Sequence[tuple[str, Style]] = ()  # what styles mean, where the legend of a picture names members only
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[int] = ()  # on the x axis, where there are few
    counts: bool = True  # whether x are whole numbers
    span: tuple[float, float] | None = None  # of the y axis
    exp: str = ""  # name of exp(y), shown on a second axis on the right
    num_members: int = 0
    height: int = 420  # pixels on the page
    note: str = ""  # below the title: number of texts per mean
    front: np.ndarray | None = None  # corners of the Pareto front [corners, 2]; see `pareto_front`

    @property
    def description(self) -> str:
        """What is drawn, in words."""
        places = [float(place) for line in self.lines for place in line.x]
        ends = f" from {min(places):,.6g} to {max(places):,.6g}" if places else ""
        labels = [line.label for line in self.lines if line.label]
        more = f" and {len(labels) - DESCRIBED:,} more" if len(labels) > DESCRIBED else ""
        return f"{self.y} over {self.x}{ends}: {'; '.join(labels[:DESCRIBED])}{more}"

    @property
    def has_bands(self) -> bool:
        """Whether intervals along lines are bands, not error bars."""
        return self.num_members <= FEW_BANDS

    @property
    def failed_heights(self) -> list[float]:
        """The height of the crosses of each member that failed, as a share of the figure's height. Crosses of members
        with different markers do not overlap."""
        rows: list[int] = []
        for place, one in enumerate(self.failed):
            before = zip(rows, self.failed[:place], strict=True)
            taken = {row for row, other in before if other.statuses.keys() & one.statuses.keys()}
            rows.append(next(row for row in count() if row not in taken))
        return [0.02 + 0.035 * (row % len(SHAPES)) for row in rows]

    @property
    def limits(self) -> tuple[float, float]:
        """The range of the y axis: `span`, else all values and intervals with a margin."""
        if self.span is not None:
            return self.span
        of_y = [one for one in self.lines if one.style != "mark"]
        values = np.concatenate([[np.nan], *(part for one in of_y for part in (one.y, *one.ends))])
        if not np.isfinite(values).any():
            return -0.5, 1.5
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        margin = 0.12 * (high - low) or 0.5
        return round(low - margin, 5), round(high + margin, 5)


@dataclass(frozen=True)
class Heat:
    """Numbers over two axes, as colours."""

    title: str
    x: str  # what the axes show, with units
    y: str
    values: np.ndarray  # [rows, columns], rows from the top; NaN where nothing was measured
    columns: Sequence[str]
    rows: Sequence[str]
    scale: str  # what the values are
    texts: Sequence[Sequence[Sequence[str]]] = ()  # hover texts of the values, in lines; the first line is a name
    span: tuple[float, float] = (0.0, 1.0)  # of the colours
    log: bool = False  # whether the colours are
    note: str = ""  # below the title: number of texts per mean

    @property
    def description(self) -> str:
        """What is drawn, in words."""
        known = self.values[np.isfinite(self.values)]
        ends = f", from {known.min():.3g} to {known.max():.3g}" if known.size else ""
        axes = ((self.x, self.columns), (self.y, self.rows))
        over = " and ".join(f"{name}, {labels[0]} to {labels[-1]}" for name, labels in axes)
        return f"{self.scale} over {over}{ends}"


def sample_size(counts: Iterable[int], what: str, *, intervals: bool = True) -> str:
    """Return the sample size of a figure's means: n = 20 texts, or n = 3 to 20 texts. Empty if nothing was measured."""
    found = sorted(set(counts))
    if not found:
        return ""
    least, most = found[0], found[-1]
    n = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"n = {n} {what}{'' if most == 1 else 's'}{INTERVALS if intervals and most > 1 else ''}"


def log_numbers(low: float, high: float, counts: bool = False) -> list[float]:
    """Return the numbers to write on a logarithmic axis: powers of ten with as few digits between them as give
    LEAST_NUMBERS, else numbers at equal distances.

    Args:
        low, high: ends of the axis, positive and different.
        counts: try powers of two first.
    """
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    sets = [np.outer(decades, digits).ravel() for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7))]
    if counts:
        sets.insert(0, 2.0 ** np.arange(np.floor(np.log2(low)), np.log2(high) + 1))
    decade = 10.0 ** np.floor(np.log10(high - low))
    steps = decade * np.array([5, 2, 1, 0.5, 0.2])
    sets += [step * np.arange(np.ceil(low / step), np.floor(high / step) + 1) for step in steps]
    found = ([float(f"{one:.10g}") for one in each if low <= one <= high] for each in sets)
    numbers = next((each for each in found if len(each) >= LEAST_NUMBERS), [])
    return numbers[:: -(-len(numbers) // MOST_NUMBERS) or 1]


def pareto_front(
    points: Sequence[tuple[float, float]], more_is_better: bool, higher_is_better: bool
) -> Float[np.ndarray, "corners 2"]:
    """Return the Pareto front of points (x, y) as the corners of a staircase: no point is better than it in both by
    more than rounding, EQUAL.

    It begins at the point with the best x, and ends at the worst x of all points.

    Args:
        more_is_better: whether a larger x is better, such as of a speed; otherwise a smaller one is.
        higher_is_better: the same of y.
    """
    signs = np.array([-1.0 if more_is_better else 1.0, 1.0 if higher_is_better else -1.0])
    ordered = sorted((signs * points).tolist(), key=lambda point: (point[0], -point[1]))
    front: list[list[float]] = []
    for x, y in ordered:
        if front and (y <= front[-1][1] or np.isclose(y, front[-1][1], EQUAL, 0)):
            continue
        if front and np.isclose(x, front[-1][0], EQUAL, 0):
            front.pop()  # costs the same
        front.append([x, y])
    corners = [front[0]]
    for x, y in front[1:]:
        corners += [[x, corners[-1][1]], [x, y]]
    return signs * [*corners, [ordered[-1][0], corners[-1][1]]]


def colour(index: int) -> str:
    """Return the colour of the member with this index in its group."""
    return COLOURS[index % len(COLOURS)]


def shape(index: int) -> tuple[str, str, str]:
    """Return the marker of the member with this index, one of SHAPES, to distinguish lines without colours. Members of
    the same colour have different markers."""
    return SHAPES[(index + index // len(COLOURS)) % len(SHAPES)]
