"""Pictures in run folders: figures, drawn with matplotlib."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure as Canvas  # not pyplot, which would choose the backend of the whole program
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path as Path2D
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Affine2D

from farspan.files import written
from farspan.record import by_key
from farspan.report.figure import FEW_TICKS, RECALL, Failed, Figure, Heat, Line, Rule, colour, log_numbers, shape
from farspan.report.legends import NEUTRAL, add_legend, add_legend_inside, share_names
from farspan.terminal import CONTROL

MOST_NATS = 300.0  # whose exp is a number
MOST_LONG = 6  # numbers of five digits and more on an x axis
ROW = 11  # height of a row of labels of rules, in points
SIDE = 12  # characters of a line of a label beside the axes
TITLE_LINES = 3
SUPTITLE = 12  # size of the title of several figures, in points
SIZE = (9.0, 6.0)  # of a picture in inches
FEW_LABELS = 16  # on one axis
SMALLEST = 5.0  # size of the numbers in a map, in points; where they would be smaller, there are none
LIGHT = 0.75  # values up to which black is easier to read on their colour than white
COLOURMAP = LinearSegmentedColormap.from_list("recall", RECALL)
FRONT = "Pareto front"
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
    """Draw several figures into one picture, NAME.png and NAME.svg, and return the two paths; none without a figure.
    Rows and columns without a figure are left out, and titles that repeat within a row. Figures in which a name has
    the same look share one legend, which names a member without result only if it has none in any figure.

    Args:
        rows: None leaves a place empty.
        size: width and height of a figure in inches.
    """
    rows = [figures for figures in rows if any(figures)]
    if not rows:
        return []
    kept = [place for place in range(len(rows[0])) if any(figures[place] for figures in rows)]
    rows = [[figures[place] for place in kept] for figures in rows]
    canvas = Canvas(figsize=(max(7.0, size[0] * len(rows[0])), size[1] * len(rows)), layout="constrained")
    canvas.suptitle(_wrapped(title, 72 * canvas.get_figwidth(), SUPTITLE), fontsize=SUPTITLE)
    grid = canvas.subplots(len(rows), len(rows[0]), squeeze=False)
    for panels, figures in zip(grid, rows, strict=True):
        titles = ["" if one is None else one.title for one in figures]
        above = [0 if one is None else _draw(axes, one) for axes, one in zip(panels, figures, strict=True)]
        for place, (axes, one) in enumerate(zip(panels, figures, strict=True)):
            if one is None:
                axes.set_axis_off()
            elif titles[place] not in titles[:place]:
                _add_title(axes, one, max(above), "left", 10)
    drawn = [one for figures in rows for one in figures if isinstance(one, Figure)]
    named = [axes for axes in grid.ravel() if axes.get_legend_handles_labels()[1]]
    if share_names(drawn):
        shown = {line.index for one in drawn for line in one.lines}
        failed: dict[str, str] = {}
        for index, bad in by_key((bad.index, bad) for one in drawn for bad in one.failed if bad.label).items():
            why = sorted({status for one in bad for at, status in one.statuses.items() if at not in one.partly})
            line = "crossed: no result" if index in shown else f"{bad[0].name}: no result, {', '.join(why)}"
            failed |= dict.fromkeys((one.label for one in bad), line)
        if named:
            add_legend(canvas, *named, failed=failed)
    else:
        for axes in named:
            add_legend_inside(axes)
    return saved(canvas, Path(folder), name)


def _picture_of(axes: Axes) -> Canvas:
    picture = axes.get_figure(root=True)
    assert picture is not None
    return picture


def draw_on(axes: Axes, one: Figure | Heat) -> None:
    """Draw a figure on some axes, without a legend."""
    _add_title(axes, one, _draw(axes, one), "center", 11)


def _draw(axes: Axes, one: Figure | Heat) -> int:
    """Draw a figure without title and legend; return the rows of labels above the axes."""
    if isinstance(one, Heat):
        _draw_heat(axes, one)
        return 0
    return _draw_lines(axes, one)


def _add_title(axes: Axes, one: Figure | Heat, rows: int, loc: Literal["left", "center"], fontsize: float) -> None:
    """Write the title of a figure above so many rows of labels."""
    title = "\n".join(part for part in (_wrapped(one.title, _size(axes)[0], fontsize), one.note) if part)
    axes.set_title(title, loc=loc, fontsize=fontsize, pad=6 + ROW * rows)


def _draw_lines(axes: Axes, one: Figure) -> int:
    """Draw a figure of lines; return the rows of labels above the axes."""
    for line in one.lines:
        if line.style == "mark":
            _draw_mark(axes, line)
        elif line.style == "points" or line.kind == "quality" or not one.has_bands:
            _draw_bars(axes, line, one)
        else:
            _draw_line(axes, line)
    for name, style in one.keys:
        key: dict[str, Any] = {"color": NEUTRAL, "linestyle": STYLES[style], "label": name}
        if style == "mark":
            key |= {"marker": "o", "markersize": 8, "markerfacecolor": "white"}
        axes.errorbar([], [], **key)  # no `plot`, whose lines precede error bars in a legend
    if one.front is not None:
        axes.plot(*one.front.T, color=NEUTRAL, linestyle="--", linewidth=1, zorder=1, label=FRONT)
    for area in one.areas:
        axes.axvspan(area.start, area.end, color=area.colour, zorder=0, label=area.label)
    highest = 0.0  # of the crosses
    for failed, height in zip(one.failed, one.failed_heights, strict=True):
        if lengths := sorted(failed.statuses.keys() - failed.partly):
            _draw_failed(axes, failed, lengths, height)
            highest = max(highest, height)
    for rule in one.rules:
        draw, place = (axes.axhline, rule.y or 0.0) if rule.x is None else (axes.axvline, rule.x)
        draw(place, color=NEUTRAL, linestyle=":", linewidth=1.2)
    axes.set(xlabel=one.x, ylabel=one.y)
    _scale(axes, one)
    if one.span is not None:
        axes.set_ylim(one.span)
    floor = _lay_strip(axes, highest)
    rows = _label_rules(axes, one.rules)
    if one.exp:
        right = axes.secondary_yaxis("right", functions=(lambda y: y, lambda y: y))  # the same height in another unit
        ends = floor, axes.get_ylim()[1]
        numbers = log_numbers(*np.exp(np.minimum(ends, MOST_NATS)))
        right.set_yticks(np.log(numbers), [f"{number:,.10g}" for number in numbers])
        right.set_ylabel(one.exp)
    axes.grid(alpha=0.25)
    return rows


def _wrapped(text: str, points: float, size: float) -> str:
    """Return a title in lines that fit a width of `points`; a title of too many lines is cut."""
    if not text:
        return ""
    measured = CONTROL.sub("\ufffd", text).replace("$", "S").replace("\n", " ")
    character = TextPath((0, 0), measured, size=size).get_extents().width / len(text)
    width = max(1, int(points / character))
    lines = [part for line in text.split("\n") for part in wrap(line, width)]
    return "\n".join(lines if len(lines) <= TITLE_LINES else [*lines[: TITLE_LINES - 1], f"{lines[TITLE_LINES - 1]} …"])


def _size(axes: Axes) -> tuple[float, float]:
    """Return width and height of some axes in points."""
    box, dpi = axes.bbox, _picture_of(axes).dpi
    return box.width * 72 / dpi, box.height * 72 / dpi


def _scale(axes: Axes, one: Figure) -> None:
    if one.log_x:
        axes.set_xscale("log", base=2 if one.counts else 10)
    else:
        places = [float(place) for line in one.lines for place in line.x]
        places += [float(length) for failed in one.failed for length in failed.statuses]
        if places:
            right = 1.015 * max(places)
            if one.span is None:
                right = 1.05 * max([*places, *(rule.x for rule in one.rules if rule.x is not None)])
            axes.set_xlim(0 if min(places) > 0 else None, right)
        most: Any = MOST_LONG if places and max(places) >= 10_000 else "auto"
        axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=one.counts))
    if one.ticks and len(one.ticks) <= FEW_TICKS:
        axes.set_xticks(one.ticks, _apart(axes, one.ticks))
        axes.minorticks_off()
    elif one.log_x:
        _number_log_axis(axes.xaxis, one.counts)
    else:
        axes.xaxis.set_major_formatter("{x:,.0f}" if one.counts else FuncFormatter(_short_number))
    if one.log_y:
        axes.set_yscale("log")
        _number_log_axis(axes.yaxis)
    elif max(map(abs, axes.get_ylim())) >= 1000:
        axes.yaxis.set_major_formatter("{x:,.10g}")


def _apart(axes: Axes, ticks: Sequence[int]) -> list[str]:
    """Return the label of each tick on an x axis, ascending; "" where it would overlap that of a larger one."""
    left, right, *places = axes.xaxis.get_transform().transform([*axes.get_xlim(), *ticks])
    end, labels = np.inf, list[str]()
    for tick, place in zip(reversed(ticks), reversed(places), strict=True):
        label = f"{tick:,}"
        middle, half = (place - left) / (right - left) * _size(axes)[0], 0.3 * 10 * len(label)
        fits = middle + half < end
        labels.append(label if fits else "")
        end = middle - half - 3 if fits else end
    return labels[::-1]


class _LogNumbers(LogLocator):
    """The places of `log_numbers`."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self._counts = counts

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        return log_numbers(vmin, vmax, self._counts)

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None
        return self.tick_values(*sorted(self.axis.get_view_interval()))


