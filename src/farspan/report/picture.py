"""Pictures in run folders: figures, drawn with matplotlib."""

from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure as Canvas  # not pyplot, which would choose the backend of the whole program
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from farspan.files import written
from farspan.report.export import three_digits
from farspan.report.figure import FEW_TICKS, MARKED, RECALL, Failed, Figure, Heat, Line, Rule, colour, shape
from farspan.terminal import CONTROL

LABEL_WIDTH = 0.03  # of a rule, as a share of the width of a picture
LEGEND_CHARACTERS = 150  # of small print in the width of a picture
LEGEND_LINES = 24
TITLE_CHARACTERS = 100
SIZE = (9.0, 6.0)  # of a picture in inches
FEW_LABELS = 16  # on one axis
NUMBERED = 400  # values that are also written as numbers, at most
COLOURMAP = LinearSegmentedColormap.from_list("recall", RECALL)
NEUTRAL = "#777777"
STYLES = {"solid": "-", "dashed": "--", "dotted": ":", "points": "", "mark": ""}


def draw_figure(one: Figure | Heat, folder: str | Path, name: str) -> list[Path]:
    """Draw a figure into NAME.png and NAME.svg and return the two paths. Lengths without a result are crosses at the
    bottom."""
    return saved(_drawn(one), Path(folder), name)


def as_png(one: Figure | Heat) -> bytes:
    """Return a figure as a small PNG, for pages that hold their pictures."""
    canvas, content = _drawn(one), BytesIO()
    show_text_as_is(canvas)
    canvas.savefig(content, format="png", dpi=72)
    return content.getvalue()


def as_pixels(one: Figure | Heat) -> np.ndarray:
    """Return a figure as an image: uint8 by [height, width, 3 colours], 600 by 900 pixels."""
    canvas = _drawn(one)
    show_text_as_is(canvas)
    drawn = FigureCanvasAgg(canvas)
    drawn.draw()
    return np.asarray(drawn.buffer_rgba())[..., :3].copy()


def _drawn(one: Figure | Heat) -> Canvas:
    canvas = Canvas(figsize=SIZE, layout="constrained")
    draw_with_legend(canvas.subplots(), one)
    return canvas


def draw_with_legend(axes: Axes, one: Figure | Heat) -> None:
    """Draw a figure on the only axes of a picture, with its legend below them."""
    draw_on(axes, one)
    if isinstance(one, Figure):
        add_legend(_picture_of(axes), axes)


def draw_grid(
    rows: Sequence[Sequence[Figure | Heat | None]],
    folder: str | Path,
    name: str,
    title: str = "",
    size: tuple[float, float] = (5.0, 4.2),
) -> list[Path]:
    """Draw several figures into one picture, NAME.png and NAME.svg, and return the two paths. Left out are a title that
    its row has already, and a legend that the next figure repeats.

    Args:
        rows: None leaves a place empty.
        size: width and height of a figure in inches.
    """
    canvas = Canvas(figsize=(max(7.0, size[0] * len(rows[0])), size[1] * len(rows)), layout="constrained")
    canvas.suptitle(title)
    for panels, figures in zip(canvas.subplots(len(rows), len(rows[0]), squeeze=False), rows, strict=True):
        titles = ["" if one is None else one.title for one in figures]
        for place, (axes, one) in enumerate(zip(panels, figures, strict=True)):
            if one is None:
                axes.set_axis_off()
                continue
            draw_on(axes, one)
            axes.set_title("")
            axes.set_title("" if titles[place] in titles[:place] else titles[place], loc="left", fontsize=10)
        labels = [axes.get_legend_handles_labels()[1] for axes in panels]
        for axes, own, following in zip(panels, labels, [*labels[1:], []], strict=True):
            if own and own != following:
                axes.legend(fontsize=8)
    return saved(canvas, Path(folder), name)


def _picture_of(axes: Axes) -> Canvas:
    picture = axes.get_figure(root=True)
    assert picture is not None
    return picture


