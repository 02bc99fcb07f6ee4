"""What a figure shows, without how it is drawn: `picture` draws it with matplotlib, `interactive` for the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
SHAPES = (("●", "circle", "o"), ("■", "square", "s"), ("◆", "diamond", "D"), ("▲", "triangle-up", "^"))
FEW_TICKS = 12  # lengths that all have a tick of their own
Style = Literal["solid", "dashed", "dotted", "points"]


@dataclass(frozen=True)
class Line:
    """Values of one member of a group, with their intervals."""

    label: str  # in a legend
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    index: int  # of the member: gives colour and marker
    low: Sequence[float] | np.ndarray | None = None  # NaN where there is no interval
    high: Sequence[float] | np.ndarray | None = None
    texts: Sequence[Sequence[str]] = ()  # what is known of each point, in lines; the first is a name
    kind: str = ""  # what the values are; the page can hide those of kind "control"
    style: Style = "solid"


@dataclass(frozen=True)
class Mark:
    """One point with a horizontal interval, such as a half-life."""

    label: str
    x: float
    y: float
    low: float | None
    high: float | None
    index: int
    text: Sequence[str]
    kind: str


@dataclass(frozen=True)
class Failed:
    """Lengths at which rows of one member failed."""

    name: str
    label: str
    index: int
    statuses: dict[int, str]  # by length
    partly: frozenset[int]  # of these, the ones with other rows that were measured


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
    marks: Sequence[Mark] = ()
    failed: Sequence[Failed] = ()
    rules: Sequence[Rule] = ()
    areas: Sequence[Area] = ()
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[int] = ()  # on the x axis, where there are few
    counts: bool = True  # whether x are whole numbers
    span: tuple[float, float] | None = None  # of the y axis
    exp: str = ""  # what exp(y) is: an axis of its own on the right
    num_members: int = 0
    height: int = 420  # pixels on the page

    @property
    def limits(self) -> tuple[float, float]:
        """From a little below all values and intervals to a little above them, or the span that was chosen."""
        if self.span is not None:
            return self.span
        parts = [part for one in self.lines for part in (one.y, one.low, one.high) if part is not None and len(part)]
        values = np.concatenate([np.asarray(part, float) for part in parts]) if parts else np.array([np.nan])
        if not np.isfinite(values).any():
            return -0.5, 1.5
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        margin = 0.12 * (high - low) or 0.5
        return round(low - margin, 5), round(high + margin, 5)


def colour(index: int) -> str:
    """Return the colour of the member of that index in its group."""
    return COLOURS[index % len(COLOURS)]


def shape(index: int) -> tuple[str, str, str]:
    """Return its marker as a character, as plotly names it and as matplotlib does; another once the colours are used
    up."""
    return SHAPES[index // len(COLOURS) % len(SHAPES)]