def _number_log_axis(axis: Axis, counts: bool = False) -> None:
    axis.set_major_locator(_LogNumbers(counts))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.10g}"))


def _draw_mark(axes: Axes, line: Line) -> None:
    x, y, low, high = _numbers(line)
    spread = [x - low, high - x] if np.isfinite(low).any() else None
    look = _look(line) | {"markersize": 9, "markerfacecolor": "white", "markeredgewidth": 1.6}
    axes.errorbar(x, y, xerr=spread, capsize=4, **look)


def _draw_line(axes: Axes, line: Line) -> None:
    """Draw a line with a band around it."""
    x, y, low, high = _numbers(line)
    look = _look(line)
    axes.plot(x, y, **look)
    if np.isfinite(low).any():
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _draw_bars(axes: Axes, line: Line, one: Figure) -> None:
    """Draw a line with error bars at its markers, shifted beside those of other lines; "points" are not shifted."""
    x, y, low, high = _numbers(line)
    if line.style != "points" and len(x) and not one.areas:
        place = line.index - (one.num_members - 1) / 2
        width = min(0.04, 0.3 / one.num_members)  # of octaves
        x = x * 2.0 ** (width * place) if one.log_x else x + width / 12 * place * np.ptp(x)
    spread = [y - low, high - y] if np.isfinite(low).any() else None
    bars = {"elinewidth": 0.7} if line.style == "dashed" else {"elinewidth": 1, "capsize": 3}
    axes.errorbar(x, y, yerr=spread, linewidth=1.4, errorevery=line.marked, **bars, **_look(line))