def draw_on(axes: Axes, one: Figure | Heat) -> None:
    """Draw a figure on some axes, without a legend."""
    if isinstance(one, Heat):
        _draw_heat(axes, one)
        return
    for number, line in enumerate(one.lines):
        _draw_line(axes, line, _beside(number, len(one.lines)) if one.log_x and not one.areas else 1.0)
    for area in one.areas:
        axes.axvspan(area.start, area.end, color=area.colour, zorder=0, label=area.label)
    for failed in one.failed:
        _draw_failed(axes, failed)
    for rule in one.rules:
        _draw_rule(axes, rule)
    axes.set(xlabel=one.x, ylabel=one.y, title=shorten(one.title, TITLE_CHARACTERS, placeholder=" …"))
    _scale(axes, one)
    if one.span is not None:
        axes.set_ylim(one.span)
    for rule in one.rules:
        _label_rule(axes, rule, one.lines)
    if one.exp:
        right = axes.secondary_yaxis("right", functions=(lambda y: y, lambda y: y))  # the same height in another unit
        right.yaxis.set_major_locator(MaxNLocator(8))
        right.yaxis.set_major_formatter(FuncFormatter(lambda nats, _: three_digits(float(np.exp(nats)))))
        right.set_ylabel(one.exp)
    axes.grid(alpha=0.25)


def _scale(axes: Axes, one: Figure) -> None:
    if one.log_x:
        axes.set_xscale("log", base=2 if one.counts else 10)
    else:
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=one.counts))
        places = [float(place) for line in one.lines for place in line.x]
        places += [float(length) for failed in one.failed for length in failed.statuses]
        if places:
            axes.set_xlim(0 if min(places) > 0 else None, 1.015 * max(places) if one.span is not None else None)
    if one.ticks and len(one.ticks) <= FEW_TICKS:
        axes.set_xticks(one.ticks, [f"{tick:,}" for tick in one.ticks])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_formatter("{x:,.0f}" if one.counts else FuncFormatter(lambda x, _: short_number(x)))
    if one.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5, 7)))
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(FuncFormatter(lambda y, _: short_number(y)))


def _beside(number: int, count: int) -> float:
    """Return a factor for lengths that draws the intervals of several lines side by side."""
    return float(2.0 ** (0.04 * (number - (count - 1) / 2)))


