"""Legends of pictures that matplotlib draws."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from farspan.record import by_key
from farspan.report.figure import Figure

NEUTRAL = "#777777"  # colour of what belongs to no member
HANDLE = 4.0  # length of a line in a legend, in font sizes: shows its dashes beside its marker
LEGEND_CHARACTERS = 150  # of small print in the width of a picture
LEGEND_LINES = 24
MOST_COLUMNS = 3
MOST_ROOM = 0.6  # share of the height of axes that a legend within them takes, at most
LOOK: dict[str, Any] = {"fontsize": 8, "handlelength": HANDLE}


def share_names(figures: Sequence[Figure]) -> bool:
    """Return whether each name in the legends of figures has one look, and members of one look have the same names."""
    names: dict[tuple[int, float | None], list[set[str]]] = {}  # by look: those in each figure
    for one in figures:
        shown = ((line, line.label if line.legend is None else line.legend) for line in one.lines)
        for look, some in by_key(((line.index, line.shade), name) for line, name in shown if name).items():
            names.setdefault(look, []).append({*some})
    of_look = [set[str]().union(*some) for some in names.values()]
    are_alike = all(whole in some for whole, some in zip(of_look, names.values(), strict=True))
    return are_alike and sum(map(len, of_look)) == len(set[str]().union(*of_look))


def add_legend(figure: Canvas, *axes: Axes, failed: Mapping[str, str] | None = None) -> None:
    """Add a legend below the axes, in as many columns as fit; a label of several axes has the look of the first. Of
    many lines it names only the first: all of them would leave no space for the axes.

    Args:
        failed: what to write instead of the labels of crosses.
    """
    named: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            named.setdefault((failed or {}).get(label, label), handle)
    labels = sorted(named, key=lambda label: _rank(named[label]))
    handles = [named[label] for label in labels]
    if (more := len(labels) - LEGEND_LINES) > 0:
        labels[LEGEND_LINES:] = [f"and {more:,} more"]
        handles[LEGEND_LINES:] = [Line2D([], [], linestyle="none")]
    columns = max(1, min(MOST_COLUMNS, LEGEND_CHARACTERS // (max(map(len, labels)) + 9)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, **LOOK)


def _rank(handle: Any) -> int:
    """Return the place of a part of a picture in its legend: members, then crosses, then what is the same for all.
    matplotlib has lines with error bars last."""
    line = handle[0] if isinstance(handle, ErrorbarContainer) else handle
    if not isinstance(line, Line2D) or line.get_color() == NEUTRAL:
        return 2
    return int(line is handle and line.get_linestyle() == "None")


def add_legend_inside(axes: Axes) -> None:
    """Add a legend at the top of some axes, and end the y axis above the values by as much as it needs: matplotlib's
    best place ignores error bars and would cover them."""
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    for columns in range(MOST_COLUMNS, 0, -1):
        legend = axes.legend(loc="upper center", ncols=columns, **LOOK)
        box = legend.get_window_extent()
        if box.width <= axes.bbox.width:
            break
    share = min(MOST_ROOM, 1.3 * box.height / axes.bbox.height)  # with a margin: a layout can make axes smaller
    scale = axes.yaxis.get_transform()
    bottom, top = scale.transform([low, high])
    axes.set_ylim(low, float(scale.inverted().transform([top + share / (1 - share) * (top - bottom)])[0]))
    axes.set_yticks(ticks)
