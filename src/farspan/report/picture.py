"""Pictures in run folders, drawn with matplotlib: figures, recall over length and depth, and curves of a training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Tick
from matplotlib.figure import Figure as Canvas  # not pyplot, which would choose the backend of the whole program
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from farspan import stats
from farspan.files import written
from farspan.report.curves import Series
from farspan.report.figure import FEW_TICKS, Failed, Figure, Line, Mark, Rule, colour, shape
from farspan.terminal import CONTROL

LEGEND_CHARACTERS = 150  # of small print in the width of a picture
LEGEND_LINES = 24
TITLE_CHARACTERS = 100
SHOWN = 5  # curves of a training in one picture
NEUTRAL = "#777777"
STYLES = {"solid": "-", "dashed": "--", "dotted": ":", "points": ""}


def draw_figure(one: Figure, folder: str | Path, name: str) -> list[Path]:
    """Draw a figure into NAME.png and NAME.svg; returns the two paths. Lengths without a result are crosses at the
    bottom."""
    canvas = Canvas(figsize=(9, 6), layout="constrained")
    axes = canvas.subplots()
    draw_on(axes, one)
    add_legend(canvas, axes)
    return saved(canvas, Path(folder), name)


def draw_grid(rows: Sequence[Sequence[Figure | None]], folder: str | Path, name: str) -> list[Path]:
    """Draw several figures into one picture, with the title of the first of each row and the legend of its last."""
    canvas = Canvas(figsize=(5 * len(rows[0]), 4.2 * len(rows)), layout="constrained")
    for panels, figures in zip(canvas.subplots(len(rows), len(rows[0]), squeeze=False), rows, strict=True):
        for axes, one in zip(panels, figures, strict=True):
            if one is None:
                axes.set_axis_off()
                continue
            draw_on(axes, one)
            axes.set_title("")
            axes.set_title(one.title if one is figures[0] else "", loc="left", fontsize=10)
        panels[-1].legend(fontsize=8)
    return saved(canvas, Path(folder), name)


def draw_on(axes: Axes, one: Figure) -> None:
    """Draw a figure on some axes, without a legend."""
    for number, line in enumerate(one.lines):
        _draw_line(axes, line, _beside(number, len(one.lines)) if one.log_x and not one.areas else 1.0)
    for area in one.areas:
        axes.axvspan(area.start, area.end, color=area.colour, zorder=0, label=area.label)
    for mark in one.marks:
        _draw_mark(axes, mark)
    for failed in one.failed:
        _draw_failed(axes, failed)
    for rule in one.rules:
        _draw_rule(axes, rule)
    axes.set(xlabel=one.x, ylabel=one.y, title=shorten(one.title, TITLE_CHARACTERS, placeholder=" …"))
    _scale(axes, one)
    if one.span is not None:
        axes.set_ylim(one.span)
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
        places = [float(place) for line in one.lines for place in line.x]
        places += [float(length) for failed in one.failed for length in failed.statuses] or [0.0]
        axes.set_xlim(0 if min(places) > 0 else None, 1.015 * max(places) if one.span is not None else None)
    if one.ticks and len(one.ticks) <= FEW_TICKS:
        axes.set_xticks(one.ticks, [f"{tick:,}" for tick in one.ticks])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_formatter("{x:,.0f}" if one.counts else FuncFormatter(lambda x, _: short_number(x)))
    if one.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(FuncFormatter(lambda y, _: short_number(y)))


def _beside(number: int, count: int) -> float:
    """A factor for lengths that puts the intervals of several lines side by side."""
    return float(2.0 ** (0.04 * (number - (count - 1) / 2)))


def _draw_line(axes: Axes, line: Line, shift: float) -> None:
    x, y = np.asarray(line.x, float), np.asarray(line.y, float)
    look: dict[str, Any] = {"color": colour(line.index), "linestyle": STYLES[line.style], "label": line.label}
    if line.style == "points" or line.kind == "quality":
        spread = None
        if line.low is not None and line.high is not None and np.isfinite(np.asarray(line.low, float)).any():
            spread = [y - np.asarray(line.low, float), np.asarray(line.high, float) - y]
        axes.errorbar(
            x * shift, y, yerr=spread, marker=shape(line.index)[2], markersize=5, linewidth=1.4, elinewidth=1,
            capsize=3, **look,
        )  # fmt: skip
        return
    axes.plot(x, y, marker="" if line.style == "dotted" else shape(line.index)[2], markersize=3, **look)
    if line.low is not None and line.high is not None:
        low, high = (np.asarray(ends, float) for ends in (line.low, line.high))
        axes.fill_between(x, low, high, color=colour(line.index), alpha=0.15, linewidth=0)


def _draw_mark(axes: Axes, mark: Mark) -> None:
    spread = None if mark.low is None or mark.high is None else [[mark.x - mark.low], [mark.high - mark.x]]
    axes.errorbar(
        mark.x, mark.y, xerr=spread, color=colour(mark.index), marker="D", markersize=6, capsize=4, linestyle="none",
        label=mark.label,
    )  # fmt: skip


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
        return
    axes.axvline(rule.x, color=NEUTRAL, linestyle=":", linewidth=1.2)
    axes.annotate(
        rule.text, (rule.x, 0.98), xycoords=axes.get_xaxis_transform(), xytext=(-3, 0), textcoords="offset points",
        rotation=90, va="top", ha="right", fontsize=8, color="#555555", annotation_clip=True,
    )  # fmt: skip


def short_number(number: float) -> str:
    """Write a tick of an axis."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def three_digits(number: float) -> str:
    """Write a number in three digits, or all those before the point."""
    return f"{number:,.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def draw_map(one: Series, folder: str | Path, title: str, name: str) -> list[Path]:
    """Draw the memory index over length and depth into NAME.png and NAME.svg; returns the two paths."""
    figure = Canvas(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    _draw_map(figure, axes, one)
    axes.set_title(title)
    return saved(figure, Path(folder), name)


def draw_training(
    steps: Mapping[int, tuple[stats.MeasuredCurve, stats.Summary]], folder: Path, trained: int | None, trained_at: int
) -> list[Path]:
    """Draws half-life and span against the step, and some of the curves, into training.png and training.svg; returns
    the two paths.

    Args:
        trained: tokens of the context that the model is trained on.
        trained_at: the length whose whole context has as many.
    """
    figure = Canvas(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    order = sorted(steps)
    _draw_lengths(left, order, [steps[step][1].half_life for step in order], "half-life", "#0072B2")
    _draw_lengths(left, order, [steps[step][1].span for step in order], "span", "#D55E00")
    for step in sorted({order[round(place)] for place in np.linspace(0, len(order) - 1, SHOWN)}):
        curve = steps[step][0].kept(steps[step][0].measured)
        shade = colormaps["viridis_r"](0.1 + 0.9 * order.index(step) / max(1, len(order) - 1))
        right.plot(curve.lengths, stats.measured_mean(curve.copy), color=shade, label=f"step {step:,}")
        right.plot(curve.lengths, stats.measured_mean(curve.control), "--", color=shade)
    if trained:
        for line in (left.axhline, right.axvline):
            line(trained_at, color="#777777", linestyle=":", label=f"context = {trained:,} (trained)")
    left.set(xlabel="step", ylabel="tokens", title="Memory of the model in training, 95 % intervals")
    left.set_ylim(bottom=0)
    left.xaxis.get_major_locator().set_params(integer=True)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.set(xlabel="length of the text to be copied (tokens)", ylim=(-0.02, 1.02), ylabel="accuracy")
    right.set(title="Forgetting curves: copy, and control (dashed)")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    return saved(figure, folder, "training")


def _draw_lengths(
    axes: Axes, steps: Sequence[int], found: Sequence[stats.MemoryLength], label: str, shade: str
) -> None:
    values, low, high = (np.array([getattr(o, n) for o in found], float) for n in ("value", "low", "high"))
    axes.plot(steps, values, "o-", color=shade, markersize=4, label=label)
    axes.fill_between(steps, low, high, color=shade, alpha=0.15, linewidth=0)
    over = np.array([one.censored for one in found])
    if over.any():
        axes.plot(np.array(steps)[over], values[over], "^", color=shade, markersize=7, label=f"{label}: at least")


def _draw_map(figure: Canvas, axes: Axes, one: Series) -> None:
    assert one.map is not None
    lengths, depths = one.map.lengths, one.map.depths
    image = axes.pcolormesh(
        np.arange(len(lengths) + 1), np.arange(len(depths) + 1), one.map.memory_index.T, cmap="cividis", vmin=0, vmax=1
    )
    for (column, row), value in np.ndenumerate(one.map.memory_index):
        if np.isfinite(value):
            shade = "black" if value > 0.6 else "white"
            axes.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=8, color=shade)
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{length:,}" for length in lengths], rotation=45, ha="right")
    axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{depth:.0%}" for depth in depths])
    axes.invert_yaxis()  # the beginning of the text on top
    axes.set(xlabel="length of the text (tokens)", ylabel="depth in the text")
    figure.colorbar(image, ax=axes, label="memory index (share recalled of what cannot be guessed)")


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
    """Write a figure as PNG and SVG. Names in it are shown as they are: a dollar sign begins no formula."""
    ticks = {id(text) for tick in figure.findobj(Tick) for text in tick.findobj(Text)}  # powers of ten are formulas
    for text in figure.findobj(Text):
        if not isinstance(text, Text) or id(text) in ticks:
            continue
        text.set_parse_math(False)
        text.set_text(CONTROL.sub("\ufffd", text.get_text()))
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        with written(path) as beside:
            figure.savefig(beside, dpi=140)
    return paths