def _draw_line(axes: Axes, line: Line, shift: float) -> None:
    x, y = np.asarray(line.x, float), np.asarray(line.y, float)
    ordered = colour(line.index) if line.shade is None else colormaps["viridis_r"](0.1 + 0.9 * line.shade)
    every = -(-len(x) // MARKED) or 1
    places = line.index % every, every  # not those of the other members
    look: dict[str, Any] = {"color": ordered, "linestyle": STYLES[line.style], "label": line.label}
    look |= {"marker": shape(line.index)[2], "markersize": 5, "markevery": places}
    low, high = (np.asarray(np.nan if end is None else end, float) for end in (line.low, line.high))
    spread = [y - low, high - y] if np.isfinite(low).any() else None
    if line.style == "mark":
        spread = [x - low, high - x] if np.isfinite(low).any() else None
        look |= {"markersize": 9, "markerfacecolor": "white", "markeredgewidth": 1.6}
        axes.errorbar(x, y, xerr=spread, capsize=4, **look)
        return
    if line.style == "points" or line.kind == "quality":
        axes.errorbar(x * shift, y, yerr=spread, linewidth=1.4, elinewidth=1, capsize=3, errorevery=places, **look)
        return
    axes.plot(x, y, **look)
    if spread is not None:
        axes.fill_between(x, low, high, color=ordered, alpha=0.15, linewidth=0)


def _draw_failed(axes: Axes, failed: Failed) -> None:
    lengths = [length for length in sorted(failed.statuses) if length not in failed.partly]
    if lengths:
        axes.plot(
            lengths, [0.02] * len(lengths), "x", color=colour(failed.index),
            transform=axes.get_xaxis_transform(), clip_on=False, label=failed.label,
        )  # fmt: skip


def _draw_rule(axes: Axes, rule: Rule) -> None:
    if rule.x is None:
        axes.axhline(rule.y or 0.0, color=NEUTRAL, linestyle=":", linewidth=1.2)
    else:
        axes.axvline(rule.x, color=NEUTRAL, linestyle=":", linewidth=1.2)


def _label_rule(axes: Axes, rule: Rule, lines: Sequence[Line]) -> None:
    """Write the text of a rule on axes whose limits are final."""
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": "#555555", "ha": "right"}
    if rule.x is None:
        across = axes.get_yaxis_transform()
        axes.annotate(rule.text, (0.99, rule.y or 0.0), xycoords=across, xytext=(0, 3), **look)
        return
    up = axes.get_xaxis_transform()
    look |= {"rotation": 90, "va": "center", "annotation_clip": True}
    axes.annotate(rule.text, (rule.x, _free_height(axes, rule.x, lines)), xycoords=up, xytext=(-3, 0), **look)


def _free_height(axes: Axes, x: float, lines: Sequence[Line]) -> float:
    """Return the middle of the largest gap between the lines and points at `x`, as a share of the height."""
    axes.autoscale_view()  # matplotlib leaves limits to be computed at the first drawing
    to_share = axes.transData + axes.transAxes.inverted()
    here, heights = to_share.transform((x, 0.0))[0], [0.0, 1.0]
    for line in lines:
        places = to_share.transform(np.column_stack([np.asarray(line.x, float), np.asarray(line.y, float)]))
        places = places[np.isfinite(places).all(1)]
        if line.style == "points":
            heights += places[abs(places[:, 0] - here) < LABEL_WIDTH, 1].tolist()
        elif len(places):
            heights.append(float(np.interp(here, *places[places[:, 0].argsort()].T)))
    heights = sorted(min(1.0, max(0.0, height)) for height in heights)
    _, low, high = max((high - low, low, high) for low, high in pairwise(heights))
    return (low + high) / 2


def short_number(number: float) -> str:
    """Write a tick of an axis."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _draw_heat(axes: Axes, one: Heat) -> None:
    values = np.maximum(one.values, one.span[0]) if one.log else one.values  # NaN stays
    norm = (LogNorm if one.log else Normalize)(*one.span)
    image = axes.imshow(values, norm=norm, cmap=COLOURMAP, aspect="auto", interpolation="nearest")
    if values.size <= NUMBERED and not one.log:
        size = min(8.0, 200 / values.shape[1])
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                shade = "white" if value > 0.6 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=size, color=shade)
    for labels, axis in ((one.columns, axes.xaxis), (one.rows, axes.yaxis)):
        step = -(-len(labels) // FEW_LABELS)
        axis.set_ticks(range(0, len(labels), step), labels[::step], fontsize=8)
    if max(map(len, one.columns)) > 2:
        axes.tick_params("x", rotation=45)
    axes.set(xlabel=one.x, ylabel=one.y, title=one.title)
    _picture_of(axes).colorbar(image, ax=axes, label=one.scale)


def add_legend(figure: Canvas, axes: Axes) -> None:
    """Add a legend below the axes, in as many columns as fit. Of many lines it names the first: with all of them it
    would leave no space for the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if (more := len(labels) - LEGEND_LINES) > 0:
        handles, labels = (
            [*handles[:LEGEND_LINES], Line2D([], [], linestyle="none")],
            [*labels[:LEGEND_LINES], f"and {more:,} more"],
        )
    columns = max(1, min(3, LEGEND_CHARACTERS // (max(map(len, labels)) + 6)))
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=columns, frameon=False)


def saved(figure: Canvas, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG."""
    show_text_as_is(figure)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        with written(path) as beside:
            figure.savefig(beside, dpi=140)
    return paths


def show_text_as_is(artist: Artist) -> None:
    """Show the names in a picture as they are: a dollar sign begins no formula, and control characters have a sign."""
    if isinstance(artist, Text):
        artist.set_parse_math(False)
        artist.set_text(CONTROL.sub("\ufffd", artist.get_text()))
    # the ticks of an axis are left out: they are many, and powers of ten are formulas
    for part in [artist.label, artist.offsetText] if isinstance(artist, Axis) else artist.get_children():
        show_text_as_is(part)