def _numbers(line: Line) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x, y and the interval of each point, NaN where there is none."""
    return np.asarray(line.x, float), np.asarray(line.y, float), *line.ends


def _look(line: Line) -> dict[str, Any]:
    ordered = colour(line.index) if line.shade is None else colormaps["viridis_r"](0.1 + 0.9 * line.shade)
    look: dict[str, Any] = {"color": ordered, "linestyle": STYLES[line.style]}
    look["label"] = line.label if line.legend is None else line.legend
    return look | {"marker": shape(line.index)[2], "markersize": 6, "markevery": line.marked}


def _draw_failed(axes: Axes, failed: Failed, lengths: Sequence[int], height: float) -> None:
    """Draw a cross within the marker of the member at each of these lengths, which have no result."""
    axes.plot(
        lengths, [height] * len(lengths), marker=_crossed(shape(failed.index)[2]), markersize=9,
        linestyle="", color=colour(failed.index), markerfacecolor="none",
        transform=axes.get_xaxis_transform(), clip_on=False, label=failed.label,
    )  # fmt: skip


def _lay_strip(axes: Axes, height: float) -> float:
    """Lay a grey strip without numbers below the values, for crosses up to a height: they have no value. Return the
    lowest y above it.

    Args:
        height: of the highest crosses, as a share of the axes; 0: no strip.
    """
    lowest, highest = axes.get_ylim()
    if height:
        share, scale = height + 0.025, axes.yaxis.get_transform()
        low, high = scale.transform([lowest, highest])
        bottom = float(scale.inverted().transform([low - share / (1 - share) * (high - low)])[0])
        axes.axhspan(bottom, lowest, color="#eeeeee", linewidth=0, zorder=1.5)  # above the grid
        axes.set_ylim(bottom, highest)
        axes.set_yticks([tick for tick in axes.get_yticks() if lowest <= tick <= highest])
    return lowest


def _crossed(marker: str) -> Path2D:
    """Return the outline of a marker with a cross in it."""
    own, cross = (
        (one := MarkerStyle(name)).get_path().transformed(one.get_transform() + Affine2D().scale(size))
        for name, size in ((marker, 1.0), ("x", 0.5))
    )
    return Path2D.make_compound_path(own, cross)


def _label_rules(axes: Axes, rules: Sequence[Rule]) -> int:
    """Write the texts of rules outside the axes, so that they hide nothing: above them, from their left end to their
    right end, in enough rows that none overlap, or right of them. The limits of the axes must be final. Return the
    number of rows."""
    look: dict[str, Any] = {"fontsize": 8, "color": "#555555"}
    look |= {"xycoords": "axes fraction", "textcoords": "offset points"}
    width, height = _size(axes)
    if rules:
        axes.autoscale_view()  # otherwise matplotlib computes limits at the first drawing
    ends: list[float] = []  # of the rows so far, in points from the left
    for rule in sorted(rules, key=lambda rule: rule.x or 0.0):
        if rule.x is None:
            lines = wrap(rule.text, SIDE)
            share = (axes.transData + axes.transAxes.inverted()).transform((0.0, rule.y or 0.0))[1]
            place = _within(height, share * height, 0.6 * 8 * len(lines))
            axes.annotate("\n".join(lines), (1.0, place / height), xytext=(4, 0), va="center", **look)
        elif rule.text:
            share = (axes.transData + axes.transAxes.inverted()).transform((rule.x, 1.0))[0]
            if not 0 <= share <= 1:  # the axis ends with the lengths of the curves
                continue
            half = 0.3 * 8 * len(rule.text)  # of the text's width
            place = _within(width, share * width, half)
            row = next((row for row, end in enumerate(ends) if place - half > end), len(ends))
            ends[row : row + 1] = [place + half + 6]
            axes.annotate(rule.text, (place / width, 1.0), xytext=(0, 3 + ROW * row), ha="center", **look)
    return len(ends)


def _within(size: float, place: float, half: float) -> float:
    """Return the place nearest to one at which a text, half of which has a size, ends within 0 and `size`."""
    return min(max(place, half), max(size - half, half))


def _short_number(number: float, _: int | None) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _draw_heat(axes: Axes, one: Heat) -> None:
    values = np.maximum(one.values, one.span[0]) if one.log else one.values  # NaN stays
    norm = (LogNorm if one.log else Normalize)(*one.span)
    image = axes.imshow(values, norm=norm, cmap=COLOURMAP, aspect="auto", interpolation="nearest")
    rows, columns = values.shape
    size = min(8.0, 200 / columns, 0.8 * _size(axes)[1] / rows)
    if size >= SMALLEST and not one.log:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                shade = "white" if value > LIGHT else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=size, color=shade)
    for labels, axis in ((one.columns, axes.xaxis), (one.rows, axes.yaxis)):
        step = -(-len(labels) // FEW_LABELS)
        axis.set_ticks(range(0, len(labels), step), labels[::step], fontsize=8)
    if 0.6 * 8 * (max(map(len, one.columns)) + 1) * len(axes.get_xticks()) > _size(axes)[0]:  # would overlap
        axes.tick_params("x", rotation=45)
    axes.set(xlabel=one.x, ylabel=one.y)
    _picture_of(axes).colorbar(image, ax=axes, label=one.scale)


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
